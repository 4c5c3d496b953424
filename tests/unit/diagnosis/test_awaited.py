"""Texts and stacks that name the rank that others waited for."""

from __future__ import annotations

import pytest

from distlaunch.core.model.record import replace
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.first_cause import diagnose
from distlaunch.diagnosis.model import Mechanism, WaitKind
from distlaunch.diagnosis.report import diagnosis_record, render_report
from tests.facts import mentions

TORCH = "/home/user/venv/lib/python3.11/site-packages/torch/distributed"


def watchdog(rank: int, number: int, op: str = "ALLREDUCE", enqueued: int | None = None) -> str:
    """Text of torch 2.6 (cut to the lines that matter)."""
    work = f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn=8, NumelOut=8, Timeout(ms)=600000)"
    caught = f"[Rank {rank}] Watchdog caught collective operation timeout: {work} ran for 600060 milliseconds before timing out."
    group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    return (
        f"[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:632] {caught}\n"
        f"[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:2268] {group}  failure detected by watchdog at work sequence id: {number} PG status: last enqueued work: {enqueued or number}, last completed work: {number - 1}\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  {group} Process group watchdog thread terminated with exception: {caught}\n"
    )


def timed_out(call: str = "all_reduce", text: str = "") -> str:
    message = text or "Timed out waiting 2000ms for recv operation to complete"
    return (
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/home/user/train.py", line 15, in <module>\n'
        f"[rank0]:     dist.{call}(torch.ones(8))\n"
        f'[rank0]:   File "{TORCH}/distributed_c10d.py", line 3252, in {call}\n'
        "[rank0]:     work.wait()\n"
        f"[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:79] {message}\n"
    )


def stopped(end_of, rank: int):
    return end_of(rank, returncode=-15, told_to_stop=True, ended_s=6.0)


def stack(rank: int, *frames: str) -> m.Stack:
    shown = "".join(
        f'  File "{file}", line {line} in {name}\n'
        for file, line, name in (frame.split(":") for frame in frames)
    )
    text = f"Current thread 0x0000000000000001 (most recent call first):\n{shown}"
    return m.Stack(rank=rank, pid=100 + rank, state="S", text=text)


OWN_ERROR = (
    "Traceback (most recent call last):\n"
    '  File "/home/user/data.py", line 6, in read\n'
    "OSError: [Errno 5] shard-3.tar\n"
)


def test_nccl_rank_that_still_runs_is_named(end_of):
    ends = [end_of(rank, watchdog(rank, 5), returncode=-6) for rank in (0, 1, 3)]
    found = diagnose([*ends, stopped(end_of, 2)], world_size=4)
    assert found.cause.ranks == (2,)
    assert found.cause.awaited
    assert found.cause.summary == (
        "did not come to the ALLREDUCE (SeqNum 5) that ranks 0-1,3 waited in: NCCL's watchdog timed "
        "out after 600 s"
    )
    assert found.exit_code == 134


def test_nccl_rank_with_the_lowest_number_is_named(end_of):
    ends = [end_of(rank, watchdog(rank, 5), returncode=-6) for rank in (0, 1, 3)]
    found = diagnose([*ends, end_of(2, watchdog(2, 4), returncode=-6)], world_size=4)
    assert found.cause.ranks == (2,)
    assert found.cause.summary == (
        "has the lowest sequence number: it is at SeqNum 4, ranks 0-1,3 are at 5 (ALLREDUCE): NCCL's "
        "watchdog timed out after 600 s"
    )
    assert found.hint_kind == "the-order-of-collectives"


def test_nccl_rank_that_has_enqueued_less_is_named(end_of):
    ends = [end_of(rank, watchdog(rank, 5, enqueued=9), returncode=-6) for rank in (0, 1, 3)]
    found = diagnose([*ends, end_of(2, watchdog(2, 5, enqueued=7), returncode=-6)], world_size=4)
    assert found.cause.ranks == (2,)


def test_nccl_rank_in_another_collective_is_named(end_of):
    ends = [end_of(rank, watchdog(rank, 5), returncode=-6) for rank in (0, 1, 3)]
    found = diagnose([*ends, end_of(2, watchdog(2, 5, "BROADCAST"), returncode=-6)], world_size=4)
    assert found.cause.ranks == (2,)
    assert found.cause.summary == (
        "called NCCL BROADCAST number 5 while ranks 0-1,3 called NCCL ALLREDUCE number 5: NCCL's "
        "watchdog timed out after 600 s"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 2000 ms",
        "[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 2000 ms",
        "Stalled ops:allreduce.loss [missing ranks: 2]\nHorovod has been shut down.",
        "One or more tensors ... for more than 60 seconds.\nMissing ranks:\n2: [allreduce.noname.1]\nHorovod has been shut down.",
        "- To our best knowledge, ranks [2] are the lagging ranks that caused this timeout. collective timeout",
    ],
)
def test_texts_of_libraries_name_the_rank(end_of, text):
    ends = [end_of(0, timed_out(text=text)), *(stopped(end_of, rank) for rank in (1, 2, 3))]
    assert diagnose(ends, world_size=4).cause.ranks == (2,)


def test_stack_of_the_rank_that_did_not_come_is_in_the_report(end_of):
    waits = (f"{TORCH}/distributed_c10d.py:3252:all_reduce", "/home/user/train.py:15:<module>")
    stacks = [
        stack(1, *waits),
        stack(2, "/home/user/data.py:7:load", "/home/user/train.py:12:<module>"),
        stack(3, *waits),
    ]
    ends = [end_of(0, timed_out()), *(stopped(end_of, rank) for rank in (1, 2, 3))]
    found = diagnose(ends, world_size=4, stacks=stacks, script_dir="/home/user")
    assert (found.cause.ranks, found.cause.frame) == ((2,), "data.py:7 in load")
    text = render_report(
        found,
        job_id="a",
        world_size=4,
        attempt=0,
        restarts=0,
        max_restarts=0,
        elapsed_s=1.0,
        run_dir="/r",
        many_hosts=False,
    )
    assert text.startswith(
        "rank 2 of 4 did not come to the all_reduce that ranks 0-1,3 waited in: gloo timed out after 2 s\n"
        "  (rank 2 was at data.py:7 in load)\n  rank 0: RuntimeError: "
    )
    assert "  where rank 2 was:\n    data.py:7 in load\n" in text


def test_all_ranks_in_one_collective_name_none(end_of):
    waits = (f"{TORCH}/distributed_c10d.py:3252:all_reduce", "/home/user/train.py:15:<module>")
    ends = [end_of(0, timed_out()), *(stopped(end_of, rank) for rank in (1, 2, 3))]
    stacks = [stack(rank, *waits) for rank in (1, 2, 3)]
    found = diagnose(ends, world_size=4, stacks=stacks, script_dir="/home/user")
    assert not found.cause.awaited
    assert mentions(found.cause.summary, "original cause")


def test_a_collective_of_one_failed_rank_differs_from_the_others(end_of):
    ends = [end_of(rank, timed_out()) for rank in (0, 1, 3)]
    found = diagnose([*ends, end_of(2, timed_out("broadcast"))], world_size=4)
    assert found.cause.ranks == (2,)
    assert "called torch.distributed broadcast while ranks 0-1,3" in found.cause.summary


def test_a_rank_in_another_call_has_its_own_stack_in_the_report(end_of):
    waits = (f"{TORCH}/distributed_c10d.py:3252:all_reduce", "/home/user/train.py:15:<module>")
    pair = (f"{TORCH}/distributed_c10d.py:5171:barrier", "/home/user/pair.py:4:sync_pair")
    stacks = [stack(1, *waits), stack(2, *pair), stack(3, *waits)]
    ends = [end_of(0, timed_out()), *(stopped(end_of, rank) for rank in (1, 2, 3))]
    found = diagnose(ends, world_size=4, stacks=stacks, script_dir="/home/user")
    assert (found.cause.ranks, found.cause.frame) == ((2,), "pair.py:4 in sync_pair")
    assert found.cause.excerpt[-1] == "pair.py:4 in sync_pair"


def test_the_line_of_a_call_without_a_frame_is_in_the_report(end_of):
    away = stack(2, "/home/user/data.py:7:load", "/home/user/train.py:12:<module>")
    stacks = [replace(away, source="    fcntl.flock(file, fcntl.LOCK_EX)")]
    ends = [end_of(0, timed_out()), *(stopped(end_of, rank) for rank in (1, 2, 3))]
    found = diagnose(ends, world_size=4, stacks=stacks, script_dir="/home/user")
    assert found.cause.excerpt[:2] == (
        "data.py:7 in load",
        "  fcntl.flock(file, fcntl.LOCK_EX)",
    )


COUNTS = "DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {} params."
SIZES = "[{}]: params[0] in this process with sizes [4, 4] appears not to match sizes of the same param in process 0."


def of_ddp(text: str) -> str:
    """Text of torch 2.13."""
    return (
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/home/user/train.py", line 15, in <module>\n'
        "[rank0]:     model = DDP(build())\n"
        f'[rank0]:   File "{TORCH}/utils.py", line 295, in _verify_param_shape_across_processes\n'
        "[rank0]:     return dist._verify_params_across_processes(process_group, tensors, logger)\n"
        f"[rank0]: RuntimeError: {text}\n"
    )


def test_the_rank_whose_model_has_another_number_of_parameters_is_named(end_of):
    others = [end_of(rank, of_ddp(COUNTS.format(rank, 2, 2, 4))) for rank in (0, 1, 3)]
    found = diagnose([*others, end_of(2, of_ddp(COUNTS.format(2, 4, 0, 2)))], world_size=4)
    assert found.cause.ranks == (2,)
    assert mentions(found.cause.summary, "4", "ranks 0-1,3", "2")


def test_two_ranks_with_different_models_are_both_named(end_of):
    ends = [
        end_of(0, of_ddp(COUNTS.format(0, 2, 1, 4))),
        end_of(1, of_ddp(COUNTS.format(1, 4, 0, 2))),
    ]
    assert diagnose(ends, world_size=2).cause.ranks == (0, 1)


def test_rank_0_is_named_if_the_sizes_of_all_others_differ_from_its(end_of):
    ends = [end_of(rank, of_ddp(SIZES.format(rank))) for rank in (1, 2, 3)]
    found = diagnose([*ends, stopped(end_of, 0)], world_size=4)
    assert found.cause.ranks == (0,)
    assert mentions(found.cause.summary, "[4, 4]", "ranks 1-3")
    assert found.exit_code == 1


def test_one_rank_whose_sizes_differ_from_those_of_rank_0_is_named(end_of):
    ends = [end_of(3, of_ddp(SIZES.format(3))), *(stopped(end_of, rank) for rank in (0, 1, 2))]
    assert diagnose(ends, world_size=4).cause.ranks == (3,)


def test_own_failure_of_another_rank_stays_the_cause(end_of):
    own = 'Traceback (most recent call last):\n  File "/p/t.py", line 1, in <module>\nKeyError: 1\n'
    ends = [end_of(0, timed_out()), end_of(3, own, ended_s=5.5), stopped(end_of, 2)]
    assert diagnose(ends, world_size=4).cause.ranks == (3,)


# --- Horovod, with and without a traceback

STALLED = (
    "[2026-11-30 00:59:36.626004: W /tmp/horovod/common/stall_inspector.cc:107] One or more tensors"
    " were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for"
    " remainder of ranks for more than 60 seconds. This may indicate that different ranks are trying"
    " to submit different tensors or that only subset of ranks is submitting tensors, which will"
    " cause deadlock. \nMissing ranks:\n2: [allreduce.grad]\n"
)
SHUT_DOWN = (
    "Traceback (most recent call last):\n"
    '  File "/home/user/train.py", line 15, in <module>\n'
    "    hvd.allreduce(grad)\n"
    "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by\n"
)


@pytest.mark.parametrize("code", [1, -6])
def test_a_stall_without_a_traceback_names_the_missing_rank(end_of, code):
    ends = [end_of(0, f"step 4\n{STALLED}", returncode=code)]
    ends += [stopped(end_of, rank) for rank in (1, 2)]
    stacks = [stack(2, "/home/user/data.py:7:load", "/home/user/train.py:12:<module>")]
    found = diagnose(ends, world_size=3, stacks=stacks, script_dir="/home/user")
    assert (found.cause.ranks, found.cause.frame) == ((2,), "data.py:7 in load")
    told = f"{found.cause.message} {found.cause.written}"
    assert "One or more tensors were submitted" in told


def test_a_stall_that_another_rank_has_written_names_the_missing_rank(end_of):
    ends = [
        end_of(0, STALLED, returncode=-15, told_to_stop=True, ended_s=6.0),
        end_of(1, SHUT_DOWN),
        stopped(end_of, 2),
    ]
    assert diagnose(ends, world_size=3).cause.ranks == (2,)


def test_a_stall_that_all_ranks_have_survived_names_none(end_of):
    ends = [end_of(rank, (STALLED if rank == 0 else "") + SHUT_DOWN) for rank in (0, 1, 2)]
    assert not diagnose(ends, world_size=3).cause.awaited


def test_a_rank_that_missed_a_monitored_barrier_is_named_though_it_failed_later(end_of):
    text = "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 2000 ms"
    ends = [
        end_of(0, timed_out(text=text)),
        end_of(2, timed_out(text="Connection closed by peer"), ended_s=5.4),
    ]
    found = diagnose([*ends, stopped(end_of, 1)], world_size=3)
    assert found.cause.ranks == (2,)


# --- a rank at the end of its script, and what ranks wrote about their wait

LATE = "INFO rank 0 waits for the vocabulary of rank 2\n"


def test_a_rank_whose_script_is_over_is_named_although_its_interpreter_still_runs(end_of):
    lost = timed_out(text="Connection closed by peer [127.0.0.1]:1926")
    ends = [end_of(0, lost), end_of(1, lost), stopped(end_of, 2)]
    over = stack(2, "/usr/lib/python3.11/threading.py:1590:_shutdown")
    found = diagnose(ends, world_size=3, stacks=[over], script_dir="/home/user")
    assert found.cause.ranks == (2,)
    assert mentions(found.cause.summary, "end of its script", "ranks 0-1")
    assert mentions(found.hint or "", "number of steps")
    assert not diagnose(ends, world_size=3, script_dir="/home/user").cause.awaited


def test_what_a_waiting_rank_wrote_about_its_wait_is_in_the_report(end_of):
    away = stack(2, "/home/user/data.py:7:load", "/home/user/train.py:12:<module>")
    ends = [end_of(0, f"step 1\n{LATE}{timed_out()}"), stopped(end_of, 1), stopped(end_of, 2)]
    found = diagnose(ends, world_size=3, stacks=[away], script_dir="/home/user")
    assert found.cause.written == (f"rank 0 had written: {LATE.strip()}",)


def test_ordinary_lines_of_ranks_are_not(end_of):
    away = stack(2, "/home/user/data.py:7:load", "/home/user/train.py:12:<module>")
    ends = [end_of(0, f"{LATE}step 1\nstep 2\nloss 0.5\n{timed_out()}")]
    ends += [
        end_of(rank, "step 2\n", returncode=-15, told_to_stop=True, ended_s=6.0) for rank in (1, 2)
    ]
    found = diagnose(ends, world_size=3, stacks=[away], script_dir="/home/user")
    assert found.cause.awaited
    assert found.cause.written == ()


def test_what_ranks_wrote_is_not_in_the_report_of_an_ordinary_failure(end_of):
    own = 'Traceback (most recent call last):\n  File "/p/t.py", line 1, in <module>\nKeyError: 1\n'
    ends = [end_of(0, LATE + own), stopped(end_of, 1)]
    assert diagnose(ends, world_size=2).cause.written == ()


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        (f"ERROR:root:cannot read, again in 60 s\n{OWN_ERROR}", "OSError: [Errno 5] shard-3.tar"),
        ("step 1\nERROR:root:shard-3.tar cannot be read\n", "shard-3.tar cannot be read"),
    ],
)
def test_an_error_that_the_awaited_rank_has_survived_is_in_the_report(end_of, tail, told):
    away = stack(2, "/home/user/data.py:7:read", "/home/user/train.py:12:<module>")
    ends = [end_of(0, timed_out())]
    ends += [end_of(2, tail, returncode=-15, told_to_stop=True, ended_s=6.0, traceback_age_s=2.0)]
    found = diagnose(ends, world_size=2, stacks=[away], script_dir="/home/user")
    assert found.cause.ranks == (2,)
    assert found.cause.awaited
    [written] = found.cause.written
    assert mentions(written, "rank 2", told)


def test_an_error_that_the_awaited_rank_prints_after_its_stack_was_taken_is_the_cause(end_of):
    away = stack(2, "/home/user/data.py:7:read", "/home/user/train.py:12:<module>")
    ends = [end_of(0, timed_out(), ended_s=5.0)]
    ends += [
        end_of(2, OWN_ERROR, returncode=-15, told_to_stop=True, ended_s=6.0, traceback_age_s=0.8)
    ]
    found = diagnose(ends, world_size=2, stacks=[away], script_dir="/home/user")
    assert found.cause.ranks == (2,)
    assert not found.cause.awaited
    assert found.cause.exception_type == "OSError"


# --- hints

AWAY = stack(2, "/home/user/data.py:7:load", "/home/user/train.py:12:<module>")


def met(end_of, text="", *, at=AWAY, own=""):
    """Return the diagnosis of two ranks that waited in vain for rank 2."""
    ends = [end_of(rank, text or timed_out()) for rank in (0, 1)]
    ends += [end_of(2, own, returncode=-15, told_to_stop=True, ended_s=6.0)]
    return diagnose(ends, world_size=3, stacks=[at], script_dir="/home/user")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("rank 2", "init_process_group", "timeout=", "monitored_barrier")),
        (
            timed_out(text="wait timeout after 5000ms, keys: /default_pg/0//vocab"),
            ("the key vocab", "rank 2", "has not set"),
        ),
        (timed_out(text="wait timeout after 5000ms, keys: /default_pg/0//0"), ("timeout=",)),
        (watchdog(0, 412), ("rank 2", "blocked", "timeout=")),
    ],
)
def test_hint_tells_what_to_do_about_a_rank_that_did_not_come(end_of, text, words):
    found = met(end_of, text)
    assert found.cause.ranks == (2,)
    assert mentions(found.hint or "", *words)


def test_a_rank_in_a_debugger_has_the_hint_of_that_place(end_of):
    at = stack(2, "/usr/lib/python3.11/bdb.py:96:trace_dispatch", "/home/user/train.py:12:<module>")
    found = met(end_of, at=at)
    assert mentions(found.hint or "", "rank 2", "breakpoint")


def test_ranks_with_other_numbers_have_the_hint_at_unequal_collectives(end_of):
    ends = [end_of(0, watchdog(0, 411, enqueued=411)), end_of(1, watchdog(1, 412, enqueued=414))]
    found = diagnose(ends, world_size=2)
    assert found.cause.ranks == (0,)
    assert mentions(found.hint or "", "different collectives", "behind")
    assert mentions(found.cause.written[0], "rank 0", "411", "ALLREDUCE", "410")


def test_last_work_of_the_awaited_rank_is_in_the_report(end_of):
    own = "[PG ID 0 PG GUID 0(default_pg) Rank 2]  PG status: last enqueued work: 411, last completed work: 411\n"
    found = met(end_of, watchdog(0, 412), own=own)
    assert found.cause.ranks == (2,)
    assert mentions(found.cause.written[0], "rank 2", "411", "411")


def test_horovods_stall_takes_the_place_of_its_general_sentence(end_of):
    log = STALLED + SHUT_DOWN
    ends = [end_of(0, log), end_of(1, SHUT_DOWN), stopped(end_of, 2)]
    found = diagnose(ends, world_size=3, stacks=[AWAY], script_dir="/home/user")
    assert (found.cause.ranks, found.cause.told_by) == ((2,), 0)
    assert (found.cause.exception_type, found.cause.message) == (
        None,
        "Missing ranks: 2: [allreduce.grad]",
    )
    assert mentions(found.hint or "", "same order", "rank 2")


# --- in what the others waited


def of_init(text: str) -> str:
    """Text of torch 2.13 in init_process_group."""
    return (
        "Traceback (most recent call last):\n"
        '  File "/home/user/train.py", line 9, in <module>\n'
        "    dist.init_process_group()\n"
        f'  File "{TORCH}/distributed_c10d.py", line 1892, in init_process_group\n'
        "    store, rank, world_size = next(rendezvous_iterator)\n"
        f'  File "{TORCH}/rendezvous.py", line 199, in _create_c10d_store\n'
        "    return TCPStore(\n"
        f"torch.distributed.DistStoreError: {text}\n"
    )


STORE_BARRIER = "Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1 (world_size=3, worker_count=2, timeout=0:30:00)"
STUCK = (
    "[rank{0}]:[E626 05:14:36.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {0}] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, and could be triggered by another thread holding the GIL inside a CUDA api.\n"
    "[rank{0}]:[F626 05:22:36.385461578 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) Rank {0}] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.\n"
)
"""Lines of torch 2.6: https://github.com/om-ai-lab/VLM-R1/issues/257."""


@pytest.mark.parametrize(
    ("text", "summary", "fields"),
    [
        (
            timed_out(),
            "did not come to the all_reduce that ranks 0-1 waited in: gloo timed out after 2 s",
            {"kind": WaitKind.COLLECTIVE, "mechanism": Mechanism.GLOO, "call": "all_reduce"},
        ),
        (
            timed_out("barrier"),
            "did not come to the barrier that ranks 0-1 waited for: gloo timed out after 2 s",
            {"kind": WaitKind.BARRIER, "mechanism": Mechanism.GLOO},
        ),
        (
            timed_out(
                "monitored_barrier", "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 2500 ms"
            ),
            "did not come to the barrier that ranks 0-1 waited for: monitoredBarrier timed out after 2.5 s",
            {"kind": WaitKind.BARRIER, "timeout_s": 2.5},
        ),
        (
            of_init("Timed out after 61 seconds waiting for clients. 2/3 clients joined."),
            (
                "did not join the process group that ranks 0-1 waited for in init_process_group: 2 of 3 "
                "joined, TCPStore timed out after 61 s"
            ),
            {"kind": WaitKind.RENDEZVOUS, "joined": 2, "expected": 3},
        ),
        (
            of_init("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/2"),
            (
                "did not join the process group that ranks 0-1 waited for in init_process_group: TCPStore "
                "timed out after 3 s"
            ),
            {"kind": WaitKind.RENDEZVOUS, "key": None},
        ),
        (
            of_init(STORE_BARRIER),
            (
                "did not join the process group that ranks 0-1 waited for in init_process_group: 2 of 3 "
                "joined, TCPStore timed out after 1800 s"
            ),
            {"mechanism": Mechanism.STORE_BARRIER, "timeout_s": 1800.0},
        ),
        (
            timed_out(text="wait timeout after 5000ms, keys: /default_pg/0//vocab"),
            (
                "did not set the key vocab of the store that ranks 0-1 waited for: TCPStore timed out "
                "after 5 s"
            ),
            {"kind": WaitKind.KEY, "key": "vocab"},
        ),
        (
            watchdog(0, 412),
            (
                "did not come to the ALLREDUCE (SeqNum 412) that ranks 0-1 waited in: NCCL's watchdog "
                "timed out after 600 s"
            ),
            {"mechanism": Mechanism.NCCL_WATCHDOG, "sequence": 412, "call": "ALLREDUCE"},
        ),
        (
            STALLED + SHUT_DOWN,
            "did not come to the allreduce.grad that ranks 0-1 waited in: Horovod stalled for 60 s",
            {"mechanism": Mechanism.HOROVOD, "call": "allreduce.grad"},
        ),
    ],
)
def test_summary_names_what_the_others_waited_in(end_of, text, summary, fields):
    found = met(end_of, text)
    assert (found.cause.ranks, found.cause.summary) == ((2,), summary)
    assert found.cause.wait is not None
    assert {name: getattr(found.cause.wait, name) for name in fields} == fields
    assert found.cause.wait.ranks == (0, 1)
    assert found.hint_kind


def test_what_the_others_waited_in_is_in_the_record(end_of):
    found = met(
        end_of, of_init("Timed out after 61 seconds waiting for clients. 2/3 clients joined.")
    )
    record = diagnosis_record(found)
    assert record["wait"] == {
        "kind": "rendezvous",
        "mechanism": "tcp_store",
        "ranks": [0, 1],
        "call": "init_process_group",
        "timeout_s": 61.0,
        "sequence": None,
        "last_sequence": None,
        "joined": 2,
        "expected": 3,
        "key": None,
    }
    assert record["hint_kind"] == "ranks-that-do-not-join"


def test_rank_0_whose_store_cannot_be_reached_is_named(end_of):
    text = of_init(
        "The client socket has timed out after 600000ms while trying to connect to (172.17.0.9, 46229)."
    )
    ends = [end_of(rank, text) for rank in (1, 2)]
    ends += [end_of(0, returncode=-15, told_to_stop=True, ended_s=6.0)]
    at = stack(0, "/home/user/data.py:7:download", "/home/user/train.py:8:<module>")
    found = diagnose(ends, world_size=3, stacks=[at], script_dir="/home/user")
    assert (found.cause.ranks, found.cause.summary) == (
        (0,),
        (
            "did not join the process group that ranks 1-2 waited for in init_process_group: their "
            "connections to its TCPStore timed out after 600 s"
        ),
    )


def test_rank_that_its_heartbeat_monitor_has_ended_is_named(end_of):
    ends = [end_of(1, STUCK.format(1), returncode=-6)]
    ends += [stopped(end_of, rank) for rank in (0, 2, 3)]
    found = diagnose(ends, world_size=4)
    assert (found.cause.ranks, found.cause.summary) == (
        (1,),
        "was ended by its NCCL heartbeat monitor: its watchdog was stuck for 480 s",
    )
    assert (found.hint_kind, found.exit_code) == ("nccl-heartbeat", 134)


def test_stuck_watchdog_of_one_rank_counts_before_the_timeouts_of_the_others(end_of):
    ends = [end_of(rank, watchdog(rank, 7), returncode=-6) for rank in (0, 2, 3)]
    found = diagnose([*ends, end_of(1, STUCK.format(1), returncode=-6)], world_size=4)
    assert found.cause.ranks == (1,)
    assert found.cause.wait is not None
    assert (found.cause.wait.mechanism, found.cause.wait.sequence) == (Mechanism.NCCL_HEARTBEAT, 7)


def test_stuck_watchdogs_of_all_ranks_name_none(end_of):
    ends = [end_of(rank, STUCK.format(rank), returncode=-6) for rank in range(4)]
    assert not diagnose(ends, world_size=4).cause.awaited


def test_sequence_numbers_of_different_process_groups_are_not_compared(end_of):
    """Lines of torch 2.6, shortened: https://github.com/NVIDIA/nccl/issues/1610."""
    line = "[rank{}]:[E218 04:54:22.883 ProcessGroupNCCL.cpp:1795] [PG ID 11 PG GUID {} Rank 1] Exception (either an error or timeout) detected by watchdog at work: {}, last enqueued NCCL work: {}, last completed NCCL work: {}.\n"
    ends = [
        end_of(0, line.format(0, 119, 216, 220, 215), returncode=-6),
        end_of(1, line.format(1, 112, 57, 57, 56), returncode=-6),
    ]
    assert not diagnose(ends, world_size=2).cause.awaited


@pytest.mark.parametrize("lost", ["Connection closed by peer [127.0.0.1]:1926"])
def test_rank_that_has_ended_is_named_with_what_it_missed(end_of, lost):
    ends = [end_of(0, timed_out(text=lost)), end_of(1, returncode=0, ended_s=4.0)]
    found = diagnose(ends, world_size=2)
    assert (
        found.cause.summary == "ended with exit code 0 before the all_reduce that rank 0 waited in"
    )
    assert found.hint_kind == "ranks-that-end-early"


def test_connection_that_a_request_for_stacks_has_interrupted_is_no_cause(end_of):
    """Text of torch 2.13."""
    late = of_init(
        "The client socket has timed out after 3000ms while trying to connect to (127.0.0.1, 46229)."
    )
    ends = [end_of(1, late), end_of(2, of_init("Interrupted system call"), ended_s=5.1)]
    ends += [end_of(0, returncode=-15, told_to_stop=True, ended_s=6.0)]
    at = stack(0, "/home/user/data.py:7:download", "/home/user/train.py:8:<module>")
    found = diagnose(ends, world_size=3, stacks=[at], script_dir="/home/user")
    assert (found.cause.ranks, found.hint_kind) == ((0,), "ranks-that-do-not-join")
