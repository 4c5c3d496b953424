"""Find Python tracebacks in log lines that are mixed with other output. No I/O.

The lines come from ``clean_text.to_lines``: they have no colours and no rank prefix. A traceback
may be incomplete:

* Its beginning is missing if only the end of a log is kept.
* Other writers may have added lines between its lines.
* Its end is missing after SIGKILL, or if a signal handler raised an exception while the interpreter
  printed the traceback. In the latter case, Python 3.11 and newer dump the exception object with
  its repr and then print ``lost sys.stderr``.

A traceback without its end is called torn. The formats are those of Python 3.10 to 3.14.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from distlaunch.core.model.record import Record
from distlaunch.diagnosis.clean_text import is_noise

Kind = Literal["main", "thread", "process", "ignored"]
_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'[\s>]\s*File "(.+)", line (\d+)(?:, in (.+))?$')
_EXCEPTION = re.compile(
    r"((?:[^\W\d]\w*|<locals>)(?:\.(?:\w+|<locals>|<lambda>))*)(?::(?: (.*))?)?$"
)
_DEPTH = 8
"""Largest number of tracebacks that are nested in each other's messages."""
_FRAME_START = '  File "'
_LIKELY = re.compile(
    r"(?:Error|Exception|Exit|Interrupt|Warning|Group|Failure|Timeout|Iteration|Failed|Traceback)$"
)
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
_NATIVE_STARTS = ("terminate called ", "Fatal Python error: ")
"""First words of a crash of native code. A process may crash while an exception ends it; torch's
gloo threads cause such crashes."""
_CARRIERS = ("ProcessRaisedException", "CheckpointException")
"""Exceptions whose messages contain the traceback of another process. Those of
torch.distributed.checkpoint contain one for each rank."""
_REACH = 4
"""How many consecutive lines of other output a traceback may contain."""
_DETAIL = 12
"""How many further lines a message may have, if no chain sentence marks its end."""
_CHAIN_REACH = 160
"""How many lines away a chain sentence may be."""
LIBRARY_PARTS = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/lib64/python3",
    "distlaunch/core/agent/",
    "distlaunch/toolkit/",
    "<frozen ",
)
_DUMP_ENDS = "lost sys.stderr"
_DUMP_BEGINS = "object address  : "
_DUMP_LINES = 12
_TYPE = "object type name: "
_REPR = "object repr     : "
_PLAIN_TEXT = re.compile(r"\((?:'([^'\\]*)'|\"([^\"\\]*)\")\)")
_LOADER = "torch/utils/data/dataloader.py"
_LOADER_WAITS = ("__next__", "_next_data", "_get_data", "_try_get_data")
_READS_ITSELF = "_dataset_fetcher"
"""Part of the line in which a loader without workers reads its data set."""


class Frame(Record):
    """One frame of a traceback: file, line and function."""

    file: str
    line: int
    function: str | None

    @property
    def of_user(self) -> bool:
        """Whether the frame is in the user's code, not in the standard library, an installed
        package or distlaunch."""
        return not any(part in self.file for part in LIBRARY_PARTS)

    def __str__(self) -> str:
        parts = self.file.split("/")
        name = "/".join(parts[-2:] if parts[-1] in ("__init__.py", "__main__.py") else parts[-1:])
        return f"{name}:{self.line} in {self.function}" if self.function else f"{name}:{self.line}"


class Raised:
    """One exception as printed in a traceback. The fields are set while the lines are read.

    ``detail`` has further lines of the message, and notes. ``inner`` is the exception of a data
    loader's worker or a spawned process, or the first leaf of an exception group.
    """

    __slots__ = ("detail", "frames", "inner", "lines", "message", "type")

    def __init__(
        self,
        type_: str = "",
        message: str = "",
        *,
        lines: Sequence[str] = (),
        frames: Sequence[Frame] = (),
        detail: Sequence[str] = (),
        inner: Raised | None = None,
    ) -> None:
        self.type = type_
        self.message = message
        self.frames = list(frames)
        self.detail = list(detail)
        self.inner = inner
        self.lines = list(lines)

    def set_exception(self, type_: str, message: str) -> None:
        """Set type and message, which are printed after the frames."""
        self.type, self.message = type_, message

    def set_inner(self, inner: Raised, lines: Sequence[str]) -> None:
        """Set ``inner``, and add the lines that contain it."""
        self.inner = inner
        self.lines.extend(lines)

    def with_message(self, message: str) -> Raised:
        """Return a copy with another message."""
        return Raised(
            self.type,
            message,
            lines=self.lines,
            frames=self.frames,
            detail=self.detail,
            inner=self.inner,
        )

    @property
    def frame(self) -> Frame | None:
        """The innermost frame of the user's code, or else the innermost frame."""
        return next(
            (frame for frame in reversed(self.frames) if frame.of_user),
            self.frames[-1] if self.frames else None,
        )

    @property
    def text(self) -> str:
        """``Type: message``, in Python's form."""
        return f"{self.type}: {self.message}" if self.message else self.type


class Traceback(Record):
    """A traceback: its exceptions in the order in which they were raised, so that the outermost is
    last."""

    kind: Kind
    chain: list[Raised]
    """The exceptions whose own line exists."""
    start: int
    end: int
    """Index of the first line after the traceback."""
    torn: Raised | None = None
    """The outermost exception, if the output ends before the line with its type. Only its frames
    are known."""


def find_tracebacks(lines: Sequence[str]) -> list[Traceback]:
    """Return all tracebacks, in order.

    A traceback is ``torn`` if the line with the type of its last exception is missing.
    """
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
            raised, index = _read_exception(lines, start, bare=kind == "ignored")
            if raised.type:
                chain.append(raised)
            following = _next_in_chain(lines, index)
            if following is None:
                break
            index = following
        torn = None
        if not raised.type and _expects_exception(lines[start], raised):
            torn = raised
        elif raised.type and _breaks_off(lines, index):
            torn, index = Raised(), len(lines)
        if chain or torn:
            found.append(Traceback(kind=kind, chain=chain, start=begin, end=index, torn=torn))
    return found


def output_after(lines: Sequence[str]) -> list[str]:
    """Return the lines after a traceback that the worker printed, up to a crash during its exit."""
    crash = next((n for n, line in enumerate(lines) if line.startswith(_NATIVE_STARTS)), len(lines))
    return [line for line in lines[:crash] if not is_noise(line)]


def _begins_another(line: str) -> bool:
    """Return whether the line precedes a traceback of an exception that did not end a process."""
    return any(line.startswith(start) and kind != "process" for start, kind in _BEFORE)


def read_tracebacks(lines: list[str]) -> tuple[list[str], list[Traceback], Traceback | None]:
    """Return the lines without the interpreter's dump of an exception, all tracebacks in these
    lines, and the torn traceback at their end, if any.

    The torn traceback has the exception's type and message if they are in the dump.
    """
    dump = _find_dump(lines)
    if dump is not None:
        named, begin, end = dump
        kept = [*lines[:begin], lines[begin].partition(_DUMP_BEGINS)[0].rstrip(), *lines[end:]]
        found = find_tracebacks(kept)
        torn = _torn_at_the_end(found, kept)
        if torn is not None and torn.torn is not None:
            torn.torn.set_exception(named.type, named.message)
            torn.torn.lines.append(named.text)
            return kept, found, torn
        if not output_after(lines[end:]):
            last = found[-1].chain[-1] if found and found[-1].chain else Raised()
            if last.type.rpartition(".")[2] == named.type:
                if named.message.startswith(last.message):
                    last.set_exception(last.type, named.message)
                return kept, found, None
            alone = Traceback(kind="main", chain=[], start=len(kept), end=len(kept), torn=named)
            return kept, [*found, alone], alone
    found = find_tracebacks(lines)
    return lines, found, _torn_at_the_end(found, lines)


def loader_may_be_gone(raised: Raised) -> bool:
    """Return whether the exception was raised while a data loader waited for its workers.

    The frames then show no call of user code.
    """
    waits = [
        number
        for number, frame in enumerate(raised.frames)
        if frame.file.endswith(_LOADER) and frame.function in _LOADER_WAITS
    ]
    if not waits or any(_READS_ITSELF in line for line in raised.lines):
        return False
    return not any(frame.of_user for frame in raised.frames[waits[-1] :])


def _kind(lines: Sequence[str], index: int) -> Kind:
    """Return who printed the traceback at ``index``, according to the lines before."""
    above = lines[index][: lines[index].find(_HEADER)] if _HEADER in lines[index] else ""
    for line in (above.strip(), *reversed(lines[max(0, index - 2) : index])):
        for start, kind in _BEFORE:
            if line.startswith(start) and (kind != "process" or line.endswith(":")):
                return kind
    return "main"


def _read_exception(
    lines: Sequence[str], index: int, *, bare: bool = False, depth: int = 0
) -> tuple[Raised, int]:
    """Read the exception that starts at ``index``. Return the exception and the index of the next
    line.

    The line at ``index`` is a header, or a frame if the header is missing. If the line with the
    exception's type is missing, the result has no type. With ``bare``, nothing after that line is
    read, because the next lines do not belong to the exception.
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
        elif line.startswith(("   ", "  [", _FRAME_START)) or (
            line and _FRAME_START.startswith(line)
        ):
            raised.lines.append(line)
            end = at + 1
        elif _HEADER in line:
            break
        elif (match := _EXCEPTION.match(line)) and not _continues(
            lines, at, likely=_LIKELY.search(match[1]) is not None
        ):
            raised.set_exception(match[1].removeprefix("__main__."), match[2] or "")
            raised.lines.append(line)
            return raised, at + 1 if bare else _read_message(raised, lines, at + 1, depth=depth)
        else:
            foreign += 1
        at += 1
    return raised, end


def _group(lines: Sequence[str], index: int) -> tuple[Raised, int]:
    """Read an exception group: its own traceback, then its first leaf that is no group."""
    end = index + 1
    while end < len(lines) and _GROUP_LINE.match(lines[end]):
        end += 1
    sections: list[list[str]] = [[_HEADER]]
    for line in lines[index + 1 : end]:
        if _GROUP_CUT.match(line):
            sections.append([])
        else:
            sections[-1].append(_GROUP_PREFIX.sub("", line))
    raised, _ = _read_exception(sections[0], 0)
    if not raised.type:
        return raised, end
    leaf: Raised | None
    for section in sections[1:]:
        start = next(
            (n for n, line in enumerate(section) if _HEADER in line or _FRAME.match(line)), None
        )
        if start is not None:
            leaf, _ = _read_exception(
                [line.replace("Exception Group ", "") for line in section], start
            )
        else:
            match = _EXCEPTION.match(section[0]) if section else None
            leaf = Raised(match[1], match[2] or "", lines=section[:1]) if match else None
        if leaf is not None and leaf.type and "sub-exception" not in leaf.message:
            raised.set_inner(leaf, leaf.lines)
            break
    raised.detail.clear()
    return raised, end


def _continues(lines: Sequence[str], at: int, *, likely: bool) -> bool:
    """Return whether frames, or a line that more likely names the exception, follow the line at
    ``at``. The line at ``at`` then only resembles an exception line."""
    for line in lines[at + 1 : at + 1 + _REACH]:
        if _HEADER in line or line.strip(" |") in _CHAIN:
            return False
        if _FRAME.match(line):
            return not (likely and line.startswith('  File "<string>"'))
        if not likely and (match := _EXCEPTION.match(line)) and _LIKELY.search(match[1]):
            return True
    return False


def _read_message(raised: Raised, lines: Sequence[str], at: int, *, depth: int) -> int:
    """Read the lines that follow the line with an exception's type into ``raised``. Return the
    index of the next line.

    They are the rest of the message, notes, and the traceback of a child process.
    """
    child = raised.message.startswith("Caught ") or raised.type.endswith(_CARRIERS)
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
            below, at = _read_exception(lines, at, depth=depth + 1)
            if not below.type:
                break
            raised.set_inner(below.inner or below, below.lines)
            child = False
            while (more := _next_in_chain(lines, at)) is not None:
                below, at = _read_exception(lines, more, depth=depth + 1)
                if below.type:
                    raised.set_inner(below, below.lines)
            break
        if line and (is_noise(line) or line.startswith(_NATIVE_STARTS)):
            break
        if _begins_another(line):
            break
        raised.detail.append(line)
        at += 1
    return at


def _next_in_chain(lines: Sequence[str], index: int) -> int | None:
    """Return the index of the next traceback of the chain. Return None if no chain sentence
    (``_CHAIN``) follows within ``_REACH`` lines of ``index``."""
    for at in range(index, min(index + _REACH, len(lines))):
        if lines[at].strip(" |") in _CHAIN:
            for start in range(at + 1, min(at + 2 + _REACH, len(lines))):
                if _HEADER in lines[start] or _FRAME.match(lines[start]):
                    return start
            return None
        if _HEADER in lines[at]:
            return None
    return None


def _expects_exception(line: str, raised: Raised) -> bool:
    """Return whether a line with the exception's type must follow. ``print_stack`` prints frames
    without such a line."""
    return line.endswith(_HEADER) or (bool(raised.frames) and raised.frames[-1].function is None)


def _breaks_off(lines: Sequence[str], index: int) -> bool:
    """Return whether the text ends after a chain sentence."""
    rest = [line for line in lines[index : index + _REACH] if line.strip(" |")]
    return len(lines) - index < _REACH and len(rest) == 1 and rest[0].strip(" |") in _CHAIN


def _find_dump(lines: Sequence[str]) -> tuple[Raised, int, int] | None:
    """Return the last dump: the exception, the index of its first line and the index after its last
    line. None without a dump."""
    if _DUMP_ENDS not in lines:
        return None
    end = len(lines) - lines[::-1].index(_DUMP_ENDS)
    begin = next(
        (at for at in range(end - 1, max(-1, end - _DUMP_LINES), -1) if _DUMP_BEGINS in lines[at]),
        None,
    )
    if begin is None:
        return None
    type_ = next(
        (line.removeprefix(_TYPE) for line in lines[begin:end] if line.startswith(_TYPE)), ""
    )
    shown = next(
        (line.removeprefix(_REPR) for line in lines[begin:end] if line.startswith(_REPR)), ""
    )
    if not type_:
        return None
    arguments = shown.removeprefix(type_.rpartition(".")[2])
    if text := _PLAIN_TEXT.fullmatch(arguments):
        message = text[1] or text[2] or ""
    else:
        message = arguments[1:-1] if arguments[:1] + arguments[-1:] == "()" else shown
    return Raised(type_, message, lines=[f"{type_}: {message}"]), begin, end


def _torn_at_the_end(found: Sequence[Traceback], lines: Sequence[str]) -> Traceback | None:
    """Return the torn traceback at the end of the output; None if there is none. Tracebacks of
    ignored exceptions may follow a torn one."""
    end = len(lines)
    for one in reversed(found):
        if any(not _begins_another(line) for line in output_after(lines[one.end : end])):
            return None
        if one.torn is not None:
            return one
        if one.kind != "ignored":
            return None
        end = one.start
    return None
