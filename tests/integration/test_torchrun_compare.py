"""Command lines under torchrun and under distlaunch torchrun: no difference that TORCHRUN.md does not judge."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PAGE = (Path(__file__).parents[2] / "distlaunch" / "TORCHRUN.md").read_text("utf-8")


@pytest.fixture(scope="module")
def script():
    """Give what scripts/compare-torchrun defines; it puts its folder on the path for its own modules."""
    before = list(sys.path)
    names = runpy.run_path(str(SCRIPTS / "compare-torchrun"))
    sys.path[:] = before
    return names


@pytest.mark.parametrize(
    "name",
    ["standalone", "PET variables", "maps", "lines copied", "a restart", "one worker fails", "beginnings of our names"],
)
def test_no_difference_is_unknown(script, name):
    (case,) = [case for case in script["CASES"] if case.name == name]
    known, unknown = script["compare"](case)
    assert unknown == []
    assert all(f"| {rule.title} |" in PAGE for rule in known.values())


def test_the_page_has_every_command_line_and_every_option_as_the_tables_have_them(script):
    for case in script["CASES"]:
        assert f"| {case.name}: `" in PAGE
    assert script["options_table"]() in PAGE
    assert len(script["CASES"]) >= 30
