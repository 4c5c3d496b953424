from __future__ import annotations

import pytest

from distlaunch.core.protocol.handshake import RefusalReason
from distlaunch.transport.tcp_listener import RepeatedNotices
from tests.facts import mentions


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.lines = []
        self.troubles = RepeatedNotices(self.lines.append, lambda: self.now)


@pytest.fixture
def world():
    return World()


def test_the_first_of_each_kind_is_reported_at_once(world):
    world.troubles.note(RefusalReason.HTTP, "10.0.0.9 speaks HTTP")
    world.troubles.note(RefusalReason.TLS, "10.0.0.8 speaks TLS")
    assert world.lines == ["10.0.0.9 speaks HTTP", "10.0.0.8 speaks TLS"]
    assert world.troubles.deadline() is None


def test_more_of_a_kind_are_counted_and_reported_once_a_minute(world):
    for port in range(1001):
        world.troubles.note(RefusalReason.HTTP, f"10.0.0.9:{port} speaks HTTP")
    assert len(world.lines) == 1
    assert world.troubles.deadline() == 160.0
    world.now = 159.9
    world.troubles.tick()
    assert len(world.lines) == 1
    world.now = 160.0
    world.troubles.tick()
    (repeated,) = world.lines[1:]
    assert mentions(repeated, "1,000 more", "10.0.0.9:1000 speaks HTTP")
    assert world.troubles.deadline() is None
    world.troubles.tick()
    assert len(world.lines) == 2


def test_one_that_comes_after_a_long_time_is_reported_too(world):
    world.troubles.note(RefusalReason.HTTP, "a:1 speaks HTTP")
    world.now = 1000.0
    world.troubles.note(RefusalReason.HTTP, "a:2 speaks HTTP")
    world.troubles.tick()
    assert world.lines[1:] == ["a:2 speaks HTTP"]
