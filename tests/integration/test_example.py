"""The first steps of README.md, as printed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.launcher import TRAINING
from tests.pages import README, ROOT, blocks


def commands() -> list[str]:
    """Return the commands of README that this file runs, one string each."""
    ours = [block for block in blocks(README) if block.mark.startswith("run: ")]
    lines = "".join(block.text for block in ours).replace("\\\n", "")
    return lines.splitlines()


def accuracy(output: str) -> str:
    found = re.findall(r"accuracy (\d\.\d{4})", output)
    assert len(found) == 1, f"rank 0 alone prints the accuracy, once:\n{output}"
    return found[0]


@pytest.fixture
def shell(clean_env, tmp_path, monkeypatch):
    """Return a function that starts a command of README in the checkout, with ``distlaunch`` on the
    PATH."""
    program = tmp_path / "distlaunch"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m distlaunch "$@"\n', "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{clean_env['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("DISTLAUNCH_PRELOAD", f"{TRAINING},sklearn.datasets")

    def start(command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"exec {command}" if command.startswith("distlaunch") else command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.mark.timeout(300)
def test_the_first_steps_of_the_readme_run_as_printed(shell):
    train, break_it, see_why, restart, find_logs, stop_it = commands()

    def run(command: str) -> tuple[int, str, str]:
        process = shell(command)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err

    code, plain, err = run(train)
    assert code == 0, err
    assert float(accuracy(plain)) >= 0.95

    code, _, err = run(break_it)
    assert code == 1, err
    assert "rank 1 of 2 failed" in err
    assert "RuntimeError: asked to fail at epoch 4" in err
    code, report, err = run(see_why)
    assert code == 0, err
    assert "RuntimeError: asked to fail at epoch 4" in report

    code, restarted, err = run(restart)
    assert code == 0, err
    assert "resuming at epoch 4 (attempt 1)" in restarted
    assert accuracy(restarted) == accuracy(plain)
    code, logs, err = run(find_logs)
    assert code == 0, err
    assert logs.split().count("rank-0.log") == 2, "one for each attempt"

    process = shell(stop_it)
    assert process.stderr is not None
    while "logs: " not in (line := process.stderr.readline()):
        assert line, "the job has started"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
