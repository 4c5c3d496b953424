r"""Carriage returns: which state of a line that is drawn over and over counts.

A state is what stands between two ``\r``. Blank ones do not count: a progress bar that is cleared leaves its last one.
"""

from __future__ import annotations

_ERASING = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K", b"\x1b[A")


def is_redrawn(line: bytes) -> bool:
    r"""Tell whether a whole line has several states; a ``\r`` at its end is only a line end."""
    return b"\r" in line.removesuffix(b"\r")


def newest_state(line: bytes) -> bytes:
    """Give the last state that is not blank; empty when there is none."""
    end = len(line)
    while end >= 0:
        start = line.rfind(b"\r", 0, end) + 1
        state = line[start:end]
        if not _is_blank(state):
            return state
        end = start - 1
    return b""


def squeeze(line: bytes) -> bytes:
    """Shorten an unfinished line to its newest state and what may become the next one."""
    end = line.rfind(b"\r")
    if end <= 0 or (end == len(line) - 1 and not is_redrawn(line)):
        return line
    rest = line[end + 1 :]
    if not _is_blank(rest):
        return b"\r" + rest
    return b"\r" + newest_state(line[:end]) + b"\r" + rest


def last_states(block: bytes) -> bytes:
    """Reduce each line of a block that has several states to its newest one; the others stay byte for byte."""
    if block.count(b"\r") == block.count(b"\r\n") + block.endswith(b"\r"):
        return block
    return b"\n".join([newest_state(line) if is_redrawn(line) else line for line in block.split(b"\n")])


def _is_blank(state: bytes) -> bool:
    if b"\x1b" in state:
        for sequence in _ERASING:
            state = state.replace(sequence, b"")
    return not state.strip()
