"""Signals after the job's exit code is settled change nothing, but end the remaining waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.process.loopback import LoopbackLaunchers

# The very end of ``launch.run_job``, with a console that tells how long it would have waited for
# its reader.
SOURCE = """
import os, signal
from distlaunch.coordinator.runtime.signal_pipe import SignalPipe
from distlaunch.launch import process

class Console:
    def close(self, *, timeout_s, hurried):
        print("waits", timeout_s, hurried(), flush=True)
        return 0

with process.closed_console(Console(), SignalPipe()) as ended:
    ended.append(CODE)
    SEND
print("went on", flush=True)
"""
SIGNALS = [
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
]
"""All that would end a process by default and that somebody may send."""


def wind_up(code: int, *numbers: int) -> tuple[str, int]:
    send = "; ".join(f"os.kill(os.getpid(), {int(number)})" for number in numbers) or "pass"
    done = subprocess.run(
        [sys.executable, "-c", SOURCE.replace("CODE", str(code)).replace("SEND", send)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout, done.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_it_hurries_the_wait_for_a_slow_reader_and_ends_nobody(number):
    assert wind_up(0, number) == ("waits None True\nwent on\n", 0)


def test_one_that_only_workers_were_to_have_changes_nothing():
    assert wind_up(0, signal.SIGUSR1) == ("waits None False\nwent on\n", 0)


@pytest.mark.parametrize(("code", "wait"), [(0, "None"), (3, "10.0")])
def test_without_one_only_a_failed_job_bounds_the_wait(code, wait):
    assert wind_up(code) == (f"waits {wait} False\nwent on\n", 0)


@pytest.mark.parametrize(("command", "code"), [("train", 0), ("train", 7), ("torchrun", 7)])
def test_signals_after_the_verdict_change_neither_exit_code_nor_report(distlaunch, command, code):
    words = (
        ["train", "--num-procs", "2"]
        if command == "train"
        else ["torchrun", "--log-dir", "logs", "--nproc-per-node", "2"]
    )
    (distlaunch.work / "ends.py").write_text(
        f"import sys; print('here', flush=True); sys.exit({code})"
    )
    for number in SIGNALS:
        running = distlaunch.start([*words, "ends.py"])
        sent = running.signal_to_the_end(number)
        result = running.wait()
        assert result.returncode == code, f"{number.name}, sent {sent} times: {result.stderr}"
        assert [event["exit_code"] for event in result.of_type("job_ended")] == [code]
        if code:
            assert "exit code 7" in result.stderr
            assert "exit code 7" in (result.run_dir / "report.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("signalled", [0, 1])
def test_signals_after_the_verdict_change_nothing_at_any_of_several_launchers(
    distlaunch, number, signalled
):
    launchers = LoopbackLaunchers(distlaunch)
    launchers.start_all()
    launchers.wait_ready(0, 1)
    for rank in (0, 1):
        launchers.put_sign(f"end-{rank}")
    launchers.by_rank[signalled].signal_to_the_end(number)
    assert launchers.exit_codes() == {0: 0, 1: 0}


@pytest.mark.parametrize("code", [0, 7])
def test_a_signal_while_a_reader_is_awaited_ends_the_wait_with_the_verdict(distlaunch, code):
    """Without a reader the launcher waits forever after 0, and 10 s after 7. One signal ends either
    within seconds."""
    reading, writing = os.pipe()
    source = (
        f"import os, sys\nfor _ in range(4000): os.write(1, b'x' * 99 + b'\\n')\nsys.exit({code})"
    )
    (distlaunch.work / "fills.py").write_text(source)
    try:
        running = distlaunch.start(["train", "--num-procs", "2", "fills.py"], stdout=writing)
        running.wait_event("job_ended")
        running.send_signal(signal.SIGTERM)
        assert running.wait(20).returncode == code
    finally:
        os.close(reading)
        os.close(writing)
