"""Hints for the calls in which hung workers stand, through the whole diagnosis of a hang.

``tests/data/hints_of_places.toml`` has a row for each row of the table: the ``calls`` of a stack,
innermost first, and a ``near`` one that ``gives`` another hint, or none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.hang import diagnose_hang
from distlaunch.diagnosis.place_hints import PLACES, find_place
from distlaunch.diagnosis.stack_parser import Frame

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).parents[2] / "data" / "hints_of_places.toml"
ROWS: list[dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))["row"]


def hint_of(calls, source=""):
    """Return the hint in the report of a job with one worker that stands in these calls.

    ``source`` is the innermost line of the script.
    """
    lines = [
        '  File "{}", line 7 in {}\n'.format(*call.rsplit(" in ", 1))
        for call in (*calls, "/home/user/project/train.py in main")
    ]
    text = "Current thread 0x00007f0 (most recent call first):\n" + "".join(lines)
    reported = diagnose_hang(
        [m.Stack(rank=0, pid=4000, state="S", text=text, source=source)],
        world_size=1,
        silent_s=30.0,
        heartbeats={},
        ended=(),
        hosts=lambda _rank: "node1",
        script_dir="/home/user/project",
    )
    return " ".join(reported.text.partition("hint: ")[2].split())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["hint"])
def test_a_place_has_the_hint_of_its_row(row):
    assert row["hint"] in hint_of(row["calls"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["hint"])
def test_a_similar_place_has_another_hint_or_none(row):
    hint = hint_of(row["near"])
    assert row["hint"] not in hint
    assert (row["gives"] in hint) if row["gives"] else hint == ""


def test_each_row_of_the_table_is_the_first_for_some_place():
    found = [
        find_place([Frame(file=file, line=7, function=function) for file, function in calls])
        for calls in ([call.rsplit(" in ", 1) for call in row["calls"]] for row in ROWS)
    ]
    assert found == list(PLACES)
    assert [row.kind.value for row in PLACES] == [row["kind"] for row in ROWS]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('name = input("name? ")', "line on stdin"),
        ("breakpoint()", "breakpoints"),
        ("pdb.set_trace()", "breakpoints"),
        ("batch = my_input(5)", ""),
    ],
)
def test_a_line_that_asks_the_user_has_a_hint(source, words):
    hint = hint_of([], source)
    assert (words in hint) if words else hint == ""
