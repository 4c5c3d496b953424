"""Tracebacks without an end: cut at every line, and within lines, as by a handler that raises
meanwhile."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import textwrap

import pytest

from distlaunch.diagnosis.first_cause import diagnose, looks_like_consequence
from distlaunch.diagnosis.report import diagnosis_record, one_line, render_report
from tests.facts import mentions

CUT_OFF = "its traceback was cut off"
TORCH = "/home/user/venv/lib/python3.11/site-packages/torch"
LOADER = f"{TORCH}/utils/data/dataloader.py"

PLAIN = """\
Traceback (most recent call last):
  File "/home/user/train.py", line 50, in <module>
    main()
  File "/home/user/train.py", line 42, in step
    loss = model(batch)
           ^^^^^^^^^^^^
  File "/home/user/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
    return forward_call(*args, **kwargs)
           ~~~~~~~~~~~~^^^^^^^^^^^^^^^^^
ValueError: bad batch
"""
FRAME_AFTER = [
    None,
    "train.py:50 in <module>",
    "train.py:50 in <module>",
    *["train.py:42 in step"] * 6,
]
"""The frame to be named, when so many lines after the header are there."""

WAITING = f"""\
Traceback (most recent call last):
  File "/home/user/train.py", line 8, in <module>
    for batch in loader:
  File "{LOADER}", line 725, in __next__
    data = self._next_data()
           ^^^^^^^^^^^^^^^^^
  File "{LOADER}", line 1505, in _next_data
    idx, data = self._get_data()
                ^^^^^^^^^^^^^^^^
  File "{LOADER}", line 1464, in _get_data
    success, data = self._try_get_data()
                    ^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 216, in recv_bytes
    buf = self._recv_bytes(maxlength)
          ^^^^^^^^^^^^^^^^^^^^^^^^^^^
EOFError
"""
HANDED_OVER = f"""\
Traceback (most recent call last):
  File "{LOADER}", line 1291, in _try_get_data
    data = self._data_queue.get(timeout=timeout)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv
    chunk = read(handle, remaining)
            ^^^^^^^^^^^^^^^^^^^^^^^
ConnectionResetError: [Errno 104] Connection reset by peer

During handling of the above exception, another exception occurred:

"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/p/a.py", line 9, in <module>
  |     raise outer(
  |     ^^^^^^^^^^^^
  | ExceptionGroup: outer (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/p/a.py", line 2, in leaf
    |     return read(
    |            ^^^^^
    | OSError: disk gone
    +---------------- 2 ----------------
    | TypeError: 2
    +------------------------------------
"""
POOL = f'multiprocessing.pool.RemoteTraceback: \n"""\n{PLAIN}"""\n\nThe above exception was the direct cause of the following exception:\n\n{PLAIN}'
SYNTAX = '  File "/p/t.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
IN_WORKER = (
    WAITING.replace(
        "EOFError", "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal "
    )[:-1]
    + PLAIN
)
DUMP = """\
object address  : 0x7f44d590dbc0
object refcount : 3
object type     : 0x7f44f6c50f20
object type name: ConnectionResetError
object repr     : ConnectionResetError(104, 'Connection reset by peer')
lost sys.stderr
"""
ALL = {
    "plain": PLAIN,
    "waiting": WAITING,
    "handed over": HANDED_OVER + WAITING,
    "group": GROUP,
    "pool": POOL,
    "syntax": SYNTAX,
    "in a worker": IN_WORKER,
    "thread": f"Exception in thread Thread-3 (work):\n{PLAIN}",
    "child": f"Process SpawnProcess-2:\n{PLAIN}",
    "ignored": f"Exception ignored in: <function f at 0x7f>\n{PLAIN}",
    "after another": f"{PLAIN}\nwill retry\n{WAITING}",
    "dump first": f"{DUMP}{WAITING}",
    "dump last": f"{WAITING.partition('EOF')[0]}{DUMP}",
    "ranks": "".join(f"[rank2]: {line}\n" for line in PLAIN.splitlines()),
}
ENDS = [1, 3, 120, -9, -15, -11, -6]


def explained(end_of, tail, **fields):
    return diagnose([end_of(2, tail, **fields)], world_size=4)


def shown_report(diagnosis):
    report = render_report(
        diagnosis,
        job_id="ab",
        world_size=4,
        attempt=0,
        restarts=0,
        max_restarts=0,
        elapsed_s=1.0,
        run_dir=None,
        many_hosts=False,
    )
    assert max(map(len, report.splitlines())) <= 100
    return report


def assert_no_markers_are_the_cause(diagnosis):
    cause = diagnosis.cause
    for text in (cause.exception_type, cause.message, cause.original, cause.frame):
        assert text is None or not re.fullmatch(r"(None: )?[\s|^~+]*", text)
    assert "^" not in one_line(diagnosis)
    assert "~" not in one_line(diagnosis)
    assert diagnosis_record(diagnosis)
    assert shown_report(diagnosis)


@pytest.mark.parametrize("returncode", ENDS)
@pytest.mark.parametrize("sample", ALL)
def test_markers_are_never_the_cause_wherever_the_text_ends(end_of, sample, returncode):
    data = ALL[sample].encode()
    # Every place once; with the other exit codes every seventh.
    for length in range(0, len(data) + 1, 1 if returncode == ENDS[0] else 7):
        assert_no_markers_are_the_cause(explained(end_of, data[:length], returncode=returncode))


@pytest.mark.parametrize("sample", ALL)
def test_markers_are_never_the_cause_where_both_ends_are_missing(end_of, sample):
    lines = ALL[sample].splitlines(keepends=True)
    for begin in range(len(lines)):
        for end in range(begin, len(lines) + 1):
            assert_no_markers_are_the_cause(explained(end_of, "".join(lines[begin:end])))


@pytest.mark.parametrize("prefix", ["", "[rank2]: "])
@pytest.mark.parametrize("cut", range(len(FRAME_AFTER)))
def test_cut_traceback_is_reported_as_one_and_its_innermost_frame_is_named(end_of, cut, prefix):
    lines = [f"{prefix}{line}\n" for line in PLAIN.splitlines()[: cut + 1]]
    cause = explained(end_of, "step 1 done\n" + "".join(lines)).cause
    assert (cause.summary, cause.frame) == (f"exit code 1; {CUT_OFF}", FRAME_AFTER[cut])
    assert (cause.exception_type, cause.message, cause.original) == (None, None, None)
    assert len(cause.excerpt) == cut


def test_whole_traceback_is_not_called_cut_off(end_of):
    cause = explained(end_of, PLAIN).cause
    assert (cause.summary, cause.exception_type, cause.frame) == (
        "exit code 1",
        "ValueError",
        "train.py:42 in step",
    )


def test_line_that_breaks_off_belongs_to_the_traceback(end_of):
    cause = explained(end_of, PLAIN[: PLAIN.index("venv/lib")]).cause
    assert CUT_OFF in cause.summary
    assert cause.frame == "train.py:42 in step"


def test_report_of_a_cut_traceback_shows_its_frames(end_of):
    report = shown_report(explained(end_of, "".join(PLAIN.splitlines(keepends=True)[:9])))
    assert CUT_OFF in " ".join(report.split())
    assert "  at train.py:42 in step\n" in report
    assert "loss = model(batch)" in report
    assert "_call_impl" in report


@pytest.mark.parametrize("lines", range(1, 15))
def test_exception_that_the_interpreter_dumped_before_the_frames_is_named(end_of, lines):
    """Under torch its excepthook prints into a buffer, which it writes after the interpreter's own
    lines."""
    shown = "".join(f"[rank2]: {line}\n" for line in WAITING.splitlines()[:lines])
    diagnosis = explained(end_of, f"step 1 done\n{DUMP}{shown}")
    cause = diagnosis.cause
    assert cause.summary == f"exit code 1; {CUT_OFF}"
    assert cause.exception_type == "ConnectionResetError"
    assert cause.message == "104, 'Connection reset by peer'"
    assert cause.frame == (None if lines == 1 else "train.py:8 in <module>")
    assert mentions(diagnosis.hint or "", "loader worker", "killed") is (lines >= 4)
    assert "object" not in shown_report(diagnosis)


def test_exception_that_was_dumped_in_the_middle_of_a_line_is_named(end_of):
    cause = explained(end_of, f"{PLAIN.partition('loss =')[0]}loss{DUMP}").cause
    assert (cause.exception_type, cause.frame) == ("ConnectionResetError", "train.py:42 in step")


def test_exception_dumped_without_any_frame_is_named(end_of):
    cause = explained(end_of, f"step 1 done\n{DUMP}").cause
    assert (cause.summary, cause.exception_type) == (
        f"exit code 1; {CUT_OFF}",
        "ConnectionResetError",
    )


def test_dump_with_other_words_after_it_is_history(end_of):
    cause = explained(end_of, f"{DUMP}no data left\n").cause
    assert (cause.summary, cause.message) == ("exit code 1", "no data left")


def test_syntax_error_without_its_last_line_is_cut_off(end_of):
    cause = explained(end_of, SYNTAX.partition("SyntaxError")[0]).cause
    assert CUT_OFF in cause.summary
    assert cause.frame == "t.py:3"


def test_stack_that_a_program_printed_is_no_cut_traceback(end_of):
    stack = '  File "/p/t.py", line 3, in f\n    traceback.print_stack()\n'
    assert CUT_OFF not in explained(end_of, stack).cause.summary
    cause = explained(end_of, f"{stack}no data left\n").cause
    assert (cause.summary, cause.message) == ("exit code 1", "no data left")


def test_cut_traceback_with_other_words_after_it_is_history(end_of):
    cause = explained(end_of, "".join(PLAIN.splitlines(keepends=True)[:5]) + "gave up\n").cause
    assert (cause.summary, cause.message) == ("exit code 1", "gave up")


def test_exception_ignored_after_a_cut_traceback_does_not_hide_it(end_of):
    ignored = "Exception ignored in: <function Pool.__del__ at 0x7f>\n" + PLAIN.replace(
        "bad batch", "at exit"
    )
    cause = explained(
        end_of, WAITING.partition("  File")[0] + '  File "/p/t.py", line 3, in f\n' + ignored
    ).cause
    assert (cause.exception_type, cause.frame) == (None, "t.py:3 in f")
    assert CUT_OFF in cause.summary


def test_the_loaders_message_in_an_ignored_exception_wins_over_a_cut_traceback(end_of):
    killed = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
    ignored = f"Exception ignored in: <function f at 0x7f>\n{PLAIN.replace('ValueError: bad batch', killed)}"
    cause = explained(end_of, WAITING.partition("EOFError")[0] + ignored).cause
    assert cause.message == "DataLoader worker (pid 7) is killed by signal: Killed."


def test_cut_traceback_hides_a_handled_one_before_it(end_of):
    cause = explained(end_of, f"{PLAIN}will retry\n{WAITING.partition('EOFError')[0]}").cause
    assert (cause.exception_type, cause.frame) == (None, "train.py:8 in <module>")
    assert CUT_OFF in cause.summary


@pytest.mark.parametrize(
    "rest", ["", "Traceback (most recent call last):\n", "".join(WAITING.splitlines(True)[:6])]
)
def test_exception_before_a_cut_one_in_the_chain_is_the_original(end_of, rest):
    cause = explained(
        end_of,
        f"{PLAIN}\nDuring handling of the above exception, another exception occurred:\n\n{rest}",
    ).cause
    assert CUT_OFF in cause.summary
    assert (cause.exception_type, cause.original) == (
        None,
        "ValueError: bad batch (train.py:42 in step)",
    )
    assert cause.frame == ("train.py:8 in <module>" if "File" in rest else "train.py:42 in step")


def test_error_file_names_the_exception_of_a_cut_traceback(end_of):
    reported = '{"message": {"message": "ValueError: bad batch", "extraInfo": {}}}'
    cause = explained(end_of, PLAIN.partition("ValueError")[0], error_file=reported).cause
    assert (cause.summary, cause.exception_type, cause.message) == (
        "exit code 1",
        "ValueError",
        "bad batch",
    )


def test_kill_while_a_traceback_was_printed_is_both_reported(end_of):
    diagnosis = explained(end_of, PLAIN.partition("ValueError")[0], returncode=-9)
    assert mentions(diagnosis.cause.summary, "SIGKILL", "outside", CUT_OFF)
    assert diagnosis.cause.frame == "train.py:42 in step"
    assert diagnosis.exit_code == 137


def test_a_message_of_native_code_wins_over_a_cut_traceback(end_of):
    native = "terminate called after throwing an instance of 'std::out_of_range'\n  what():  vector::at\n"
    cause = explained(end_of, PLAIN.partition("ValueError")[0] + native, returncode=-6).cause
    assert (cause.exception_type, cause.message) == ("std::out_of_range", "vector::at")


@pytest.mark.parametrize("lines", range(4, 15))
def test_killed_loader_worker_is_possible_where_the_loader_waited(end_of, lines):
    end = end_of(2, "".join(WAITING.splitlines(keepends=True)[:lines]))
    diagnosis = diagnose([end], world_size=4)
    assert diagnosis.cause.frame == "train.py:8 in <module>"
    assert mentions(diagnosis.hint, "loader worker", "killed")
    assert "/dev/shm" in diagnosis.hint
    assert not looks_like_consequence(end)


def test_killed_loader_worker_is_possible_where_the_hand_over_broke(end_of):
    assert mentions(explained(end_of, WAITING).hint, "loader worker", "killed")
    cut = HANDED_OVER.partition("\nDuring")[0]
    assert mentions(explained(end_of, cut).hint, "loader worker", "killed")


@pytest.mark.parametrize(
    "tail",
    [
        "".join(PLAIN.splitlines(keepends=True)[:9]),
        "".join(WAITING.splitlines(keepends=True)[:3]),
        "".join(WAITING.splitlines(keepends=True)[:6])
        + '  File "/home/user/data.py", line 4, in __getitem__\n',
        "".join(WAITING.splitlines(keepends=True)[:6])
        + f'  File "{LOADER}", line 789, in _next_data\n    data = self._dataset_fetcher.fetch(index)\n',
    ],
    ids=["no loader", "not yet", "the user's data set", "a loader without workers"],
)
def test_loader_is_not_blamed_for_what_is_elsewhere(end_of, tail):
    assert explained(end_of, tail).hint is None


def test_loader_is_not_blamed_after_another_exit_code(end_of):
    assert (
        explained(end_of, "".join(WAITING.splitlines(keepends=True)[:6]), returncode=3).hint is None
    )


def test_named_exception_of_another_rank_wins_over_a_cut_traceback(end_of):
    torn = end_of(1, "".join(PLAIN.splitlines(keepends=True)[:5]), ended_s=4.0)
    assert looks_like_consequence(torn)
    diagnosis = diagnose([torn, end_of(2, PLAIN, ended_s=5.0)], world_size=4)
    assert diagnosis.cause.ranks == (2,)
    assert any(CUT_OFF in line for line in diagnosis.others)


def test_a_cut_traceback_wins_over_a_lost_rank(end_of):
    lost = PLAIN.replace(
        "ValueError: bad batch",
        "RuntimeError: [/g/gloo/pair.cc:5] Connection closed by peer [::1]:4",
    )
    torn = end_of(1, "".join(PLAIN.splitlines(keepends=True)[:5]), ended_s=5.0)
    assert diagnose([end_of(2, lost, ended_s=4.0), torn], world_size=4).cause.ranks == (1,)


def test_markers_under_the_last_words_are_no_message(end_of):
    cause = explained(
        end_of, "k.cu:3:5: error: x is undeclared\n    3 |   y = x;\n      |       ^\n"
    ).cause
    assert cause.message is None
    assert cause.excerpt[0] == "k.cu:3:5: error: x is undeclared"


def test_a_traceback_whose_printing_breaks_off_is_read(end_of, tmp_path):
    """Writing fails after each possible number of writes, as if a signal handler raised an
    exception."""
    program = tmp_path / "torn.py"
    program.write_text(
        textwrap.dedent("""\
            import os, sys

            class Torn:
                left = int(sys.argv[1])

                def write(self, text):
                    if self.left <= 0:
                        raise KeyboardInterrupt
                    self.left -= 1
                    return os.write(2, text.encode())

                def flush(self):
                    pass

            def step(batch):
                return batch.size + step(batch)

            sys.stderr = Torn()
            step(int(sys.argv[1]))
            """),
        encoding="utf-8",
    )
    named = []
    for writes in range(200):
        run = [sys.executable, "-I", str(program), str(writes)]
        done = subprocess.run(run, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
        diagnosis = explained(end_of, done.stderr, returncode=done.returncode)
        assert_no_markers_are_the_cause(diagnosis)
        cause = diagnosis.cause
        assert (
            not done.stderr or cause.exception_type == "AttributeError" or CUT_OFF in cause.summary
        )
        assert "lost sys.stderr" not in shown_report(diagnosis)
        if sys.version_info >= (3, 11):
            assert cause.message == "'int' object has no attribute 'size'"
        if b"\nAttributeError: 'int' object has no attribute 'size'\n" in done.stderr:
            break
        named.append(cause.frame)
    assert cause.summary == "exit code 1"
    frames = [frame for frame, _ in itertools.groupby(named)]
    assert frames == [None, "torn.py:19 in <module>", "torn.py:16 in step"]
