from __future__ import annotations

import errno
import os
import subprocess
import threading

import pytest

from distlaunch.core.probe.files import read_bounded

WRITER_S = 0.2


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)


def test_a_fifo_that_no_program_opens_is_given_up(fifo):
    with pytest.raises(TimeoutError) as caught:
        read_bounded(fifo, most=100, timeout_s=60.0, writer_s=WRITER_S)
    assert caught.value.errno == errno.ETIMEDOUT


def test_a_fifo_with_a_slow_writer_is_read_to_the_end(fifo):
    opened = threading.Event()

    def write() -> None:
        with open(fifo, "w") as file:
            opened.set()
            threading.Event().wait(3 * WRITER_S)
            file.write("n1\nn2\n")

    writer = threading.Thread(target=write)
    writer.start()
    keeper = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # lets the writer open it before we look
    opened.wait(20)
    try:
        assert read_bounded(fifo, most=100, timeout_s=60.0, writer_s=WRITER_S) == b"n1\nn2\n"
    finally:
        os.close(keeper)
        writer.join()


def test_a_writer_that_never_ends_is_bounded_in_size_and_in_time(fifo):
    with subprocess.Popen(
        ["/bin/sh", "-c", f"exec yes >{fifo}"], stderr=subprocess.DEVNULL
    ) as writer:
        with pytest.raises(OSError, match="1 MiB"):
            read_bounded(fifo, most=1 << 20, timeout_s=60.0, writer_s=WRITER_S)
        assert writer.wait(20) != 0
    with subprocess.Popen(["/bin/sh", "-c", f"exec sleep 600 >{fifo}"]) as writer:
        with pytest.raises(OSError, match=r"0\.3"):
            read_bounded(fifo, most=100, timeout_s=0.3)
        writer.kill()


def test_a_process_substitution_is_read_completely():
    reading, writing = os.pipe()
    os.write(writing, b"n1\n")
    os.close(writing)
    try:
        assert (
            read_bounded(f"/dev/fd/{reading}", most=100, timeout_s=60.0, writer_s=WRITER_S)
            == b"n1\n"
        )
    finally:
        os.close(reading)
