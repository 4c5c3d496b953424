"""Programs that pause while drawing."""

from __future__ import annotations

import logging
import re

import pyte
import pytest

from distlaunch.console.live_display import Display

PLAIN = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
PAUSE_S = 60.0


class Terminal:
    """A file that keeps each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, text: str) -> int:
        if text:
            self.writes.append(text.encode())
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch):
    """Disable tqdm's monitor thread, which would redraw bars."""
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def bar(file, steps, desc, **options):
    from tqdm import tqdm

    return tqdm(steps, desc=desc, file=file, bar_format=PLAIN, mininterval=0, ncols=60, **options)


def tqdm_in_a_row(file):
    for epoch in range(3):
        for _ in bar(file, range(3), f"epoch {epoch}"):
            pass


def tqdm_nested(file):
    for _ in bar(file, range(3), "epochs"):
        for _ in bar(file, range(3), "steps", leave=False):
            pass


def tqdm_nested_and_kept(file):
    for epoch in bar(file, range(3), "epochs"):
        for _ in bar(file, range(3), f"steps of epoch {epoch}"):
            pass


def tqdm_deep(file):
    for _ in bar(file, range(2), "epochs"):
        for _ in bar(file, range(2), "folds", leave=False):
            for _ in bar(file, range(2), "steps", leave=False):
                pass


def tqdm_positions(file):
    from tqdm import tqdm

    bars = [bar(file, range(4), f"loader {number}", position=number) for number in range(3)]
    for step in range(4):
        for each in bars:
            each.update()
        if step == 1:
            tqdm.write("half way", file=file)
    for each in bars:
        each.close()


def tqdm_and_lines(file):
    handler = logging.StreamHandler(file)
    for step in bar(file, range(4), "steps"):
        handler.emit(logging.makeLogRecord({"msg": f" step {step}"}))
    for line in range(3):
        file.write(f"line {line}\n")


def nested_and_lines(file):
    tqdm_nested(file)
    for line in range(20):
        file.write(f"line {line}\n")


def rich_live(file):
    from rich.console import Console
    from rich.live import Live

    console = Console(file=file, force_terminal=True, width=60, legacy_windows=False)
    with Live("one", console=console, auto_refresh=False) as live:
        for rows in range(1, 5):
            live.update("\n".join(f"{row} of {rows}" for row in range(rows)), refresh=True)
            if rows == 2:
                console.print("a line")
    console.print("trained")


def rich_progress(file):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=file, force_terminal=True, width=60, legacy_windows=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"))
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        tasks = [progress.add_task("train", total=3)]
        for _ in range(3):
            progress.update(tasks[0], advance=1, refresh=True)
            tasks.append(progress.add_task("validate", total=1))
            progress.update(tasks[-1], advance=1, refresh=True)
        for task in tasks[1:]:
            progress.update(task, visible=False, refresh=True)


def rows_below_the_cursor(file):
    """Draw three rows with a visible cursor that stops in the last of them."""
    for step in range(4):
        file.write("\x1b[2A" if step else "\r")
        for row in range(3):
            file.write(f"\rrow {row}: {step}" + ("\n" if row < 2 else ""))
    file.write("\n")


def keras(file):
    for epoch in range(2):
        file.write(f"Epoch {epoch}/2\n")
        for step in range(3):
            file.write("\r")
            file.write(f"\x1b[1m{step}/3\x1b[0m loss: {step}")
        file.write("\n")


PROGRAMS = [
    tqdm_in_a_row,
    tqdm_nested,
    tqdm_nested_and_kept,
    tqdm_deep,
    tqdm_positions,
    tqdm_and_lines,
    nested_and_lines,
    rich_live,
    rich_progress,
    rows_below_the_cursor,
    keras,
]


def written(program) -> list[bytes]:
    terminal = Terminal()
    program(terminal)
    return terminal.writes


def on_a_terminal(writes: list[bytes]) -> list[str]:
    emulator = pyte.Screen(100, 60)
    emulator.set_mode(pyte.modes.LNM)
    pyte.ByteStream(emulator).feed(b"".join(writes))
    return [row.rstrip() for row in emulator.display if row.strip()]


def shown(writes: list[bytes], pause: int) -> list[str]:
    """Return all lines of a program that pauses after this many writes."""
    display, now, lines = Display(), 0.0, []
    for count, data in enumerate(writes, 1):
        lines += display.feed(data, now)
        now += PAUSE_S if count == pause else 0.001
        while (due := display.due()) is not None and due <= now:
            found = display.settle(due)
            assert found, "nothing was final when it was due"
            lines += found
        if display.is_over:
            lines += display.finish()
            display = Display()
    lines += display.finish()
    return [
        text for line in lines if (text := re.sub(r"\x1b\[[\d;]*m", "", line.decode()).rstrip())
    ]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_pause_anywhere_makes_no_line_of_a_row_that_is_drawn_again(program):
    writes = written(program)
    wanted = on_a_terminal(writes)
    wrong = [pause for pause in range(len(writes) + 1) if shown(writes, pause) != wanted]
    assert wrong == [], [
        (pause, writes[max(0, pause - 4) : pause], writes[pause : pause + 4]) for pause in wrong[:3]
    ]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_pauses_everywhere_make_no_line_of_a_row_that_is_drawn_again(program):
    writes = written(program)
    display, lines = Display(), []
    for count, data in enumerate(writes):
        lines += display.feed(data, count * PAUSE_S)
        while (due := display.due()) is not None and due < (count + 1) * PAUSE_S:
            lines += display.settle(due)
    lines += display.finish()
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line.decode()).rstrip() for line in lines]
    assert [line for line in plain if line] == on_a_terminal(writes)
