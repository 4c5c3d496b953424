"""How long a coordinator has been silent, and how long to poll for it."""

from __future__ import annotations

import select

import pytest

from distlaunch.core.agent.liveness import SilenceMonitor
from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m


class Hearer:
    """A hearing by a clock of its own."""

    def __init__(self, silence_s: float) -> None:
        self.now = 100.0
        self.monitor = SilenceMonitor(silence_s, now=lambda: self.now)

    def wait(self, seconds: float, *, polled_s: float) -> float | None:
        """Poll for so long, and give the silence after so many seconds."""
        self.monitor.poll_ms([polled_s])
        self.now += seconds
        return self.monitor.silent_s()


def test_silence_counts_from_the_last_word():
    hearer = Hearer(10.0)
    assert hearer.wait(9.0, polled_s=9.0) is None
    hearer.monitor.reset()
    assert hearer.wait(9.0, polled_s=9.0) is None
    assert hearer.monitor.left_s == 1.0
    assert hearer.wait(1.0, polled_s=1.0) == 10.0


def test_after_a_sleep_words_that_lie_unread_have_two_seconds():
    hearer = Hearer(10.0)
    assert hearer.wait(500.0, polled_s=10.0) is None
    assert hearer.monitor.left_s == 2.0
    assert hearer.wait(2.0, polled_s=2.0) == 10.0


@pytest.mark.parametrize("told_s", [2.0, 5.0, 3.6e6, 1e9])
def test_the_coordinator_says_how_long_it_may_be_silent(told_s):
    hearer = Hearer(10.0)
    hearer.monitor.on_ping(m.Ping(serial=1, silence_s=told_s))
    hearer.monitor.on_ping(m.Ping(serial=2))
    assert hearer.monitor.left_s == told_s


@pytest.mark.parametrize("told_s", [0.0, -1.0, 1e-9, 1.99, 1e10, 1e300])
def test_no_silence_is_taken_that_no_ping_comes_in_time_for(told_s):
    hearer = Hearer(10.0)
    with pytest.raises(ProtocolError, match="of silence"):
        hearer.monitor.on_ping(m.Ping(serial=1, silence_s=told_s))
    assert hearer.monitor.left_s == 10.0


@pytest.mark.parametrize(
    ("waits_s", "expected_s"),
    [([], 3600.0), ([1e9], 3600.0), ([1e300], 3600.0), ([5.0, 0.5], 0.5), ([-3.0], 0.0)],
)
def test_no_poll_is_longer_than_the_kernel_takes(waits_s, expected_s):
    poll_ms = Hearer(10.0).monitor.poll_ms(waits_s)
    assert poll_ms == expected_s * 1000 + 1
    poll = select.poll()
    closed = select.epoll()
    poll.register(closed.fileno(), select.POLLIN)
    closed.close()  # so that it does not wait
    assert poll.poll(poll_ms)
