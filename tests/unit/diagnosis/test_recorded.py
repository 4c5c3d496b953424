"""Ends recorded from the programs in tests/programs/failures (CPython 3.11, torch 2.13, four
workers)."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlaunch.diagnosis.first_cause import diagnose, looks_like_consequence
from distlaunch.diagnosis.report import diagnosis_record, render_report

PROGRAMS = sorted(
    path.stem for path in (Path(__file__).parents[2] / "programs" / "failures").glob("[!_]*.py")
)
NEED_A_STACK = frozenset(
    {
        "key_is_never_set",
        "monitored_barrier_missed",
        "rank_0_comes_late",
        "store_waits_for_a_rank",
    }
)
"""Programs whose frame and hint are those of a running worker. The recorded exits have no stacks."""


def missed(program, score) -> list[str]:
    of_stack = ("frame", "hint") if program in NEED_A_STACK else ()
    return [what for what in score.missed if not any(name in what for name in of_stack)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_recorded_failure_is_explained_as_its_program_expects(program, recorded, judge_score):
    diagnosis = diagnose(recorded(program), world_size=4)
    score = judge_score(program, diagnosis_record(diagnosis), diagnosis.exit_code)
    assert missed(program, score) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_recorded_failure_is_explained_whatever_the_order_of_the_ends(
    program, recorded, judge_score
):
    diagnosis = diagnose(recorded(program)[::-1], world_size=4)
    score = judge_score(program, diagnosis_record(diagnosis), diagnosis.exit_code)
    assert missed(program, score) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_rank_is_accounted_for_in_the_report(program, recorded):
    diagnosis = diagnose(recorded(program), world_size=4)
    message = len(diagnosis.cause.ranks) + sum(
        (int(part.partition("-")[2] or part) - int(part.partition("-")[0]) + 1)
        for line in (*diagnosis.failed_too, *diagnosis.others)
        for part in line.partition(":")[0].removeprefix("ranks ").removeprefix("rank ").split(",")
    )
    assert message == 4


@pytest.mark.parametrize("program", PROGRAMS)
def test_report_fits_the_screen_and_has_no_control_characters(program, recorded):
    text = render_report(
        diagnose(recorded(program), world_size=4),
        job_id="ab12",
        world_size=4,
        attempt=0,
        restarts=0,
        max_restarts=0,
        elapsed_s=3.0,
        run_dir="/home/user/jobs/ab12",
        many_hosts=False,
    )
    assert text.isprintable() or all(char == "\n" or char.isprintable() for char in text)
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) <= 26


def test_only_the_failing_rank_is_no_consequence(recorded):
    judged = {end.rank: looks_like_consequence(end) for end in recorded("value_error_in_step")}
    assert judged == {0: True, 1: True, 2: False, 3: True}


def test_same_assertion_on_all_ranks_is_one_cause(recorded):
    assert sorted(diagnose(recorded("assertion_on_all_ranks"), world_size=4).cause.ranks) == [
        0,
        1,
        2,
        3,
    ]
