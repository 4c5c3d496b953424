"""``attach``: the console of a job that was started with --detach, in another shell."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from typing import Literal

from distlaunch.cli.error_output import print_notice
from distlaunch.console.escapes import clean_text, hold_back
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.run_files import STDERR, STDOUT
from distlaunch.core.model.text import printable
from distlaunch.jobs.console_log import ConsoleLog
from distlaunch.jobs.events import POLL_S
from distlaunch.jobs.job import Job
from distlaunch.jobs.stop import find_end, stop_job

_LINES = 24
"""Lines that are shown first if stdout is no terminal."""


_Answer = Literal["detach", "stop", "stay"]
_ANSWERS: dict[str, _Answer] = {
    "": "stay",
    "d": "detach",
    "detach": "detach",
    "s": "stop",
    "stop": "stop",
}


def attach(job: Job) -> Job | None:
    """Show the console of a job until the job has ended, and return the ended job.

    Ctrl-C asks whether to detach or to stop the job. Return None if the user detaches. Raises
    ConfigError if the job has no console of its own.
    """
    name = printable(job.name)
    try:
        console = ConsoleLog(job)
        view = _View(console)
    except FileNotFoundError as exc:
        raise ConfigError(
            f"job {name} was not started with --detach: its console is the terminal that "
            "started it",
            hint=f"distlaunch logs {name} --follow",
        ) from exc
    except OSError as exc:
        raise ConfigError(
            f"the console of job {name} cannot be read: {exc.strerror}",
            hint=f"distlaunch logs {name} --follow",
        ) from exc
    with closing(console):
        console.skip_to_last(_screen_lines())
        stops: Literal["", "grace", "now"] = ""
        while True:
            try:
                if stops:
                    return stop_job(job, each=view.show, now=stops == "now", say=print_notice)
                return _follow(job, view)
            except KeyboardInterrupt:
                answer = _ask_user(name, is_stopping=bool(stops))
            if answer == "detach":
                print_notice(
                    f"detached; the job goes on. distlaunch attach {name} shows its console again"
                )
                return None
            if answer == "stop":
                stops = "now" if stops else "grace"


def _follow(job: Job, view: _View) -> Job:
    while True:
        ended = find_end(job)
        view.show()
        if ended is not None:
            view.finish()
            return ended
        time.sleep(POLL_S)


class _View:
    """Writes a console to stdout. A terminal gets it without harmful control sequences."""

    def __init__(self, console: ConsoleLog) -> None:
        self._console = console
        self._is_terminal = os.isatty(STDOUT)
        self._held = b""
        """An unfinished sequence or character."""
        self._waiting = b""
        """Is to be written next."""

    def show(self) -> None:
        """Write what has come since the last call."""
        self._write_waiting()
        while block := self._console.read():
            self._console.advance(len(block))
            if self._is_terminal:
                block, self._held = hold_back(self._held + block)
                block = clean_text(block)
            self._waiting = block
            self._write_waiting()

    def finish(self) -> None:
        """Write the unfinished sequence at the end, if there is one."""
        self._waiting, self._held = clean_text(self._held), b""
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[os.write(STDOUT, self._waiting) :]


def _screen_lines() -> int:
    try:
        return max(1, os.get_terminal_size(STDOUT).lines - 1)
    except OSError:
        return _LINES


def _ask_user(name: str, *, is_stopping: bool) -> _Answer:
    """Ask the user what Ctrl-C means. Without a terminal, and after another Ctrl-C, it detaches."""
    if not os.isatty(0):
        return "detach"
    stop = "kill its workers now" if is_stopping else "stop"
    question = (
        f"\ndistlaunch: job {name}: detach or {stop}? Type d or s, then Enter. Enter alone stays "
        "attached, Ctrl-C detaches: "
    )
    while True:
        os.write(STDERR, question.encode(errors="backslashreplace"))
        try:
            line = sys.stdin.readline()
        except (KeyboardInterrupt, OSError):
            line = ""
        if not line:
            os.write(STDERR, b"\n")
            return "detach"
        answer = _ANSWERS.get(line.strip().lower())
        if answer is not None:
            return answer
        question = "distlaunch: not understood. Type d or s, then Enter: "
