"""Collect the evidence of one worker's exit: its error file, its stderr, and its exit code. No I/O.

torch's ``@record`` writes JSON to the file TORCHELASTIC_ERROR_FILE: ``{"message": {"message":
"Type: text", "extraInfo": {"py_callstack": "...", "timestamp": "..."}}}``. Older versions of torch,
and other programs, write a plain string instead of the inner object. The worker writes the file, so
the content may be invalid. An invalid file is treated like a missing one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.diagnosis import tracebacks as tb
from distlaunch.diagnosis.clean_text import is_markers, shorten_middle, to_lines, without_escapes
from distlaunch.diagnosis.consequence import (
    Standing,
    is_own_interrupt,
    standing_of_chain,
    standing_of_text,
)
from distlaunch.diagnosis.exception_text import is_decoration, lines_below, message_of, text_of
from distlaunch.diagnosis.inner_cause import (
    before,
    crash_of_child,
    device_assertion,
    error_of_loader,
    is_report_of_a_child,
    is_report_of_another_end,
    limit_of_library,
    start_of_note,
    words_of_child,
)
from distlaunch.diagnosis.last_lines import (
    PROBLEM,
    Stream,
    choose,
    is_logged_below_error,
    last_lines,
)
from distlaunch.diagnosis.model import RepeatKind
from distlaunch.diagnosis.native import (
    DUMP_BEGINS,
    NativeMessage,
    describe_signal,
    find_native_message,
    signal_name,
)
from distlaunch.diagnosis.stack_parser import main_thread, parse_stacks
from distlaunch.diagnosis.tracebacks import (
    Frame,
    Raised,
    find_tracebacks,
    loader_may_be_gone,
    read_tracebacks,
)
from distlaunch.diagnosis.unwrap import unwrap

_EXCERPT = 20
_LAST_WORDS = 3
_GIVES_UP = re.compile(
    r"giving up|\b(?:exit(?:ing)?|abort(?:ing)?|quit(?:ting)?|terminating|shutting down)\b",
    re.IGNORECASE,
)
_MAINS = ("main", "_main", "run", "cli")
_GOES_ON = re.compile(
    r"retr(?:y|ies)|again|attempt|skip|ignor|continu|recover|\bWARN", re.IGNORECASE
)
"""Words before the traceback of an exception after which a script goes on."""
_STALE = 20
"""If more lines of ordinary output follow a traceback, its exception was handled."""
_FLOOD_S = 60.0
"""A worker may write other output for this long between its traceback and its exit."""
_MESSAGE_CHARS = 600
_LINE_CHARS = 300
_CANNOT_OPEN = re.compile(r".*can't open file '(.+)': \[Errno \d+\] (.+)")
_NO_MODULE = re.compile(
    r"\S*python[\d.]*: (?:Error while finding module specification for '(.+)' \((?:\w+: )?)?"
    r"(.*No module named '?([\w.]+).*?)\)?$"
)
_OF_KIND = {"thread": " (exception in a thread)", "process": " (exception in a child process)"}
_INTERRUPT_WITHIN = 3
"""A message among this many lines before explains a KeyboardInterrupt."""
_INTERRUPTS = re.compile(
    r"watch ?dog|interrupt|stall|stuck|\bhang|\bhung\b|no progress|timed? ?out|deadline|abort"
    r"|giving up|did not change|\bfor (?:more than |over )?\d[\d.]* ?(?:s|sec|seconds|min|minutes)\b",
    re.IGNORECASE,
)
"""Words in the message of a thread that interrupts the main thread."""
_STALLED = "are waiting for remainder of ranks"
"""Horovod 0.16 to 0.28 writes this and the missing ranks. An exception need not follow."""
_ENDS_ITSELF = re.compile(
    r"watch ?dog|interrupting|terminating|killing|aborting|giving up|no progress|\bstall",
    re.IGNORECASE,
)
"""Words in the message of a thread that ends its own process by a signal."""
_HAS_GOT_A_SIGNAL = re.compile(r"SIG[A-Z]{3}|\bsignal|received|caught|cancel", re.IGNORECASE)
_TIMEOUT = re.compile(r"Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$")
_OF_A_DUMP = re.compile(
    r"$|  File |  \.\.\.|  <|(?:Current thread|Thread|Stack) ?.*\(most recent call"
)
_DUMP_LINES = 2000
_READER_GONE = ("EOFError", "ConnectionResetError")
"""Exceptions of a data loader if its worker process dies while sending a tensor."""
_SYNTAX_TYPES = ("SyntaxError", "IndentationError", "TabError")
_IMPORT_TYPES = ("ModuleNotFoundError", "ImportError")
_CPP_PLACE = re.compile(r"^\[/\S+:\d+\] ")
_GLOO_TAIL = re.compile(r"\. This is typically caused by .*")
_OF_A_LIMIT = (None, "KeyboardInterrupt", "ImportError", "MemoryError")
"""Exceptions that follow when a library cannot start its threads. OpenBLAS raises SIGINT itself."""
_LIBRARY_PATH = re.compile(r'File "(?:.*/(?:site|dist)-packages/|.*?/lib/python3[\d.]*/)')
_STOP_CODES = (130, 143, 137, -2, -9, -15)
_OUTERMOST = ("<module>", "_run_module_as_main")
_LIMIT = 262144


class FailureEvidence(Record):
    """The evidence of one worker's exit: the facts for a ``Cause``, and the ``Standing`` of the
    error."""

    end: WorkerExit
    summary: str
    failed_s: float = 0.0
    """When the worker printed its traceback, in seconds since the attempt began; without a
    traceback, when it exited."""
    left_the_script: bool = False
    """Whether the traceback of the main thread begins where the interpreter begins to run the
    script. The script has not caught the exception, or has caught it outside all functions."""
    is_last: bool = False
    """Whether nothing was printed after the traceback of the main thread."""
    caught_in_main: bool = False
    """Whether the function that runs the whole script has caught the exception, and its output does
    not say that it goes on."""
    gives_up: bool = False
    """Whether the lines after the traceback say that the process ends."""
    standing: Standing = Standing.CAUSE
    exception_type: str | None = None
    message: str | None = None
    original: str | None = None
    frame: str | None = None
    frames: tuple[Frame, ...] = ()
    """All frames of the exception, outermost first."""
    excerpt: tuple[str, ...] = ()
    last_words: bool = False
    """Whether the excerpt is the last output of the worker, and not an exception's."""
    main_module: str | None = None
    """The module that ``python -m`` did not find."""
    repeats: RepeatKind | None = None
    loader_may_be_gone: bool = False
    """Whether the failure may result from the death of a data-loader worker, although the output
    does not mention that death."""
    child_crashed: bool = False
    """Whether a child process has crashed in native code, and the failure results from that."""
    text: str = ""
    """The text in which hints are looked up."""
    between: str = ""
    """The exceptions between the original and the outermost one, in which hints are looked up if
    ``text`` has none."""
    stream: Stream = "stderr"
    """The stream to which the worker wrote the excerpt."""

    @property
    def is_uncaught(self) -> bool:
        """Whether the script did not catch the exception, or ends with it, as far as its output
        shows."""
        return (self.is_last and (self.left_the_script or self.caught_in_main)) or self.gives_up

    @property
    def kind(self) -> tuple[object, ...]:
        """A value that is equal for ranks that failed in the same way.

        Messages may contain the rank, so they are compared only if no frame is known.
        """
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


def was_stopped(end: WorkerExit) -> bool:
    """Return whether a worker ended only because the launcher stopped it."""
    return end.told_to_stop and (
        end.returncode in _STOP_CODES
        or b"KeyboardInterrupt" in end.stderr_tail[-200:].rstrip().rsplit(b"\n", 1)[-1]
    )


def printed_s(end: WorkerExit) -> float:
    """Return when a worker printed its last traceback; without a traceback, when it exited."""
    return end.ended_s - (end.traceback_age_s or 0.0)


def read(end: WorkerExit) -> FailureEvidence:
    """Return the evidence in a worker's error file, its stderr and its exit code or signal."""
    lines, found, torn = read_tracebacks(unwrap(to_lines(end.stderr_tail[-65536:])))
    number = _signal_of(end)
    native = (
        find_native_message(lines)
        if number is not None and signal_name(number) != "SIGKILL"
        else None
    )
    chain, kind, trailing = _exception(end, lines, found, torn)
    stdout = unwrap(to_lines(end.stdout_tail.encode("utf-8", "replace")))
    if native is not None and not chain:
        evidence = _of_native_message(end, native, lines, stdout)
    elif chain:
        evidence = _of_chain(end, chain, trailing, standing_of_chain(chain))
        own = is_own_interrupt(chain[-1])
        more = " while it ended with an exception" if number is not None and not own else ""
        evidence = replace(evidence, summary=f"{evidence.summary}{more}{_OF_KIND.get(kind, '')}")
        evidence = _with_inner_cause(evidence, chain, found, lines)
        evidence = _with_own_message(evidence, chain, found, lines, stdout)
    elif torn is not None and (number is None or torn.kind != "ignored"):
        evidence = _of_torn_traceback(end, torn)
    elif number is None and (timeout := _of_own_timeout(end, lines)) is not None:
        evidence = timeout
    elif number is None:
        evidence = _of_stdouts_traceback(end, stdout) or _of_last_lines(end, lines, stdout)
    else:
        evidence = _of_own_signal(end, number, lines, stdout)
    if evidence.original is None and evidence.exception_type in _OF_A_LIMIT:
        evidence = replace(evidence, original=limit_of_library(lines))
    changes: dict[str, object] = {}
    if number is not None and native is None and not chain and evidence.message is None:
        changes["standing"] = _standing_of_signal(number, lines)
    if not evidence.excerpt and number is not None and signal_name(number) != "SIGKILL":
        changes |= {"excerpt": last_lines(lines, 4), "last_words": True}
    if not lines and not chain and end.returncode > 0:
        changes["summary"] = f"{evidence.summary}, and it wrote nothing to stderr"
    changes["failed_s"] = end.ended_s
    if chain and kind == "main":
        gives_up = _gives_up((*chain[-1].detail, *trailing))
        # The last lines of its message may have been written by the script that has survived.
        is_last = not trailing and not chain[-1].detail
        left = _left_the_script(chain[-1])
        changes |= {"left_the_script": left, "is_last": is_last, "gives_up": gives_up}
        in_main = _was_caught_in_main(chain, found, lines)
        changes["caught_in_main"] = in_main
        ends_itself = is_last or gives_up or (end.returncode == 1 and not end.told_to_stop)
        if (left and ends_itself) or (in_main and is_last):
            changes["failed_s"] = printed_s(end)
    if evidence.message is not None:
        changes["message"] = shorten_middle(evidence.message, _MESSAGE_CHARS) or None
    return replace(evidence, **changes)


def _gives_up(lines: Sequence[str]) -> bool:
    """Return whether the last of the few lines after a traceback says that the process ends."""
    written = [line for line in lines if line.strip()]
    return 0 < len(written) <= _LAST_WORDS and _GIVES_UP.search(written[-1]) is not None


def _was_caught_in_main(
    chain: list[tb.Raised], found: Sequence[tb.Traceback], lines: Sequence[str]
) -> bool:
    frames = chain[-1].frames
    start = next((one.start for one in found if one.chain is chain), 0)
    return (
        bool(frames)
        and frames[0].function in _MAINS
        and not any(map(_GOES_ON.search, lines[max(0, start - 1) : start + 1]))
    )


def _left_the_script(raised: Raised) -> bool:
    """Return whether the traceback begins where the interpreter begins to run the script."""
    return bool(raised.frames) and raised.frames[0].function in (None, *_OUTERMOST)


def read_error_file(data: str | None) -> list[Raised]:
    """Return the chain of exceptions in an error file, outermost last.

    Return an empty list if the file cannot be read.
    """
    if not data or len(data) > _LIMIT:
        return []
    import json

    try:
        record = json.loads(data)
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


def _summary(end: WorkerExit) -> str:
    if end.returncode < 0:
        return describe_signal(-end.returncode, oom_kills=end.oom_kills)
    if 128 < end.returncode < 128 + 32:
        return (
            f"exit code {end.returncode} (a shell's way to say {signal_name(end.returncode - 128)})"
        )
    return f"exit code {end.returncode}"


def _signal_of(end: WorkerExit) -> int | None:
    """Return the signal that ended the worker. Return None if the worker exited with a code."""
    return -end.returncode if end.returncode < 0 else None


def _exception(
    end: WorkerExit, lines: list[str], found: Sequence[tb.Traceback], torn: tb.Traceback | None
) -> tuple[list[tb.Raised], tb.Kind, list[str]]:
    """Return the exception that ended the worker: its chain, who printed it, and the lines printed
    after it.

    If there is a ``torn`` traceback of the main thread, all other tracebacks are older and do not
    count.
    """
    fatal = end.returncode < 0
    found = [one for one in found if one.chain and one is not torn]
    recorded = read_error_file(end.error_file)
    mains = (
        [one for one in found if one.kind == "main"] if torn is None or torn.kind != "main" else []
    )
    main = mains[-1] if mains else None
    trailing = tb.output_after(lines[main.end :]) if main else []
    if main and len(trailing) > _STALE and _is_flooded(end, lines[main.end :]):
        trailing = []
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
    if main is not None and is_report_of_a_child(main.chain[-1]):
        child = before(main, found)
        if child is not None:
            return child.chain, "process", []
    if main is not None:
        told = {raised.type for raised in main.chain}
        told |= {name.rpartition(".")[2] for name in told}
        if recorded and recorded[-1].type and recorded[-1].type not in told:
            return recorded, "main", []
        if (
            side
            and (
                standing_of_chain(main.chain) >= Standing.WEAK
                or is_report_of_another_end(main.chain[-1])
            )
            and standing_of_chain(side.chain) is Standing.CAUSE
        ):
            return side.chain, side.kind, []
        return main.chain, "main", trailing
    if side and not fatal:
        return side.chain, side.kind, []
    ignored = next((one for one in reversed(found) if one.kind == "ignored"), None)
    if ignored and torn is None and not fatal and not last_lines(lines[ignored.end :], 1):
        return ignored.chain, "ignored", []
    return [], "main", []


def _is_flooded(end: WorkerExit, lines: list[str]) -> bool:
    """Return whether a traceback explains the exit although many ``lines`` follow it.

    They were written within seconds, and neither they nor stdout name another problem.
    """
    if end.returncode <= 0 or end.traceback_age_s is None or end.traceback_age_s > _FLOOD_S:
        return False
    stdout = to_lines(end.stdout_tail.encode("utf-8", "replace"))
    return choose(lines, stdout, 6).message is None


def _is_the_loaders(traceback: tb.Traceback) -> bool:
    """Return whether torch's signal handler reports here that a data-loader worker was killed.

    The handler may run in any function.
    """
    return traceback.kind == "ignored" and traceback.chain[-1].message.startswith(
        "DataLoader worker (pid"
    )


def _with_inner_cause(
    evidence: FailureEvidence,
    chain: list[tb.Raised],
    found: Sequence[tb.Traceback],
    lines: list[str],
) -> FailureEvidence:
    """Return the evidence with what a child process or a GPU has printed about the failure."""
    main = next((one for one in found if one.chain is chain), None)
    words: tuple[str, ...] = ()
    for raised in reversed(chain):
        words = words or words_of_child(raised, main, found, lines)
    if words:
        text = "\n".join((evidence.text, *words))
        excerpt = (*words[:-1], *evidence.excerpt)[-_EXCERPT:]
        evidence = replace(evidence, original=words[-1], excerpt=excerpt, text=text)
    if main is not None and (crash := crash_of_child(chain, lines[: main.start])) is not None:
        text = "\n".join((evidence.text, *crash[1]))
        evidence = replace(evidence, original=crash[0], child_crashed=True, text=text)
    if (told := error_of_loader(chain, lines)) is not None:
        text = f"{evidence.text}\n{told}"
        evidence = replace(evidence, original=told, standing=Standing.CAUSE, text=text)
    if "device-side assert" in evidence.text and (asserted := device_assertion(lines)):
        evidence = replace(evidence, original=asserted)
    return evidence


def _with_own_message(
    evidence: FailureEvidence,
    chain: list[tb.Raised],
    found: Sequence[tb.Traceback],
    lines: list[str],
    stdout: list[str],
) -> FailureEvidence:
    """Return the evidence with the message that a thread of the worker wrote before it interrupted
    the main thread.

    ``_thread.interrupt_main()`` looks like a SIGINT from outside.
    """
    raised = chain[-1]
    if raised.type != "KeyboardInterrupt" or evidence.end.told_to_stop or is_own_interrupt(raised):
        return evidence
    start = next((one.start for one in found if one.chain is chain), 0)
    streams: tuple[tuple[Stream, Sequence[str]], ...] = (
        ("stderr", lines[:start]),
        ("stdout", stdout),
    )
    for stream, written in streams:
        for line in reversed(last_lines(written, _INTERRUPT_WITHIN)):
            if _INTERRUPTS.search(line):
                return replace(
                    evidence,
                    summary="ended by a KeyboardInterrupt that its own message explains",
                    standing=Standing.CAUSE,
                    exception_type=None,
                    message=line,
                    text=f"{line}\n{evidence.text}",
                    stream=stream if stream == "stdout" else evidence.stream,
                )
    return evidence


def _of_own_timeout(end: WorkerExit, lines: list[str]) -> FailureEvidence | None:
    """Return the evidence of ``faulthandler.dump_traceback_later(exit=True)``. Return None if this
    did not end the worker."""
    begin = max(0, len(lines) - _DUMP_LINES)
    at = next((n for n in range(len(lines) - 1, begin - 1, -1) if _TIMEOUT.match(lines[n])), None)
    if at is None or any(not _OF_A_DUMP.match(line) for line in lines[at + 1 :]):
        return None
    main = main_thread(parse_stacks("\n".join((*lines[at + 1 :], ""))))
    frames = main.frames if main is not None else ()
    frame = next((one for one in frames if one.of_user), frames[0] if frames else None)
    return FailureEvidence(
        end=end,
        summary=f"{_summary(end)}, by faulthandler.dump_traceback_later",
        message=lines[at],
        frame=str(frame) if frame else None,
        excerpt=tuple(str(one) for one in frames[:6]),
        text=lines[at],
    )


def _of_own_signal(
    end: WorkerExit, number: int, lines: list[str], stdout: list[str]
) -> FailureEvidence:
    """Return the evidence of a signal that ended the worker. A thread of the worker may have sent
    it, and have written why."""
    summary = _summary(end)
    if signal_name(number) in ("SIGTERM", "SIGINT", "SIGHUP") and not end.told_to_stop:
        for written in (lines, stdout):
            for line in reversed(last_lines(written, _INTERRUPT_WITHIN)):
                if _ENDS_ITSELF.search(line) and not _HAS_GOT_A_SIGNAL.search(line):
                    return FailureEvidence(
                        end=end,
                        summary=f"killed by {signal_name(number)}, which its own message explains",
                        message=line,
                        text=line,
                    )
    return FailureEvidence(end=end, summary=summary)


def _of_stdouts_traceback(end: WorkerExit, stdout: list[str]) -> FailureEvidence | None:
    """Return the evidence of a traceback at the end of stdout. Return None if there is no such
    traceback."""
    lines, found, _ = read_tracebacks(stdout)
    whole = [one for one in found if one.chain and one.kind != "ignored"]
    if not whole:
        return None
    trailing = tb.output_after(lines[whole[-1].end :])
    if len(trailing) > _STALE:
        return None
    chain = whole[-1].chain
    evidence = _of_chain(end, chain, trailing, standing_of_chain(chain))
    return replace(evidence, stream="stdout")


def _of_native_message(
    end: WorkerExit, native: NativeMessage, lines: list[str], stdout: list[str]
) -> FailureEvidence:
    summary, text = _summary(end), "\n".join(native.lines)
    if native.at_exit and native.lines[0] in lines:
        words = choose(lines[: lines.index(native.lines[0])], stdout, 6)
        if words.message is not None:
            return FailureEvidence(
                end=end,
                summary=f"{summary} at its exit",
                standing=standing_of_text(words.message),
                message=words.message,
                excerpt=words.lines,
                last_words=True,
                stream=words.stream,
                text="\n".join((words.message, *words.lines)),
            )
    standing = standing_of_text(text)
    bare = native.type is None and (native.frame is None or native.message == "Aborted")
    if standing is Standing.CAUSE and bare and end.returncode == -signal.SIGABRT:
        dump = next((n for n, line in enumerate(lines) if line.startswith(DUMP_BEGINS)), None)
        standing = standing_of_text("\n".join(lines[:dump][-60:]))
    return FailureEvidence(
        end=end,
        summary=summary,
        standing=standing,
        exception_type=native.type,
        message=native.message if native.message.lower() not in summary else None,
        frame=str(native.frame) if native.frame else None,
        excerpt=tuple(shorten_middle(line, _LINE_CHARS) for line in native.lines[:_EXCERPT]),
        text=text,
    )


def _of_chain(
    end: WorkerExit, chain: list[tb.Raised], trailing: list[str], standing: Standing
) -> FailureEvidence:
    """Return the evidence of a chain of exceptions, with the outermost and the original exception.

    If the outermost exception is a consequence that was raised in a cleanup, an earlier exception
    that is a cause replaces it.
    """
    summary, outermost = _summary(end), chain[-1]
    if standing is Standing.CAUSE:
        outermost = next(
            (raised for raised in reversed(chain) if standing_of_chain([raised]) is Standing.CAUSE),
            outermost,
        )
    original = chain[0].inner or chain[0]
    head = outermost
    if is_own_interrupt(outermost) and end.returncode == -signal.SIGINT:
        summary = "ended by a KeyboardInterrupt that the script raised itself"
    if outermost.inner is not None and "sub-exception" in outermost.message:
        original = outermost.inner
    elif outermost.inner is not None:
        head = outermost.inner
        where = (
            "data-loader worker" if "DataLoader worker" in outermost.message else "child process"
        )
        if not outermost.type.endswith("CheckpointException"):
            summary += f" (raised in a {where})"
    if standing >= Standing.TIMED_OUT and head is chain[0]:
        short = head.with_message(_GLOO_TAIL.sub("", _CPP_PLACE.sub("", head.message)))
        original = short if original is head else original
        outermost = short if outermost is head else outermost
        head = short
    message = message_of(head)
    if head.message.endswith(")") and "sub-exception" in head.message:
        message = head.message[: head.message.rfind(" (")]
    frame, shown_original = head.frame, None
    if original.text != head.text:
        shown_original = _shown_original(original)
    elif original.frame is not None:
        frame = original.frame
    if head is outermost.inner and outermost.frame and not (frame and frame.of_user):
        frame = outermost.frame
    loader_gone = head.type in _READER_GONE and loader_may_be_gone(head)
    types = {name.rpartition(".")[2] for name in (head.type, original.type)}
    repeats: RepeatKind | None = None
    if types.intersection(_SYNTAX_TYPES):
        repeats = "syntax error"
    elif types.intersection(_IMPORT_TYPES):
        repeats = "import error"
    return FailureEvidence(
        end=end,
        summary=summary,
        standing=Standing.CAUSE if loader_gone else standing,
        exception_type=head.type or None,
        message=message,
        original=shown_original,
        frame=str(frame) if frame else None,
        frames=tuple(head.frames),
        excerpt=_excerpt(head, trailing),
        repeats=repeats,
        loader_may_be_gone=loader_gone,
        text="\n".join(
            f"{raised.text}\n" + "\n".join(raised.detail[:12])
            for raised in (head, original, outermost)
        ),
        between="\n".join((raised.inner or raised).text for raised in chain[1:-1]),
    )


def _shown_original(original: tb.Raised) -> str:
    where = f" ({original.frame})" if original.frame is not None else ""
    return shorten_middle(text_of(original), _MESSAGE_CHARS) + where


def _excerpt(raised: tb.Raised, trailing: Sequence[str]) -> tuple[str, ...]:
    """Return the lines for the user's frames and the innermost frame, then the lines of the
    message."""
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
    detail = lines_below(raised)
    native = (
        n
        for n, line in enumerate(detail)
        if line.startswith(("Exception raised from ", "C++ CapturedTraceback"))
    )
    note = start_of_note(detail)
    if note is not None and len(detail) > 6:
        detail = [detail[note], *detail[-5:]]
    shown.extend(detail[: min(next(native, 6), 6)])
    shown.extend([line for line in trailing if not is_decoration(line)][-3:])
    return tuple(
        shorten_middle(_LIBRARY_PATH.sub('File "', line), _LINE_CHARS) for line in shown[-_EXCERPT:]
    )


def _of_torn_traceback(end: WorkerExit, torn: tb.Traceback) -> FailureEvidence:
    """Return the evidence of a traceback whose end is missing. Its frames are known.

    The type of the exception is known only if the interpreter's dump has it. An exception raised
    earlier in the same chain is used as the original one.
    """
    raised = torn.torn or tb.Raised()
    cut_off = f"{_OF_KIND.get(torn.kind, '')}; its traceback was cut off"
    loader_gone = loader_may_be_gone(raised)
    if raised.type:
        chain = [*torn.chain, raised]
        evidence = _of_chain(end, chain, [], standing_of_chain(chain))
        shown = _summary(end)
        changes: dict[str, object] = {
            "summary": f"{shown}{cut_off}{evidence.summary.removeprefix(shown)}"
        }
        if end.returncode > 0 and loader_gone:
            changes |= {"loader_may_be_gone": True, "standing": Standing.CAUSE}
        return replace(evidence, **changes)
    frame, original, text = raised.frame, None, ""
    if torn.chain:
        first = torn.chain[0].inner or torn.chain[0]
        original = _shown_original(first)
        text = f"{first.text}\n" + "\n".join(first.detail[:12])
        frame = frame or first.frame
    standing = Standing.CAUSE
    if end.returncode > 0 and not loader_gone:
        standing = standing_of_chain(torn.chain) if torn.chain else Standing.WEAK
    return FailureEvidence(
        end=end,
        summary=f"{_summary(end)}{cut_off}",
        standing=standing,
        original=original,
        frame=str(frame) if frame else None,
        excerpt=tuple(
            shorten_middle(_LIBRARY_PATH.sub('File "', line), _LINE_CHARS)
            for line in raised.lines[-_EXCERPT:]
        ),
        loader_may_be_gone=loader_gone,
        text=text,
    )


def _of_last_lines(end: WorkerExit, lines: list[str], stdout: list[str]) -> FailureEvidence:
    """Return the evidence of an exit without an exception.

    The evidence is a usage error, a missing script, the text of sys.exit, a logged error, or the
    last lines.
    """
    words = last_lines(lines, 6)
    evidence = FailureEvidence(
        end=end, summary=_summary(end), last_words=True, text="\n".join(words)
    )
    if words and (found := _of_interpreter(evidence, words, lines)):
        return found
    chosen = choose(lines, stdout, 6)
    if not chosen.lines:
        return evidence
    text = "\n".join((chosen.message or "", *chosen.lines))
    evidence = replace(evidence, text=text, stream=chosen.stream)
    last = chosen.lines[-1]
    stalled = next((line for line in reversed(chosen.lines) if _STALLED in line), None)
    if stalled is not None:
        return replace(evidence, message=stalled, standing=Standing.TIMED_OUT, excerpt=chosen.lines)
    if end.returncode in (1, 126, 127):
        # The text of sys.exit("text") is the last line. The lines before it are shown if they name
        # a problem too.
        is_exit_text = chosen.stream == "stderr" and not is_logged_below_error(last)
        message = last if is_exit_text else chosen.message or last
        shown = chosen.stream == "stdout" or any(
            PROBLEM.search(line) for line in chosen.lines if line != message
        )
        return replace(
            evidence,
            message=message,
            standing=standing_of_text(message),
            excerpt=chosen.lines if shown else (),
        )
    return replace(
        evidence,
        message=chosen.message,
        standing=standing_of_text(chosen.message or last),
        excerpt=chosen.lines,
    )


def _of_interpreter(
    evidence: FailureEvidence, words: tuple[str, ...], lines: list[str]
) -> FailureEvidence | None:
    """Return the evidence if the interpreter or an option parser has refused the command line."""
    last = words[-1]
    if is_markers(last):
        return replace(evidence, standing=standing_of_text(evidence.text), excerpt=words)
    if match := _CANNOT_OPEN.match(last):
        message = f"cannot open {match[1]}: {match[2]}"
        return replace(evidence, message=message, repeats="missing script")
    if match := _NO_MODULE.match(last):
        return replace(
            evidence,
            exception_type="ModuleNotFoundError",
            message=match[2],
            repeats="import error",
            main_module=match[1] or match[3].removesuffix(".__main__"),
        )
    if (usage := _usage_error(lines)) and evidence.end.returncode in (1, 2):
        return replace(
            evidence,
            message=usage,
            repeats="usage error",
            excerpt=words,
            summary=f"{evidence.summary} (usage error of the script)",
        )
    return None


def _usage_error(lines: Sequence[str]) -> str | None:
    """Return the error of argparse, click or absl about the command line. Return None if there is
    no such error."""
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


def _standing_of_signal(number: int, lines: Sequence[str]) -> Standing:
    """Return how strong a death by a signal is as evidence of the cause. For SIGABRT the last lines
    decide."""
    if signal_name(number) in ("SIGTERM", "SIGINT", "SIGHUP", "SIGPIPE"):
        return Standing.WEAK
    return (
        standing_of_text("\n".join(lines[-60:]))
        if signal_name(number) == "SIGABRT"
        else Standing.CAUSE
    )
