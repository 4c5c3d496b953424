from __future__ import annotations

import os
import select
import socket
import threading

import pytest

from distlaunch.core.agent.frames import FrameStream
from distlaunch.core.agent.workers.output_sender import OutputSender
from distlaunch.core.agent.workers.stdin import StdinPipe
from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.codec import Decoder, encode


class Ends:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.other_end = theirs
        self.wakes = 0
        descriptor = ours.detach()
        self.stream = FrameStream(
            descriptor, descriptor, Decoder(m.TO_REMOTE, m.REMOTE_NESTED_TYPES), self._wake
        )
        self.decoder: Decoder = Decoder(m.FROM_REMOTE, m.REMOTE_NESTED_TYPES)

    def _wake(self) -> None:
        self.wakes += 1

    def take(self) -> list:
        return list(self.decoder.feed(self.other_end.recv(1 << 20)))


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.stream.close(bound_s=0)
    made.other_end.close()


def test_messages_arrive_in_both_directions(ends):
    ends.stream.send(m.RankEnded(rank=1))
    assert ends.take() == [m.RankEnded(rank=1)]
    assert ends.stream.receive() == []
    ends.other_end.sendall(encode(m.ExitAgent()) + encode(m.Credit(size=5))[:4])
    assert ends.stream.receive() == [m.ExitAgent()]
    ends.other_end.sendall(encode(m.Credit(size=5))[4:])
    assert ends.stream.receive() == [m.Credit(size=5)]
    assert ends.wakes == 0


def test_unsent_messages_wait_complete_and_in_order(ends):
    sent = [m.Output(rank=rank, stream=1, data=bytes([rank]) * 100_000) for rank in range(40)]
    threads = [threading.Thread(target=ends.stream.send, args=(each,)) for each in sent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends.wakes == 1
    [(descriptor, wanted)] = ends.stream.descriptors().items()
    assert wanted == select.POLLIN | select.POLLOUT
    came: list = []
    while len(came) < len(sent):
        came += ends.take()
        ends.stream.flush()
    assert sorted(came, key=lambda each: each.rank) == sent
    assert ends.stream.descriptors() == {descriptor: select.POLLIN}


def test_the_end_of_the_stream_comes_after_all_messages(ends):
    ends.other_end.sendall(encode(m.ExitAgent()))
    ends.other_end.shutdown(socket.SHUT_WR)
    assert ends.stream.receive() == [m.ExitAgent()]
    assert ends.stream.receive() is None
    assert not ends.stream.is_open
    ends.stream.send(m.RankEnded(rank=0))  # the other end still reads
    assert ends.take() == [m.RankEnded(rank=0)]


def test_messages_to_a_closed_connection_are_dropped(ends):
    ends.other_end.close()
    for _ in range(3):
        ends.stream.send(m.Output(rank=0, stream=1, data=b"x" * 1000))
    assert ends.stream.is_broken
    assert ends.stream.receive() is None


def test_closing_waits_only_for_a_limited_time(ends):
    ends.stream.send(m.Output(rank=0, stream=1, data=b"x" * (1 << 20)))
    ends.stream.close(bound_s=0.01)
    ends.stream.send(m.RankEnded(rank=0))


def test_garbage_is_refused(ends):
    ends.other_end.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    with pytest.raises(ProtocolError):
        ends.stream.receive()


# --- output, by credit


def test_output_is_sent_as_long_as_there_is_credit():
    sent: list = []
    wakes: list[int] = []
    sink = OutputSender(sent.append)
    sink.on_room(lambda: wakes.append(1))
    assert not sink.has_room()
    sink.grant(10)
    assert (sink.has_room(), len(wakes)) == (True, 1)
    sink.output(0, 1, b"x" * 25, 0.0)
    assert not sink.has_room()
    sink.grant(15)
    assert (sink.has_room(), len(wakes)) == (False, 1), "still in debt"
    sink.output(0, 2, b"last words", 0.0)
    sink.rank_ended(0, 0.0)
    assert [type(each) for each in sent] == [m.Output, m.Output, m.RankEnded]
    sink.grant(11)
    assert sink.has_room()
    assert sink.tick(0.0) is None


def test_output_is_accepted_after_the_coordinator_is_lost():
    sent: list = []
    wakes: list[int] = []
    sink = OutputSender(sent.append)
    sink.on_room(lambda: wakes.append(1))
    sink.on_coordinator_lost()
    assert (sink.has_room(), len(wakes)) == (True, 1)
    sink.output(0, 1, b"x" * 1000, 0.0)
    assert (sink.has_room(), sent) == (True, [])


# --- the feed


def test_stdin_reports_what_was_read_and_ends_after_all_of_it():
    sent: list = []
    feed = StdinPipe(sent.append)
    feed.write(b"for nobody")
    assert sent == [m.StdinConsumed(size=0, closed=True, unread=10)]
    sent.clear()
    end = feed.open()
    feed.write(b"x" * 100_000)
    took = sum(each.size for each in sent)
    assert 0 < took < 100_000
    [(_, wanted)] = feed.descriptors().items()
    assert wanted == select.POLLOUT
    feed.write(b"")
    data = b""
    while chunk := os.read(end, 1 << 20):
        data += chunk
        feed.on_ready()
    assert data == b"x" * 100_000
    assert sum(each.size for each in sent) == 100_000
    assert feed.descriptors() == {}
    feed.finish()
    os.close(end)
    assert not any(isinstance(each, m.AgentFailed) for each in sent)


def test_stdin_without_a_reader_drops_waiting_bytes():
    sent: list = []
    feed = StdinPipe(sent.append)
    end = feed.open()
    os.close(end)
    [(_, wanted)] = feed.descriptors().items()
    assert wanted == 0
    feed.on_hangup()
    assert sent == [m.StdinConsumed(size=0, closed=True)]
    end = feed.open()
    feed.write(b"x" * 200_000)
    os.close(end)
    feed.on_ready()
    assert sent[-1].closed
    assert sum(each.size for each in sent) < 200_000


def test_closing_a_stream_twice_closes_no_other_file():
    ends = Ends()
    ends.stream.close(bound_s=0)
    others = os.pipe()  # get the number that was the stream's
    ends.stream.close(bound_s=0)
    for descriptor in others:
        os.close(descriptor)  # raises if that was done already
    ends.other_end.close()
