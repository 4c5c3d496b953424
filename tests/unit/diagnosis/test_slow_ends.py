"""Ranks that print their traceback and take long to end."""

from __future__ import annotations

import pytest

from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.first_cause import diagnose
from tests.facts import mentions

RAISED = """Traceback (most recent call last):
  File "/home/user/train.py", line 30, in <module>
    main()
  File "/home/user/train.py", line 12, in step
    raise ValueError("loss is nan")
ValueError: loss is nan
"""
OTHER = RAISED.replace("ValueError", "KeyError").replace("loss is nan", "'mask'")
TIMED_OUT = RAISED.replace(
    "ValueError: loss is nan",
    "RuntimeError: [/gloo/tcp/unbound_buffer.cc:79] Timed out waiting 2000ms for recv operation to complete",
)
AFTER = "logger: 12 of 300 records are sent\nlogger: 200 of 300 records are sent\n"
ENDS = '  File "/lib/python3.11/threading.py", line 1590 in _shutdown\n'
IN_SCRIPT = '  File "/home/user/train.py", line 40 in fit\n  File "/home/user/train.py", line 50 in <module>\n'


def stack(rank: int, frames: str) -> m.Stack:
    text = f"Current thread 0x0000000000000001 (most recent call first):\n{frames}"
    return m.Stack(rank=rank, pid=100 + rank, state="S", text=text)


def slow(end_of, tail: str, **fields):
    """Return a rank that printed its traceback 9 s before it ended."""
    fields = {"returncode": -15, "ended_s": 14.0, "told_to_stop": True} | fields
    return end_of(2, tail, traceback_age_s=9.0, **fields)


def timed_out(end_of, ended_s: float = 12.0):
    return [end_of(rank, TIMED_OUT, ended_s=ended_s, traceback_age_s=0.2) for rank in (0, 1)]


@pytest.mark.parametrize("code", [-15, -9, 0, 1, 143])
def test_a_rank_that_was_sending_its_log_when_the_others_ran_out_of_time_is_the_cause(end_of, code):
    ends = [*timed_out(end_of), slow(end_of, RAISED + AFTER, returncode=code)]
    found = diagnose(ends, world_size=3, stacks=[stack(2, ENDS)], script_dir="/home/user")
    assert found.cause.ranks == (2,)
    assert found.cause.exception_type == "ValueError"
    assert not found.cause.awaited
    assert found.exit_code == 1


def test_a_rank_that_survived_its_exception_is_not_the_cause(end_of):
    ends = [*timed_out(end_of), slow(end_of, RAISED + AFTER)]
    stacks = [stack(2, IN_SCRIPT)]
    found = diagnose(ends, world_size=3, stacks=stacks, script_dir="/home/user")
    assert found.cause.awaited
    assert found.cause.frame == "train.py:40 in fit"
    assert found.cause.exception_type == "RuntimeError"  # of a waiting rank


def test_an_exception_of_before_that_the_script_survived_does_not_hide_another_ranks_own(end_of):
    ends = [end_of(0, OTHER, ended_s=12.0, traceback_age_s=0.1), slow(end_of, RAISED)]
    with_stack = diagnose(ends, world_size=3, stacks=[stack(2, IN_SCRIPT)])
    assert with_stack.cause.ranks == (0,)
    assert diagnose(ends, world_size=3).cause.ranks == (2,)


def test_a_rank_that_ignored_the_stop_and_ended_with_its_own_code_is_the_cause(end_of):
    ends = [
        end_of(0, OTHER, ended_s=6.0, traceback_age_s=0.1),
        slow(end_of, RAISED, returncode=1, ended_s=12.0),
    ]
    found = diagnose(ends, world_size=2)
    assert (found.cause.ranks, found.cause.summary) == ((2,), "exit code 1")


def test_lines_of_its_logger_after_the_traceback_do_not_delay_a_failure(end_of):
    ends = [
        end_of(0, OTHER, ended_s=9.0, traceback_age_s=0.2),
        end_of(2, RAISED + AFTER, ended_s=9.1, traceback_age_s=4.0),
    ]
    assert diagnose(ends, world_size=2).cause.ranks == (2,)


def test_both_reasons_are_told_if_the_second_rank_was_stopped_while_it_ended(end_of):
    ends = [
        end_of(0, RAISED, ended_s=5.0, traceback_age_s=0.05),
        end_of(2, OTHER, returncode=-15, told_to_stop=True, ended_s=5.4, traceback_age_s=0.35),
    ]
    found = diagnose(ends, world_size=3)
    assert found.cause.ranks == (0,)
    assert mentions(found.failed_too[0], "rank 2", "KeyError", "'mask'")


def test_an_exception_that_the_stop_has_raised_is_no_second_reason(end_of):
    ends = [
        end_of(0, RAISED, ended_s=5.0, traceback_age_s=0.05),
        end_of(2, OTHER, returncode=-15, told_to_stop=True, ended_s=5.8, traceback_age_s=0.5),
    ]
    assert diagnose(ends, world_size=3).failed_too == ()


def test_the_same_reason_is_told_once(end_of):
    ends = [
        end_of(0, RAISED, ended_s=5.0, traceback_age_s=0.05),
        end_of(2, RAISED, returncode=-15, told_to_stop=True, ended_s=5.4, traceback_age_s=0.35),
    ]
    found = diagnose(ends, world_size=3)
    assert (found.cause.ranks, found.failed_too) == ((0, 2), ())


# --- many lines after the cause

FLOOD = "".join(f"prefetch: slot {number} is drained\n" for number in range(400))


@pytest.mark.parametrize("code", [1, 4])
def test_an_exception_before_a_flood_of_lines_is_the_cause(end_of, code):
    end = end_of(0, RAISED + FLOOD, returncode=code, traceback_age_s=2.0)
    found = diagnose([end], world_size=1)
    assert (found.cause.exception_type, found.cause.frame) == ("ValueError", "train.py:12 in step")


@pytest.mark.parametrize(
    ("age_s", "last"), [(300.0, ""), (2.0, "cannot write the checkpoint: disk is full\n")]
)
def test_an_exception_of_long_ago_or_before_another_problem_is_not(end_of, age_s, last):
    found = diagnose([end_of(0, RAISED + FLOOD + last, traceback_age_s=age_s)], world_size=1)
    assert found.cause.exception_type is None
    assert "loss is nan" not in (found.cause.message or "")


# --- a thread of the rank interrupts the main thread

INTERRUPTED = """Traceback (most recent call last):
  File "/home/user/train.py", line 30, in <module>
    main()
  File "/home/user/train.py", line 12, in step
    time.sleep(1)
KeyboardInterrupt
"""


@pytest.mark.parametrize(
    "line",
    [
        "watchdog: no batch for 30 s",
        "ERROR:root:no progress since step 500",
        "stall detected: interrupting the main thread",
        "loss did not change for 500 steps",
    ],
)
@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_the_message_of_the_thread_that_interrupted_is_the_cause(end_of, line, stream):
    text = f"step 7\n{line}\n"
    tails = {"tail": text + INTERRUPTED} if stream == "stderr" else {"tail": INTERRUPTED}
    told = "" if stream == "stderr" else text
    end = end_of(0, returncode=-2, stdout_tail=told, **tails)
    found = diagnose([end], world_size=1)
    assert found.cause.message == line
    assert "outside" not in found.cause.summary


@pytest.mark.parametrize("line", ["step 7 of 90, loss 0.3", "3 samples are invalid", ""])
def test_an_interrupt_without_such_a_message_came_from_outside(end_of, line):
    found = diagnose([end_of(0, f"{line}\n{INTERRUPTED}", returncode=-2)], world_size=1)
    assert "outside" in found.cause.summary


def test_an_interrupt_of_the_launcher_keeps_its_meaning(end_of):
    ends = [
        end_of(0, RAISED, ended_s=5.0),
        end_of(
            1,
            f"watchdog: no batch for 30 s\n{INTERRUPTED}",
            returncode=-2,
            told_to_stop=True,
            ended_s=5.5,
        ),
    ]
    found = diagnose(ends, world_size=2)
    assert (found.cause.ranks, found.others) == ((0,), ("rank 1: stopped by us",))


# --- a child process that crashes

CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f92f125cb80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/user/train.py", line 9 in tokenize
  File "/usr/lib/python3.11/concurrent/futures/process.py", line 261 in _process_worker
  File "/home/user/train.py", line 13 in <module>
"""
BROKEN_POOL = RAISED.replace(
    "ValueError: loss is nan",
    "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated"
    " abruptly while the future was running or pending.",
)


def test_a_crash_of_a_pools_process_is_told_with_its_line(end_of):
    found = diagnose([end_of(0, CRASH + BROKEN_POOL)], world_size=2)
    assert mentions(found.cause.original or "", "Segmentation fault", "train.py:9 in tokenize")
    assert found.hint_kind == "crashes-of-native-code"


def test_the_message_before_an_abort_of_a_pools_process_is_told_with_its_line(end_of):
    panic = "thread '<unnamed>' panicked at src/models/bpe.rs:41: index out of bounds\n"
    aborted = CRASH.replace("Segmentation fault", "Aborted")
    found = diagnose([end_of(0, panic + aborted + BROKEN_POOL)], world_size=2)
    assert mentions(found.cause.original or "", "bpe.rs:41", "Aborted", "train.py:9 in tokenize")


@pytest.mark.parametrize(
    ("words", "shown", "kind"),
    [
        (
            "memory allocation of 8589934592 bytes failed\n",
            "memory allocation of 8589934592 bytes failed",
            "host-memory",
        ),
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
            "std::bad_alloc",
            "host-memory",
        ),
        ("free(): invalid pointer\n", "free(): invalid pointer", "crashes-of-native-code"),
        (
            "thread '<unnamed>' panicked at src/bpe.rs:41:9:\nindex out of bounds: the len is 3\n",
            "index out of bounds: the len is 3",
            "crashes-of-native-code",
        ),
        ("mylib: cannot open the table\n", "mylib: cannot open", "crashes-of-native-code"),
    ],
)
def test_last_words_of_a_pools_process_are_told_before_its_abort(end_of, words, shown, kind):
    log = words + CRASH.replace("Segmentation fault", "Aborted") + BROKEN_POOL
    found = diagnose([end_of(0, log)], world_size=2)
    original = found.cause.original or ""
    assert original.index(shown) < original.index("Aborted") < original.index("train.py:9")
    assert found.hint_kind == kind


def test_last_words_of_a_pools_process_count_without_a_dump(end_of):
    log = "memory allocation of 64 bytes failed\n" + BROKEN_POOL
    found = diagnose([end_of(0, log)], world_size=2)
    assert (found.cause.original or "").startswith("memory allocation of 64 bytes failed")
    assert found.hint_kind == "host-memory"


RESET = """\
Traceback (most recent call last):
  File "/home/u/project/train.py", line 20, in <module>
    for batch in loader:
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 378, in _recv
    chunk = read(handle, remaining)
ConnectionResetError: [Errno 104] Connection reset by peer
"""
BUS = (
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
    "shared memory (shm).\n"
)


@pytest.mark.parametrize(
    "log", [BUS + RESET, BUS + "step 4\n" + RESET.replace("ConnectionReset", "EOF")]
)
def test_bus_error_of_a_loaders_worker_is_the_original_cause(end_of, log):
    found = diagnose([end_of(0, log)], world_size=2)
    assert found.cause.original == BUS.strip()
    assert (found.cause_seen, found.hint_kind) == (True, "shared-memory")


def test_reset_connection_of_a_loader_wins_over_a_later_failure(end_of):
    later = end_of(1, RAISED, ended_s=5.3)
    found = diagnose([end_of(0, BUS + RESET, ended_s=5.0), later], world_size=2)
    assert found.cause.ranks == (0,)


def test_a_broken_pool_without_a_crash_keeps_its_hint(end_of):
    found = diagnose([end_of(0, BROKEN_POOL)], world_size=2)
    assert found.cause.original is None
    assert found.hint is not None


# --- a thread of the rank ends it by a signal, or faulthandler does

DUMPED = """Timeout (0:00:01.500000)!
Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1590 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f0000000001 (most recent call first):
  File "/home/user/data.py", line 12 in read_block
  File "/home/user/train.py", line 40 in <module>
"""


def test_a_timeout_of_faulthandler_is_named_with_the_line_of_the_main_thread(end_of):
    found = diagnose([end_of(0, "step 7\n" + DUMPED)], world_size=1)
    assert found.cause.message == "Timeout (0:00:01.500000)!"
    assert found.cause.frame == "data.py:12 in read_block"


def test_a_dump_that_the_script_has_survived_is_not_the_cause(end_of):
    found = diagnose([end_of(0, DUMPED + "cannot open the file x.bin\n")], world_size=1)
    assert found.cause.message == "cannot open the file x.bin"


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_the_message_of_a_thread_that_sent_the_signal_is_the_cause(end_of, stream):
    text = "step 7\nwatchdog: step 8 took more than 60 s, terminating\n"
    tails = {"tail": text} if stream == "stderr" else {"stdout_tail": text}
    found = diagnose([end_of(0, returncode=-15, **tails)], world_size=1)
    assert mentions(found.cause.message or "", "watchdog")
    assert "outside" not in found.cause.summary


@pytest.mark.parametrize(
    "line",
    ["step 7", "received SIGTERM, terminating", "slurmstepd: error: *** STEP 7.0 CANCELLED ***"],
)
def test_a_signal_from_outside_keeps_its_name(end_of, line):
    found = diagnose([end_of(0, f"{line}\n", returncode=-15)], world_size=1)
    assert "outside" in found.cause.summary
