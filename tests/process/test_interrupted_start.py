"""Ctrl-C while the command starts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import distlaunch

MOMENTS = 25
ROUNDS = 8
"""A quick command may end, or be in Python's own start, at all moments of one round."""


def interrupted(words: list[str], after_s: float) -> tuple[int, str]:
    running = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(after_s)  # any moment will do
    running.send_signal(2)
    _, message = running.communicate(timeout=60)
    return running.returncode, message


@pytest.mark.parametrize(
    "words",
    [["plan", "--num-procs", "2", "--no-python", "/bin/true"], ["train", "--help"]],
    ids=["plan", "help"],
)
def test_ctrl_c_at_any_moment_shows_no_traceback_of_ours(clean_env, words):
    """Python shows a traceback while it sets itself up; from our first statement on there is
    none."""
    command = [sys.executable, "-m", "distlaunch", *words]
    began = time.monotonic()
    subprocess.run(command, capture_output=True, check=True)
    whole_s = time.monotonic() - began
    ours = str(Path(distlaunch.__file__).parent)
    codes: set[int] = set()
    for number in range(MOMENTS * ROUNDS):
        if number % MOMENTS == 0 and 130 in codes:
            break
        code, message = interrupted(command, whole_s * (number % MOMENTS) / MOMENTS)
        assert ours not in message, message
        if "Traceback" not in message:
            codes.add(code)
            assert len(message.splitlines()) <= 1, message
    assert codes <= {130, -2, 0}, "0: it was ready before"
    assert 130 in codes
