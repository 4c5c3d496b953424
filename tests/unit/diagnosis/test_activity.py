"""Two samples of a silent worker: evidence of progress, or none."""

from __future__ import annotations

import pytest

from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.activity import find_activity

SITE = "/venv/lib/python3.11/site-packages"
LIB = "/usr/lib/python3.11"
MAIN = ("/home/u/train.py", 90, "main")
STEP = ("/home/u/train.py", 42, "step")
ALL_REDUCE = (f"{SITE}/torch/distributed/distributed_c10d.py", 2800, "all_reduce")
BARRIER = (f"{SITE}/torch/distributed/distributed_c10d.py", 4100, "barrier")
FORWARD = (f"{SITE}/torch/nn/modules/linear.py", 125, "forward")
BACKWARD = (f"{SITE}/torch/autograd/graph.py", 829, "_engine_run_backward")
SYNCHRONIZE = (f"{SITE}/torch/cuda/__init__.py", 1040, "synchronize")
ADAM = (f"{SITE}/torch/optim/adam.py", 400, "step")
EXISTS = (f"{LIB}/genericpath.py", 19, "exists")
LOADER = (f"{SITE}/torch/utils/data/dataloader.py", 1280, "_get_data")
QUEUE = (f"{LIB}/queue.py", 180, "get")
JOIN = (f"{LIB}/threading.py", 1119, "join")
STARTED = (f"{LIB}/threading.py", 1002, "_bootstrap")


def at(frame, line):
    return (frame[0], line, frame[2])


def dump(*frames, name="Current thread 0x00007f00") -> str:
    """Return a stack in faulthandler's format. The frames come outermost first."""
    lines = [
        f'  File "{file}", line {line} in {function}' for file, line, function in reversed(frames)
    ]
    return "\n".join([f"{name} (most recent call first):", *lines, ""])


def sample(
    text, *, at_s=0.0, state="S", cpu_s=0.0, children_cpu_s=0.0, gpu=False, rank=1, pid=7
) -> m.Stack:
    return m.Stack(
        rank=rank,
        pid=pid,
        state=state,
        text=text,
        taken_s=at_s,
        cpu_s=cpu_s,
        children_cpu_s=children_cpu_s,
        holds_gpu=gpu,
    )


def why(first: str, second: str, *, state="S", share=0.0, children=0.0, gpu=False) -> str | None:
    """Return the verdict on two samples of one worker, 2 s apart; ``share``: of a processor that it
    used."""
    before = sample(first, state=state, gpu=gpu)
    after = sample(
        second, at_s=2.0, state=state, cpu_s=2 * share, children_cpu_s=2 * children, gpu=gpu
    )
    found = find_activity([before], [after], "/home/u")
    return found.why if found else None


def test_a_worker_in_another_function_has_moved_and_is_named_with_its_place():
    before, after = dump(MAIN, STEP, FORWARD), dump(MAIN, STEP, ADAM)
    found = find_activity([sample(before)], [sample(after, at_s=2.0)], "/home/u")
    assert found is not None
    assert (found.rank, found.why, found.frame) == (1, "moved", "train.py:42 in step")
    assert found.words == "rank 1 works, at train.py:42 in step"


def test_a_worker_that_stands_still_shows_nothing():
    assert why(dump(MAIN, STEP), dump(MAIN, STEP)) is None


@pytest.mark.parametrize(
    "second", [dump(MAIN, at(STEP, 43)), dump(MAIN, STEP, EXISTS), dump(MAIN, at(STEP, 43), EXISTS)]
)
def test_two_lines_of_a_loop_that_polls_are_no_change(second):
    assert why(dump(MAIN, STEP), second, share=0.01) is None
    assert why(second, dump(MAIN, STEP), share=0.05, state="S") is None


@pytest.mark.parametrize("call", [ALL_REDUCE, LOADER, QUEUE, JOIN])
def test_progress_within_a_waiting_call_is_no_change(call):
    inner = (
        (f"{LIB}/selectors.py", 415, "select"),
        (f"{LIB}/multiprocessing/connection.py", 900, "wait"),
    )
    assert why(dump(MAIN, STEP, call, inner[0]), dump(MAIN, STEP, at(call, 9), inner[1])) is None


def test_a_worker_in_another_collective_has_left_the_one_before():
    assert why(dump(MAIN, STEP, ALL_REDUCE), dump(MAIN, STEP, BARRIER)) == "moved"
    assert why(dump(MAIN, STEP, ALL_REDUCE), dump(MAIN, at(STEP, 50), ALL_REDUCE)) == "moved"
    assert why(dump(MAIN, STEP, ALL_REDUCE), dump(MAIN, at(STEP, 50))) == "moved"


@pytest.mark.parametrize("frames", [(MAIN, STEP), (MAIN, STEP, FORWARD), (MAIN, STEP, BACKWARD)])
def test_a_worker_that_uses_a_processor_computes(frames):
    assert why(dump(*frames), dump(*frames), share=0.9) == "computes"


def test_a_worker_of_a_loaded_machine_computes_though_it_is_given_little_time():
    assert why(dump(MAIN, STEP), dump(MAIN, STEP), share=0.05, state="R") == "computes"
    assert why(dump(MAIN, STEP), dump(MAIN, STEP), share=0.05, state="S") is None


@pytest.mark.parametrize("call", [ALL_REDUCE, BARRIER, SYNCHRONIZE])
@pytest.mark.parametrize("gpu", [False, True])
def test_processor_time_in_a_collective_or_a_synchronise_proves_nothing(call, gpu):
    assert (
        why(dump(MAIN, STEP, call), dump(MAIN, STEP, call), share=1.0, state="R", gpu=gpu) is None
    )


def test_processor_time_of_a_worker_with_a_gpu_proves_nothing_alone_for_a_wait_may_spin():
    assert why(dump(MAIN, STEP), dump(MAIN, STEP), share=1.0, state="R", gpu=True) is None
    assert (
        why(dump(MAIN, STEP), dump(MAIN, at(STEP, 43)), share=1.0, state="R", gpu=True) == "moved"
    )


@pytest.mark.parametrize("call", [LOADER, (f"{LIB}/subprocess.py", 1200, "wait")])
def test_processes_that_a_worker_waits_for_may_compute_for_it(call):
    assert why(dump(MAIN, STEP, call), dump(MAIN, STEP, call), children=1.0) == "children"
    assert why(dump(MAIN, STEP, call), dump(MAIN, STEP, call), children=0.01) is None


def test_processes_beside_a_worker_in_a_collective_prove_nothing():
    assert why(dump(MAIN, STEP, ALL_REDUCE), dump(MAIN, STEP, ALL_REDUCE), children=1.0) is None


def test_a_thread_that_the_main_one_waits_for_may_be_the_one_that_trains():
    def both(*frames) -> str:
        return dump(STARTED, *frames, name="Thread 0x00007f01") + "\n" + dump(MAIN, JOIN)

    assert why(both(STEP, FORWARD), both(STEP, ADAM)) == "moved"
    assert why(both(STEP, FORWARD), both(STEP, FORWARD)) is None

    def beside_a_collective(*frames) -> str:
        return dump(STARTED, *frames, name="Thread 0x00007f01") + "\n" + dump(MAIN, ALL_REDUCE)

    assert why(beside_a_collective(STEP, FORWARD), beside_a_collective(STEP, ADAM)) is None


@pytest.mark.parametrize("state", ["T", "t", "D", "Z", ""])
def test_a_worker_that_cannot_run_shows_nothing(state):
    assert why(dump(MAIN, STEP, FORWARD), dump(MAIN, STEP, ADAM), state=state, share=1.0) is None


def test_without_a_stack_processor_time_proves_nothing():
    assert why("", "", share=1.0, state="R") is None
    assert why("torn", "torn", share=1.0, state="R") is None


def test_one_rank_of_many_that_goes_on_is_enough_and_another_process_is_another_worker():
    still = [sample(dump(MAIN, STEP), rank=rank, pid=10 + rank) for rank in range(8)]
    moved = sample(dump(MAIN, STEP, FORWARD), at_s=2.0, rank=5, pid=15, cpu_s=1.9)
    found = find_activity(still, [*still[:5], moved, *still[6:]], "/home/u")
    assert found is not None
    assert found.rank == 5
    other = sample(dump(MAIN, STEP, FORWARD), at_s=2.0, rank=5, pid=99, cpu_s=1.9)
    assert find_activity(still, [*still[:5], other, *still[6:]], "/home/u") is None
