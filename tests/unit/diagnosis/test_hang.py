"""Diagnoses of hangs: recorded ones of four workers (torch 2.13, gloo) and made ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.model.record import replace
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.hang import HangDiagnosis, diagnose_hang
from tests.facts import mentions

RECORDED = Path(__file__).parent / "recorded_stacks"
PROJECT = "/home/user/project"
LIB = "/home/user/venv/lib/python3.11/site-packages"
ALL_REDUCE = (f"{LIB}/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
BARRIER = (f"{LIB}/torch/distributed/distributed_c10d.py", 5356, "barrier")
BACKWARD = (f"{LIB}/torch/autograd/graph.py", 979, "_engine_run_backward")
LOADER = (f"{LIB}/torch/utils/data/dataloader.py", 1291, "_try_get_data")


def explain(stacks: list[m.Stack], **how) -> HangDiagnosis:
    defaults = {
        "world_size": len(stacks) + len(how.get("ended", ())),
        "silent_s": 30.0,
        "heartbeats": {},
        "ended": (),
        "hosts": lambda _rank: "node1",
        "script_dir": PROJECT,
    }
    return diagnose_hang(stacks, **(defaults | how))


def recorded(name: str) -> list[m.Stack]:
    entries = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return [m.Stack(**entry) for entry in entries]


def stack(
    rank: int,
    *frames: tuple[str, int, str],
    line: int = 90,
    function: str = "main",
    state: str = "S",
) -> m.Stack:
    whole = (
        *frames,
        (f"{PROJECT}/train.py", line, function),
        (f"{PROJECT}/train.py", 99, "<module>"),
    )
    lines = [f'  File "{file}", line {number} in {name}\n' for file, number, name in whole]
    text = "Current thread 0x00007f0 (most recent call first):\n" + "".join(lines)
    return m.Stack(rank=rank, pid=4000 + rank, state=state, text=text)


def silent(rank: int, state: str) -> m.Stack:
    return m.Stack(rank=rank, pid=4000 + rank, state=state, text="")


def steps(*numbers: float) -> dict[int, dict[str, float]]:
    return {rank: {"step": float(number), "loss": 0.5} for rank, number in enumerate(numbers)}


@pytest.mark.parametrize(
    ("name", "rank", "function"),
    [
        ("late_in_all_reduce.python311", 2, "load_batch"),
        ("late_in_all_reduce.py-spy", 2, "load_batch"),
        ("late_in_backward.python311", 1, "load_batch"),
        ("late_in_barrier.python311", 3, "load_batch"),
        ("rendezvous.python311", 1, "load_batch"),
        ("other_collective.python311", 0, "other_collective"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named_with_its_line(name, rank, function):
    reported = explain(recorded(name))
    assert reported.behind == (rank,)
    assert reported.frame is not None
    assert reported.frame.endswith(f" in {function}")
    assert reported.signature == ("hang", reported.frame)
    assert f"rank {rank} " in reported.summary
    assert reported.frame in reported.summary
    groups = [line for line in reported.text.splitlines()[2:] if line.startswith("  rank")]
    assert groups[0].startswith(f"  rank {rank}")


def test_a_whole_report_reads_as_people_write():
    stacks = [stack(rank, ALL_REDUCE) for rank in (0, 1, 3)]
    stacks.insert(2, stack(2, line=57, function="load_batch"))
    assert explain(stacks, heartbeats=steps(119, 119, 118, 119)).text.splitlines() == [
        "hang: no sign of life from any of 4 workers for 30 s",
        "  rank 2 is behind (at least at step 118, the others at 119), at train.py:57 in load_batch",
        "  rank 2:",
        "      train.py:57 in load_batch",
        "      train.py:99 in <module>",
        "  ranks 0-1,3, in torch.distributed all_reduce:",
        "      distributed_c10d.py:3252 in all_reduce",
        "      train.py:90 in main",
        "      train.py:99 in <module>",
    ]


@pytest.mark.parametrize("name", ["stopped.python311", "stopped.py-spy"])
def test_a_stopped_worker_comes_first_and_who_may_have_stopped_it_is_reported(name):
    reported = explain(recorded(name))
    assert reported.behind == (3,)
    assert reported.frame is None
    assert mentions(reported.text.splitlines()[1], "rank 3", "state T", "SIGSTOP")
    assert mentions(reported.text, "`kill -STOP`")
    [hint] = reported.text.partition("hint: ")[2:]
    assert "4003" not in hint, "it has been killed when this is read"


def test_a_worker_in_the_kernel_is_named_and_where_to_look():
    reported = explain([stack(0, ALL_REDUCE), silent(1, "D")], heartbeats=steps(3, 4))
    assert reported.behind == (1,)
    assert mentions(reported.text, "rank 1", "kernel", "state D")
    assert "/proc/4001/stack" in reported.text


@pytest.mark.parametrize(("state", "words"), [("t", "held by a debugger"), ("Z", "zombie")])
def test_other_odd_states_are_named(state, words):
    reported = explain([stack(0, ALL_REDUCE), silent(1, state)])
    assert reported.behind == (1,)
    assert words in reported.text


def test_a_waiting_rank_is_not_behind_for_any_steps():
    """The last heartbeats of two ranks may differ though the ranks do not."""
    stacks = [stack(0, ALL_REDUCE), stack(1, line=57, function="load_batch"), stack(2, ALL_REDUCE)]
    assert explain(stacks, heartbeats=steps(117, 118, 118)).behind == (1,)


def test_a_computing_rank_is_behind_those_that_may_wait_in_backward():
    assert explain(
        [stack(0, BACKWARD), stack(1, line=57), stack(2, BACKWARD), stack(3, BACKWARD)]
    ).behind == (1,)


def test_a_rank_that_may_wait_in_backward_is_behind_those_that_surely_wait():
    assert explain([stack(0, ALL_REDUCE), stack(1, BACKWARD), stack(2, ALL_REDUCE)]).behind == (1,)


def test_where_nobody_waits_the_lowest_step_is_behind():
    stacks = [stack(0, line=10), stack(1, line=20), stack(2, line=30), stack(3, line=30)]
    reported = explain(stacks, heartbeats=steps(7, 8, 5, 5))
    assert reported.behind == (2, 3)
    assert mentions(reported.text, "step 5", "7-8")


def test_the_odd_rank_is_behind_if_no_rank_waits_and_steps_are_equal():
    stacks = [stack(rank, line=20 if rank == 5 else 10) for rank in range(8)]
    assert explain(stacks, heartbeats=steps(*[4] * 8)).behind == (5,)


def test_where_nobody_stands_out_nobody_is_blamed_but_all_places_are_shown():
    reported = explain([stack(0, line=10, function="one"), stack(1, line=20, function="two")])
    assert reported.behind == ()
    assert mentions(reported.text, "no rank", "2 places")
    assert "train.py:10 in one" in reported.text
    assert "train.py:20 in two" in reported.text


@pytest.mark.parametrize(
    ("frames", "call"), [((ALL_REDUCE,), "torch.distributed all_reduce"), ((), "")]
)
def test_where_all_stand_at_the_same_place_nobody_is_blamed(frames, call):
    reported = explain([stack(rank, *frames) for rank in range(4)], heartbeats=steps(8, 8, 9, 8))
    assert reported.behind == ()
    assert reported.frame == "train.py:90 in main"
    assert mentions(reported.text, "all 4", call)
    assert reported.signature == ("hang", "train.py:90 in main")


def test_the_only_worker_is_the_one_that_hangs():
    reported = explain([stack(0, LOADER)])
    assert reported.behind == (0,)
    first, second = reported.text.splitlines()[:2]
    assert mentions(first, "only worker", "30 s")
    assert mentions(second, "train.py:90 in main")


def test_workers_that_compute_are_doubted_to_hang():
    stacks = [stack(rank, line=40 + rank, state="R") for rank in range(3)]
    assert mentions(explain(stacks).text, "they compute", "state R", "--hang-timeout")
    one = explain([stack(0, ALL_REDUCE), stack(1, line=57, state="R")])
    assert mentions(one.text, "it computes", "state R")


@pytest.mark.parametrize("state", ["R", "S"])
def test_a_waiting_or_sleeping_rank_is_not_reported_to_compute(state):
    frames = (ALL_REDUCE,) if state == "R" else ()
    assert "compute" not in explain([stack(rank, *frames, state=state) for rank in range(3)]).text
    assert "compute" not in explain([stack(0, line=57), stack(1, line=58, state="R")]).text


def test_output_that_did_not_count_is_reported_with_what_to_do_beside_the_hint_of_the_place():
    reported = explain([stack(0, LOADER)], output_came=True)
    assert mentions(reported.text.splitlines()[0], "heartbeat", "only worker", "30 s", "output")
    flat = reported.text.replace("\n    ", " ")
    assert mentions(flat, "hint", "heartbeat", "evaluation")
    assert mentions(flat, "hint", "DataLoader's workers")
    assert reported.record["output_came"] is True


def test_ranks_that_wait_in_different_collectives_are_reported():
    reported = explain([stack(0, ALL_REDUCE), stack(1, ALL_REDUCE), stack(2, BARRIER, line=80)])
    assert reported.behind == (2,)
    first = " ".join(line.strip() for line in reported.text.splitlines()[1:3])
    assert mentions(first, "rank 2", "torch.distributed barrier", "train.py:80 in main")
    assert "same order" in reported.text


def test_ranks_that_look_for_each_other_without_torchs_own_call_are_reported_to_form_a_group():
    looking = (f"{LIB}/torch/distributed/rendezvous.py", 190, "_create_c10d_store")
    toolkit = f"{LIB}/distlaunch/toolkit/context.py"
    forming = (
        f"{LIB}/torch/distributed/distributed_c10d.py",
        1899,
        "init_process_group",
    )  # only rank 0 waits before
    init = (toolkit, 147, "init")
    reported = explain(
        [
            stack(0, looking, (toolkit, 280, "_meet"), init),
            *(stack(rank, forming, init) for rank in (1, 2)),
        ]
    )
    assert reported.behind == ()
    flat = " ".join(reported.text.split())
    assert mentions(flat, "all 3", "torch.distributed init_process_group", "hint", "group")


def test_ranks_that_ended_are_what_the_others_wait_for():
    reported = explain([stack(rank, ALL_REDUCE) for rank in range(3)], ended=[3])
    assert reported.behind == (3,)
    assert mentions(reported.text, "3 workers", "still run")
    assert mentions(reported.text, "rank 3", "code 0", "wait")
    assert mentions(explain([stack(0)], ended=[1]).text, "only worker", "still runs", "30 s")
    assert "rank 0 stands at train.py:90" in explain([stack(0)], ended=[1]).text


def test_ranks_that_ended_are_only_mentioned_where_somebody_else_is_behind():
    reported = explain([stack(0, ALL_REDUCE), stack(1, line=57)], ended=[2])
    assert reported.behind == (1,)
    assert mentions(reported.text, "rank 2", "before", "code 0")


def test_a_rank_without_a_stack_is_behind_when_all_others_wait():
    reported = explain([stack(0, ALL_REDUCE), silent(1, "S"), stack(2, ALL_REDUCE)])
    assert reported.behind == (1,)
    assert mentions(reported.text, "rank 1", "no stack", "state S", "pid 4001")


def test_a_node_that_does_not_answer_is_named():
    reported = explain([stack(0, ALL_REDUCE), stack(1, ALL_REDUCE)], world_size=4)
    assert reported.behind == (2, 3)
    assert mentions(reported.text, "ranks 2-3", "no answer")


def test_of_no_stacks_at_all_the_report_is_honest():
    reported = explain([silent(rank, "S") for rank in range(2)])
    assert reported.behind == ()
    assert reported.frame is None
    assert reported.signature is None
    assert explain([], ended=[0]).text


def test_hosts_are_named_where_there_are_several():
    stacks = [stack(0, ALL_REDUCE), stack(1, ALL_REDUCE), stack(2, line=57)]
    reported = explain(stacks, hosts=lambda rank: f"node{rank}")
    assert "  rank 2 on node2:" in reported.text
    assert "ranks 0-1, in" in reported.text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dataloader", "DataLoader"),
        ("download", "server on the network"),
        ("import_lock", "import"),
        ("join", "another of its threads to end"),
        ("event", "lock or an event"),
        ("queue", "queue"),
        ("child", "process that it has started"),
        ("debugger", "debugger"),
    ],
)
def test_a_hint_says_what_to_look_at(name, hint):
    reported = explain(recorded(f"{name}.python311"))
    assert hint in reported.text.replace("\n    ", " ").partition("hint: ")[2]


INITIALIZE = (f"{LIB}/deepspeed/__init__.py", 203, "initialize")
JIT_LOAD = (f"{LIB}/torch/utils/cpp_extension.py", 1681, "load")
WAITS_FOR_LOCK = (
    (f"{LIB}/torch/utils/file_baton.py", 50, "wait"),
    (f"{LIB}/torch/utils/cpp_extension.py", 2175, "_jit_compile"),
    JIT_LOAD,
    INITIALIZE,
)
BUILDS = (
    ("/usr/lib/python3.11/subprocess.py", 1209, "communicate"),
    (f"{LIB}/torch/utils/cpp_extension.py", 2598, "_run_ninja_build"),
    (f"{LIB}/torch/utils/cpp_extension.py", 2150, "_jit_compile"),
    JIT_LOAD,
    INITIALIZE,
)


def test_a_rank_that_builds_an_extension_is_distinguished_from_those_that_wait_for_it():
    reported = explain([stack(0, *WAITS_FOR_LOCK), stack(1, *BUILDS), stack(2, *WAITS_FOR_LOCK)])
    assert reported.behind == (1,)
    assert [group["ranks"] for group in reported.record["groups"]] == [[1], [0, 2]]
    assert "communicate" not in json.dumps(reported.record["groups"][1])
    assert mentions(reported.text, "ranks 0,2", "lock", "extension")
    assert mentions(reported.record["hint"], "builds", "--hang-timeout")
    assert "remove" not in reported.text


def test_a_lock_that_nobody_holds_is_to_be_removed():
    reported = explain([stack(0, *WAITS_FOR_LOCK), stack(1, *WAITS_FOR_LOCK)])
    assert mentions(reported.text, "all 2", "lock", "extension")
    assert "remove that" in reported.text


def test_other_threads_of_the_users_code_are_shown_with_who_is_behind():
    assert "another thread: train.py:26 in holder" in explain(recorded("lock.python311")).text


def test_a_main_thread_that_is_not_in_the_dump_is_reported():
    assert mentions(explain(recorded("many_threads.python311")).text, "main thread", "faulthandler")


def test_a_thousand_ranks_make_a_short_report():
    stacks = [stack(rank, ALL_REDUCE) for rank in range(1024)]
    stacks[700] = stack(700, line=57, function="load_batch")
    reported = explain(stacks, heartbeats=steps(*[119] * 1024))
    assert reported.behind == (700,)
    assert len(reported.text.splitlines()) < 15
    assert "ranks 0-699,701-1023, in torch.distributed all_reduce" in reported.text


def test_a_thousand_places_make_a_short_report_too():
    stacks = [stack(rank, line=rank) for rank in range(1024)]
    reported = explain(stacks)
    assert len(reported.text.splitlines()) <= 60
    assert len(json.dumps(reported.record)) < 100_000


def test_ranks_that_alternate_are_counted():
    stacks = [stack(rank, ALL_REDUCE) if rank % 2 else stack(rank, line=57) for rank in range(1024)]
    reported = explain(stacks)
    assert "512 ranks (0,2,4," in reported.text
    assert max(map(len, reported.text.splitlines())) <= 100


def test_the_record_is_json_and_has_what_the_report_has():
    reported = explain(recorded("late_in_all_reduce.python311"), heartbeats=steps(3, 3, 2, 3))
    record = json.loads(json.dumps(reported.record))
    assert record["behind"] == [2]
    assert record["frame"] == reported.frame
    assert [group["ranks"] for group in record["groups"]] == [[2], [0, 1, 3]]
    assert record["groups"][1]["waits_in"] == "torch.distributed all_reduce"
    assert record["groups"][0]["steps"] == [2, 2]
    assert record["groups_left_out"] == 0


def test_hostile_words_reach_the_screen_as_text_only():
    evil = m.Stack(
        rank=0,
        pid=1,
        state="\x1b",
        text='Current thread 0x0 [\x1b]0;x\x07] (most recent call first):\n  File "/p/\x1b[2J.py", line 1 in a\x07\n',
    )
    reported = explain([evil, silent(1, "\x07\n")], hosts=lambda rank: f"n\x1b{rank}")
    assert all(line.isprintable() for line in reported.text.splitlines())
    assert reported.summary.isprintable()


STACKS = st.builds(
    m.Stack,
    rank=st.integers(0, 7),
    pid=st.integers(1, 9),
    state=st.sampled_from(["R", "S", "D", "T", "t", "Z", "X", "", "?"]),
    text=st.sampled_from(
        [
            "",
            "x",
            stack(0).text,
            stack(0, ALL_REDUCE).text,
            stack(0, BARRIER).text,
            stack(0, BACKWARD).text,
        ]
    ),
)


@given(
    st.lists(STACKS, unique_by=lambda one: one.rank),
    st.dictionaries(
        st.integers(0, 9),
        st.dictionaries(st.sampled_from(["step", "loss"]), st.floats(allow_nan=False)),
    ),
    st.sets(st.integers(0, 7)),
)
def test_the_report_accounts_for_every_rank_and_fits_the_screen_for_any_input(
    stacks, heartbeats, ended
):
    ended -= {one.rank for one in stacks}
    reported = explain(stacks, world_size=8, heartbeats=heartbeats, ended=sorted(ended))
    assert reported.text.endswith("\n")
    assert "\n\n" not in reported.text
    assert max(map(len, reported.text.splitlines())) <= 100
    assert reported.summary.isprintable()
    assert set(reported.behind) <= set(range(8))
    ranks = [rank for group in reported.record["groups"] for rank in group["ranks"]]
    assert sorted([*ranks, *ended]) == list(range(8))
    json.dumps(reported.record, allow_nan=True)


@pytest.mark.parametrize(
    "source",
    [
        'store.wait(["ready"], timedelta(minutes=10))',
        'value = self.store.get("address")',
        'store = dist.TCPStore("n0", 29600, 4, is_master=False)',
        "work.wait()",
        "req.wait()",
        "comm.Barrier()",
    ],
)
def test_of_ranks_in_three_places_the_one_that_the_others_wait_for_is_named(source):
    stacks = [
        stack(0, ALL_REDUCE),
        replace(stack(1, line=41, function="wait_for_ready"), source=source),
        replace(stack(2, line=52, function="build_index"), source="time.sleep(0.5)"),
        stack(3, ALL_REDUCE),
    ]
    hang = explain(stacks)
    assert hang.behind == (2,)
    assert hang.frame == "train.py:52 in build_index"


def test_line_of_source_below_a_call_of_a_library_decides_nothing():
    stacks = [
        stack(0, ALL_REDUCE),
        replace(stack(1, LOADER), source="store.wait()"),
    ]
    assert explain(stacks).behind == (1,)


TENSORFLOW = (f"{LIB}/tensorflow/python/eager/execute.py", 53, "quick_execute")


def test_a_rank_outside_tensorflow_is_behind_those_in_its_functions():
    reported = explain([stack(0, TENSORFLOW), stack(1, line=70, function="read_records")])
    assert (reported.behind, reported.frame) == ((1,), "train.py:70 in read_records")
    assert reported.others_wait


@pytest.mark.parametrize(
    ("stacks", "expected"),
    [
        ([stack(0, ALL_REDUCE), stack(1, line=70), stack(2, BACKWARD)], True),
        ([stack(0, ALL_REDUCE), stack(1, ALL_REDUCE)], False),
        ([stack(0), stack(1, line=70), stack(2)], False),
        ([stack(0, ALL_REDUCE), stack(1, line=70), silent(2, "S")], False),
    ],
)
def test_whether_all_ranks_that_are_not_behind_wait(stacks, expected):
    assert explain(stacks).others_wait is expected


def test_the_line_of_a_call_of_native_code_is_in_the_report():
    at = replace(stack(1, line=70), source="    fcntl.flock(file, fcntl.LOCK_EX)")
    reported = explain([stack(0, ALL_REDUCE), at])
    assert "      train.py:70 in main\n        fcntl.flock(file, fcntl.LOCK_EX)\n" in reported.text
    below = replace(stack(1, LOADER), source="return self._data_queue.get(timeout=timeout)")
    assert "_data_queue" not in explain([stack(0, ALL_REDUCE), below]).text


def test_a_job_that_is_not_silent_has_its_own_first_line():
    stacks = [stack(0, ALL_REDUCE), stack(1, line=70)]
    reported = explain(stacks, by_steps=True)
    assert mentions(reported.headline, "no new step", "30 s")
    assert reported.record["by_steps"] is True
