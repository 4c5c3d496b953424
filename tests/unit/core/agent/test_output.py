from __future__ import annotations

import os
import queue
import threading

from distlaunch.core.agent.workers.output_pump import Pump
from distlaunch.core.agent.workers.worker_table import Drained, OutputsClosed
from distlaunch.core.model.record import replace
from distlaunch.core.model.worker_exit import WorkerExit

SIZE = 60_000  # less than any pipe holds


class OneByOne:
    """Has room for one more chunk each time it is told to."""

    def __init__(self) -> None:
        self.took: list[tuple[int, int]] = []
        self.room = False
        self.came = threading.Event()

    def output(self, rank, stream, data, now):
        self.room = False
        self.took.append((rank, len(data)))
        self.came.set()

    def rank_ended(self, rank, now):
        pass

    def tick(self, now):
        return None

    def has_room(self):
        return self.room

    def on_room(self, wake):
        self.wake = wake

    def let_one(self):
        self.came.clear()
        self.room = True
        self.wake()
        assert self.came.wait(30)


def test_with_room_for_one_chunk_streams_are_read_in_turn():
    sink = OneByOne()
    closed = threading.Event()
    pump = Pump(sink, lambda event: closed.set() if isinstance(event, OutputsClosed) else None)
    pump.start()
    ends = []
    for rank in range(4):
        ours, theirs = os.pipe()
        assert os.write(theirs, b"x" * SIZE) == SIZE
        ends.append(theirs)
        pump.add(rank, 1, ours, tail_of=None)
    for turn in range(8):
        sink.let_one()
        rank, size = sink.took[-1]
        assert len(sink.took) == turn + 1
        assert size == SIZE
        os.write(ends[rank], b"x" * SIZE)  # so that all have something again
    assert len({rank for rank, _ in sink.took[-4:]}) == 4
    pump.finish()
    assert closed.wait(30)
    pump.stop()
    pump.join()
    for end in ends:
        os.close(end)


def test_a_workers_error_file_is_read_with_its_last_output(tmp_path):
    path = tmp_path / "rank-0.error.json"
    path.write_text('{"message": "it failed"}')
    came: queue.SimpleQueue = queue.SimpleQueue()
    pump = Pump(OneByOne(), came.put)
    pump.start()
    ends = [WorkerExit(rank=rank, pid=5, returncode=1) for rank in range(3)]
    pump.drain(ends[0], str(path))
    pump.drain(ends[1], str(tmp_path / "none"))
    pump.drain(ends[2])
    found = [came.get(timeout=30) for _ in range(3)]
    pump.stop()
    pump.join()
    assert found == [
        Drained(exit=replace(ends[0], error_file='{"message": "it failed"}')),
        *(Drained(exit=each) for each in ends[1:]),
    ]
