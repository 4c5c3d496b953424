"""Progress bars of common libraries, on a terminal that pyte draws.

``tests/data/screens`` has the screen half way and at the end. ``WRITE_SCREENS=1`` writes these
files anew: check the differences.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher import PROGRAMS

BARS = PROGRAMS / "bars" / "bars.py"
SCREENS = Path(__file__).parents[2] / "data" / "screens"
WRITE = os.environ.get("WRITE_SCREENS") == "1"
OTHER = "[1] a line of rank 1"
ABOVE = {"tqdm_kept": 1, "tqdm_position": 1}
"""Rows of rank 0 that have become lines, or soon will: the line of rank 1 may come before or after
them."""
QUICK = ["tqdm_single", "tqdm_nested", "tqdm_kept", "tqdm_position", "rich_track", "rich_live"]


def normal(rows: list[str]) -> list[str]:
    """Keep the rows of workers and the status line, without values that differ from run to run."""
    kept = [re.sub(r"^(distlaunch: 2/2 workers up).*", r"\1", row) for row in rows]
    kept = [row for row in kept if row.startswith("[") or row == "distlaunch: 2/2 workers up"]
    return [re.sub(r"\b\d+:\d\d(:\d\d)?\b|-:--:--|--:--", "TIME", row) for row in kept]


def ordered(rows: list[str], kind: str) -> str:
    """Put the line of rank 1 below the rows of rank 0: it may also stand above."""
    above = ABOVE.get(kind, 0)
    if OTHER in rows[:above]:
        rows = [*rows[1 : above + 1], OTHER, *rows[above + 1 :]]
    return "\n".join(rows)


def normal_of_lightning(rows: list[str]) -> list[str]:
    """Leave out rates, and the length of a bar beside them."""
    return [
        re.sub(r"[━╸╺█▏▎▍▌▋▊▉]+", "━", re.sub(r" *[\d.]+ ?(it/s|s/it)", " RATE", row))
        for row in normal(rows)
    ]


def normal_of_keras(rows: list[str]) -> list[str]:
    kept = [
        row
        for row in normal(rows)
        if not row.startswith("[0]") or "━" in row or row == "[0] trained"
    ]
    return [re.sub(r"━ .*", "━ NUMBERS", re.sub(r"\] \d/", "] N/", row)) for row in kept]


def watch(distlaunch, screen, on_screen, kind: str, columns: int, *, clean, words=()) -> None:
    screen.resize(30, columns)
    running = on_screen("--num-procs", "2", *words, str(BARS), kind)
    for rank in (0, 1):
        reached = distlaunch.work / f"half-{rank}"
        running.wait_for(
            lambda reached=reached: (screen.look(), reached.exists())[1], reached.name, timeout=100
        )
    file = SCREENS / f"{kind}-{columns}.txt"
    half, _, end = ("-", "", "-") if WRITE else file.read_text().partition("\n-----\n")
    deadline = time.monotonic() + (3 if WRITE else 40)
    while (shown := ordered(clean(screen.drawn()), kind)) != half and time.monotonic() < deadline:
        screen.look(0.1)
    assert any(row.startswith("distlaunch: job ") for row in screen.drawn())
    (distlaunch.work / "go").touch()
    assert screen.read_until_end(running, 100).returncode == 0
    ended = ordered(clean(screen.drawn()), kind)
    if WRITE:
        SCREENS.mkdir(exist_ok=True)
        file.write_text(f"{shown}\n-----\n{ended}\n")
    else:
        assert shown == half
        assert ended == end.removesuffix("\n")


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("kind", QUICK)
def test_bars_move_in_place_below_the_lines_of_other_ranks(
    distlaunch, screen, on_screen, kind, columns
):
    watch(distlaunch, screen, on_screen, kind, columns, clean=normal)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "columns"), [("lightning_rich", 80), ("lightning_tqdm", 200)])
def test_both_bars_of_lightning_move_in_place(distlaunch, screen, on_screen, kind, columns):
    watch(distlaunch, screen, on_screen, kind, columns, clean=normal_of_lightning)


@pytest.mark.timeout(900)
def test_the_bar_of_keras_moves_in_place(
    distlaunch, screen, on_screen, tensorflow_python, monkeypatch
):
    monkeypatch.setitem(distlaunch.env, "KERAS_BACKEND", "tensorflow")
    words = ("--python", tensorflow_python)
    watch(distlaunch, screen, on_screen, "keras", 80, clean=normal_of_keras, words=words)


@pytest.mark.parametrize("kind", ["tqdm_nested", "rich_live"])
def test_the_file_of_rank_0_keeps_every_byte_of_its_bars(distlaunch, screen, on_screen, kind):
    (distlaunch.work / "go").touch()
    result = screen.read_until_end(on_screen("--num-procs", "2", str(BARS), kind))
    assert result.returncode == 0
    bars = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "TQDM_NCOLS": "195", "COLUMNS": "196"}
    alone = subprocess.run(
        [sys.executable, BARS, kind],
        env={**distlaunch.env, "TERM": "xterm", "RANK": "0", "PYTHONUNBUFFERED": "1", **bars},
        cwd=distlaunch.work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )
    assert b"\x1b[" in alone.stdout
    assert (result.run_dir / "attempt-0" / "rank-0.log").read_bytes() == alone.stdout


def test_cursor_codes_of_one_rank_leave_lines_of_others_and_the_status_line_alone(
    distlaunch, screen, on_screen
):
    screen.resize(30, 80)
    running = on_screen("--num-procs", "2", str(BARS), "hostile")
    deadline = time.monotonic() + 40
    rows: list[str] = []
    while OTHER not in rows and time.monotonic() < deadline:
        screen.look(0.1)
        rows = screen.drawn()
    (distlaunch.work / "go").touch()
    assert OTHER in rows
    assert rows[-1].startswith("distlaunch: 2/2 workers up")
    assert screen.read_until_end(running).returncode == 0
    allowed = re.sub(rb"\x1b\[(\d*A|J|K|[\d;]*m)", b"", screen.seen)
    assert b"\x1b" not in allowed
    assert b"[1] before" in allowed


def test_only_rank_0_learns_of_a_terminal_and_only_where_one_shows_it(
    distlaunch, screen, on_screen
):
    names = ["TTY_COMPATIBLE", "TTY_INTERACTIVE", "TQDM_NCOLS"]
    script = distlaunch.work / "names.py"
    script.write_text(
        f"import os\nprint('variables', [os.environ.get(name) for name in {names}])\n"
    )
    reported, nothing = "variables ['1', '1', '195']", "variables [None, None, None]"

    def seen(*words: str, **env: str) -> list[list[str]]:
        result = screen.read_until_end(on_screen("--num-procs", "2", *words, str(script), env=env))
        assert result.returncode == 0
        return [result.lines_of(rank) for rank in (0, 1)]

    assert seen() == [[reported], [nothing]]
    assert seen(TTY_COMPATIBLE="0", TQDM_NCOLS="50") == [
        ["variables ['0', '1', '50']"],
        ["variables ['0', None, '50']"],
    ]
    assert seen("--env", "TTY_INTERACTIVE=0") == [
        ["variables ['1', '0', '195']"],
        ["variables [None, '0', None]"],
    ]
    assert (
        seen("--format", "jsonl")
        == seen("--output", "1")
        == seen(TERM="dumb")
        == [[nothing], [nothing]]
    )
    assert distlaunch.train("--num-procs", "2", script).lines_of(0) == [nothing]
