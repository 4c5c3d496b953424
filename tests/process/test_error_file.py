"""The first failure, for whoever started the launcher: in torch's format, where
TORCHELASTIC_ERROR_FILE says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from distlaunch.coordinator.runtime.error_file import ErrorFile
from tests.facts import mentions

RECORDS = """
import json, os, sys, time
if os.environ["RANK"] != "1":
    time.sleep(60)
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    extra = {"py_callstack": "Traceback: here", "timestamp": "1700000000"}
    json.dump({"message": {"message": "ValueError: recorded", "extraInfo": extra}}, file)
sys.exit(int(sys.argv[1]))
"""
RAISES = "raise ValueError('no record')\n"
VARIABLE = "TORCHELASTIC_ERROR_FILE"
TERMINATION = """
mount -t tmpfs none "$0" && mkdir "$0/upper" "$0/work" || exit 99
mount -t overlay overlay -o "lowerdir=/dev,upperdir=$0/upper,workdir=$0/work" /dev || exit 99
touch /dev/termination-log || exit 99
"$@"
code=$?
cat /dev/termination-log
exit $code
"""


def failure_in(path) -> dict:
    """Return the inner message of an error file, which torch's own reader takes as well."""
    record = json.loads(path.read_text())
    assert record.keys() == {"message"}
    assert record["message"]["extraInfo"]["timestamp"].isdigit()
    return record["message"]


@pytest.mark.parametrize(
    "command",
    [["train", "--num-procs", "2"], ["torchrun", "--nproc-per-node=2"]],
    ids=["train", "torchrun"],
)
def test_the_recorded_error_of_the_first_worker_is_copied_with_its_exit_code(distlaunch, command):
    (distlaunch.work / "train.py").write_text(RECORDS)
    file = distlaunch.work / "error.json"
    result = distlaunch.run([*command, "train.py", "37"], env={VARIABLE: str(file)})
    assert result.returncode == 37
    found = failure_in(file)
    assert (found["message"], found["errorCode"]) == ("ValueError: recorded", 37)
    assert found["extraInfo"] == {"py_callstack": "Traceback: here", "timestamp": "1700000000"}


@pytest.mark.parametrize("by", ["option", "variable", "our variable"])
def test_a_failure_that_nobody_recorded_is_written_in_the_same_format(distlaunch, by):
    (distlaunch.work / "train.py").write_text(RAISES)
    words = ["--error-file", "error.json"] if by == "option" else []
    env = {
        "option": {},
        "variable": {VARIABLE: "error.json"},
        "our variable": {"DISTLAUNCH_ERROR_FILE": "error.json"},
    }
    (distlaunch.work / "error.json").write_text("of an earlier job " * 1000)
    assert distlaunch.train("--num-procs", "1", *words, "train.py", env=env[by]).returncode == 1
    found = failure_in(distlaunch.work / "error.json")
    assert (found["message"], found["errorCode"]) == ("ValueError: no record", 1)
    assert "train.py:1 in <module>" in found["extraInfo"]["py_callstack"]


def test_the_option_wins_over_the_variable_and_workers_have_files_of_their_own(distlaunch):
    (distlaunch.work / "train.py").write_text(
        f"import os, time\nprint(os.environ['{VARIABLE}'], flush=True)\nrank = int(os.environ['RANK'])\n"
        "open(f'ready-{rank}', 'w').close()\n"
        "while not os.path.exists(f'ready-{1 - rank}'):\n    time.sleep(0.01)\nraise SystemExit(3)\n"
    )
    env = {VARIABLE: str(distlaunch.work / "variable.json")}
    result = distlaunch.train(
        "--num-procs", "2", "--error-file", "option.json", "train.py", env=env
    )
    assert failure_in(distlaunch.work / "option.json")["errorCode"] == 3
    assert not (distlaunch.work / "variable.json").exists()
    attempt = result.run_dir / "attempt-0"
    assert [result.lines_of(rank) for rank in (0, 1)] == [
        [f"{attempt}/rank-{rank}.error.json"] for rank in (0, 1)
    ]


def test_only_the_last_attempt_of_a_job_is_written_and_a_success_is_not(distlaunch):
    source = (
        "import os\nraise SystemExit(5 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    (distlaunch.work / "train.py").write_text(source)
    words = ["--num-procs", "1", "--max-restarts", "1", "--error-file", "error.json", "train.py"]
    assert distlaunch.train(*words).returncode == 0
    assert not (distlaunch.work / "error.json").exists()


def test_a_job_that_cannot_start_and_one_that_hangs_are_failures_too(distlaunch):
    result = distlaunch.train("--error-file", "error.json", "missing.py")
    assert result.returncode == 2
    found = failure_in(distlaunch.work / "error.json")
    assert found["errorCode"] == 2
    assert mentions(found["message"], "missing.py")
    (distlaunch.work / "train.py").write_text("import time\ntime.sleep(600)\n")
    result = distlaunch.train(
        "--num-procs", "1", "--hang-timeout", "2", "--error-file", "error.json", "train.py"
    )
    assert result.returncode == 124
    found = failure_in(distlaunch.work / "error.json")
    assert found["errorCode"] == 124
    assert mentions(found["extraInfo"]["py_callstack"], "stacks", "logs")


def test_a_file_that_cannot_be_written_is_reported_and_changes_nothing_else(distlaunch):
    (distlaunch.work / "train.py").write_text("raise SystemExit(7)\n")
    result = distlaunch.train("train.py", env={"TORCHELASTIC_ERROR_FILE": "nowhere/error.json"})
    assert result.returncode == 7
    assert f"{distlaunch.work}/nowhere/error.json" in result.stderr


def test_a_rank_that_no_launcher_has_given_as_in_a_pod_of_an_operator_changes_nothing(distlaunch):
    (distlaunch.work / "train.py").write_text("raise SystemExit(7)\n")
    env = {"RANK": "0", "WORLD_SIZE": "1", VARIABLE: "error.json"}
    assert distlaunch.train("--num-procs", "1", "train.py", env=env).returncode == 7
    assert failure_in(distlaunch.work / "error.json")["errorCode"] == 7


def test_a_launcher_that_the_script_of_a_rank_starts_leaves_the_ranks_file_alone(distlaunch):
    (distlaunch.work / "evaluate.py").write_text(RAISES)
    inner = [sys.executable, "-m", "distlaunch", "train", "--num-procs", "1", "evaluate.py"]
    (distlaunch.work / "train.py").write_text(
        f"import os, subprocess\nassert subprocess.run({inner!r}).returncode == 1\n"
        f"assert not os.path.exists(os.environ['{VARIABLE}'])\n"
    )
    assert distlaunch.train("--num-procs", "1", "train.py").returncode == 0


@pytest.mark.parametrize("in_kubernetes", [True, False])
def test_in_kubernetes_the_first_failure_is_the_termination_message_and_fits_it(
    distlaunch, tmp_path, in_kubernetes
):
    (distlaunch.work / "train.py").write_text("raise ValueError('x' * 9000)\n")
    disk = tmp_path / "dev"
    disk.mkdir()
    unshare = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    )
    command = [
        sys.executable,
        "-m",
        "distlaunch",
        "train",
        "--num-procs",
        "1",
        "--output",
        "none",
        "train.py",
    ]
    done = subprocess.run(
        [*unshare, "sh", "-c", TERMINATION, disk, *command],
        env={
            **distlaunch.env,
            **({"KUBERNETES_SERVICE_HOST": "10.0.0.1"} if in_kubernetes else {}),
        },
        cwd=distlaunch.work,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    if not in_kubernetes:
        assert done.stdout == b""
        return
    assert 0 < len(done.stdout) <= 4096
    found = json.loads(done.stdout)["message"]
    assert found["message"].startswith("ValueError: xxx")
    assert found["errorCode"] == 1


def test_an_error_file_that_cannot_be_made_is_refused_before_anything_is_started(distlaunch):
    (distlaunch.work / "train.py").write_text("print('started')\n")
    for name, why in (
        ("nodir/err.json", "its directory does not exist"),
        (".", "it is a directory"),
    ):
        result = distlaunch.train("--num-procs", "1", "--error-file", name, "train.py")
        assert result.returncode == 2
        assert f"--error-file {name}: {why}" in result.stderr
        assert "started" not in result.stdout


def test_an_error_file_that_is_our_own_stderr_is_appended_to(distlaunch):
    (distlaunch.work / "train.py").write_text("raise ValueError('a bad batch')\n")
    with (distlaunch.work / "log").open("wb") as log:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "distlaunch",
                "train",
                "--num-procs",
                "1",
                "--error-file",
                "/dev/stderr",
                "train.py",
            ],
            env=distlaunch.env,
            cwd=distlaunch.work,
            stdin=subprocess.DEVNULL,
            stderr=log,
            timeout=100,
        )
    assert done.returncode == 1
    text = (distlaunch.work / "log").read_text()
    assert text.count("Traceback (most recent call last)") >= 1
    assert '"errorCode": 1' in text
    assert mentions(text, "only rank", "code 1")


def test_only_the_termination_log_of_a_pod_is_shortened(tmp_path):
    path = tmp_path / "termination-log"
    ErrorFile(str(path)).write("ValueError", "x" * 9000, 1)
    assert json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"] == "x" * 9000
