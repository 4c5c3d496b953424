"""Choose the lines that explain an exit without an exception, from stderr and stdout. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from distlaunch.core.model.record import Record
from distlaunch.diagnosis.clean_text import is_noise, shorten_middle

Stream = Literal["stderr", "stdout"]
_LOOKED_AT = 200
_ERRORS_WITHIN = 40
"""A logged error counts only among this many last lines."""
_LINE_CHARS = 400
_ERROR_LEVEL = re.compile(
    r"^(?:\S+ )?(?:ERROR|CRITICAL|FATAL)[:\s]"
    r"|[\s|:(\[<-](?:ERROR|CRITICAL|FATAL)[\s|:)\]>-]"
    r"|^[EF]\d{4} \d\d:"
    r"|\b(?:level|levelname|severity|lvl)[\"']?\s*[=:]\s*[\"']?(?:error|critical|fatal)\b",
)
"""Real lines::

    ERROR:root:loss is nan                                            logging.basicConfig()
    2026-11-29 12:00:00,123 - train - CRITICAL - no data              logging, usual format
    [2026-11-29 12:00:00,123][train][ERROR] - no data                 Hydra
    2026-11-29 12:00:00.123 | ERROR    | __main__:main:12 - no data   loguru
    E1129 12:00:00.123456 4711 train.py:12] no data                   absl, glog
    {"event": "no data", "level": "error"}                            structlog
    level=error msg="no data"                                         logfmt
"""
_LOWER_LEVEL = re.compile(
    r"^(?:\S+ )?(?:DEBUG|INFO|NOTICE|WARNING)[:\s]"
    r"|[\s|:(\[<-](?:DEBUG|INFO|NOTICE|WARNING)[\s|:)\]>-]"
    r"|^[IW]\d{4} \d\d:"
    r"|\b(?:level|levelname|severity|lvl)[\"']?\s*[=:]\s*[\"']?(?:debug|info|warn(?:ing)?)\b",
)
PROBLEM = re.compile(
    r"error|fail|fatal|cannot|can't|could not|unable|denied|not found|no such|missing|invalid"
    r"|\bnan\b|\binf\b|diverged|exceeded|corrupt|mismatch|abort|stopping|giving up|refus|must ",
    re.IGNORECASE,
)


_WRITTEN_WITHIN = 3
_ABOUT_WAITING = re.compile(
    r"\bwait|\btimed? ?out|\block|\bstall|\bbarrier|\bstuck|\bretry|\bblock(?:ed|ing)"
    r"|\brank \d|\bsynchroni[sz]",
    re.IGNORECASE,
)


class LastLines(Record):
    """The last lines of a worker that explain its exit."""

    lines: tuple[str, ...]
    stream: Stream = "stderr"
    message: str | None = None
    """The line that names the problem, if any."""


def last_lines(lines: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the last ``count`` lines that are not noise (``is_noise``)."""
    words: list[str] = []
    for line in reversed(lines[-_LOOKED_AT:]):
        if not is_noise(line):
            words.append(shorten_middle(line, _LINE_CHARS))
            if len(words) == count:
                break
    return tuple(reversed(words))


def choose(stderr: Sequence[str], stdout: Sequence[str], count: int) -> LastLines:
    """Return the last ``count`` lines of stderr or of stdout.

    Those of stdout are returned if stderr names no problem, and one of these is true: stderr is
    empty, it ends with a log record below the level error, or stdout names a problem in its last
    line or in a log record.
    """
    found = _of_stream(stderr, "stderr", count)
    if found.message is not None:
        return found
    other = _of_stream(stdout, "stdout", count)
    if not other.lines:
        return found
    says_nothing = not found.lines or is_logged_below_error(found.lines[-1])
    if says_nothing or other.message in {other.lines[-1], *filter(is_logged_error, other.lines)}:
        return other
    return found


def line_about_waiting(stderr: Sequence[str], stdout: Sequence[str]) -> str | None:
    """Return the latest line about a wait, of stderr or else of stdout; None if there is none."""
    for lines in (stderr, stdout):
        for line in reversed(last_lines(lines, _WRITTEN_WITHIN)):
            if _ABOUT_WAITING.search(line):
                return line.strip()
    return None


def is_logged_error(line: str) -> bool:
    """Return whether a line is a log record of level ERROR or above."""
    return _ERROR_LEVEL.search(line[:_LINE_CHARS]) is not None


def is_logged_below_error(line: str) -> bool:
    """Return whether a line is a log record of level WARNING or below."""
    return not is_logged_error(line) and _LOWER_LEVEL.search(line[:_LINE_CHARS]) is not None


def _of_stream(lines: Sequence[str], stream: Stream, count: int) -> LastLines:
    """Return the last ``count`` lines of a stream, and the line among them that names the problem.

    If the last line names none, begin at the last logged error that is near the end.
    """
    words = last_lines(lines, count)
    message = words[-1] if words and _names_a_problem(words[-1]) else None
    if message is None:
        near = last_lines(lines, _ERRORS_WITHIN)
        at = next((n for n in reversed(range(len(near))) if is_logged_error(near[n])), None)
        if at is not None:
            message, words = near[at], near[at : at + count]
    if message is None:
        message = next((line for line in reversed(words) if _names_a_problem(line)), None)
    return LastLines(lines=words, stream=stream, message=message)


def _names_a_problem(line: str) -> bool:
    return not is_logged_below_error(line) and (
        is_logged_error(line) or PROBLEM.search(line) is not None
    )
