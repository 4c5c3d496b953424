"""``top``: show what each rank of a running job uses, refreshed periodically, or printed once."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from distlaunch.cli.error_output import print_notice
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.record import plain, replace
from distlaunch.jobs.ask_running import JobEndedError, NotNowError, ask_running, refuse_odd_answers
from distlaunch.jobs.control import ANSWER_S
from distlaunch.jobs.job import Job
from distlaunch.jobs.top import RankOrder, TopView, view_of
from distlaunch.jobs.top_screen import ScreenState, draw, shown_ranks

if TYPE_CHECKING:
    from rich.console import Console

_ANSWER_S = 5.0
"""How long the launcher may take: it waits up to 3 s for nodes that do not answer."""
_BETWEEN_S = 1.0
"""Time between the two readings of ``--once``."""
_PIPE_WIDTH = 200
_KEYS = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b" ": "page down",
    b"\r": "stacks",
    b"\n": "stacks",
    b"q": "quit",
    b"\x03": "interrupt",
    b"\x04": "quit",
    b"s": "sort",
    b"n": "node",
    b"a": "all",
    b"?": "help",
    b"h": "help",
    b"\x1b": "back",
}
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_PAGE = 10


def run_top(job: Job, *, once: bool, as_json: bool, interval_s: float) -> int:
    """Show what the ranks of a job use. Return the exit code.

    Raises ConfigError if the job does not run, or cannot be asked from here.
    """
    readings = _Readings(job)
    if once or as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _print_once(readings, as_json=as_json)
        return 0
    readings.read()
    try:
        _Screen(readings, max(0.2, interval_s)).run()
    except JobEndedError as exc:
        print_notice(f"{exc.message}; {exc.hint}")
    return 0


class _Readings:
    """The launcher's answers: the newest, and the one before for rates."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._usage: Any = None
        self._before: Any = None
        self.view: TopView | None = None

    def read(self) -> TopView:
        """Ask the launcher. Raises ConfigError."""
        with refuse_odd_answers(self._job):
            return self._read()

    def _read(self) -> TopView:
        # A suspended launcher is noticed early; later it may be busy for some seconds.
        snapshot = self._keep_asking("snapshot", ANSWER_S if self.view is None else _ANSWER_S)
        usage = None
        with suppress(NotNowError):  # between two attempts no worker runs
            usage = self._keep_asking("usage", _ANSWER_S)
        if usage != self._usage:  # the launcher answers several shells with one reading
            self._before, self._usage = self._usage, usage
        self.view = view_of(snapshot, self._usage, self._before, name=self._job.name)
        return self.view

    def _keep_asking(self, kind: str, timeout_s: float) -> Any:
        return ask_running(self._job, "top", kind, timeout_s=timeout_s)

    def stacks(self, rank: int) -> str:
        """Return the stacks of a rank as text. Raises ConfigError."""
        from distlaunch.jobs.stacks import read_stacks

        return read_stacks(self._job, frozenset((rank,)), command="top").text


def _print_once(readings: _Readings, *, as_json: bool) -> None:
    readings.read()
    time.sleep(_BETWEEN_S)
    view = readings.read()
    if as_json:
        text = json.dumps(plain(_json_fields(view)), indent=2)
    else:
        width = os.get_terminal_size(1).columns if sys.stdout.isatty() else _PIPE_WIDTH
        lines = draw(view, ScreenState(is_interactive=False), width=width, height=None)
        text = "\n".join(line.plain.rstrip() for line in lines)
    sys.stdout.buffer.write(text.encode(errors="backslashreplace") + b"\n")


def _json_fields(view: TopView) -> dict[str, object]:
    """Return the fields of ``--format json``."""
    fields = {name: getattr(view, name) for name in type(view)._fields}
    fields["ranks"] = [
        {
            **_record_fields(row),
            "straggler": None if row.straggler is None else _straggler_fields(row.straggler),
        }
        for row in view.ranks
    ]
    return fields


def _straggler_fields(found: Any) -> dict[str, object]:
    return {**_record_fields(found), "reason": found.reason.value}


def _record_fields(record: Any) -> dict[str, object]:
    return {name: getattr(record, name) for name in type(record)._fields}


class _Screen:
    """Draws the figures and obeys the keys, until the user or the job ends it.

    A thread asks the launcher, which may take seconds, so that keys are answered at once.
    """

    def __init__(self, readings: _Readings, interval_s: float) -> None:
        self._readings = readings
        self._interval_s = interval_s
        self._state = ScreenState()
        self._is_over = False
        self._error: LaunchError | None = None
        self._wanted_stacks: int | None = None
        self._text = ""
        self._order = threading.Event()
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        from rich.console import Console

        console = Console(file=sys.stdout, highlight=False)
        thread = threading.Thread(target=self._keep_asking, name="ask", daemon=True)
        thread.start()
        # The signal of a changed size, and the end of the job, wake the loop.
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGWINCH, lambda *_: None)
        signal.signal(signal.SIGTERM, _raise_exit)  # the terminal is put right
        try:
            with _raw_keys(), console.screen(hide_cursor=True):
                while not self._is_over:
                    self._draw(console)
                    self._wait_and_handle_keys()
        finally:
            self._is_over = True
            self._order.set()
        if self._error is not None:
            raise self._error

    # --- the thread

    def _keep_asking(self) -> None:
        while not self._is_over:
            rank, self._wanted_stacks = self._wanted_stacks, None
            try:
                if rank is not None:
                    self._text = self._stacks_or_problem(rank)
                self._readings.read()
            except NotNowError as exc:
                self._text = exc.message
            except LaunchError as exc:
                self._error, self._is_over = exc, True
            with suppress(BlockingIOError):
                os.write(self._wake_end, b"\0")
            self._order.wait(self._interval_s)
            self._order.clear()

    def _stacks_or_problem(self, rank: int) -> str:
        try:
            return self._readings.stacks(rank)
        except JobEndedError:
            raise
        except LaunchError as exc:  # the rank has ended
            return exc.message

    # --- drawing

    def _draw(self, console: Console) -> None:
        from rich.control import Control
        from rich.text import Text

        view = self._readings.view
        if view is None:
            return
        width, height = console.size
        state = replace(self._state, text=self._text or self._state.text)
        lines = draw(view, state, width=width, height=height)
        console.control(Control.home())
        whole = Text("\n").join([_pad(line, width) for line in lines])
        console.print(whole, end="", soft_wrap=True, no_wrap=True)

    def _wait_and_handle_keys(self) -> None:
        """Wait for a key, a reading, or a change of the terminal's size. Handle the keys."""
        ready, _, _ = select.select([0, self._wake], [], [], self._interval_s)
        if self._wake in ready:
            with suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if 0 in ready:
            data = os.read(0, 64)
            for key in _KEY.findall(data) if data else (b"q",):
                self._on_key(_KEYS.get(key, ""))

    # --- keys

    def _on_key(self, key: str) -> None:
        state, view = self._state, self._readings.view
        is_covered = bool(self._text) or state.shows_help
        if key == "interrupt" or (key == "quit" and not is_covered):
            self._is_over = True
        elif view is None or key == "":
            return
        elif is_covered:
            self._text = ""
            self._state = replace(state, shows_help=False, notice="")
        elif key == "help":
            self._state = replace(state, shows_help=True)
        elif key == "sort":
            orders = list(RankOrder)
            following = orders[(orders.index(state.order) + 1) % len(orders)]
            self._state = replace(state, order=following)
        elif key == "node":
            numbers: list[int | None] = [None, *(node.number for node in view.nodes)]
            at = numbers.index(state.node) if state.node in numbers else 0
            self._state = replace(state, node=numbers[(at + 1) % len(numbers)])
        elif key == "all":
            self._state = replace(state, node=None)
        elif key == "stacks":
            rows = shown_ranks(view, state)
            if rows:
                self._wanted_stacks = rows[0].rank if state.chosen is None else state.chosen
                self._text = f"asking rank {self._wanted_stacks} ..."
                self._order.set()
        else:
            self._move_choice(
                {"up": -1, "down": 1, "page up": -_PAGE, "page down": _PAGE}.get(key, 0)
            )

    def _move_choice(self, lines: int) -> None:
        view, state = self._readings.view, self._state
        ranks = [] if view is None else [row.rank for row in shown_ranks(view, state)]
        if ranks and lines:
            at = ranks.index(state.chosen) if state.chosen in ranks else -1 if lines > 0 else 0
            self._state = replace(state, chosen=ranks[min(max(0, at + lines), len(ranks) - 1)])


def _raise_exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _pad(line: Any, width: int) -> Any:
    line.pad_right(max(0, width - line.cell_len))
    return line


@contextmanager
def _raw_keys() -> Iterator[None]:
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)
        # Output is still converted: a newline begins a new line.
        changed = termios.tcgetattr(0)
        changed[1] = before[1]
        termios.tcsetattr(0, termios.TCSADRAIN, changed)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
