"""Everything that one worker's end tells, read once.

Read the JSON that torch's ``@record`` leaves in TORCHELASTIC_ERROR_FILE.

``{"message": {"message": "Type: text", "extraInfo": {"py_callstack": "...", "timestamp":
"..."}}}``; older torch and other writers put a plain string there. A worker writes it, so anything
may be in it: a file that cannot be read is as good as none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from distlaunch.diagnosis import tracebacks as tb
from distlaunch.diagnosis.clean_text import is_markers, is_noise, shorten, to_lines, without_escapes
from distlaunch.diagnosis.consequence import Standing, standing_of_chain, standing_of_text
from distlaunch.diagnosis.model import RepeatKind, WorkerEnd
from distlaunch.diagnosis.native import NativeEnd, describe_signal, find_native_end, signal_name
from distlaunch.diagnosis.tracebacks import (
    Raised,
    find_tracebacks,
    loader_may_be_gone,
    read_tracebacks,
)

_EXCERPT = 20
_STALE = 20
"""A traceback with more lines of ordinary output after it than this was handled, and is history."""
_MESSAGE_CHARS = 400
_CANNOT_OPEN = re.compile(r".*can't open file '(.+)': \[Errno \d+\] (.+)")
_NO_MODULE = re.compile(
    r"\S*python[\d.]*: (?:Error while finding module specification for '(.+)' \((?:\w+: )?)?"
    r"(.*No module named '?([\w.]+).*?)\)?$"
)
_OF_KIND = {"thread": " (exception in a thread)", "process": " (exception in a child process)"}
_READER_GONE = ("EOFError", "ConnectionResetError")
"""What a data loader meets where a worker dies while it hands over a tensor."""
_SYNTAX_TYPES = ("SyntaxError", "IndentationError", "TabError")
_IMPORT_TYPES = ("ModuleNotFoundError", "ImportError")
_CPP_PLACE = re.compile(r"^\[/\S+:\d+\] ")
_GLOO_TAIL = re.compile(r"\. This is typically caused by .*")
_LIBRARY_PATH = re.compile(r'File "(?:.*/(?:site|dist)-packages/|.*?/lib/python3[\d.]*/)')
_TROUBLE = re.compile(
    r"error|fail|fatal|cannot|can't|unable|denied|not found|no such", re.IGNORECASE
)
_STOP_CODES = (130, 143, 137, -2, -9, -15)


class Evidence:
    """What one end tells: the facts of a ``Cause``, with how much they weigh; hints are looked up
    in ``text``."""

    def __init__(self, end: WorkerEnd) -> None:
        self.end = end
        self.standing = Standing.CAUSE
        self.summary = _summary(end)
        self.exception_type: str | None = None
        self.message: str | None = None
        self.original: str | None = None
        self.frame: str | None = None
        self.excerpt: tuple[str, ...] = ()
        self.last_words = False
        """Whether the excerpt is only what it wrote last, and no exception's own lines."""
        self.main_module: str | None = None
        """The module that python -m did not find."""
        self.repeats: RepeatKind | None = None
        self.loader_may_be_gone = False
        """It failed where the death of a data-loader worker shows, and what it wrote does not say
        so."""
        self.text = ""

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for ranks that failed in the same way. Messages may name the rank: they count only
        without a frame."""
        original = self.original.partition(":")[0] if self.original else None
        words = None if self.frame else self.message
        return (
            self.standing,
            self.end.returncode,
            self.exception_type,
            self.frame,
            original,
            words,
        )


def was_stopped(end: WorkerEnd) -> bool:
    """Tell whether a worker only died of our order to stop."""
    return end.told_to_stop and (
        end.returncode in _STOP_CODES
        or b"KeyboardInterrupt" in end.stderr_tail[-200:].rstrip().rsplit(b"\n", 1)[-1]
    )


def read(end: WorkerEnd) -> Evidence:
    """Read one worker's end: its error file, its stderr, its exit code or signal."""
    lines, found, torn = read_tracebacks(to_lines(end.stderr_tail[-65536:]))
    number = _signal_of(end)
    evidence = Evidence(end)
    native = (
        find_native_end(lines) if number is not None and signal_name(number) != "SIGKILL" else None
    )
    chain, kind, trailing = _exception(end, lines, found, torn)
    if native is not None and not chain:
        _take_native(evidence, native, lines)
    elif chain:
        _take_chain(evidence, chain, trailing)
        if number is not None:
            evidence.summary += " while it ended with an exception"
        evidence.summary += _OF_KIND.get(kind, "")
    elif torn is not None and (number is None or torn.kind != "ignored"):
        _take_torn(evidence, torn)
    elif number is None:
        _take_words(evidence, lines)
    if number is not None and native is None and not chain:
        evidence.standing = _standing_of_signal(number, lines)
    if not evidence.excerpt and number is not None and signal_name(number) != "SIGKILL":
        evidence.excerpt, evidence.last_words = _last_words(lines, 4), True
    if not lines and not chain and end.returncode > 0:
        evidence.summary += ", and it wrote nothing to stderr"
    if evidence.message is not None:
        evidence.message = shorten(evidence.message, _MESSAGE_CHARS) or None
    return evidence


def _signal_of(end: WorkerEnd) -> int | None:
    """Return the signal that ended the worker itself."""
    return -end.returncode if end.returncode < 0 else None


def _summary(end: WorkerEnd) -> str:
    if end.returncode < 0:
        return describe_signal(-end.returncode, oom_kills=end.oom_kills)
    if 128 < end.returncode < 128 + 32:
        return (
            f"exit code {end.returncode} (a shell's way to say {signal_name(end.returncode - 128)})"
        )
    return f"exit code {end.returncode}"


def _standing_of_signal(number: int, lines: Sequence[str]) -> Standing:
    if signal_name(number) in ("SIGTERM", "SIGINT", "SIGHUP", "SIGPIPE"):
        return Standing.WEAK
    return (
        standing_of_text("\n".join(lines[-60:]))
        if signal_name(number) == "SIGABRT"
        else Standing.CAUSE
    )


def _exception(
    end: WorkerEnd, lines: list[str], found: Sequence[tb.Traceback], torn: tb.Traceback | None
) -> tuple[list[tb.Raised], tb.Kind, list[str]]:
    """Choose the exception that ended the worker: its chain, who printed it, and what was printed
    after it.

    A ``torn`` traceback of the main thread makes all others of it history.
    """
    fatal = end.returncode < 0
    found = [one for one in found if one.chain and one is not torn]
    recorded = read_error_file(end.error_file)
    mains = (
        [one for one in found if one.kind == "main"] if torn is None or torn.kind != "main" else []
    )
    main = mains[-1] if mains else None
    trailing = tb.said_after(lines[main.end :]) if main else []
    if main and (len(trailing) > _STALE or (fatal and (trailing or end.returncode in (-9, -15)))):
        main = None
    side = next(
        (
            one
            for one in reversed(found)
            if one.kind in ("thread", "process") or _is_the_loaders(one)
        ),
        None,
    )
    if main is None and recorded:
        return recorded, "main", []
    if main is not None:
        told = {raised.type for raised in main.chain}
        told |= {name.rpartition(".")[2] for name in told}
        if recorded and recorded[-1].type and recorded[-1].type not in told:
            return recorded, "main", []
        if (
            side
            and standing_of_chain(main.chain) >= Standing.WEAK
            and standing_of_chain(side.chain) is Standing.CAUSE
        ):
            return side.chain, side.kind, []
        return main.chain, "main", trailing
    if side and not fatal:
        return side.chain, side.kind, []
    ignored = next((one for one in reversed(found) if one.kind == "ignored"), None)
    if ignored and torn is None and not fatal and not _last_words(lines[ignored.end :], 1):
        return ignored.chain, "ignored", []
    return [], "main", []


def _is_the_loaders(traceback: tb.Traceback) -> bool:
    """Tell whether torch's handler says here, wherever it was called, that a data-loader worker was
    killed."""
    return traceback.kind == "ignored" and traceback.chain[-1].message.startswith(
        "DataLoader worker (pid"
    )


def _take_chain(evidence: Evidence, chain: list[tb.Raised], trailing: list[str]) -> None:
    """Name the outermost and the original exception; a consequence raised in a cleanup gives way to
    the original."""
    evidence.standing = standing_of_chain(chain)
    outermost = chain[-1]
    if evidence.standing is Standing.CAUSE:
        outermost = next(
            (raised for raised in reversed(chain) if standing_of_chain([raised]) is Standing.CAUSE),
            outermost,
        )
    original = chain[0].inner or chain[0]
    head = outermost
    if outermost.inner is not None and "sub-exception" in outermost.message:
        original = outermost.inner
    elif outermost.inner is not None:
        head = outermost.inner
        where = (
            "data-loader worker" if "DataLoader worker" in outermost.message else "child process"
        )
        evidence.summary += f" (raised in a {where})"
    evidence.exception_type = head.type or None
    if evidence.standing >= Standing.TIMED_OUT and head is chain[0]:
        head.message = _GLOO_TAIL.sub("", _CPP_PLACE.sub("", head.message))
    further = (line.strip() for line in head.detail if line.strip() and not is_markers(line))
    evidence.message = head.message or next(further, None)
    if head.message.endswith(")") and "sub-exception" in head.message:
        evidence.message = head.message[: head.message.rfind(" (")]
    frame = head.frame
    if original.text != head.text:
        evidence.original = shorten(original.text, _MESSAGE_CHARS)
        if original.frame is not None:
            evidence.original += f" ({original.frame})"
    elif original.frame is not None:
        frame = original.frame
    evidence.frame = str(frame) if frame else None
    if head.type in _READER_GONE and loader_may_be_gone(head):
        evidence.loader_may_be_gone, evidence.standing = True, Standing.CAUSE
    evidence.excerpt = _excerpt(head, trailing)
    evidence.text = "\n".join(
        f"{raised.text}\n" + "\n".join(raised.detail[:12]) for raised in (head, original, outermost)
    )
    types = {name.rpartition(".")[2] for name in (head.type, original.type)}
    if types.intersection(_SYNTAX_TYPES):
        evidence.repeats = "syntax error"
    elif types.intersection(_IMPORT_TYPES):
        evidence.repeats = "import error"


def _take_torn(evidence: Evidence, torn: tb.Traceback) -> None:
    """Say that a traceback has no end, with the frames it has; what ended the worker is known only
    from a dump.

    An exception that was raised before it in the same chain is shown as the original.
    """
    raised = torn.torn or tb.Raised()
    evidence.summary += f"{_OF_KIND.get(torn.kind, '')}; its traceback was cut off"
    if raised.type:
        _take_chain(evidence, [*torn.chain, raised], [])
        if evidence.end.returncode > 0 and loader_may_be_gone(raised):
            evidence.loader_may_be_gone, evidence.standing = True, Standing.CAUSE
        return
    frame = raised.frame
    if torn.chain:
        original = torn.chain[0].inner or torn.chain[0]
        evidence.original = shorten(original.text, _MESSAGE_CHARS) + (
            f" ({original.frame})" if original.frame else ""
        )
        evidence.text = f"{original.text}\n" + "\n".join(original.detail[:12])
        frame = frame or original.frame
    evidence.frame = str(frame) if frame else None
    evidence.excerpt = tuple(
        shorten(_LIBRARY_PATH.sub('File "', line), 200) for line in raised.lines[-_EXCERPT:]
    )
    evidence.loader_may_be_gone = loader_may_be_gone(raised)
    if evidence.end.returncode > 0 and not evidence.loader_may_be_gone:
        evidence.standing = standing_of_chain(torn.chain) if torn.chain else Standing.WEAK


def _excerpt(raised: tb.Raised, trailing: Sequence[str]) -> tuple[str, ...]:
    """Show the user's frames and the innermost one, then the message's own lines."""
    blocks: list[list[str]] = []
    for line in raised.lines:
        if line.lstrip().startswith('File "') or not line.startswith("  ") or not blocks:
            blocks.append([])
        blocks[-1].append(line)
    innermost = max(
        (n for n, block in enumerate(blocks) if block[0].lstrip().startswith('File "')), default=-1
    )
    shown: list[str] = []
    for number, block in enumerate(blocks):
        library = block[0].lstrip().startswith('File "') and any(
            part in block[0] for part in tb.LIBRARY_PARTS
        )
        if not library or number == innermost:
            shown.extend(block)
    detail = [line for line in raised.detail if line.strip() and line.strip() != '"""']
    native = (
        n
        for n, line in enumerate(detail)
        if line.startswith(("Exception raised from ", "C++ CapturedTraceback"))
    )
    shown.extend(detail[: min(next(native, 6), 6)])
    shown.extend(trailing[-3:])
    return tuple(shorten(_LIBRARY_PATH.sub('File "', line), 200) for line in shown[-_EXCERPT:])


def _take_native(evidence: Evidence, native: NativeEnd, lines: list[str]) -> None:
    evidence.exception_type = native.type
    evidence.message = native.message if native.message.lower() not in evidence.summary else None
    evidence.frame = str(native.frame) if native.frame else None
    evidence.excerpt = tuple(shorten(line, 200) for line in native.lines[:_EXCERPT])
    evidence.text = "\n".join(native.lines)
    evidence.standing = standing_of_text(evidence.text)
    if (
        evidence.standing is Standing.CAUSE
        and native.type is None
        and native.frame is None
        and evidence.end.returncode == -6
    ):
        evidence.standing = standing_of_text("\n".join(lines[-60:]))


def _last_words(lines: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the last ``count`` lines that are no noise."""
    words: list[str] = []
    for line in reversed(lines[-200:]):
        if not is_noise(line):
            words.append(shorten(line, 200))
            if len(words) == count:
                break
    return tuple(reversed(words))


def _take_words(evidence: Evidence, lines: list[str]) -> None:
    """Read an end without an exception: a usage error, a missing script, the text of sys.exit, last
    words."""
    code = evidence.end.returncode
    words = _last_words(lines, 6)
    evidence.text = "\n".join(words)
    evidence.last_words = True
    if not words:
        return
    if is_markers(words[-1]):
        evidence.standing = standing_of_text(evidence.text)
        evidence.excerpt = words
    elif match := _CANNOT_OPEN.match(words[-1]):
        evidence.message, evidence.repeats = f"cannot open {match[1]}: {match[2]}", "missing script"
    elif match := _NO_MODULE.match(words[-1]):
        evidence.exception_type, evidence.message, evidence.repeats = (
            "ModuleNotFoundError",
            match[2],
            "import error",
        )
        evidence.main_module = match[1] or match[3].removesuffix(".__main__")
    elif (usage := _usage_error(lines)) and code in (1, 2):
        evidence.message, evidence.repeats, evidence.excerpt = usage, "usage error", words
        evidence.summary += " (usage error of the script)"
    elif code == 1 or code in (126, 127):
        evidence.message = words[-1]
        evidence.standing = standing_of_text(words[-1])
        # What sys.exit("text") wrote is the message; what stood before it is shown where it tells
        # of trouble too.
        evidence.excerpt = words if any(_TROUBLE.search(line) for line in words[:-1]) else ()
    else:
        evidence.standing = standing_of_text(words[-1])
        evidence.excerpt = words


def _usage_error(lines: Sequence[str]) -> str | None:
    """Find what argparse, click or absl had against the command line."""
    usage = False
    for line in lines[-80:]:
        low = line.lower().lstrip()
        if low.startswith("usage:"):
            usage = True
        elif low.startswith("fatal flags parsing error:"):
            return line.partition(":")[2].strip()
        elif usage and (": error: " in low or low.startswith("error: ")):
            return line[low.find("error: ") + len(line) - len(low) + 7 :].strip()
    return None


_LIMIT = 262144


def read_error_file(data: bytes | None) -> list[Raised]:
    """Return the chain of exceptions that the file tells of, the outermost last; nothing if it
    cannot be read."""
    if not data or len(data) > _LIMIT:
        return []
    import json

    try:
        record = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return []
    message = record.get("message") if isinstance(record, dict) else None
    stack: object = None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = message.get("message")
    if isinstance(stack, str):
        found = [
            one for one in find_tracebacks(to_lines(stack.encode("utf-8", "replace"))) if one.chain
        ]
        if found:
            return found[-1].chain
    if not isinstance(message, str) or not message.strip():
        return []
    first, *rest = (without_escapes(line) for line in message.strip().split("\n"))
    type_, colon, text = first.partition(": ")
    typed = colon and type_.replace(".", "").isidentifier()
    raised = Raised(type_, text, lines=[first]) if typed else Raised(message=first, lines=[first])
    raised.detail.extend(rest)
    return [raised]
