from __future__ import annotations

import os
import queue

import pytest

from distlaunch.core.agent.node.log_reader import LogReader, answer
from distlaunch.core.agent.workers.log_files import LogFiles
from distlaunch.core.model.log_times import MARK_BYTES
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import TORCHRUN, TRAIN
from distlaunch.core.protocol import agent_messages as m

LISTS = m.ListLogs(serial=4, attempt=0, ranks=(0, 1, 7))
READS = m.ReadLog(serial=5, attempt=0, rank=1, stream=0, offset=0, size=1 << 20)


@pytest.fixture
def logs(tmp_path):
    files = LogFiles(str(tmp_path), 0, print, make_folders=True)
    files.output(0, 1, b"one\n", 1.0)
    files.output(1, 1, b"two\nthree\n", 1.0)
    for rank in (0, 1):
        files.rank_ended(rank, 1.0)
    return str(tmp_path), TRAIN


def test_files_of_the_asked_ranks_are_listed(logs):
    listed = answer(LISTS, logs)
    assert [(each.rank, each.stream, each.size) for each in listed.files] == [(0, 0, 4), (1, 0, 10)]
    assert (listed.index_bytes, listed.problem) == (2 * MARK_BYTES, None)


@pytest.mark.parametrize(
    ("fields", "data"),
    [
        ({}, b"two\nthree\n"),
        ({"offset": 4, "size": 3}, b"thr"),
        ({"offset": 10}, b""),
        ({"offset": 1 << 60}, b""),
        ({"size": -3}, b""),
    ],
)
def test_a_part_is_read(logs, fields, data):
    part = answer(replace(READS, **fields), logs)
    assert (part.data, part.problem) == (data, None)


def test_no_part_is_larger_than_the_limit(logs):
    path = os.path.join(logs[0], "attempt-0", "rank-1.log")
    os.truncate(path, 10 << 30)  # a sparse file
    assert answer(LISTS, logs).files[1].size == 10 << 30
    part = answer(replace(READS, offset=9 << 30, size=10 << 30), logs)
    assert len(part.data) == m.LOG_PART_BYTES


def test_the_index_of_times_is_read(logs):
    assert len(answer(replace(READS, rank=None), logs).data) == 2 * MARK_BYTES


def test_separate_files_of_the_streams_are_listed(tmp_path):
    files = LogFiles(str(tmp_path), 0, print, layout=TORCHRUN, make_folders=True)
    for rank in (0, 1):
        os.makedirs(TORCHRUN.rank_dir(str(tmp_path), 0, rank))
    files.output(1, 2, b"err", 1.0)
    files.output(1, 1, b"output", 1.0)
    files.rank_ended(1, 1.0)
    listed = answer(LISTS, (str(tmp_path), TORCHRUN))
    assert [(each.stream, each.size) for each in listed.files] == [(1, 6), (2, 3)]
    assert answer(replace(READS, stream=2), (str(tmp_path), TORCHRUN)).data == b"err"


def test_bytes_that_were_left_out_are_known(tmp_path):
    layout = replace(TRAIN, log_bytes=64 << 10)
    files = LogFiles(str(tmp_path), 0, print, layout=layout, make_folders=True)
    for _ in range(100):
        files.output(0, 1, b"x" * 1023 + b"\n", 1.0)
    files.rank_ended(0, 1.0)
    [info] = answer(LISTS, (str(tmp_path), layout)).files
    assert (info.gap_begin, info.left_out > 0) == (32 << 10, True)


@pytest.mark.parametrize("stands_there", ["link", "pipe", "nothing"])
def test_what_is_no_plain_file_is_not_read(logs, stands_there):
    path = os.path.join(logs[0], "attempt-0", "rank-1.log")
    os.unlink(path)
    if stands_there == "link":
        os.symlink("/etc/hostname", path)
    elif stands_there == "pipe":
        os.mkfifo(path)
    part = answer(READS, logs)
    assert part.data == b""
    assert part.problem
    assert [each.rank for each in answer(LISTS, logs).files] == [0]


def test_a_node_without_logs_says_so():
    answers: queue.Queue[object] = queue.Queue()
    reader = LogReader(answers.put)
    for request, logs in ((LISTS, None), (READS, None), (LISTS, ("/not/there", TRAIN))):
        reader.read(request, logs)
        found = answers.get(timeout=30)
        assert (found.serial, bool(found.problem)) == (request.serial, True)


def test_requests_are_answered_one_after_another(logs):
    answers: queue.Queue[object] = queue.Queue()
    reader = LogReader(answers.put)
    for serial in range(20):
        reader.read(replace(READS, serial=serial), logs)
        assert answers.get(timeout=30) == m.LogPart(serial=serial, data=b"two\nthree\n")
