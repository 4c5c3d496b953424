"""Read Python tracebacks out of lines that hold anything else too.

The lines come from ``text.to_lines``: no colours, no rank prefix. The head may be torn (only the tail of a log is
kept) and other writers may have put lines in between. Formats: Python 3.10 to 3.14.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from distlaunch.core.model.record import Record
from distlaunch.diagnosis.clean_text import is_noise

Kind = Literal["main", "thread", "process", "ignored"]

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "(.+)", line (\d+)(?:, in (.+))?$')
_EXCEPTION = re.compile(r"((?:[^\W\d]\w*|<locals>)(?:\.(?:\w+|<locals>|<lambda>))*)(?::(?: (.*))?)?$")
_DEPTH = 8
"""How deep a traceback may stand in another one's message."""
_FRAME_START = '  File "'
_LIKELY = re.compile(r"(?:Error|Exception|Exit|Interrupt|Warning|Group|Failure|Timeout|Iteration|Failed|Traceback)$")
_GROUP_LINE = re.compile(r"\s*[|+](?: |-|$)")
_GROUP_PREFIX = re.compile(r"^(?:\s*\| ?)")
_GROUP_CUT = re.compile(r"\s*\+-[+-]*(?: (?:\d+|\.\.\.) -+)?$")
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_BEFORE: tuple[tuple[str, Kind], ...] = (
    ("Exception in thread", "thread"),
    ("Exception ignored", "ignored"),
    ("Exception in callback", "ignored"),
    ("Task exception was never retrieved", "ignored"),
    ("Error in atexit", "ignored"),
    ("Error in sys.excepthook", "ignored"),
    ("--- Logging error ---", "ignored"),
    ("Process ", "process"),
)
NATIVE_STARTS = ("terminate called ", "Fatal Python error: ")
"""First words of a crash, which may well come while a process ends with its exception (torch's gloo threads do it)."""
_REACH = 4
"""How many foreign lines in a row a traceback may have between its own."""
_DETAIL = 12
"""How many further lines a message may have (where no chain sentence shows its end)."""
_CHAIN_REACH = 160
"""How far off a chain sentence may be."""
LIBRARY_PARTS = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/lib64/python3",
    "distlaunch/core/agent/",
    "distlaunch/toolkit/",
    "<frozen ",
)


class Frame(Record):
    """One frame of a traceback."""

    file: str
    line: int
    function: str | None

    @property
    def of_user(self) -> bool:
        """Whether this is the user's code: not the standard library, an installed package or ours."""
        return not any(part in self.file for part in LIBRARY_PARTS)

    def __str__(self) -> str:
        parts = self.file.split("/")
        name = "/".join(parts[-2:] if parts[-1] in ("__init__.py", "__main__.py") else parts[-1:])
        return f"{name}:{self.line} in {self.function}" if self.function else f"{name}:{self.line}"


class Raised:
    """One exception as a traceback shows it.

    ``detail``: further lines of the message, and notes. ``inner``: what a worker of a data loader or a spawned process
    raised, or the first leaf of a group. Filled while its lines are read.
    """

    __slots__ = ("detail", "frames", "inner", "lines", "message", "type")

    def __init__(self, type_: str = "", message: str = "", *, lines: Sequence[str] = ()) -> None:
        self.type = type_
        self.message = message
        self.frames: list[Frame] = []
        self.detail: list[str] = []
        self.inner: Raised | None = None
        self.lines = list(lines)

    @property
    def frame(self) -> Frame | None:
        """The innermost frame of the user's code, else the innermost."""
        return next(
            (frame for frame in reversed(self.frames) if frame.of_user), self.frames[-1] if self.frames else None
        )

    @property
    def text(self) -> str:
        """``Type: message``, as Python writes it."""
        return f"{self.type}: {self.message}" if self.message else self.type


class Traceback(Record):
    """A traceback: exceptions in the order in which they were raised, the outermost last."""

    kind: Kind
    chain: list[Raised]
    """Those whose own line is there."""
    start: int
    end: int
    """Index of the first line after it."""
    torn: Raised | None = None
    """The frames of one more, the outermost, if the writing stopped before the line that names it."""


def find_tracebacks(lines: Sequence[str]) -> list[Traceback]:
    """Find every traceback, in order; ``torn`` those without an exception line, or whose last exception has none."""
    found: list[Traceback] = []
    index = 0
    while index < len(lines):
        if _HEADER not in lines[index] and not _FRAME.match(lines[index]):
            index += 1
            continue
        kind = _kind(lines, index)
        chain: list[Raised] = []
        begin = index
        while True:
            start = index
            raised, index = _one(lines, start, bare=kind == "ignored")
            if raised.type:
                chain.append(raised)
            following = _after_chain_line(lines, index)
            if following is None:
                break
            index = following
        torn = None
        if not raised.type and _announced(lines[start], raised):
            torn = raised
        elif raised.type and _breaks_off(lines, index):
            torn, index = Raised(), len(lines)
        if chain or torn:
            found.append(Traceback(kind=kind, chain=chain, start=begin, end=index, torn=torn))
    return found


def said_after(lines: Sequence[str]) -> list[str]:
    """Return what a worker said in the lines after its traceback, up to a crash on its way out."""
    crash = next((n for n, line in enumerate(lines) if line.startswith(NATIVE_STARTS)), len(lines))
    return [line for line in lines[:crash] if not is_noise(line)]


def announces_another(line: str) -> bool:
    """Tell whether a traceback that ended no process follows this line."""
    return any(line.startswith(start) and kind != "process" for start, kind in _BEFORE)


def _announced(line: str, raised: Raised) -> bool:
    """Tell whether an exception was to come after these frames: ``print_stack`` writes frames without any."""
    return line.endswith(_HEADER) or (bool(raised.frames) and raised.frames[-1].function is None)


def _breaks_off(lines: Sequence[str], index: int) -> bool:
    """Tell whether a chain sentence is all that comes."""
    rest = [line for line in lines[index : index + _REACH] if line.strip(" |")]
    return len(lines) - index < _REACH and len(rest) == 1 and rest[0].strip(" |") in _CHAIN


def _kind(lines: Sequence[str], index: int) -> Kind:
    """Tell from the lines before a traceback who printed it."""
    above = lines[index][: lines[index].find(_HEADER)] if _HEADER in lines[index] else ""
    for line in (above.strip(), *reversed(lines[max(0, index - 2) : index])):
        for start, kind in _BEFORE:
            if line.startswith(start) and (kind != "process" or line.endswith(":")):
                return kind
    return "main"


def _after_chain_line(lines: Sequence[str], index: int) -> int | None:
    """Return where the next traceback of the chain starts, if a chain sentence comes next."""
    for at in range(index, min(index + _REACH, len(lines))):
        if lines[at].strip(" |") in _CHAIN:
            for start in range(at + 1, min(at + 2 + _REACH, len(lines))):
                if _HEADER in lines[start] or _FRAME.match(lines[start]):
                    return start
            return None
        if _HEADER in lines[at]:
            return None
    return None


def _one(lines: Sequence[str], index: int, *, bare: bool = False, depth: int = 0) -> tuple[Raised, int]:
    """Read one exception that starts at ``index`` (its header or, torn, a frame); return it and the next index.

    It has no type if its own line is not there. ``bare``: without what follows that line, which is then no part of it.
    """
    if "Exception Group " + _HEADER in lines[index]:
        return _group(lines, index)
    raised = Raised()
    at = end = index + 1 if _HEADER in lines[index] else index
    foreign = 0
    while at < len(lines) and foreign <= _REACH:
        line = lines[at]
        if match := _FRAME.match(line):
            raised.frames.append(Frame(file=match[1], line=int(match[2][:9]), function=match[3]))
            raised.lines.append(line)
            foreign, end = 0, at + 1
        elif line.startswith(("   ", "  [", _FRAME_START)) or (line and _FRAME_START.startswith(line)):
            raised.lines.append(line)
            end = at + 1
        elif _HEADER in line:
            break
        elif (match := _EXCEPTION.match(line)) and not _goes_on(lines, at, likely=_LIKELY.search(match[1]) is not None):
            raised.type = match[1].removeprefix("__main__.")
            raised.message = match[2] or ""
            raised.lines.append(line)
            return raised, at + 1 if bare else _message(raised, lines, at + 1, depth=depth)
        else:
            foreign += 1
        at += 1
    return raised, end


def _goes_on(lines: Sequence[str], at: int, *, likely: bool) -> bool:
    """Tell whether the line at ``at`` only looks like the exception's: frames or a likelier one follow."""
    for line in lines[at + 1 : at + 1 + _REACH]:
        if _HEADER in line or line.strip(" |") in _CHAIN:
            return False
        if _FRAME.match(line):
            return not (likely and line.startswith('  File "<string>"'))
        if not likely and (match := _EXCEPTION.match(line)) and _LIKELY.search(match[1]):
            return True
    return False


def _message(raised: Raised, lines: Sequence[str], at: int, *, depth: int) -> int:
    """Read what follows the exception's first line: more message, notes, a child's traceback."""
    child = raised.message.startswith("Caught ") or raised.type.endswith("ProcessRaisedException")
    last = min(at + _DETAIL, len(lines))
    for probe in range(at, min(at + _CHAIN_REACH, len(lines))):
        if lines[probe].strip(" |") in _CHAIN:
            last = probe
            break
        if _HEADER in lines[probe]:
            break
    while at < last:
        line = lines[at]
        if _HEADER in line:
            if depth >= _DEPTH or not (child or line.startswith("Original ")):
                break
            below, at = _one(lines, at, depth=depth + 1)
            if not below.type:
                break
            raised.inner = below.inner or below
            child = False
            raised.lines.extend(below.lines)
            while (more := _after_chain_line(lines, at)) is not None:
                below, at = _one(lines, more, depth=depth + 1)
                if below.type:
                    raised.inner = below
                    raised.lines.extend(below.lines)
            break
        if line and (is_noise(line) or line.startswith(NATIVE_STARTS)):
            break
        if announces_another(line):
            break
        raised.detail.append(line)
        at += 1
    return at


def _group(lines: Sequence[str], index: int) -> tuple[Raised, int]:
    """Read an exception group: its own traceback, then the first of its leaves that is no group itself."""
    end = index + 1
    while end < len(lines) and _GROUP_LINE.match(lines[end]):
        end += 1
    sections: list[list[str]] = [[_HEADER]]
    for line in lines[index + 1 : end]:
        if _GROUP_CUT.match(line):
            sections.append([])
        else:
            sections[-1].append(_GROUP_PREFIX.sub("", line))
    raised, _ = _one(sections[0], 0)
    if not raised.type:
        return raised, end
    leaf: Raised | None
    for section in sections[1:]:
        start = next((n for n, line in enumerate(section) if _HEADER in line or _FRAME.match(line)), None)
        if start is not None:
            leaf, _ = _one([line.replace("Exception Group ", "") for line in section], start)
        else:
            match = _EXCEPTION.match(section[0]) if section else None
            leaf = Raised(match[1], match[2] or "", lines=section[:1]) if match else None
        if leaf is not None and leaf.type and "sub-exception" not in leaf.message:
            raised.inner = leaf
            raised.lines.extend(leaf.lines)
            break
    raised.detail.clear()
    return raised, end
