"""Processes that workers on other hosts leave have the same time to end as on one machine."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.cluster.hosts import HEAD, until
from tests.cluster.stepping import wait_empty
from tests.facts import mentions
from tests.launcher import PROGRAMS

TWO = ("--hosts", "n1:1,n2:1", "--device", "cpu")
SHELL = ("--no-python", "/bin/bash", "-c", '"$@"; true', "wrap.sh", sys.executable)
"""A shell that does not execute the program in its place."""


def put(hosts, sign: str) -> None:
    (hosts.work / sign).touch()


def has(hosts, *signs: str) -> bool:
    return all((hosts.work / sign).exists() for sign in signs)


def test_an_upload_on_another_host_may_end_after_the_training(hosts):
    running = hosts.start(
        ["train", *TWO, "--linger", "100", PROGRAMS / "uploads.py", "--ranks", "1"]
    )
    running.wait_stderr("waiting up to 100 s (--linger) for 1 process left by rank 1 on n2: python")
    put(hosts, "go")
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert "rank 1 has uploaded" in result.stdout
    assert has(hosts, "uploaded-1")
    assert not has(hosts, "terms-1")
    wait_empty(hosts, HEAD, "n1", "n2")


def test_an_upload_that_takes_longer_is_ended_and_named_with_its_host(hosts):
    running = hosts.start(
        ["train", *TWO, "--linger", "0.1", PROGRAMS / "uploads.py", "--ranks", "0,1"]
    )
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert "distlaunch: ended 2 processes left by ranks 0-1 on n[1-2]: python" in result.stderr
    assert has(hosts, "got-TERM-0", "got-TERM-1")
    wait_empty(hosts, HEAD, "n1", "n2")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL], ids=["told to stop", "launcher killed"]
)
def test_the_programs_of_wrappers_save_on_their_hosts(hosts, number):
    options = ("--grace", "60", "--failure-grace", "60")
    running = hosts.start(
        ["train", *TWO, *options, *SHELL, PROGRAMS / "waits.py", "--save", "TERM"]
    )
    running.wait_for(lambda: has(hosts, "ready-0", "ready-1"), "the programs")
    running.send_signal(number)
    until(lambda: has(hosts, "got-TERM-0", "got-TERM-1"), "they were asked to end")
    put(hosts, "go")
    until(lambda: has(hosts, "saved-0", "saved-1"), "they have saved")
    result = running.wait()
    if number == signal.SIGTERM:
        assert result.returncode == 143
        assert mentions(result.stderr.rstrip().splitlines()[-1], "stopped", "2 workers", "none")
    wait_empty(hosts, HEAD, "n1", "n2")
