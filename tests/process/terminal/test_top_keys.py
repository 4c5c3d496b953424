"""``top`` on a terminal that pyte draws: keys, another size, and the end of the job."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest

from distlaunch.cli.commands import top as commands_top
from distlaunch.core.errors import ConfigError
from distlaunch.jobs import stacks
from distlaunch.jobs.ask_running import NotNowError
from tests.launcher import PROGRAMS

LONG_S = 40.0


@pytest.fixture
def job(distlaunch):
    running = distlaunch.start(["train", "--num-procs", "4", PROGRAMS / "steps.py", "0.02", "1"])
    running.wait_for(
        lambda: all((distlaunch.work / f"stepping-{rank}").exists() for rank in range(4)),
        "steps of all ranks",
        timeout=LONG_S,
    )
    return running


@pytest.fixture
def top(distlaunch, screen, job):
    return distlaunch.start(
        ["top", "latest", "--interval", "0.2"], env={"TERM": "xterm"}, **screen.streams()
    )


def wait_drawn(screen, wanted, what: str) -> list[str]:
    """Read until the rows of the terminal are as wanted, and return them."""
    deadline = time.monotonic() + LONG_S
    while not wanted(rows := screen.drawn()):
        screen.look(0.1)
        if time.monotonic() > deadline:
            pytest.fail(f"{what} is not on the terminal:\n" + "\n".join(rows))
    return rows


def ranks_of(rows: list[str]) -> list[str]:
    """Return the ranks of the rows, from top to bottom."""
    first = next((at for at, row in enumerate(rows) if "STEP-TIME" in row), len(rows))
    return [row[1:].split()[0] for row in rows[first + 1 :] if row[1:].strip()[:1].isdigit()]


def test_keys_sort_show_stacks_and_help_and_quit(distlaunch, screen, top, job):
    wait_drawn(screen, lambda rows: any(row.startswith("!") for row in rows), "the slow rank")
    assert ranks_of(screen.drawn())[0] == "1"
    screen.type("s")
    wait_drawn(
        screen,
        lambda rows: "sort: rank" in rows[-1] and ranks_of(rows) == list("0123"),
        "the order by rank",
    )
    screen.type("?")
    wait_drawn(screen, lambda rows: any("PgUp" in row for row in rows), "the help")
    screen.type("?")
    wait_drawn(screen, lambda rows: ranks_of(rows) == list("0123"), "the ranks again")
    screen.type("j")
    screen.type("\r")
    wait_drawn(screen, lambda rows: any("steps.py" in row for row in rows), "a stack")
    screen.type("x")
    screen.type("q")
    wait_drawn(screen, lambda rows: ranks_of(rows) == list("0123"), "the ranks again")
    screen.type("q")
    assert screen.read_until_end(top).returncode == 0
    assert screen.modes() == screen.modes_before
    (distlaunch.work / "go").touch()
    assert job.wait(LONG_S).returncode == 0


@pytest.fixture
def readings(monkeypatch):
    """Return what top reads of a job whose launcher gives the answers that the test sets."""
    answers: dict[str, object] = {}
    for module in (commands_top, stacks):
        monkeypatch.setattr(module, "ask_running", lambda _, __, kind, **___: answers[kind])
    return commands_top._Readings(SimpleNamespace(name="exp", job_id="exp")), answers


def test_the_stacks_of_a_rank_that_has_ended_are_a_text(readings):
    read, answers = readings
    answers["snapshot"] = {"attempt": 0, "workers": []}
    answers["stacks"] = {"attempt": 0, "nodes": []}
    screen = commands_top._Screen(read, 1.0)
    assert "rank 3" in screen._stacks_or_problem(3)
    os.close(screen._wake)
    os.close(screen._wake_end)


def test_stacks_of_two_attempts_are_refused(readings):
    read, answers = readings
    answers["snapshot"] = {"attempt": 0, "workers": []}
    answers["stacks"] = {"attempt": 1, "nodes": []}
    with pytest.raises(NotNowError):
        read.stacks(0)


@pytest.mark.parametrize("answer", [{}, [], None, {"workers": [{}]}])
def test_an_answer_without_fields_is_a_clear_error(readings, answer):
    read, answers = readings
    answers.update(snapshot=answer, usage=None, stacks=answer)
    for ask in (read.read, lambda: read.stacks(0)):
        with pytest.raises(ConfigError, match="exp"):
            ask()


def test_ctrl_c_quits_from_a_stack_too(screen, top, job):
    wait_drawn(screen, lambda rows: ranks_of(rows) != [], "the ranks")
    screen.type("\r")
    wait_drawn(screen, lambda rows: any("steps.py" in row for row in rows), "a stack")
    screen.type("\x03")
    assert screen.read_until_end(top).returncode == 0
    assert screen.modes() == screen.modes_before


def test_another_size_of_the_terminal_is_used(screen, top, job):
    wait_drawn(screen, lambda rows: any("REASON" in row for row in rows), "the wide screen")
    screen.resize(12, 70)
    os.kill(top.pid, 28)
    screen.seen = b""
    rows = wait_drawn(screen, lambda rows: "quit" in rows[-1], "the last row at the new size")
    assert len(rows) == 12
    assert not any("REASON" in row for row in rows)
    screen.type("q")
    assert screen.read_until_end(top).returncode == 0


def test_top_ends_with_the_job_and_says_so(distlaunch, screen, top, job):
    wait_drawn(screen, lambda rows: ranks_of(rows) != [], "the ranks")
    (distlaunch.work / "go").touch()
    assert screen.read_until_end(top).returncode == 0
    assert screen.modes() == screen.modes_before
    assert b"status" in screen.seen


def test_top_goes_on_while_a_job_restarts(distlaunch, screen):
    words = ["--max-restarts", "1", "--restart-delay", "3", "--min-uptime", "0"]
    job = distlaunch.start(["train", *words, "--num-procs", "2", PROGRAMS / "steps.py", "0.02"])
    signs = [distlaunch.work / f"stepping-{rank}" for rank in range(2)]
    job.wait_for(lambda: all(sign.exists() for sign in signs), "steps of all ranks")
    words = ["top", "latest", "--interval", "0.2"]
    top = distlaunch.start(words, env={"TERM": "xterm"}, **screen.streams())
    wait_drawn(screen, lambda rows: "attempt 0" in rows[0], "the first attempt")
    os.kill(int(signs[1].read_text()), signal.SIGKILL)
    wait_drawn(screen, lambda rows: "waiting" in rows[0], "the delay")
    wait_drawn(screen, lambda rows: "running" in rows[0] and "attempt 1" in rows[0], "the restart")
    screen.type("q")
    assert screen.read_until_end(top).returncode == 0
    (distlaunch.work / "go").touch()
    assert job.wait(LONG_S).returncode == 0
