from __future__ import annotations

import select

import pytest

from distlaunch.core.agent.liveness import SilenceMonitor
from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m


class Silence:
    """A silence monitor with a clock of its own."""

    def __init__(self, silence_s: float) -> None:
        self.now = 100.0
        self.monitor = SilenceMonitor(silence_s, now=lambda: self.now)

    def wait(self, seconds: float, *, polled_s: float) -> float | None:
        """Poll, and return the silence after some seconds."""
        self.monitor.poll_ms([polled_s])
        self.now += seconds
        return self.monitor.silent_s()


def test_silence_counts_from_the_last_message():
    silence = Silence(10.0)
    assert silence.wait(9.0, polled_s=9.0) is None
    silence.monitor.reset()
    assert silence.wait(9.0, polled_s=9.0) is None
    assert silence.monitor.left_s == 1.0
    assert silence.wait(1.0, polled_s=1.0) == 10.0


def test_after_a_suspension_unread_messages_have_two_seconds():
    silence = Silence(10.0)
    assert silence.wait(500.0, polled_s=10.0) is None
    assert silence.monitor.left_s == 2.0
    assert silence.wait(2.0, polled_s=2.0) == 10.0


@pytest.mark.parametrize("limit_s", [2.0, 5.0, 3.6e6, 1e9])
def test_a_ping_sets_the_limit(limit_s):
    silence = Silence(10.0)
    silence.monitor.on_ping(m.Ping(serial=1, silence_s=limit_s))
    silence.monitor.on_ping(m.Ping(serial=2))
    assert silence.monitor.left_s == limit_s


@pytest.mark.parametrize("limit_s", [0.0, -1.0, 1e-9, 1.99, 1e10, 1e300])
def test_a_limit_shorter_than_the_ping_interval_is_refused(limit_s):
    silence = Silence(10.0)
    with pytest.raises(ProtocolError, match="of silence"):
        silence.monitor.on_ping(m.Ping(serial=1, silence_s=limit_s))
    assert silence.monitor.left_s == 10.0


@pytest.mark.parametrize(
    ("waits_s", "expected_s"),
    [([], 3600.0), ([1e9], 3600.0), ([1e300], 3600.0), ([5.0, 0.5], 0.5), ([-3.0], 0.0)],
)
def test_a_poll_is_never_longer_than_the_kernel_allows(waits_s, expected_s):
    poll_ms = Silence(10.0).monitor.poll_ms(waits_s)
    assert poll_ms == expected_s * 1000 + 1
    poll = select.poll()
    closed = select.epoll()
    poll.register(closed.fileno(), select.POLLIN)
    closed.close()  # so that it does not wait
    assert poll.poll(poll_ms)
