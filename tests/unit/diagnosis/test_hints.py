"""Hints for failures as they are in the logs of ranks: tests/data/hints, one file for each group.

Each ``[[row]]`` belongs to one row of the table of hints: the ``kind`` of the failure and words of
the ``hint``. Its ``text`` has real texts of libraries, with the version that wrote them and where
the text came from. A text whose source nobody has looked up says ``not checked`` instead and names
no version. Its ``near`` has failures with similar words from another cause, ``why`` they are
another, and the kind of hint that one ``gives`` (none if empty). An ``exception`` stands below a
traceback of the script; a ``log`` is all that the worker wrote. ``code`` is how it ended, -9 for a
signal. One rank of four failed in that way, or ``everywhere`` all of them, on one node or on ``nodes``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import replace
from distlaunch.diagnosis.awaited_hints import AWAITED
from distlaunch.diagnosis.evidence import read
from distlaunch.diagnosis.failure_kinds import Failure, FailureKind
from distlaunch.diagnosis.first_cause import diagnose
from distlaunch.diagnosis.hint_table import ROWS, ROWS_BY_TEXT
from distlaunch.diagnosis.place_hints import PLACES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "tests" / "data" / "hints").glob("*.toml"))
CASES: list[dict[str, Any]] = [
    row for file in FILES for row in tomllib.loads(file.read_text(encoding="utf-8"))["row"]
]
ORDINARY = ROOT / "tests" / "data" / "ordinary_lines.txt"
"""Lines that workers write in successful jobs."""
TEXTS = [(row, text) for row in CASES for text in row["text"]]
NEAR = [(row, text) for row in CASES for text in row["near"]]
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/home/u/project/train.py", line 42, in step\n'
    "    run(batch)\n"
)
VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]+_[A-Z0-9_]+\b")
VERSION = re.compile(r"\b\d")
NOT_CHECKED = "not checked"
SETTINGS = {"adds_local_rank", "dashes_first", "master_port"}


class Names(dict):
    """The names in a hint: options of train, and nothing for the groups of a pattern."""

    def __missing__(self, key):
        return Opt if key == "Opt" else "..."


def end_of_case(end_of, case, rank=None):
    tail = case["log"] if "log" in case else f"{TRACEBACK}{case['exception']}\n"
    rank = case.get("rank", 0) if rank is None else rank
    return end_of(
        rank,
        tail,
        host=f"node{rank % case.get('nodes', 1)}",
        returncode=case.get("code", 1),
        oom_kills=case.get("oom_kills", 0),
    )


def diagnosed(end_of, case):
    workers = case.get("workers", 4)
    ranks = range(workers) if case.get("everywhere") else [case.get("rank", 0)]
    settings = {name: case[name] for name in SETTINGS if name in case}
    return diagnose(
        [end_of_case(end_of, case, rank) for rank in ranks], world_size=workers, **settings
    )


def failure_of(end_of, case):
    settings = {name: case[name] for name in SETTINGS if name in case}
    return Failure(
        read(end_of_case(end_of, case)),
        python=None,
        world_size=case.get("workers", 4),
        nodes=case.get("nodes", 1),
        **settings,
    )


def name_of(case):
    row, text = case
    return f"{row['kind']}: {text.get('library') or text['why']}"


@pytest.mark.parametrize("case", TEXTS, ids=name_of)
def test_a_real_text_gets_the_hint_of_its_row(end_of, case):
    row, text = case
    diagnosis = diagnosed(end_of, text)
    assert row["hint"] in (diagnosis.hint or "")
    assert diagnosis.hint_kind == row["kind"]


@pytest.mark.parametrize("case", NEAR, ids=name_of)
def test_similar_words_from_another_cause_do_not_get_that_hint(end_of, case):
    row, text = case
    diagnosis = diagnosed(end_of, text)
    assert row["hint"] not in (diagnosis.hint or "")
    assert (diagnosis.hint_kind or "") == text["gives"]


def test_each_row_of_the_table_is_the_first_that_matches_some_real_text(end_of):
    first = Counter()
    for _, text in TEXTS:
        failure = failure_of(end_of, text)
        first[next(n for n, row in enumerate(ROWS) if row.hint_of(failure) is not None)] += 1
    unused = [(ROWS[n].kind, ROWS[n].marks) for n in range(len(ROWS)) if n not in first]
    assert unused == []


def test_the_order_of_rows_decides_where_more_than_one_matches(end_of):
    pairs = set()
    for _, text in TEXTS:
        failure = failure_of(end_of, text)
        kinds = [row.kind for row in ROWS if row.hint_of(failure) is not None]
        pairs |= {(kinds[0], later) for later in kinds[1:] if later is not kinds[0]}
    kind = FailureKind
    assert pairs >= {
        (kind.SHARED_MEMORY, kind.DISK),
        (kind.SHARED_MEMORY, kind.NCCL),
        (kind.SHARED_MEMORY, kind.LOADER),
        (kind.INDEX, kind.GPU_KERNEL),
        (kind.GPU_DRIVER, kind.BINARY),
        (kind.HOST_MEMORY, kind.SIGNAL),
        (kind.NO_GROUP, kind.CRASH),
    }


def test_rows_of_different_kinds_match_one_text_only_where_the_later_is_more_general(end_of):
    pairs = set()
    for _, text in TEXTS:
        failure = failure_of(end_of, text)
        first, *later = [row.kind for row in ROWS_BY_TEXT if row.hint_of(failure) is not None] or [
            None
        ]
        pairs |= {(first, kind) for kind in later if kind is not first}
    kind = FailureKind
    assert pairs == {
        (kind.CHECKPOINT, kind.MISSING_FILE),
        (kind.COMMAND, kind.PERMISSION),
        (kind.EXTENSION, kind.VARIABLE),
        (kind.GPU_DRIVER, kind.BINARY),
        (kind.GPU_MEMORY, kind.NCCL),
        (kind.HOST_MEMORY, kind.CRASH),
        (kind.INDEX, kind.GPU_KERNEL),
        (kind.INTERFACE, kind.NCCL),
        (kind.NCCL, kind.SAME_GPU),
        (kind.NO_GPU, kind.OLD_NAME),
        (kind.RANK, kind.VARIABLE),
        (kind.SAME_FILE, kind.MISSING_FILE),
        (kind.SHARED_MEMORY, kind.DISK),
        (kind.SHARED_MEMORY, kind.LOADER),
        (kind.SHARED_MEMORY, kind.NCCL),
    }


@pytest.mark.parametrize("stream", ["stderr_tail", "stdout_tail"])
def test_ordinary_last_line_of_a_worker_gives_no_hint(end_of, stream):
    lines = ORDINARY.read_text(encoding="utf-8").splitlines()
    given = {}
    for line in lines:
        text = f"{line}\n"
        end = end_of(0, text) if stream == "stderr_tail" else end_of(0, b"", stdout_tail=text)
        given[line] = diagnose([end], world_size=4).hint_kind
    of_rows = {row.kind.value for row in ROWS}
    assert {line: kind for line, kind in given.items() if kind in of_rows} == {}
    assert len(lines) >= 200


def test_ordinary_lines_above_an_exception_do_not_change_its_hint(end_of):
    log = ORDINARY.read_text(encoding="utf-8")
    hints = {}
    for _, text in TEXTS:
        if "exception" in text and not text.get("everywhere"):
            alone = diagnosed(end_of, text)
            below = diagnosed(end_of, {**text, "log": f"{log}{TRACEBACK}{text['exception']}\n"})
            hints[text["exception"]] = (alone.hint, below.hint)
    assert {key: pair for key, pair in hints.items() if pair[0] != pair[1]} == {}


def test_a_failure_that_is_written_to_stdout_has_the_same_hint(end_of):
    row, text = next((row, text) for row, text in TEXTS if "synchronize.py" in text.get("log", ""))
    end = end_of(0, b"", stdout_tail=text["log"])
    diagnosis = diagnose([end], world_size=4)
    assert (diagnosis.cause.stream, diagnosis.hint_kind) == ("stdout", row["kind"])


def test_each_row_has_words_that_distinguish_it_from_the_other_rows_and_a_near_miss():
    for row in CASES:
        assert row["text"], row["hint"]
        assert row["near"], row["hint"]
        assert row["kind"] in {kind.value for kind in FailureKind}
        for text in row["text"]:
            assert text["library"]
            if text["from"] == NOT_CHECKED:
                assert VERSION.search(text["library"]) is None
            else:
                assert text["from"].startswith("https://") or (ROOT / text["from"]).exists()


def test_each_kind_has_a_row():
    kind = FailureKind
    without_rows = {kind.EARLY, kind.NETWORK}
    assert {row.kind for row in (*ROWS, *PLACES, *AWAITED)} | without_rows == set(kind)


def test_a_hint_fits_on_four_lines_of_the_report(end_of):
    for _, text in TEXTS:
        assert len(diagnosed(end_of, text).hint) <= 360


def test_the_page_behind_a_hint_has_a_section_for_each_kind():
    page = (ROOT / "distlaunch" / "docs" / "hints.md").read_text(encoding="utf-8")
    sections = [
        line[4:].lower().replace(" ", "-") for line in page.splitlines() if line[:4] == "### "
    ]
    assert sorted(sections) == sorted(kind.value for kind in FailureKind)


def test_section_of_a_kind_names_the_variables_of_its_hints():
    page = (ROOT / "distlaunch" / "docs" / "hints.md").read_text(encoding="utf-8")
    sections = {
        part.partition("\n")[0].lower().replace(" ", "-"): part
        for part in re.split(r"^##+ ", page, flags=re.MULTILINE)
    }
    missing = set()
    for row in (*ROWS, *PLACES):
        hint = row.hint.format_map(Names()) if isinstance(row.hint, str) else ""
        for name in VARIABLE.findall(hint):
            if name not in sections[row.kind.value]:
                missing.add((row.kind.value, name))
    assert missing == set()


def test_hint_at_shared_memory_has_its_size(end_of):
    text = next(text for row, text in TEXTS if row["kind"] == "shared-memory")
    end = replace(end_of_case(end_of, text), shared_memory_bytes=64 << 20)
    diagnosis = diagnose([end], world_size=4)
    assert diagnosis.hint_kind == "shared-memory"
    assert "64 MiB" in diagnosis.hint
