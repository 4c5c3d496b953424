from __future__ import annotations

import pytest

from distlaunch.diagnosis.first_cause import diagnose, looks_like_consequence
from tests.facts import mentions


def raised(text, line=7):
    return f'Traceback (most recent call last):\n  File "/p/train.py", line {line}, in step\n    f()\n{text}\n'


LOST = raised(
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41"
)
LATE = raised(
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete"
)
OWN = raised("ValueError: bad")


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [x/gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:8",
        "RuntimeError: Connection closed by peer [127.0.0.1]:8",
        "RuntimeError: [x/gloo/transport/tcp/pair.cc:1] Read error [127.0.0.1]:8: Connection reset by peer",
        "RuntimeError: Application timeout caused pair closure",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:1, remote process exited or there was a network error",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistNetworkError: Broken pipe",
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 3/4 clients joined.",
        "RuntimeError: Timeout waiting for key: default_pg/0//cuda// after 600000 ms",
        "torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /default_pg/0//cpu//0",
        "RuntimeError: Rank 2 failed to pass monitoredBarrier in 5000 ms",
        "RuntimeError: NCCL communicator was aborted on rank 1.",
        "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception on one of the ranks",
        "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error: Collective ops is aborted by: Error reported from /job:worker/task:1: The following tasks are unhealthy (stopped sending heartbeats):",
        "jaxlib.xla_extension.XlaRuntimeError: UNAVAILABLE: Polled an error from coordination service (this can be an error from this or another task).",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_symptoms_are_worth_a_moments_wait(end_of, text):
    assert looks_like_consequence(end_of(0, raised(text)))


@pytest.mark.parametrize(
    "text",
    [
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE)",
        "[rank1]:[E1128 00:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
        "[rank1]:[F1128 00:00:00.1 ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds: HeartbeatMonitor",
    ],
)
def test_aborts_of_the_watchdog_are_consequences(end_of, text):
    assert looks_like_consequence(end_of(0, f"{text}\n", returncode=-6))


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: bad",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "torch.distributed.DistBackendError: NCCL error in: x, invalid usage. Duplicate GPU detected : rank 0 and rank 1 both on CUDA device",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE",
        "TimeoutError: lock file is held",
    ],
)
def test_causes_are_not_waited_for(end_of, text):
    assert not looks_like_consequence(end_of(0, raised(text)))


def test_cuda_error_that_the_watchdog_reports_is_a_cause(end_of):
    text = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [Rank 1] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n"
    assert not looks_like_consequence(end_of(0, text, returncode=-6))


def test_workers_that_had_to_be_killed_are_reported_with_what_leaves_them_more_time(end_of):
    ends = [
        end_of(0, returncode=-9, told_to_stop=True, ended_s=11.0),
        end_of(1, OWN),
        end_of(2, returncode=-15, told_to_stop=True, ended_s=6.0),
    ]
    diagnosis = diagnose(ends, world_size=3, after_grace="after the 5 s")
    assert mentions(diagnosis.others, "rank 0", "stopped", "KILL after the 5 s")
    assert mentions(diagnosis.others, "rank 2", "stopped")
    assert not mentions(diagnosis.others, "rank 2", "KILL")
    assert "longer --failure-grace" in (diagnosis.hint or "")


@pytest.mark.parametrize("code", [-11, 3])
def test_silent_ends_are_causes(end_of, code):
    assert not looks_like_consequence(end_of(0, returncode=code))


def test_consequence_never_wins_even_if_it_ended_first(end_of):
    ends = [end_of(0, LOST, ended_s=1.0), end_of(1, LATE, ended_s=1.1), end_of(2, OWN, ended_s=2.5)]
    diagnosis = diagnose(ends, world_size=4, running=[3])
    assert (diagnosis.cause.ranks, diagnosis.cause.message, diagnosis.cause_seen) == (
        (2,),
        "bad",
        True,
    )
    lost, late, running = diagnosis.others
    assert mentions(lost, "rank 0", "lost", "(Connection closed by peer)")
    assert mentions(late, "rank 1", "timed out")
    assert mentions(running, "rank 3", "running")


def test_first_of_two_causes_wins_and_the_other_is_reported(end_of):
    ends = [end_of(3, raised("KeyError: 'a'"), ended_s=2.0), end_of(1, OWN, ended_s=1.0)]
    diagnosis = diagnose(ends, world_size=4)
    assert diagnosis.cause.ranks == (1,)
    assert diagnosis.failed_too == (
        "rank 3: failed too, exit code 1: KeyError: 'a' (train.py:7 in step)",
    )


@pytest.mark.parametrize("code", [-15, -9, 143, 137])
def test_worker_that_we_stopped_is_never_a_cause(end_of, code):
    ends = [
        end_of(0, returncode=code, told_to_stop=True, ended_s=1.0),
        end_of(1, LOST, ended_s=2.0),
    ]
    diagnosis = diagnose(ends, world_size=2)
    assert diagnosis.cause.ranks == (1,)
    assert not diagnosis.cause_seen
    (stopped,) = diagnosis.others
    assert mentions(stopped, "rank 0", "stopped")
    assert mentions(stopped, "KILL") == (code == -9)


def test_a_worker_that_had_lost_the_other_ranks_before_our_order_is_not_only_stopped(end_of):
    stopped = {"returncode": -15, "told_to_stop": True, "ended_s": 1.5}
    ends = [
        end_of(0, LOST, **stopped),
        end_of(2, LOST, **stopped),
        end_of(3, **stopped),
        end_of(1, OWN, ended_s=1.0),
    ]
    diagnosis = diagnose(ends, world_size=4)
    assert diagnosis.cause.ranks == (1,)
    lost, stopped = diagnosis.others
    assert mentions(lost, "ranks 0,2", "lost", "(Connection closed by peer)")
    assert mentions(stopped, "rank 3", "stopped")


@pytest.mark.parametrize("reported", [False, True])
def test_a_worker_that_aborted_by_itself_was_not_stopped_by_us(end_of, reported):
    ends = [
        end_of(0, LOST, returncode=-6, told_to_stop=reported, ended_s=1.5),
        end_of(1, OWN, ended_s=1.0),
    ]
    (lost,) = diagnose(ends, world_size=2).others
    assert mentions(lost, "rank 0", "lost", "(Connection closed by peer)")


def test_only_ranks_that_showed_nothing_are_reported_to_have_hung(end_of):
    stopped = {"told_to_stop": True, "returncode": -15, "ended_s": 2.0}
    ends = [end_of(1, LOST, ended_s=1.0), end_of(0, LOST, **stopped), end_of(2, **stopped)]
    assert mentions(diagnose(ends, world_size=3).hint or "", "rank 2", "running")


def test_keyboard_interrupt_after_our_order_is_never_a_cause(end_of):
    ends = [
        end_of(0, raised("KeyboardInterrupt"), told_to_stop=True, ended_s=1.1),
        end_of(1, LOST, ended_s=1.0),
    ]
    assert diagnose(ends, world_size=2).cause.ranks == (1,)


@pytest.mark.parametrize(("ended_s", "winner"), [(2.9, 0), (3.1, 1)])
def test_own_exception_soon_after_the_order_is_eligible(end_of, ended_s, winner):
    ends = [end_of(1, LOST, ended_s=1.0), end_of(0, OWN, told_to_stop=True, ended_s=ended_s)]
    assert diagnose(ends, world_size=2).cause.ranks == (winner,)


def test_exception_already_printed_by_a_worker_that_we_then_killed_is_used_as_last_resort(end_of):
    ends = [
        end_of(1, LOST, ended_s=1.0),
        end_of(0, OWN, returncode=-15, told_to_stop=True, ended_s=9.0),
    ]
    diagnosis = diagnose(ends, world_size=2)
    assert (diagnosis.cause.ranks, diagnosis.cause.message, diagnosis.exit_code) == ((0,), "bad", 1)


def test_all_consequences_are_reported_honestly(end_of):
    diagnosis = diagnose([end_of(0, LOST, ended_s=1.0), end_of(1, LATE, ended_s=1.1)], world_size=2)
    assert not diagnosis.cause_seen
    assert mentions(diagnosis.cause.summary, "original cause")
    assert (diagnosis.signature, diagnosis.repeats, diagnosis.exit_code) == (None, None, 1)


def test_rank_that_left_early_is_pointed_at(end_of):
    ends = [
        end_of(2, returncode=0, ended_s=1.0),
        end_of(0, LOST, ended_s=1.2),
        end_of(1, LOST, ended_s=1.3),
    ]
    assert mentions(diagnose(ends, world_size=3).hint or "", "rank 2", "code 0")


def test_rank_that_nothing_is_known_of_is_pointed_at(end_of):
    hint = diagnose([end_of(0, LOST), end_of(1, LOST)], world_size=3).hint or ""
    assert mentions(hint, "rank 2", "not fail")


def test_same_failure_is_one_cause_first_to_end_first_and_messages_may_differ(end_of):
    ends = [
        end_of(rank, raised(f"ValueError: bad on rank {rank}"), ended_s=5.0 - rank)
        for rank in range(4)
    ]
    assert diagnose(ends, world_size=4).cause.ranks == (3, 2, 1, 0)


def test_ranks_with_the_same_exception_before_the_stop_failed_alike(end_of):
    stopped = {"returncode": -15, "told_to_stop": True, "ended_s": 1.2}
    other = raised("ValueError: bad", line=9)
    ends = [
        end_of(0, OWN, **stopped),
        end_of(1, OWN, ended_s=1.0),
        end_of(2, other, **stopped),
        end_of(3, **stopped),
    ]
    diagnosis = diagnose(ends, world_size=4)
    assert diagnosis.cause.ranks == (1, 0)
    (stopped,) = diagnosis.others
    assert mentions(stopped, "ranks 2-3", "stopped")


def test_same_exception_elsewhere_is_another_failure(end_of):
    ends = [end_of(0, OWN, ended_s=1.0), end_of(1, raised("ValueError: bad", line=9), ended_s=1.1)]
    assert diagnose(ends, world_size=2).cause.ranks == (0,)


def test_weak_reason_wins_over_consequences_only(end_of):
    weak = end_of(
        1, raised("ConnectionResetError: [Errno 104] Connection reset by peer"), ended_s=2.0
    )
    assert diagnose([end_of(0, LOST, ended_s=1.0), weak], world_size=3).cause.ranks == (1,)
    assert diagnose([weak, end_of(2, OWN, ended_s=3.0)], world_size=3).cause.ranks == (2,)


def test_timeout_is_named_before_a_lost_connection(end_of):
    ends = [end_of(0, LOST, ended_s=1.0), end_of(1, LATE, ended_s=1.1)]
    assert diagnose(ends, world_size=2).cause.ranks[0] == 1


def test_cleanup_that_breaks_does_not_hide_the_first_exception(end_of):
    tail = OWN + "\nDuring handling of the above exception, another exception occurred:\n\n" + LOST
    cause = diagnose(
        [end_of(0, LOST, ended_s=1.0), end_of(1, tail, ended_s=2.0)], world_size=2
    ).cause
    assert (cause.ranks, cause.exception_type, cause.original) == ((1,), "ValueError", None)


def test_signature_is_type_and_frame(end_of):
    assert diagnose([end_of(0, OWN)], world_size=1).signature == (
        "ValueError",
        "train.py:7 in step",
    )
    assert diagnose([end_of(0, returncode=3)], world_size=1).signature is None


def test_no_bad_end_is_no_crash():
    diagnosis = diagnose([], world_size=2)
    assert (diagnosis.cause.ranks, diagnosis.exit_code) == ((), 1)


def test_cause_is_found_behind_a_thousand_consequences(end_of):
    ends = [end_of(rank, LOST, ended_s=1.0 + rank / 1e6) for rank in range(1000)]
    ends.append(end_of(1000, OWN, ended_s=2.0))
    assert diagnose(ends, world_size=1001).cause.ranks == (1000,)


def test_a_hundred_thousand_equal_failures_are_reported_in_one_line(end_of):
    ends = [end_of(rank, OWN) for rank in range(100_000)]
    diagnosis = diagnose(ends, world_size=100_000)
    assert len(diagnosis.cause.ranks) == 100_000
    assert diagnosis.others == ()


def test_tensorflows_rank_that_ended_with_0_is_named(end_of):
    aborted = raised(
        "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error: Collective"
        " ops is aborted by: Error reported from /job:worker/task:1: The following tasks are"
        " unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:1"
    )
    ends = [end_of(1, returncode=0, ended_s=2.0), end_of(0, aborted)]
    assert diagnose(ends, world_size=2).cause.ranks == (1,)
