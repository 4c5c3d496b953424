from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading

import pytest

from distlaunch.console.writer import HIGH_WATER, Writer


class Reader:
    """Reads a pipe to its end, in a thread."""

    def __init__(self, fd: int) -> None:
        self.data = bytearray()
        self._fd = fd
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._fd, 1 << 16):
            self.data += data
        os.close(self._fd)

    def end(self) -> bytes:
        self._thread.join(20)
        return bytes(self.data)


@pytest.fixture
def pipe():
    return os.pipe()


def fill(writer: Writer) -> int:
    put = 0
    while writer.has_room():
        assert writer.put(b"%07d\n" % (put // 8) * 1000)
        put += 8000
    return put


def test_a_full_pipe_has_no_room_until_it_has_drained_to_half_and_loses_nothing(pipe):
    reading, writing = pipe
    writer = Writer(writing)
    room = threading.Event()
    writer.on_room = room.set
    put = fill(writer)
    assert HIGH_WATER <= put < HIGH_WATER + (1 << 20)
    assert not room.is_set()
    reader = Reader(reading)
    assert room.wait(20)
    assert writer.has_room()
    writer.begin_close()
    assert writer.finish_close(None) == 0
    os.close(writing)
    assert reader.end() == b"".join(b"%07d\n" % (at // 8) * 1000 for at in range(0, put, 8000))


def test_a_closed_reader_is_dropped_for_good_and_gives_room(pipe):
    reading, writing = pipe
    writer = Writer(writing)
    room = threading.Event()
    writer.on_room = room.set
    put = fill(writer)
    os.close(reading)
    assert room.wait(20)
    assert writer.has_room()
    assert not writer.put(b"more\n")
    writer.begin_close()
    lost = writer.finish_close(None)
    assert 0 < lost <= put + 5
    os.close(writing)


def test_a_reader_that_is_gone_before_the_first_byte_ends_nothing(pipe):
    reading, writing = pipe
    os.close(reading)
    writer = Writer(writing)
    writer.put(b"x\n")
    assert writer.wait_idle(20)
    writer.begin_close()
    assert writer.finish_close(None) == 2
    os.close(writing)


def test_a_full_disk_is_dropped_for_good():
    fd = os.open("/dev/full", os.O_WRONLY)
    writer = Writer(fd)
    writer.put(b"x\n")
    assert writer.wait_idle(20)
    assert not writer.put(b"y\n")
    writer.begin_close()
    assert writer.finish_close(None) == 4
    os.close(fd)


def test_closing_gives_up_on_a_stuck_pipe_and_counts_what_is_lost(pipe):
    reading, writing = pipe
    writer = Writer(writing)
    put = fill(writer)
    writer.begin_close()
    lost = writer.finish_close(0.05)
    assert 0 < lost <= put
    assert not writer.put(b"late\n")
    os.close(reading)
    os.close(writing)


def test_closing_goes_on_while_a_slow_reader_makes_progress(pipe):
    reading, writing = pipe
    writer = Writer(writing)
    put = 0
    while put < 256 << 10:
        writer.put(b"x" * 4096)
        put += 4096
    writer.begin_close()
    lost: list[int] = []
    closer = threading.Thread(target=lambda: lost.append(writer.finish_close(5.0)))
    closer.start()
    got = 0
    while got < put:
        got += len(os.read(reading, 1024))
    closer.join(20)
    assert lost == [0]
    os.close(reading)
    os.close(writing)


def test_a_description_that_somebody_made_non_blocking_is_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.set_blocking(ours.fileno(), False)
        writer = Writer(ours.fileno())
        data = b"0123456789abcdef" * 65536
        writer.put(data)
        got = bytearray()
        while len(got) < len(data):
            assert select.select([theirs], [], [], 20)[0]
            got += theirs.recv(1 << 16)
        assert bytes(got) == data
        assert not os.get_blocking(ours.fileno())
        writer.begin_close()
        assert writer.finish_close(None) == 0


def test_the_shared_description_stays_blocking(pipe):
    reading, writing = pipe
    reader = Reader(reading)
    writer = Writer(writing)
    writer.put(b"x\n")
    assert writer.wait_idle(20)
    assert os.get_blocking(writing)
    writer.begin_close()
    assert writer.finish_close(None) == 0
    os.close(writing)
    assert reader.end() == b"x\n"


def test_nothing_written_starts_no_thread(pipe):
    before = threading.active_count()
    writer = Writer(pipe[1])
    assert threading.active_count() == before
    writer.begin_close()
    assert writer.finish_close(None) == 0
    for fd in pipe:
        os.close(fd)


def test_without_a_thread_to_be_had_the_descriptor_counts_as_failed_and_nobody_waits():
    # A stack that does not fit into the address space: the same error as at the limit of processes,
    # for root too.
    source = (
        "import os, resource, threading\n"
        "from distlaunch.console.terminal_writer import TerminalWriter\n"
        "from distlaunch.console.writer import Writer\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "threading.stack_size(8 << 30)\n"
        "for writer in (Writer(1), TerminalWriter(1, skipped=lambda lines: b'', colour=False)):\n"
        "    assert not writer.put(b'12345')\n"
        "    assert not writer.put(b'678', must=True)\n"
        "    assert writer.has_room() and writer.wait_idle(None)\n"
        "    writer.begin_close()\n"
        "    assert writer.finish_close(None) == 8\n"
        "writer = TerminalWriter(1, skipped=lambda lines: b'', colour=False)\n"
        "writer.set_status('up')\n"
        "writer.begin_close()\n"
        "assert writer.finish_close(None) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], env={}, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
