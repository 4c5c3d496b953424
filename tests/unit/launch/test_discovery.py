from __future__ import annotations

import os
from pathlib import Path

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.launch.discovery import run_discover
from tests.facts import mentions

PATH = {"PATH": os.defpath}


def is_running(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def failed(command: str, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        run_discover(command, PATH, **kwargs)
    return caught.value.message


def test_a_command_gets_our_environment_and_no_stdin():
    assert run_discover('echo "$A:2"; cat', {**PATH, "A": "h"}) == "h:2\n"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("exit 3", "exit code 3"),
        ("kill -TERM $$", "signal SIGTERM"),
        ("kill -40 $$", "signal 40"),
        ("echo one >&2; echo 'two \x1b[1m' >&2; exit 1", r"its last message is 'two \x1b[1m'"),
        ("no-such-command", "exit code 127"),
        ("yes", "printed over 1 MiB"),
    ],
)
def test_a_command_that_fails_is_quoted_with_its_last_words(command, text):
    assert text in failed(command, most=1 << 20)


def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(tmp_path):
    pids = tmp_path / "pids"
    message = failed(f"sleep 600 & echo $! > {pids}; echo slow >&2; wait", timeout_s=3.0)
    assert mentions(message, "3 s", "'slow'")
    stat = Path("/proc", pids.read_text().strip(), "stat")
    assert not is_running(stat)


def test_one_that_closes_its_output_and_runs_on_is_waited_for():
    assert run_discover("exec 2>&-; echo a; exec >&-; sleep 0.2", PATH) == "a\n"


@pytest.mark.parametrize(
    "leaving", ["sleep 600", "setsid sleep 600", "setsid sh -c 'sleep 600 & sleep 600 & wait'"]
)
def test_background_processes_of_a_command_are_killed(tmp_path, leaving):
    os.mkfifo(tmp_path / "held")
    end = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    assert run_discover(f"{leaving} 3>'{tmp_path / 'held'}' & echo a; sleep 0.1", PATH) == "a\n"
    assert os.read(end, 1) == b""  # nobody has the other end
    os.close(end)


def test_a_command_that_no_shell_can_be_given_is_an_error():
    assert "NUL" in failed("echo a\0")
    assert "Argument list too long" in failed("echo " + "a" * (1 << 21))
