"""A rank has failed when it prints its traceback, not when it has exited."""

from __future__ import annotations

import pytest

from distlaunch.diagnosis.first_cause import diagnose, exceptions_of_threads
from distlaunch.diagnosis.report import render_report
from tests.facts import mentions

RAISED = """Traceback (most recent call last):
  File "/home/user/train.py", line 30, in <module>
    main()
  File "/home/user/train.py", line 12, in step
    raise ValueError("loss is nan")
ValueError: loss is nan
"""
LATER = RAISED.replace("ValueError", "KeyError").replace("loss is nan", "'label'")


def test_a_rank_whose_interpreter_still_ends_is_the_first_cause(end_of):
    ends = [
        end_of(1, returncode=-9, ended_s=5.1),
        end_of(2, RAISED, returncode=-15, ended_s=5.3, told_to_stop=True, traceback_age_s=0.3),
    ]
    found = diagnose(ends, world_size=3)
    assert found.cause.ranks == (2,)
    assert (found.cause.exception_type, found.cause.message) == ("ValueError", "loss is nan")
    assert found.exit_code == 1
    assert mentions(found.failed_too[0], "rank 1", "failed too", "SIGKILL")


def test_the_traceback_that_was_printed_first_wins_over_the_earlier_exit(end_of):
    ends = [
        end_of(0, LATER, ended_s=5.0, traceback_age_s=0.1),
        end_of(3, RAISED, ended_s=5.6, traceback_age_s=0.9),
    ]
    assert diagnose(ends, world_size=4).cause.ranks == (3,)


def test_a_traceback_that_the_script_survived_is_no_failure(end_of):
    ends = [
        end_of(1, LATER, ended_s=5.1),
        end_of(
            2,
            f"{RAISED}next epoch\n",
            returncode=-15,
            ended_s=5.3,
            told_to_stop=True,
            traceback_age_s=0.4,
        ),
    ]
    found = diagnose(ends, world_size=3)
    assert found.cause.ranks == (1,)
    assert found.failed_too == ()


def test_a_traceback_long_before_the_first_exit_is_no_failure(end_of):
    ends = [
        end_of(1, LATER, ended_s=50.1),
        end_of(2, RAISED, returncode=-15, ended_s=50.3, told_to_stop=True, traceback_age_s=40.0),
    ]
    assert diagnose(ends, world_size=3).cause.ranks == (1,)


def test_a_traceback_after_the_first_exit_came_with_the_stop(end_of):
    ends = [
        end_of(1, LATER, ended_s=5.1),
        end_of(2, RAISED, returncode=-15, ended_s=5.4, told_to_stop=True, traceback_age_s=0.1),
    ]
    assert diagnose(ends, world_size=3).cause.ranks == (1,)


def test_two_ranks_that_fail_together_for_different_reasons_are_both_in_the_first_lines(end_of):
    ends = [
        end_of(0, LATER, ended_s=5.4),
        end_of(2, RAISED, ended_s=5.0),
        end_of(1, returncode=-15, told_to_stop=True, ended_s=6.0),
    ]
    found = diagnose(ends, world_size=3)
    text = render_report(
        found,
        job_id="a",
        world_size=3,
        attempt=0,
        restarts=0,
        max_restarts=0,
        elapsed_s=1.0,
        run_dir="/r",
        many_hosts=False,
    )
    assert found.cause.ranks == (2,)
    assert text.splitlines()[:4] == [
        "rank 2 of 3 failed: exit code 1",
        "  ValueError: loss is nan",
        "  at train.py:12 in step",
        "  rank 0: failed too, exit code 1: KeyError: 'label' (train.py:12 in step)",
    ]
    assert found.others == ("rank 1: stopped by us",)


def test_end_of_a_long_message_is_in_the_report(end_of):
    tail = RAISED.replace("loss is nan", "x" * 2000 + " and the reason is here")
    found = diagnose([end_of(0, tail)], world_size=1)
    assert (found.cause.message or "").endswith("and the reason is here")


def test_thread_that_had_ended_with_an_exception_is_named_for_a_hang(end_of):
    dead = f"Exception in thread prefetch (fill):\n{RAISED}"
    ends = [
        end_of(1, dead, returncode=-15, told_to_stop=True),
        end_of(2, RAISED, returncode=-15, told_to_stop=True),
        end_of(0, "step 1\n", returncode=-15, told_to_stop=True),
    ]
    assert exceptions_of_threads(ends) == (
        "rank 1: a thread had ended with ValueError: loss is nan, at train.py:12 in step",
    )


CAUGHT = RAISED.replace("in <module>", "in fetch")
IN_MAIN = RAISED.replace("in <module>", "in main")


def ending(end_of, tail):
    """Return a rank that printed its traceback 0.5 s before another failed, and was stopped."""
    return end_of(2, tail, returncode=-15, ended_s=5.6, told_to_stop=True, traceback_age_s=0.9)


@pytest.mark.parametrize(
    "tail",
    [
        RAISED,
        f"ERROR:root:failed\n{RAISED}",
        f"{RAISED}ERROR:root:giving up\n",
        f"{CAUGHT}Exiting with code 1\n",
        IN_MAIN,
        f"ERROR:root:training failed\n{IN_MAIN}",
    ],
)
def test_a_rank_that_says_that_it_ends_is_named_before_a_later_failure(end_of, tail):
    found = diagnose([end_of(1, LATER, ended_s=5.2), ending(end_of, tail)], world_size=3)
    assert (found.cause.ranks, found.cause.exception_type) == ((2,), "ValueError")
    assert mentions(found.failed_too[0], "rank 1", "KeyError")


@pytest.mark.parametrize("tail", [CAUGHT, f"ERROR:root:shard 7 failed, next attempt\n{IN_MAIN}"])
def test_a_caught_exception_that_was_the_last_output_is_in_the_first_lines(end_of, tail):
    found = diagnose([end_of(1, LATER, ended_s=5.2), ending(end_of, tail)], world_size=3)
    assert found.cause.ranks == (1,)
    [line] = found.failed_too
    assert mentions(line, "rank 2", "ValueError: loss is nan", "train.py:12")
    assert "failed" not in line
    assert found.others == ()


@pytest.mark.parametrize(
    "tail", [f"{CAUGHT}again in 1 s\n", f"{CAUGHT}INFO exit code was 1\nstep 4\n"]
)
def test_a_caught_exception_before_other_output_is_not(end_of, tail):
    found = diagnose([end_of(1, LATER, ended_s=5.2), ending(end_of, tail)], world_size=3)
    assert (found.cause.ranks, found.failed_too) == ((1,), ())
