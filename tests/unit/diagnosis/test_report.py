from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.model.record import replace
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.diagnosis.clean_text import without_escapes
from distlaunch.diagnosis.evidence import read_error_file
from distlaunch.diagnosis.first_cause import diagnose, looks_like_consequence
from distlaunch.diagnosis.report import diagnosis_record, one_line, render_report
from tests.examples import examples
from tests.facts import mentions

TAIL = """\
Traceback (most recent call last):
  File "/home/user/train.py", line 50, in <module>
    step()
  File "/home/user/train.py", line 42, in step
    raise ValueError("bad batch")
ValueError: bad batch
"""


def shown(diagnosis, **fields):
    defaults = {
        "job_id": "ab12",
        "world_size": 4,
        "attempt": 0,
        "restarts": 0,
        "max_restarts": 0,
        "elapsed_s": 12.34,
        "run_dir": "/jobs/ab12",
        "many_hosts": False,
    }
    return render_report(diagnosis, **(defaults | fields))


def with_log(diagnosis, path):
    return replace(diagnosis, cause=replace(diagnosis.cause, log_path=path))


def is_safe(text):
    return all(char == "\n" or char.isprintable() for char in text)


def test_whole_report(end_of):
    ends = [
        end_of(2, TAIL),
        end_of(0, returncode=-15, told_to_stop=True, ended_s=5.2),
        end_of(1, returncode=-15, told_to_stop=True, ended_s=5.2),
        end_of(3, returncode=-15, told_to_stop=True, ended_s=5.2),
    ]
    path = "/jobs/ab12/attempt-0/rank-2.log"
    assert shown(with_log(diagnose(ends, world_size=4), path)) == (
        "rank 2 of 4 failed: exit code 1\n"
        "  ValueError: bad batch\n"
        "  at train.py:42 in step\n"
        "\n"
        '      File "/home/user/train.py", line 50, in <module>\n'
        "        step()\n"
        '      File "/home/user/train.py", line 42, in step\n'
        '        raise ValueError("bad batch")\n'
        "\n"
        "  ranks 0-1,3: stopped by us\n"
        "  log: /jobs/ab12/attempt-0/rank-2.log\n"
        "  job ab12, after 12.3 s\n"
    )


def test_host_and_attempt_are_reported_where_there_are_several(end_of):
    text = shown(
        diagnose([end_of(2, TAIL)], world_size=4),
        many_hosts=True,
        attempt=2,
        restarts=1,
        max_restarts=3,
        elapsed_s=3725,
    )
    assert text.startswith("rank 2 of 4 on node1 failed: exit code 1\n")
    assert text.endswith(
        "  logs: /jobs/ab12 (rank 2 wrote none)\n  job ab12, after 1 h 2 min, attempt 2 (restart 1 of 3)\n"
    )


def test_a_log_that_another_nodes_launcher_files_is_not_reported_as_missing(end_of):
    text = shown(
        diagnose([end_of(2, TAIL)], world_size=4),
        filed="ab12/attempt-0/rank-2.log of n2",
    )
    assert mentions(text, "log", "ab12/attempt-0/rank-2.log", "n2", "rank 2")
    assert "wrote none" not in text


def test_same_failure_everywhere_is_all_ranks(end_of):
    text = shown(diagnose([end_of(rank, TAIL) for rank in range(4)], world_size=4))
    assert text.startswith("all 4 ranks failed: exit code 1\n")
    assert text.count("ValueError: bad batch") == 1


def test_two_ranks_are_both(end_of):
    text = shown(diagnose([end_of(rank, TAIL) for rank in range(2)], world_size=2), world_size=2)
    assert text.startswith("both ranks failed: exit code 1\n")


def test_where_all_ranks_failed_alike_all_logs_are_named(end_of):
    folder = "/jobs/ab12/attempt-0"
    ends, path = [end_of(rank, TAIL) for rank in range(4)], f"{folder}/rank-0.log"
    all_alike, most = (with_log(diagnose(those, world_size=4), path) for those in (ends, ends[:3]))
    assert f"  logs: {folder}/rank-*.log\n" in shown(all_alike)
    assert f"  log: {folder}/rank-0.log\n" in shown(most)


def test_last_words_are_shown_as_such(end_of):
    text = shown(diagnose([end_of(0, "step 3\ngiving up\n", returncode=3)], world_size=4))
    assert text.startswith(
        "rank 0 of 4 failed: exit code 3\n  giving up\n  last lines on stderr:\n    step 3\n\n  logs: "
    )


def test_some_ranks_name_the_first(end_of):
    ends = [end_of(rank, TAIL, ended_s=9.0 - rank) for rank in (0, 1)]
    assert shown(diagnose(ends, world_size=4)).startswith(
        "ranks 0-1 of 4 failed (rank 1 first): exit code 1\n"
    )


def test_a_missing_cause_is_reported_first(end_of):
    lost = TAIL.replace(
        "ValueError: bad batch",
        "RuntimeError: [/x/gloo/pair.cc:1] Connection closed by peer [::1]:3",
    )
    text = shown(diagnose([end_of(0, lost)], world_size=2), world_size=2)
    assert mentions(text.splitlines()[0], "rank 0", "code 1", "original cause")


def test_record_is_json_and_names_the_cause(end_of):
    record = json.loads(json.dumps(diagnosis_record(diagnose([end_of(2, TAIL)], world_size=4))))
    assert (record["ranks"], record["exit_code"], record["cause_seen"]) == ([2], 1, True)
    assert record["signature"] == ["ValueError", "train.py:42 in step"]


def test_bytes_of_a_path_that_are_not_utf8_are_shown_and_stay_in_their_line(end_of):
    # As Python writes it to a worker's stderr.
    tail = 'Traceback (most recent call last):\n  File "/d/f\\udcff.py", line 1, in <module>\nOSError: it has a \\udcff\n'
    log = os.fsdecode(b"/tmp/l\xff\n/rank-0.log")
    diagnosis = with_log(diagnose([end_of(0, tail)], world_size=1), log)
    lines = shown(diagnosis, world_size=1).splitlines()
    assert "  at f\\xff.py:1 in <module>" in lines
    assert '      File "/d/f\\xff.py", line 1, in <module>' in lines
    assert "  OSError: it has a \\udcff" in lines
    assert "  log: /tmp/l\\xff\\n/rank-0.log" in lines


def test_a_script_that_cannot_be_opened_is_named_with_its_odd_bytes(end_of):
    tail = (
        "/usr/bin/python3: can't open file '/d/f\\udcff.py': [Errno 2] No such file or directory\n"
    )
    cause = diagnose([end_of(0, tail, returncode=2)], world_size=1).cause
    assert cause.message == "cannot open /d/f\\xff.py: No such file or directory"


def test_a_cause_fits_in_one_line(end_of):
    assert (
        one_line(diagnose([end_of(2, TAIL)], world_size=4))
        == "rank 2: ValueError: bad batch (train.py:42 in step)"
    )
    both = [end_of(rank, TAIL.replace("bad", "b" * 300), ended_s=rank) for rank in (0, 1)]
    text = one_line(diagnose(both, world_size=4))
    assert text.startswith("ranks 0-1: ValueError: bbb")
    assert len(text) < 220
    killed = one_line(diagnose([end_of(1, returncode=-9)], world_size=4))
    assert mentions(killed, "rank 1", "SIGKILL")


def test_escape_sequences_are_taken_out_whole():
    assert (
        without_escapes("a\x1b]0;title\x07b\x1b[2Jc\x9b31md\u202ee\x1bPq\x1b\\f\tg\x00")
        == "abcdef    g"
    )


@given(st.text())
def test_cleaned_text_is_printable_and_stays_as_it_is(text):
    once = without_escapes(text)
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in once)
    assert without_escapes(once) == once


PIECES = st.sampled_from(
    [
        b"Traceback (most recent call last):\n",
        b'  File "/p/t.py", line 3, in f\n',
        b'  File "/p/t.py", line 99999999999999999999\n',
        b"    code()\n",
        b"    ~~~^^^\n",
        b"ValueError: x\n",
        b"RuntimeError: Connection closed by peer\n",
        b"\n",
        b"During handling of the above exception, another exception occurred:\n",
        b"The above exception was the direct cause of the following exception:\n",
        b"  + Exception Group Traceback (most recent call last):\n",
        b"  | ExceptionGroup: g (1 sub-exception)\n",
        b"  +-+---------------- 1 ----------------\n",
        b"    | ValueError: 1\n",
        b"    | Traceback (most recent call last):\n",
        b'    |   File "/p/t.py", line 3, in f\n',
        b"Original Traceback (most recent call last):\n",
        b"ValueError: Caught ValueError in DataLoader worker process 0.\n",
        b"torch.multiprocessing.spawn.ProcessRaisedException: \n",
        b"Exception in thread Thread-1:\n",
        b"Exception ignored in: f\n",
        b"Process Process-1:\n",
        b"Fatal Python error: Aborted\n",
        b"Current thread 0x01 (most recent call first):\n",
        b'  File "/p/t.py", line 3 in f\n',
        b"terminate called after throwing an instance of 'E'\n",
        b"  what():  w\n",
        b"usage: x\n",
        b"x: error: y\n",
        b"\x1b[2J\x1b]0;t\x07\r\x9b",
        b"[rank0]: ",
        b" 10%|# | 1/2",
    ]
)


@given(
    st.lists(st.one_of(PIECES, st.binary(max_size=30)), max_size=30).map(b"".join),
    st.sampled_from([1, 2, 3, 127, 137, -6, -9, -11, -15]),
    st.one_of(st.none(), st.text(max_size=200)),
    st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_report_is_short_and_safe_for_any_output(tail, returncode, error_file, reported):
    end = WorkerExit(
        rank=0,
        local_rank=0,
        host="h",
        pid=1,
        returncode=returncode,
        ended_s=1.0,
        uptime_s=1.0,
        told_to_stop=reported,
        stderr_tail=tail,
        error_file=error_file,
    )
    looks_like_consequence(end)
    diagnosis = diagnose([end], world_size=2)
    json.dumps(diagnosis_record(diagnosis))
    text = shown(diagnosis)
    assert is_safe(text)
    assert len(text.splitlines()) < 50
    assert len(diagnosis.cause.excerpt) <= 20


@pytest.mark.parametrize(
    "piece",
    [
        b'ValueError: Caught \nOriginal Traceback (most recent call last):\n  File "/a", line 3, in f\n',
        b"  + Exception Group Traceback (most recent call last):\n",
        (
            b'Traceback (most recent call last):\n  File "/a", line 3, in f\nE: x\n\n'
            b"During handling of the above exception, another exception occurred:\n\n"
        ),
        b"\x1b]",
        b"1",
        b"Assertion `: ",
        b"\n",
    ],
)
@pytest.mark.parametrize("returncode", [1, -6])
def test_a_full_tail_of_one_thing_neither_overflows_nor_takes_long(piece, returncode, end_of):
    diagnose([end_of(0, piece * (65536 // len(piece)), returncode=returncode)], world_size=1)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["message", "extraInfo", "py_callstack", "timestamp", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=examples(60), deadline=None)
def test_error_file_of_any_shape_does_no_harm(value):
    data = json.dumps(value)
    for raised in read_error_file(data):
        assert without_escapes(raised.text) == raised.text
    read_error_file(data[:-1])
