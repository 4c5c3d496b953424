from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"
LISTED = "0, GPU-00000000-1111-2222-3333-444444444444, Some GPU, 81559, 580.65.06"


def gpu_check(*words: str, path: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it. ``path`` is the PATH for nvidia-smi."""
    environ = {"PATH": path, **env} if path is not None else {**os.environ, **env}
    return subprocess.run(
        [sys.executable, SCRIPT, *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_a_gpu_every_check_passes_within_four_minutes():
    done = gpu_check("--format", "json", "--require-gpu")
    found = json.loads(done.stdout)
    failed = [
        f"{row['check']}: {row['detail']}" for row in found["checks"] if row["result"] == "FAILED"
    ]
    assert not failed, "\n\n".join(failed)
    assert done.returncode == 0
    skipped = {row["check"] for row in found["checks"] if row["result"] == "skipped"}
    assert skipped <= {"accelerate", "deepspeed", "ray", "kill"}
    assert found["seconds"] < 240


# --- without one


@pytest.fixture
def no_smi(tmp_path, clean_env):
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def with_smi(folder: Path, text: str, code: int = 0) -> str:
    """Write an nvidia-smi with this output. Return the PATH."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\nexit {code}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_without_a_gpu_every_check_is_skipped_with_the_reason(no_smi, lib):
    done = gpu_check(path=str(no_smi))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first, heads, *rows, last = done.stdout.splitlines()
    assert first == "gpu-check: no GPU: no nvidia-smi on the PATH"
    assert heads.split() == ["check", "result", "seconds", "detail"]
    names = [check.name for check in lib.checks.CHECKS]
    assert [row.split()[0] for row in rows] == names
    assert all(
        row.split(maxsplit=3)[1:] == ["skipped", "0.0", "no nvidia-smi on the PATH"] for row in rows
    )
    assert last == f"{len(names)} checks in 0 s: 0 ok, 0 FAILED, {len(names)} skipped"


def test_a_gpu_that_is_required_and_not_there_is_a_failure(no_smi):
    done = gpu_check("--require-gpu", "--only", "nccl", "--format", "json", path=str(no_smi))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["gpu"] is None
    assert found["missing"] == "no nvidia-smi on the PATH"
    assert found["checks"] == [
        {
            "check": "nccl",
            "result": "skipped",
            "seconds": 0.0,
            "detail": "no nvidia-smi on the PATH",
        }
    ]


@pytest.mark.parametrize(
    ("last_output", "code", "reason"),
    [
        ("No devices were found", 6, "nvidia-smi ended with 6: No devices were found"),
        ("", 0, "nvidia-smi lists no GPU"),
        (
            "Failed to initialize NVML: Driver/library version mismatch",
            18,
            "nvidia-smi ended with 18: Failed to init",
        ),
    ],
)
def test_the_message_of_nvidia_smi_is_the_reason(no_smi, last_output, code, reason):
    done = gpu_check("--only", "facts", path=with_smi(no_smi, last_output, code))
    assert done.returncode == 0
    assert done.stdout.startswith(f"gpu-check: no GPU: {reason}")


def test_a_gpu_that_torch_does_not_see_is_none(no_smi):
    done = gpu_check("--only", "facts", path=with_smi(no_smi, LISTED), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    first = done.stdout.splitlines()[0]
    assert (
        "is built without CUDA" in first
        or "sees no GPU (CUDA_VISIBLE_DEVICES=); nvidia-smi lists 1" in first
    )


def test_a_wrong_name_is_a_usage_error_and_the_list_needs_no_gpu(no_smi, lib):
    wrong = gpu_check("--only", "nclc", path=str(no_smi))
    assert wrong.returncode == 2
    assert "invalid choice: 'nclc'" in wrong.stderr
    listed = gpu_check("--list", path=str(no_smi))
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [
        check.name for check in lib.checks.CHECKS
    ]


# --- how one check is made


@pytest.fixture
def make(lib, clean_env):
    def run(function, limit_s: float = 60.0, within_s: float = 60.0):
        check = lib.checks.Check("it", "about it", function, limit_s)
        return lib.checks.make(check, None, until=time.monotonic() + within_s, environ=clean_env)

    return run


def test_a_check_reports_its_observations(make):
    assert make(lambda check: "seen")[:2] == ("it", "ok")


def test_a_missing_tool_is_skipped(make, lib):
    row = make(lambda check: lib.frameworks._need("nothing_of_this_name"))
    assert (row.result, row.detail) == ("skipped", "no nothing_of_this_name here")


def test_any_exception_in_a_check_is_its_own_failure(make):
    row = make(lambda check: {}["key"])
    assert (row.result, row.detail) == ("FAILED", "KeyError: 'key'")


def test_a_job_that_does_not_end_is_ended_at_the_limit(make, tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    pids = []

    def run(check):
        job = check.distlaunch(
            "train", "--num-procs", "1", "--log-dir", "jobs", "--job-id", "job", str(script)
        )
        job.until(lambda: job.log() != [], "worker")
        pids.append(int(job.log()[0]))
        return job.end()

    began = time.monotonic()
    row = make(run, limit_s=4.0)
    assert row.result == "FAILED"
    assert row.detail.startswith("no end within 4 s: ")
    assert time.monotonic() - began < 20
    (pid,) = pids
    while Path(f"/proc/{pid}").exists():  # killed; whoever is its parent now has to collect it
        assert time.monotonic() - began < 20
        time.sleep(0.01)


def test_a_job_with_another_exit_code_is_a_failure_that_shows_its_output(make, tmp_path):
    row = make(
        lambda check: check.distlaunch(
            "train", "--num-procs", "1", str(tmp_path / "missing.py")
        ).end()
    )
    assert row.result == "FAILED"
    assert row.detail.startswith("exit code 2, not 0: ")
    assert "missing.py" in row.detail


def test_no_check_begins_when_the_time_is_over(make):
    row = make(lambda check: "seen", within_s=0.5)
    assert row.result == "FAILED"
    assert row.detail.startswith("not made: all together may take ")


def test_one_failure_decides_the_exit_code_and_is_shown_whole(lib):
    long = "why " * 100
    rows = [lib.checks.Row("a", "ok", 1.0, "fine"), lib.checks.Row("b", "FAILED", 2.0, long)]
    assert lib.report.exit_code(rows, None, required=False) == 1
    assert lib.report.exit_code(rows[:1], None, required=False) == 0
    assert len(lib.report.line(rows[1])) < 220
    assert long in lib.report.foot(rows, 3.2)
    assert lib.report.foot(rows, 3.2).endswith("2 checks in 3 s: 1 ok, 1 FAILED, 0 skipped")
