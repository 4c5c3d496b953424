"""Classify errors: as the cause of a failure, or as a consequence of another rank's failure.

The texts are those that torch 2.2 to 2.13, gloo, NCCL, Horovod, TensorFlow and JAX write when another rank has
failed or is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from distlaunch.diagnosis.clean_text import is_markers
from distlaunch.diagnosis.tracebacks import Raised


class Standing(IntEnum):
    """How likely an error is the cause of the failure. Smaller values win."""

    CAUSE = 0
    WEAK = 1
    """Perhaps a cause, or from outside, such as KeyboardInterrupt."""
    TIMED_OUT = 2
    """The worker waited for another rank until a timeout."""
    LOST_PEER = 3


_NEVER_CONSEQUENCE = (
    "cuda error",
    "out of memory",
    "oom when allocating tensor",
    "device-side assert",
    "illegal memory access",
    "unhandled cuda error",
    "duplicate gpu",
    "no space left on device",
    "address already in use",
    "eaddrinuse",
)
_LOST_PEER = (
    "remote process exited",
    "ncclremoteerror",
    "failed to recv, got 0 bytes",
    "did the remote server shutdown or crash",
    "recvvalue failed",
    "sendbytes failed",
    "connectfullmesh failed",
    "communicator was aborted",
    "ncclcommabort",
    "gloo::ioexception",
    "horovod has been shut down",
    "horovodinternalerror",
    "closed by remote peer",
    "remote worker crashing",
    "remote worker hanging",
    "collective ops is aborted by",  # TensorFlow 2.4 to 2.21
    "another task died",  # JAX's distributed service
    "polled an error from coordination service",
)
_TIMED_OUT = (
    "application timeout caused pair closure",
    "watchdog caught collective operation timeout",
    "nccl operations have failed or timed out",
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "failed to pass monitoredbarrier",
    "monitored barrier encountered error",
    "timeout waiting for key",
    "waiting for clients",
    "client socket has timed out",
    "heartbeat monitor timed out",
    "heartbeatmonitor",
    "watchdog got stuck for",
    "process group watchdog thread terminated",
    "collective timeout",
    "are waiting for remainder of ranks",
)
_LOST_PEER_IF_DISTRIBUTED = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "interrupted system call",  # of a TCPStore that connects when the launcher asks for stacks
)
"""Texts that show a consequence if a collective library has written them. Otherwise the program may
have lost another server."""
_TIMED_OUT_IF_DISTRIBUTED = ("timed out", "socket timeout", "wait timeout after")
_DISTRIBUTED = (
    "gloo",
    "nccl",
    "c10d",
    "tcpstore",
    "torch.distributed",
    "processgroup",
    "process group",
    "horovod",
)
_INTERRUPTS_ITSELF = ("raise KeyboardInterrupt", "interrupt_main(", "raise_signal(", "os.kill(")
_WEAK_TYPES = (
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "BrokenPipeError",
)
_WEAK = (
    *_LOST_PEER_IF_DISTRIBUTED[:3],
    "socket timeout",
    "wait timeout after",
    "timed out waiting",
    "unhandled system error",
    "failed to connect to any network address",
    "network error",
)


def standing_of_text(text: str) -> Standing:
    """Return the standing of a message, or of the last lines of a process that native code
    ended."""
    low = text.lower()

    def has(marks: Sequence[str]) -> bool:
        return any(mark in low for mark in marks)

    if has(_NEVER_CONSEQUENCE):
        return Standing.CAUSE
    if has(_TIMED_OUT):
        return Standing.TIMED_OUT
    if has(_LOST_PEER):
        return Standing.LOST_PEER
    if has(_DISTRIBUTED):
        if has(_LOST_PEER_IF_DISTRIBUTED):
            return Standing.LOST_PEER
        if has(_TIMED_OUT_IF_DISTRIBUTED):
            return Standing.TIMED_OUT
    return Standing.WEAK if has(_WEAK) else Standing.CAUSE


def standing_of(raised: Raised) -> Standing:
    """Return the standing of an exception, by type, message, and whether a collective raised it."""
    inner = raised.inner or raised
    text = f"{inner.text}\n" + "\n".join(inner.detail[:12])
    in_collective = any(
        "torch/distributed/" in frame.file or "horovod/" in frame.file
        for frame in raised.frames[-4:]
    )
    if in_collective:
        text += "\ntorch.distributed"
    standing = standing_of_text(text)
    if standing is Standing.CAUSE and inner.type.endswith(_WEAK_TYPES):
        return Standing.LOST_PEER if in_collective else Standing.WEAK
    if inner.type == "KeyboardInterrupt" and is_own_interrupt(inner):
        return Standing.CAUSE
    if inner.type in ("KeyboardInterrupt", "SystemExit"):
        return Standing.WEAK
    return standing


def is_own_interrupt(raised: Raised) -> bool:
    """Return whether the script raised its KeyboardInterrupt itself: a signal's has no text."""
    if raised.type != "KeyboardInterrupt":
        return False
    sources = (line for line in raised.lines[:-1] if line.startswith("    "))
    source = next((line for line in reversed(list(sources)) if not is_markers(line)), "")
    return bool(raised.message) or any(call in source for call in _INTERRUPTS_ITSELF)


def standing_of_chain(chain: Sequence[Raised]) -> Standing:
    """Return the standing of the exception that was raised first.

    An exception that was raised while a consequence was handled is a consequence too, unless it
    is a lack of memory or the like.
    """
    first = standing_of(chain[0])
    if first >= Standing.TIMED_OUT and any(
        mark in raised.text.lower() for raised in chain[1:] for mark in _NEVER_CONSEQUENCE[:3]
    ):
        return Standing.CAUSE
    return first
