from __future__ import annotations

import os
import select

import pytest

from distlaunch.core.agent.workers.progress_pipe import (
    GATHER_S,
    LINE_BYTES,
    NAMES,
    PERIOD_S,
    ActivityMonitor,
    last_heartbeat,
)
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.codec import Decoder, encode


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (
            b'{"step": 120, "loss": 0.31, "samples": 4096}',
            {"step": 120, "loss": 0.31, "samples": 4096},
        ),
        (b"{}", {}),
        (b' {"step":1}\r', {"step": 1}),
        (
            b'{"step": 1, "phase": "train", "done": true, "x": null, "y": [1], "z": {"a": 1}}',
            {"step": 1},
        ),
        (b'{"step": 1, "loss": NaN, "a": Infinity, "b": -Infinity}', {"step": 1}),
        (b'{"step": 1, "huge": 1' + b"0" * 3000 + b"}", {"step": 1}),
        (b'{"big": 9007199254740993}', {"big": 9007199254740992.0}),
        (b'{"": 1, "a\\nb": 2, "\\u001b[31m": 3, "' + b"n" * 65 + b'": 4, "ok": 5}', {"ok": 5}),
    ],
)
def test_only_finite_numbers_of_an_object_are_kept(line, values):
    assert last_heartbeat([line]) == values


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"step 5",
        b"5",
        b"[1]",
        b'"x"',
        b'{"step": ',
        b"\0" * 100,
        bytes(range(256)),
        b'{"step": \xff}',
        b"null",
        b"[" * 4000,
        b'{"a":' * 800,
        b'{"step": 1' + b"0" * 5000 + b"}",
        b'{"a": "' + b"x" * LINE_BYTES + b'"}',
    ],
)
def test_other_lines_are_no_heartbeats(line):
    assert last_heartbeat([line]) is None


def test_the_last_valid_line_counts():
    assert last_heartbeat([b'{"step": 1}', b'{"step": 2}', b"oops", b'{"step"']) == {"step": 2}


def test_a_heartbeat_has_a_limited_number_of_values():
    line = b"{" + b", ".join(b'"n%d": %d' % (number, number) for number in range(100)) + b"}"
    assert last_heartbeat([line]) == {f"n{number}": number for number in range(NAMES)}


class Node:
    """Pipes of some workers. Tests play the pump."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        self.posted: list[m.Alive] = []
        self.monitor = ActivityMonitor((self.poll,), self.posted.append)
        self.monitor.begin(0, watching=False)
        self.ends: dict[int, int] = {}
        self.now = 100.0

    def add(self, *ranks: int) -> None:
        for rank in ranks:
            reader, self.ends[rank] = os.pipe()
            os.set_blocking(reader, False)
            os.set_blocking(self.ends[rank], False)
            self.monitor.add(rank, reader)

    def write(self, rank: int, data: bytes) -> None:
        os.write(self.ends[rank], data)

    def turn(self, after: float = 0.0, *, held: bool = False) -> bool:
        """Run the loop once. Return whether there was something to read."""
        self.now += after
        readable = bool(self.poll.poll(0))
        self.monitor.tick(self.now, readable=readable, held=held)
        return readable

    def round(self) -> None:
        """Advance by a whole round."""
        self.turn()
        self.turn(PERIOD_S)

    def close_end(self, rank: int) -> None:
        os.close(self.ends.pop(rank))

    def close(self) -> None:
        self.monitor.close()
        self.poll.close()
        for end in self.ends.values():
            os.close(end)


@pytest.fixture
def node():
    node = Node()
    yield node
    node.close()


def beats(alive: m.Alive) -> dict[int, dict[str, float]]:
    return {heartbeat.rank: dict(heartbeat.values) for heartbeat in alive.heartbeats}


def test_the_first_heartbeat_is_reported_with_others_that_follow_soon(node):
    node.add(0, 1, 2)
    node.write(0, b'{"step": 1}\n')
    node.turn()
    assert node.monitor.due == node.now + GATHER_S
    node.write(2, b'{"step": 1}\n{"step": 2}\n')
    node.turn(GATHER_S)
    assert [beats(alive) for alive in node.posted] == [{0: {"step": 1}, 2: {"step": 2}}]


def test_nothing_wakes_up_if_no_worker_reports(node):
    node.add(0, 1)
    for _ in range(3):
        assert not node.turn(10.0)
    assert (node.monitor.due, node.posted) == (None, [])


def test_a_flood_of_reports_is_read_once_a_second(node):
    node.add(0)
    rounds = 0
    for _ in range(100):  # 10 s, in steps of 0.1
        try:
            node.write(0, b'{"step": 7}\n' * 300)
        except BlockingIOError:
            pass
        rounds += node.turn(0.1)
    assert len(node.posted) <= 11
    assert rounds <= 22, "the descriptor stays quiet between the rounds"
    assert all(beats(alive) == {0: {"step": 7}} for alive in node.posted)


@pytest.mark.parametrize(
    "junk", [b"x" * 60_000, b"[" * 60_000, b"\0" * 60_000, b"\n" * 60_000, os.urandom(60_000)]
)
def test_invalid_lines_are_ignored_and_later_ones_count(node, junk):
    node.add(0)
    node.write(0, junk)
    node.round()
    assert node.posted == []
    node.write(0, b'\n{"step": 3}\n')
    node.round()
    assert [beats(alive) for alive in node.posted] == [{0: {"step": 3}}]


def test_a_line_may_arrive_in_pieces_and_an_endless_one_is_dropped(node):
    node.add(0, 1)
    node.write(0, b'{"st')
    node.write(1, b"{" + b" " * LINE_BYTES)
    node.round()
    node.write(0, b'ep": 4}\n')
    node.write(1, b'"step": 4}\n{"step": 5}\n')
    node.round()
    assert [beats(alive) for alive in node.posted] == [{0: {"step": 4}, 1: {"step": 5}}]


def test_the_last_line_of_a_worker_counts_without_a_newline(node):
    node.add(0, 1)
    node.write(0, b'{"step": 8}\n{"step": 9}')
    node.close_end(0)
    node.monitor.drain(0)
    node.monitor.finish()
    assert [beats(alive) for alive in node.posted] == [{0: {"step": 9}}]


def test_the_last_report_of_an_exited_worker_does_not_wait_for_others(node):
    node.add(0, 1)
    node.write(0, b'{"step": 8}\n')
    node.monitor.drain(0)
    node.round()
    assert [beats(alive) for alive in node.posted] == [{0: {"step": 8}}]


def test_finishing_closes_the_pipes_for_the_next_attempt(node):
    node.add(0)
    node.write(0, b'{"step": 1}\n')
    node.round()
    node.monitor.finish()
    with pytest.raises(BrokenPipeError):
        node.write(0, b"{}\n")
    node.close_end(0)
    node.monitor.begin(1, watching=False)
    node.add(0)
    node.write(0, b'{"step": 2}\n')
    node.turn()
    node.turn(GATHER_S)
    assert [(alive.attempt, beats(alive)) for alive in node.posted] == [
        (0, {0: {"step": 1}}),
        (1, {0: {"step": 2}}),
    ]


def test_a_closed_pipe_does_not_wake_the_loop(node):
    node.add(0)
    node.close_end(0)
    node.round()
    assert not node.turn()
    assert (node.posted, node.monitor.due) == ([], None)


def test_output_before_a_silence_is_reported_if_hangs_are_detected(node):
    node.monitor.begin(0, watching=True)
    node.monitor.wrote.add(3)
    node.turn()
    node.turn(GATHER_S)
    node.monitor.wrote.update((5, 4))
    node.turn(0.1)
    assert node.monitor.due == pytest.approx(node.now - 0.1 + PERIOD_S)
    node.turn(PERIOD_S)
    assert [alive.wrote for alive in node.posted] == [(3,), (4, 5)]


def test_held_back_output_is_reported_repeatedly_if_hangs_are_detected(node):
    node.monitor.begin(0, watching=True)
    node.turn(held=True)
    for reported in range(4):
        assert len(node.posted) == reported
        assert node.monitor.due is not None, "nothing else would wake the loop"
        node.turn(node.monitor.due - node.now, held=True)
    assert all(alive.held for alive in node.posted)


def test_held_back_output_is_not_reported_if_hangs_are_not_detected(node):
    for _ in range(30):
        node.turn(0.1, held=True)
    assert node.posted == []


SAVED = b'{"checkpoint": {"step": 300, "seconds": 1.5, "bytes": 4096}}\n'


def test_checkpoints_are_all_reported_beside_the_last_heartbeat(node):
    node.add(0, 1)
    node.write(0, b'{"step": 299, "loss": 0.5}\n' + SAVED)
    node.write(1, SAVED + SAVED.replace(b"300", b"400") + b'{"step": 300}\n')
    node.round()
    [alive] = node.posted
    assert beats(alive) == {0: {"step": 299, "loss": 0.5}, 1: {"step": 300}}
    assert [(each.rank, each.step, each.seconds, each.bytes) for each in alive.checkpoints] == [
        (0, 300, 1.5, 4096),
        (1, 300, 1.5, 4096),
        (1, 400, 1.5, 4096),
    ]
    node.write(0, SAVED)
    node.round()
    assert beats(node.posted[1]) == {}, "a checkpoint alone is no heartbeat"
    assert len(node.posted[1].checkpoints) == 1


@pytest.mark.parametrize(
    "line",
    [
        b'{"checkpoint": 5}\n',
        b'{"checkpoint": {"step": 5}}\n',
        b'{"checkpoint": {"step": -5, "seconds": 1, "bytes": 1}}\n',
        b'{"checkpoint": {"step": "5", "seconds": 1, "bytes": NaN}}\n',
        b'{"checkpoint": {"step": 1, "seconds": 1, "bytes": 1e19}}\n',
        b'{"checkpoint": {"step": 1e308, "seconds": 1, "bytes": 1}}\n',
        b'{"checkpoint": {"step": 9223372036854775808, "seconds": 1, "bytes": 1}}\n',
        b'{"checkpoint": {"step": 1, "seconds": 1, "bytes": 1' + b"0" * 400 + b"}}\n",
        b'{"checkpoint": {"step": 1, "seconds": Infinity, "bytes": [1]}}\n',
        b'["checkpoint"]\n',
        b'{"checkpoint": ' + b"[" * 60 + b"\n",
    ],
)
def test_other_values_are_no_checkpoints(node, line):
    node.add(0)
    node.write(0, b'{"step": 1}\n' + line)
    node.round()
    assert [alive.checkpoints for alive in node.posted] == [()]


def test_the_newest_checkpoints_of_a_flood_are_reported(node):
    node.add(0)
    node.write(0, b"".join(SAVED.replace(b"300", b"%d" % step) for step in range(100)))
    node.round()
    assert [each.step for each in node.posted[0].checkpoints] == list(range(84, 100))


@pytest.mark.parametrize("number", [b"1e308", b"-1e308", b"9223372036854775807", b"9" * 300])
def test_every_reported_number_passes_the_codec(node, number):
    node.add(0)
    node.write(
        0,
        SAVED.replace(b"1.5", number)
        + SAVED.replace(b"4096", number)
        + b'{"step": %s, "loss": %s, "samples": %s}\n' % (number, number, number),
    )
    node.round()
    [alive] = node.posted
    decoder = Decoder((m.Alive,), (m.Heartbeat, m.SavedCheckpoint))
    assert list(decoder.feed(encode(alive))) == [alive]
