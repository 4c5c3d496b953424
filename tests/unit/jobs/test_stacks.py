"""The report of ``stack``, from answers of a launcher."""

from __future__ import annotations

import pytest

from distlaunch.core.errors import UsageError
from distlaunch.jobs.stacks import report_of
from tests.facts import mentions

WAITS = (
    "Current thread 0x01 (most recent call first):\n"
    '  File "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
    '  File "/work/train.py", line 5 in step\n'
)
LOADS = 'Current thread 0x01 (most recent call first):\n  File "/work/train.py", line 3 in load\n'
NATIVE = 'Thread 7 (idle): "MainThread"\n    wait (libc.so.6)\n    step (train.py:5)\n\nThread 8\n    x (y)\n'


def group(enqueued: int, pending: int | None) -> dict:
    return {
        "number": "0",
        "name": "default_pg",
        "enqueued": enqueued,
        "pending": pending,
        "operation": "" if pending is None else "all_reduce",
        "sizes": "" if pending is None else "[[7]]",
        "of_a_later_release": 1,
    }


def stack(rank: int, text: str, **changed) -> dict:
    return {"rank": rank, "pid": 10 + rank, "state": "S", "text": text, **changed}


def report(*stacks: dict, states=("running",) * 3, ranks=None, **more):
    snapshot = {
        "job_id": "an id",
        "attempt": 1,
        "workers": [
            {"rank": rank, "host": f"n{rank}", "state": state, "step": 4.0}
            for rank, state in enumerate(states)
        ],
    }
    answers = {
        "attempt": 1,
        "script_dir": "/work",
        "nodes": [{"node": each["rank"], "stacks": [each]} for each in stacks],
    }
    return report_of("exp", snapshot, answers, ranks, **more)


def test_equal_stacks_are_merged_and_the_other_comes_first():
    found = report(stack(0, WAITS), stack(1, LOADS), stack(2, WAITS))
    assert (found.record["name"], found.record["job_id"]) == ("exp", "an id")
    assert [each["ranks"] for each in found.record["groups"]] == [[1], [0, 2]]
    assert [each["hosts"] for each in found.record["groups"]] == [["n1"], ["n0", "n2"]]
    assert "all_reduce" in found.record["groups"][1]["waits_in"]
    assert found.text.index("load") < found.text.index("all_reduce")
    assert found.record["process_groups"] == []


def test_the_rank_that_is_behind_in_a_collective_is_named():
    waits = {"process_groups": [group(7, 7)]}
    found = report(
        stack(0, WAITS, **waits),
        stack(1, LOADS, process_groups=[group(6, None)]),
        stack(2, WAITS, **waits),
    )
    [order] = found.record["process_groups"]
    assert (order["behind"], order["waiting"], order["pending"]) == ([1], [0, 2], 7)
    assert mentions(found.text, "rank 1", "ranks 0,2", "all_reduce")


def test_a_rank_that_is_behind_stands_before_one_that_waits():
    found = report(stack(0, WAITS), stack(1, LOADS), states=("running",) * 2)
    assert [each["ranks"] for each in found.record["groups"]] == [[1], [0]]


def test_a_rank_without_a_record_is_named_and_not_counted_as_one_of_all():
    waits = {"process_groups": [group(1, 1)]}
    found = report(stack(0, WAITS, **waits), stack(1, LOADS), stack(2, WAITS, **waits))
    assert "all ranks" not in found.text
    assert "ranks 0,2 are in collective 1" in found.text
    assert "rank 1: no record" in found.text


def test_a_rank_that_goes_on_in_a_second_answer_is_not_behind():
    waits = {"process_groups": [group(7, 7)]}
    later = {"process_groups": [group(9, 9)]}
    again = {
        "attempt": 1,
        "nodes": [{"node": rank, "stacks": [stack(rank, WAITS, **later)]} for rank in range(3)],
    }
    found = report(
        stack(0, WAITS, **waits),
        stack(1, WAITS, process_groups=[group(6, None)]),
        stack(2, WAITS, **waits),
        again=again,
    )
    assert found.record["process_groups"][0]["behind"] == []
    assert "behind" not in found.text


def test_one_rank_is_not_called_all_ranks():
    found = report(
        *(stack(rank, LOADS, process_groups=[group(211, None)]) for rank in range(3)), ranks={2}
    )
    assert "rank 2 is after collective 211" in found.text


def test_ranks_without_an_answer_and_ranks_that_have_ended_are_named():
    found = report(stack(0, WAITS), states=("running", "running", "ended"))
    assert (found.record["unanswered"], found.record["ended"]) == ([1], [2])
    assert mentions(found.text, "rank 1", "no answer")
    assert mentions(found.text, "rank 2", "ended")


def test_only_the_ranks_that_are_asked_for_are_shown():
    found = report(stack(0, WAITS), stack(1, LOADS), stack(2, WAITS), ranks={1})
    assert [each["ranks"] for each in found.record["groups"]] == [[1]]
    with pytest.raises(UsageError, match="7"):
        report(stack(0, WAITS), ranks={0, 7})


def test_native_frames_are_those_of_the_main_thread():
    found = report(stack(0, WAITS, native=NATIVE), native=True)
    [answered] = [each for each in found.record["groups"] if each["ranks"] == [0]]
    assert answered["native"] == ["wait (libc.so.6)", "step (train.py:5)"]
    assert "libc.so.6" in found.text
    assert "x (y)" not in found.text


def test_it_is_said_if_there_are_no_native_frames():
    found = report(stack(0, WAITS), native=True)
    assert found.record["groups"][0]["native"] is None
    assert mentions(found.text, "py-spy")


def test_a_worker_cannot_control_the_terminal():
    text = LOADS.replace("train.py", "tr\x1b[2Jain.py")
    assert "\x1b" not in report(stack(0, text, native="    \x1b[2J (x)\n"), native=True).text
