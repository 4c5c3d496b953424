"""A byte stream to the agent of one node, however it got there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from distlaunch.core.model.record import Record
from distlaunch.transport.connect_errors import ConnectFailure


class Link(Protocol):
    """An open stream to an agent that has greeted; ``send`` and ``close`` may be called from any
    thread.

    ``fileno`` and ``receive`` are the main loop's.
    """

    def fileno(self) -> int:
        """Give the descriptor to poll for reading: ready when ``receive`` has something."""

    def receive(self) -> bytes | None:
        """Give what has come, without waiting (empty: nothing now); None at the end, and for ever
        after."""

    def send(self, data: bytes) -> None:
        """Send all of it; may wait for the peer as long as the network takes. OSError: the link is
        closed."""

    def close(self) -> None:
        """Close the stream, which ends the agent; does not wait for the peer. May be called
        again."""

    def why_closed(self) -> str:
        """Say, after the end, what is known of it, as a clause: ``the connection was closed by the
        peer``."""


class Target(Record):
    """A node to connect to."""

    host: str
    """As the user or the source wrote it."""
    user: str | None = None
    port: int | None = None
    here: bool = False
    """It is this very machine: no network is needed."""


class Unconnected(Exception):  # noqa: N818 - it is an outcome, and travels as a value
    """``Connect`` did not succeed."""

    def __init__(self, failure: ConnectFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


Open = Callable[[Target, float], Link]
"""Connects, starts the agent and reads its greeting, within so many seconds. Called from a thread
of its own, several at once for different nodes. Raises Unconnected; nothing of it is left running
then."""
