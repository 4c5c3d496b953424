"""A signal that comes when the job has ended but the launcher still winds up is not lost."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The job's end is where SignalPipe is closed: a signal that was noted and not read before must still end the process.
SOURCE = """
import os, signal
from distlaunch.job.signals import SignalPipe

pipe = SignalPipe()
os.kill(os.getpid(), {number})
os.kill(os.getpid(), signal.SIGUSR1)
late = pipe.close()
print(late, flush=True)
signal.raise_signal(late[0])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_an_unread_signal_is_given_back(number):
    done = subprocess.run(
        [sys.executable, "-c", SOURCE.format(number=int(number))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == f"[{int(number)}]\n", done.stderr
    assert done.returncode == -number
