"""The last report on workers that wrote nothing, or that had to be killed."""

from __future__ import annotations

import json
import os
import sys

from tests.facts import mentions


def test_no_log_is_named_that_is_not_there(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    os._exit(7)\ntime.sleep(600)\n"
    )
    result = job.run(script)
    assert result.returncode == 7
    assert not (result.run_dir / "attempt-0" / "rank-1.log").exists()
    assert f"  logs: {result.run_dir}/attempt-0 (rank 1 wrote none)" in result.stderr


def test_a_worker_that_was_killed_while_it_saved_is_reported_with_how_to_leave_it_more_time(
    job, distlaunch
):
    result = job.run("ends.py", "--ignore", "3", options=["--failure-grace", "1"])
    assert result.returncode == 3
    assert mentions(result.stderr, "rank 1", "KILL", "1 s", "--failure-grace")
    assert mentions(result.stderr, "hint", "killed", "--failure-grace")


def test_report_as_data_stands_beside_the_text(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('loss is nan')\ntime.sleep(600)\n"
    )
    result = job.run(script)
    record = json.loads((result.run_dir / "report.json").read_text())
    assert (record["schema"], record["kind"], record["exit_code"]) == (1, "failure", 1)
    assert record["diagnosis"]["ranks"] == [1]
    assert record["diagnosis"]["exception_type"] == "ValueError"
    assert (record["hang"], record["error"]) == (None, None)
    assert record["text"] + "\n" == (result.run_dir / "report.txt").read_text()


def test_native_crash_has_the_line_of_python_without_an_option(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import ctypes, os, time\n"
        "def tokenize():\n    ctypes.string_at(8)\n"
        "if os.environ['RANK'] == '1':\n    tokenize()\ntime.sleep(600)\n"
    )
    result = job.run(script)
    assert result.returncode == 139
    assert "  at train.py:3 in tokenize" in result.stderr


def test_error_of_a_command_whose_stderr_the_script_captured_is_in_the_report(job, distlaunch):
    (distlaunch.work / "prep.py").write_text(
        "def main():\n    raise ValueError('bad vocab')\nmain()\n"
    )
    script = distlaunch.work / "train.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    subprocess.run([sys.executable, 'prep.py'], check=True, capture_output=True)\n"
        "time.sleep(600)\n"
    )
    result = job.run(script)
    diagnosis = json.loads((result.run_dir / "report.json").read_text())["diagnosis"]
    assert (diagnosis["ranks"], diagnosis["exception_type"]) == (
        [1],
        "subprocess.CalledProcessError",
    )
    shows_notes = sys.version_info >= (3, 11)
    assert (diagnosis["original"] or "").startswith(
        "ValueError: bad vocab (prep.py:2"
    ) is shows_notes


def test_error_of_a_command_whose_stdout_the_script_captured_is_in_the_report(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import subprocess\n"
        "subprocess.check_output(['sh', '-c', 'echo fatal: no branch >&2; exit 3'])\n"
    )
    result = job.run(script)
    diagnosis = json.loads((result.run_dir / "report.json").read_text())["diagnosis"]
    assert diagnosis["original"] == "fatal: no branch"
    assert not mentions(result.stderr, "The command wrote:")


def test_error_in_the_log_counts_before_what_a_command_wrote_to_a_captured_stdout(job, distlaunch):
    script = distlaunch.work / "train.py"
    command = "echo 2 files are missing; echo fatal: no branch >&2; exit 3"
    script.write_text(f"import subprocess\nsubprocess.check_output(['sh', '-c', {command!r}])\n")
    result = job.run(script)
    diagnosis = json.loads((result.run_dir / "report.json").read_text())["diagnosis"]
    assert diagnosis["original"] == "fatal: no branch"
    shown = any("2 files are missing" in line for line in diagnosis["excerpt"])
    assert shown is (sys.version_info >= (3, 11))


def test_hint_at_shared_memory_has_the_size_on_the_node(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGBUS)\n"
        "time.sleep(600)\n"
    )
    result = job.run(script, options=["-x", "PYTHONFAULTHANDLER=0"])
    diagnosis = json.loads((result.run_dir / "report.json").read_text())["diagnosis"]
    found = os.statvfs("/dev/shm")
    assert diagnosis["hint_kind"] == "shared-memory"
    assert mentions(diagnosis["hint"], f"{found.f_frsize * found.f_blocks >> 20} MiB")
