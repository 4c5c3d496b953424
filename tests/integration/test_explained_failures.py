"""Every program of tests/programs/failures through the real launcher: the report names the right
rank and cause."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

SCORES = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "explain-scores"))
COLD = frozenset({"store_owner_exits", "collectives_differ"})
"""Programs with torch whose workers import it themselves; the second sets what torch reads then. For
the others it is preloaded: one import serves four workers."""
KNOWN_MISSES: frozenset[str] = frozenset()
"""Programs whose failure is not explained as it should be; docs/limits.md names each."""


def test_there_are_enough_ways_to_fail():
    programs = SCORES["programs"]()
    sources = [(SCORES["PROGRAMS"] / f"{name}.py").read_text(encoding="utf-8") for name in programs]
    with_gloo = [
        text for text in sources if re.search(r"^from _group import .*\bjoin\b", text, re.MULTILINE)
    ]
    assert len(programs) >= 32
    assert len(with_gloo) >= 15
    assert set(programs) >= KNOWN_MISSES


@pytest.mark.parametrize("program", SCORES["programs"]())
def test_failure_is_explained(program, tmp_path):
    warm = SCORES["uses_torch"](program) and program not in COLD
    score = SCORES["run"](program, tmp_path, preload="torch" if warm else None)
    assert score.right is (program not in KNOWN_MISSES), score.missed
