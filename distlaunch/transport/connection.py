"""The byte stream to the agent of one node, over any transport, and how it may end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

from distlaunch.core.model.record import Record, assert_never
from distlaunch.core.model.text import printable
from distlaunch.transport.connect_errors import ConnectFailure


class EndKind(Enum):
    """How a connection ended."""

    EXITED = "exited"
    """The program that carries the connection, or the agent, exited with a status."""
    KILLED = "killed"
    """A signal killed that program."""
    OUTPUT_CLOSED = "output closed"
    """The program closed its output and still runs."""
    CLOSED_HERE = "closed here"
    CLOSED_BY_PEER = "closed by peer"
    CLOSED = "closed"
    """The connection is closed for an unknown reason."""
    LOST = "lost"
    """The kernel reported an error."""
    FAILED = "failed"
    """The SSH client reported an error."""
    COMMAND_REFUSED = "command refused"
    """The SSH server refused to run the command."""
    CARRIER = "carrier"
    """``text`` is a message of the program that carries the connection, such as a ProxyCommand."""
    RAY_DRIVER = "ray driver"
    """Ray's driver ended, and with it the connections to all nodes."""
    RAY_ACTOR = "ray actor"
    """Ray lost the actor that carries the bytes."""


class ConnectionEnd(Record):
    """How a connection ended, as far as known."""

    kind: EndKind
    number: int = 0
    """The status of ``EXITED``, or the signal of ``KILLED``."""
    text: str = ""
    """Details for other kinds; printable."""
    last_words: str = ""
    """The last line of the program's stderr after a colon (``clause_of_last_lines``); may be empty."""


_FIRST_OF_SIGNALS = 128
"""A shell adds this to the number of the signal that killed its child."""


def end_of_program(code: int | None, last_words: str) -> ConnectionEnd:
    """Return how a connection ended, from the exit code of its program; None if it still runs."""
    if code is None:
        return ConnectionEnd(kind=EndKind.OUTPUT_CLOSED, last_words=last_words)
    kind = EndKind.KILLED if code < 0 else EndKind.EXITED
    return ConnectionEnd(kind=kind, number=abs(code), last_words=last_words)


def end_to_json(end: ConnectionEnd) -> dict[str, object]:
    """Return the end as plain data, for ``end_from_json`` in another process."""
    return {
        "kind": end.kind.value,
        "number": end.number,
        "text": end.text,
        "last_words": end.last_words,
    }


def end_from_json(record: Mapping[str, Any]) -> ConnectionEnd:
    """Return the end that ``end_to_json`` made in another process, with printable texts."""
    return ConnectionEnd(
        kind=EndKind(record["kind"]),
        number=record["number"],
        text=printable(record["text"]),
        last_words=printable(record["last_words"]),
    )


def behind_shell(end: ConnectionEnd) -> ConnectionEnd:
    """Return the end of a program whose parent is a shell: a status above 128 becomes the signal
    that it stands for."""
    if end.kind is EndKind.EXITED and end.number > _FIRST_OF_SIGNALS:
        number = end.number - _FIRST_OF_SIGNALS
        return ConnectionEnd(kind=EndKind.KILLED, number=number, last_words=end.last_words)
    return end


def describe_end(end: ConnectionEnd, who: str = "it") -> str:
    """Return a clause on how a connection ended. ``who`` is the program that carries it."""
    match end.kind:
        case EndKind.EXITED:
            text = f"{who} ended with status {end.number}"
        case EndKind.KILLED:
            text = f"{who} was killed by signal {end.number}"
        case EndKind.OUTPUT_CLOSED:
            text = f"{who} closed its output"
        case EndKind.CLOSED_HERE:
            text = "the connection was closed here"
        case EndKind.CLOSED_BY_PEER:
            text = "the connection was closed by the peer"
        case EndKind.CLOSED:
            text = "the connection was closed"
        case EndKind.LOST:
            text = f"the connection was lost: {end.text}"
        case EndKind.FAILED:
            text = f"the connection has failed: {end.text}"
        case EndKind.COMMAND_REFUSED:
            text = "the server has refused to run a command"
        case EndKind.CARRIER:
            text = end.text
        case EndKind.RAY_DRIVER:
            text = f"Ray's driver {end.text}"
        case EndKind.RAY_ACTOR:
            text = f"Ray has lost the actor there: {end.text}"
        case _:
            assert_never(end.kind)
    return text + end.last_words


class Connection(Protocol):
    """An open stream to an agent that has sent its greeting.

    ``send`` and ``close`` may be called from any thread, the rest by the main loop only.
    """

    def fileno(self) -> int:
        """Return the descriptor to poll for reading: ``receive`` has data or the end to return."""

    def receive(self) -> bytes | None:
        """Return the bytes that have arrived, perhaps none; None from the end on."""

    def send(self, data: bytes) -> None:
        """Send all bytes. Waits while the network is busy. Raises OSError if the connection is
        closed."""

    def close(self) -> None:
        """Close the stream without waiting, which ends the agent. Can be called again."""

    def end(self) -> ConnectionEnd:
        """Return how the connection ended. Called after its end."""


class Target(Record):
    """A node to connect to."""

    host: str
    """The host as the user or the source of the nodes wrote it."""
    user: str | None = None
    port: int | None = None
    here: bool = False
    """Whether the node is this machine."""


class ConnectError(Exception):
    """A node could not be reached."""

    def __init__(self, failure: ConnectFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


Open = Callable[[Target, float], Connection]
"""Connects to a node, starts the agent and reads its greeting, within a number of seconds.

Called in several threads at once, for different nodes. On failure, raises ConnectError and leaves
no process running.
"""
