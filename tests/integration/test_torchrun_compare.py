"""Command lines under torchrun and under distlaunch torchrun: docs/from-torchrun.md judges all
differences."""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PAGE = (Path(__file__).parents[2] / "distlaunch" / "docs" / "from-torchrun.md").read_text("utf-8")


@pytest.fixture(scope="module")
def script():
    """Return what scripts/compare-torchrun defines; it puts its folder on the path for its own
    modules."""
    before = list(sys.path)
    names = runpy.run_path(str(SCRIPTS / "compare-torchrun"))
    sys.path[:] = before
    return names


@pytest.mark.parametrize(
    "name",
    [
        "standalone",
        "PET variables",
        "maps",
        "lines copied",
        "a restart",
        "one worker fails",
        "beginnings of our names",
    ],
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


# --- the judge, on differences that are made up: what would be a fault is not known


def judged(script, case: str, **here: object) -> list[str]:
    """Return the differences that nobody has judged if distlaunch does what torchrun does, except
    ``here``."""
    seen = sys.modules["comparelib.observe"].Seen
    worker = {
        "argv": ["probe.py", "--lr", "0.1"],
        "name": "__main__",
        "cwd": "{here}",
        "stdin": None,
        "unbuffered": True,
        "affinity": 2,
        "env": {"RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"},
    }
    usual = {
        "exit_code": 0,
        "workers": {"0-0": worker},
        "stdout": Counter(["out 0", "out 1"]),
        "stderr": Counter(),
        "own_words": "",
        "files": {},
    }
    there = seen(**{**usual, **here.pop("there", {})})
    env = here.pop("env", None)
    changed = here.pop("worker", {}) | (
        {"env": {**worker["env"], **env}} if env is not None else {}
    )
    workers = {"0-0": {**worker, **changed}, **here.pop("more", {})}
    for name in [name for name, value in workers["0-0"]["env"].items() if value is None]:
        del workers["0-0"]["env"][name]
    found = script["differences"](there, seen(**{**usual, "workers": workers, **here}))
    return [difference for difference in found if script["judge"](difference, case) is None]


@pytest.mark.parametrize(
    "fault",
    [
        {"worker": {"argv": ["probe.py", "--lr"]}},
        {"worker": {"argv": ["probe.py", "$lr", "0.1"]}},
        {"worker": {"argv": ["probe.py"]}},
        {"there": {"exit_code": 1}},
        {"there": {"exit_code": 2}},
        {"there": {"exit_code": 1}, "exit_code": 2},
        {"there": {"exit_code": 1}, "exit_code": 5},
        {"exit_code": 1},
        {"more": {"0-1": {}}},
        {"more": {"1-0": {}}},
        {"env": {"DISTLAUNCH_WARM_FD": "7"}},
        {"env": {"DISTLAUNCH_ATTEMPT": "none"}},
        {"env": {"NODE_RANK": "1"}},
        {"env": {"CUDA_VISIBLE_DEVICES": None}},
        {"env": {"CUDA_VISIBLE_DEVICES": "0"}},
        {"env": {"RANK": "1"}},
        {"env": {"RANK": None}},
        {"env": {"OMP_NUM_THREADS": "0"}},
        {"env": {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}},
        {"env": {"PET_NNODES": "1"}},
        {"worker": {"unbuffered": False}},
        {"worker": {"affinity": 1}},
        {"worker": {"cwd": "/"}},
        {"stdout": Counter(["out 0"])},
        {"stdout": Counter(["out 0", "out 1", "out 1"])},
        {"stdout": Counter(["out 0", "[default1]:out 1"])},
        {"stdout": Counter(["out 0out 1"]), "there": {"stdout": Counter(["out 0", "out 2"])}},
        {"files": {"secrets.txt": ""}},
        {"files": {"report.txt": ""}},
        {"files": {"attempt_0/2/stdout.log": ""}},
    ],
    ids=str,
)
def test_a_difference_that_would_be_a_fault_is_not_known(script, fault):
    for case in ("standalone", "one worker fails", "tee"):
        assert judged(script, case, **deepcopy(fault)), case


def test_a_difference_that_is_known_in_one_case_is_not_in_another(script):
    fails = {"there": {"exit_code": 1}, "exit_code": 37}
    assert judged(script, "one worker fails", **fails) == []
    assert judged(script, "standalone", **fails) == ["exit code 1 -> 37"]
    assert judged(script, "one worker is killed", **fails) == ["exit code 1 -> 37"]
    added = {"env": {"NODE_RANK": "0", "DISTLAUNCH_ATTEMPT": "0", "PYTHONUNBUFFERED": "1"}}
    assert judged(script, "standalone", **added) == []


def test_lines_that_torchrun_tore_are_known_by_being_the_same_letters(script):
    assert judged(script, "standalone", there={"stdout": Counter(["out 0out 1"])}) == []
    assert judged(script, "standalone", there={"stdout": Counter(["out 0out 2"])})


def test_every_rule_names_cases_that_there_are(script):
    names = {case.name for case in script["CASES"]}
    for rule in script["RULES"]:
        assert isinstance(rule.pattern, str) or rule.pattern.keys() <= names
