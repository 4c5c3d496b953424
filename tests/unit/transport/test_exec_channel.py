from __future__ import annotations

import select
import threading

import pytest
from paramiko import SSHException

from distlaunch.transport.ssh.exec_channel import WINDOW, ReceiveBuffer, StderrBuffer


@pytest.fixture
def inbox():
    made = ReceiveBuffer()
    yield made
    made.release()


def ready(inbox) -> bool:
    poll = select.poll()
    poll.register(inbox.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def test_it_is_ready_while_there_is_something_and_no_longer(inbox):
    assert not ready(inbox)
    assert inbox.take() == b""
    inbox.feed(b"a")
    inbox.feed(b"b")
    assert ready(inbox)
    assert inbox.take() == b"ab"
    assert not ready(inbox)


def test_more_than_is_given_at_once_leaves_it_ready(inbox):
    pieces = [bytes([number]) * 32768 for number in range(40)]
    for piece in pieces:
        inbox.feed(piece)
    taken = b""
    while ready(inbox):
        taken += inbox.take()
    assert taken == b"".join(pieces)


def test_the_end_comes_after_what_came_before_and_stays(inbox):
    inbox.feed(b"last")
    inbox.close()
    assert inbox.take() == b"last"
    assert ready(inbox)
    assert inbox.take() is None
    assert ready(inbox)
    assert inbox.take() is None


def test_returned_messages_come_first(inbox):
    inbox.feed(b"second")
    inbox.unread(b"first ")
    assert ready(inbox)
    assert inbox.take() == b"first second"


def test_stderr_wakes_and_is_kept_apart_and_capped(inbox):
    words = StderrBuffer(inbox)
    words.feed(b"x" * 100_000 + b"end")
    assert ready(inbox)
    assert inbox.take() == b""
    assert not ready(inbox)
    assert len(inbox.stderr) < 100_000
    assert inbox.stderr.endswith(b"end")


def test_read_output_is_credited_once_stderr_too(inbox):
    inbox.feed(b"x" * (WINDOW // 4))
    assert not inbox.needs_window()
    inbox.take()
    StderrBuffer(inbox).feed(b"y" * 1000)
    assert inbox.take_window() <= WINDOW // 4 + 1000
    while inbox.take():
        pass
    inbox.take_window()
    assert inbox.take_window() == 0
    inbox.take_window(back=WINDOW)
    assert inbox.needs_window()


def test_returned_messages_need_no_credit(inbox):
    inbox.feed(b"x" * 1000)
    inbox.unread(inbox.take())
    assert inbox.take_window() == 0


def test_a_server_that_ignores_its_window_is_cut_off(inbox):
    for _ in range(2 * WINDOW // 65536):
        inbox.feed(bytes(65536))
    with pytest.raises(SSHException, match="window"):
        inbox.feed(bytes(65536))


def test_after_its_release_nothing_is_written_to_a_descriptor_that_may_be_anothers(inbox):
    inbox.release()
    inbox.feed(b"late")
    inbox.feed_stderr(b"late")
    inbox.close()
    inbox.release()
    assert inbox.take() is None


def test_two_threads_lose_nothing(inbox):
    count = 20_000

    def feed() -> None:
        for number in range(count):
            inbox.feed(b"%6d" % number)
        inbox.close()

    thread = threading.Thread(target=feed)
    thread.start()
    poll = select.poll()
    poll.register(inbox.fileno(), select.POLLIN)
    taken = b""
    while True:
        assert poll.poll(20_000)
        data = inbox.take()
        if data is None:
            break
        taken += data
    thread.join()
    assert taken == b"".join(b"%6d" % number for number in range(count))
