"""Choose the lines of an exception's message that say most. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from distlaunch.diagnosis.clean_text import is_markers, is_noise
from distlaunch.diagnosis.tracebacks import Raised

_ANNOUNCES = re.compile(r":$|^\d+ (?:validation )?errors?\b")
"""A first line after which the text follows: ``Error(s) in loading state_dict for Net:``, ``1
validation error for Config`` of pydantic."""
_LETTER = re.compile(r"[^\W_]")
_MORE_CHARS = 300
_OF_NATIVE_CODE = ("Exception raised from ", "C++ CapturedTraceback")


def is_decoration(line: str) -> bool:
    """Return whether a line has no letter or digit, such as a line of asterisks."""
    return _LETTER.search(line) is None


def message_of(raised: Raised) -> str | None:
    """Return the message of an exception in one line.

    If the first line of the message is empty or decoration, the next lines take its place. Return
    None if there is no message.
    """
    further = list(_further(raised))
    own = raised.message.strip()
    if own and not (is_decoration(own) and further):
        return own
    # Without a colon after the type, the next line is a note, or another program's.
    own_lines = bool(own) or any(line == f"{raised.type}:" for line in raised.lines)
    return _joined(further[: 2 if own_lines else 1]) or None


def text_of(raised: Raised) -> str:
    """Return ``Type: message``, with the next lines of a message whose first line announces them."""
    if not raised.message and f"{raised.type}:" not in raised.lines:
        return raised.text
    message = message_of(raised) or ""
    if _ANNOUNCES.search(raised.message) and message == raised.message.strip():
        message = _joined([message, *islice(_further(raised), 2)])
    return f"{raised.type}: {message}" if raised.type and message else raised.text


def _joined(lines: Sequence[str]) -> str:
    """Return lines in one line: the first, and as many of the others as there is room for."""
    text = ""
    for number, line in enumerate(lines):
        if number and len(text) + len(line) > _MORE_CHARS:
            break
        text = f"{text} {line}".strip()
    return text


def lines_below(raised: Raised) -> list[str]:
    """Return the further lines of the message that ``message_of`` does not contain."""
    message = "" if raised.message else message_of(raised) or ""
    lines = (line for line in raised.detail if not is_decoration(line) or is_markers(line))
    return [line for line in lines if line.strip() not in message or is_markers(line)]


def _further(raised: Raised) -> Iterator[str]:
    """Yield the lines of the message after the first, without lines that say nothing."""
    for line in raised.detail:
        if line.startswith(_OF_NATIVE_CODE):
            return
        text = line.strip()
        if text and not is_markers(line) and not is_decoration(text) and not is_noise(line):
            yield text
