"""A signal that comes when the job has ended but the launcher still winds up is not lost."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.launcher import default_signals

# The very end of ``launch.run_job``, with a console that tells how long it would have waited for its reader.
SOURCE = """
import os, signal
from distlaunch import launching
from distlaunch.job.signals import SignalPipe

class Console:
    def close(self, *, timeout_s):
        print("waits", timeout_s, flush=True)
        return 0

with launching.closed_console(Console(), SignalPipe()) as ended:
    ended.append(CODE)
    SEND
print("went on", flush=True)
"""


def wind_up(code: int, number: int | None) -> tuple[str, int]:
    send = "pass" if number is None else f"os.kill(os.getpid(), {int(number)})"
    done = subprocess.run(
        [sys.executable, "-c", SOURCE.replace("CODE", str(code)).replace("SEND", send)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=default_signals,  # the tests may run in the background, where a shell has some ignored
    )
    return done.stdout, done.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_it_bounds_the_wait_for_a_slow_reader_and_ends_the_launcher(number):
    assert wind_up(0, number) == ("waits 1.0\n", -number)


def test_one_that_only_workers_were_to_have_changes_nothing():
    assert wind_up(0, signal.SIGUSR1) == ("waits None\nwent on\n", 0)


@pytest.mark.parametrize(("code", "wait"), [(0, "None"), (3, "10.0")])
def test_without_one_only_a_failed_job_bounds_the_wait(code, wait):
    assert wind_up(code, None) == (f"waits {wait}\nwent on\n", 0)
