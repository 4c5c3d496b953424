"""Find the cause in a log if the last exception only reports it. No I/O.

Such an exception says that another process or thread has ended, that a device has failed, or that a
library has reached a limit. The lines that name the cause are earlier in the same log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from distlaunch.core.model.record import replace
from distlaunch.diagnosis.consequence import Standing, standing_of_chain
from distlaunch.diagnosis.exception_text import text_of
from distlaunch.diagnosis.last_lines import PROBLEM, is_logged_below_error, last_lines
from distlaunch.diagnosis.native import find_crash, find_native_message, words_before_crash
from distlaunch.diagnosis.tracebacks import Raised, Traceback

_OF_LAUNCHERS = ("ChildFailedError", "ProcessExitedException", "SignalException")
"""Exceptions of torchrun, of torch.multiprocessing, and of launchers based on these, when a child
process has failed."""
_OF_PROCESSES = ("CalledProcessError", "TimeoutExpired")
_WROTE = "The command wrote:"
_WROTE_TO_STDOUT = "The command wrote to stdout:"
"""First line of the note of ``boot/sitecustomize.py`` on an exception of ``subprocess``: what the
command wrote to a stderr that the script had captured, or else to stdout. The command's lines follow,
each after ``| ``."""
_SAYS_ERROR = re.compile(
    r"(?:\S+: )?(?:fatal|(?:fatal )?error|exception|panic|critical)\b[^:]{0,40}:", re.IGNORECASE
)
"""The line of a command that names its error: ``fatal: repository not found`` of Git, ``error: ``,
``clang: error: ``, ``fatal error: Unable to locate credentials`` of the AWS tools."""
_INNER_FRAME = re.compile(r'\s*File "(?:.*/)?([^"/]+)", line (\d+)(?:, in (.+))?$')
_INNER_EXCEPTION = re.compile(
    r"([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Failure))(?:: ?(.*))?$"
)
_LIMITS = (
    "OpenBLAS blas_thread_init: pthread_create",
    "libgomp: Thread creation failed",
    "OMP: Error #",
)
"""First words of lines about a library that could not start, before Python fails in another way."""
_WITHOUT_CAUSE = (
    "EOFError",
    "BrokenPipeError",
    "ConnectionResetError",
    "BrokenProcessPool",
    "Empty",
    "Full",
    "TimeoutError",
    "BrokenBarrierError",
)
"""Exceptions of a pipe, queue or pool whose process at the other end has ended."""
_SHOWN_NEAR = 3
_SHOWN_CHARS = 300
_NEAR = 60
"""Largest number of lines between a child's output and the exception that reports its end."""
_HAS_ENDED = re.compile(
    # torch's data loader and spawn, joblib, Hugging Face's datasets
    r"is killed by signal: (?!Killed)|terminated with signal (?!SIGKILL)|exited unexpectedly"
    r"|unexpectedly terminated|has abruptly died"
)
"""Messages on the end of a child process that may have crashed."""
_LOADER_ERROR = re.compile(
    # torch 1.0 to 2.13: "ERROR: Unexpected bus error encountered in worker. This might be caused by
    # insufficient shared memory (shm)."
    r"^ERROR: Unexpected [\w ]+ encountered in worker\."
)
_DEVICE_ASSERT = re.compile(
    # torch 1.0 to 2.13: "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex:
    # block: [12,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed."
    r"(?:.*/)?([\w.-]+\.(?:cu|cuh|h|hpp|cpp|hip)):(\d+): (.*?):? ?block: \[[\d,]+\], "
    r"thread: \[[\d,]+\] Assertion [`'](.*?)['`] failed"
)


def is_report_of_a_child(raised: Raised) -> bool:
    """Return whether an exception only reports that a launcher's or a pool's child process has
    failed."""
    return raised.type.rpartition(".")[2] in _OF_LAUNCHERS


def is_report_of_another_end(raised: Raised) -> bool:
    """Return whether an exception only reports the end of the process at the other end of a pipe or
    queue."""
    return raised.type.rpartition(".")[2] in _WITHOUT_CAUSE


def before(main: Traceback, found: Sequence[Traceback]) -> Traceback | None:
    """Return the last traceback before ``main`` in ``found``, if a child process that ``main``
    reports may have printed it."""
    earlier = [one for one in found if one.chain and one.end <= main.start]
    if not earlier or main.start - earlier[-1].end > _NEAR:
        return None
    return earlier[-1] if standing_of_chain(earlier[-1].chain) is Standing.CAUSE else None


def words_of_child(
    raised: Raised, main: Traceback | None, found: Sequence[Traceback], lines: Sequence[str]
) -> tuple[str, ...]:
    """Return the last lines of the process whose failure ``raised`` reports, the cause last.

    ``main`` is the traceback of ``raised``. ``found`` are all tracebacks in ``lines``, the worker's
    output.
    """
    if main is None or raised.type.rpartition(".")[2] not in _OF_PROCESSES:
        return ()
    begin = start_of_note(raised.detail)
    noted = () if begin is None else _noted(raised.detail[begin + 1 :])
    names_problem = any(map(PROBLEM.search, noted))
    if names_problem and begin is not None and raised.detail[begin] == _WROTE:
        return _with_cause_last(noted)[-1:]
    child = before(main, found)
    if child is not None:
        inner = child.chain[-1]
        where = f" ({inner.frame})" if inner.frame is not None else ""
        return (f"{text_of(inner)}{where}",)
    above = last_lines(lines[max(0, main.start - _NEAR) : main.start], 6)
    if any(map(PROBLEM.search, above)):
        return _with_cause_last(above)
    return _with_cause_last(noted)[-1:] if names_problem else (noted or above)[-1:]


def start_of_note(detail: Sequence[str]) -> int | None:
    """Return the index of the first line of the note on a failed command; None without a note."""
    return next((n for n, line in enumerate(detail) if line in (_WROTE, _WROTE_TO_STDOUT)), None)


def _noted(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines that a note of an exception quotes from a command's output."""
    return tuple(line[2:] for line in lines if line.startswith("| "))


def _with_cause_last(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last lines of a command, with the line that names its error last.

    Lines shortly before it that name a problem too are in one line with it: the last one may be
    general.
    """
    if (exception := _exception_in(lines)) is not None:
        return (exception,)
    says = [n for n, line in enumerate(lines) if _SAYS_ERROR.match(line)]
    named = [n for n, line in enumerate(lines) if n in says or _names_a_problem(line)]
    at = (says or named or [len(lines) - 1])[-1]
    shown = [n for n in named if at - _SHOWN_NEAR <= n < at][-2:]
    while shown and sum(len(lines[n]) for n in (*shown, at)) > _SHOWN_CHARS:
        del shown[0]
    cause = "; ".join(lines[n].strip() for n in (*shown, at))
    return (*(line for n, line in enumerate(lines) if n not in (*shown, at)), cause)


def _names_a_problem(line: str) -> bool:
    return PROBLEM.search(line) is not None and not is_logged_below_error(line)


def _exception_in(lines: Sequence[str]) -> str | None:
    """Return the exception of a Python program, with its place, if the lines end with its
    traceback."""
    frames = [n for n, line in enumerate(lines) if _INNER_FRAME.match(line)]
    begin = frames[-1] + 1 if frames else len(lines) - 1
    for at in range(begin, len(lines)):
        match = _INNER_EXCEPTION.match(lines[at])
        if match is None:
            continue
        rest = lines[at + 1 :]
        if any(map(_SAYS_ERROR.match, rest)):
            return None
        text = text_of(Raised(match[1], match[2] or "", lines=lines[at : at + 1], detail=rest))
        if not frames:
            return text
        found = _INNER_FRAME.match(lines[frames[-1]])
        file, number, function = found.groups() if found else ("", "", None)
        return (
            f"{text} ({file}:{number} in {function})" if function else f"{text} ({file}:{number})"
        )
    return None


def crash_of_child(
    chain: Sequence[Raised], lines: Sequence[str]
) -> tuple[str, tuple[str, ...]] | None:
    """Return how a child process has crashed in native code, in one line, and the lines about it.

    Return None if no such crash is reported. ``lines`` are those before the ``chain``, which
    reports the end of the process.
    """
    if not any(
        is_report_of_another_end(raised) or _HAS_ENDED.search(raised.message)
        for raised in (chain[0], chain[-1])
    ):
        return None
    crash, dump = find_native_message(lines), find_crash(lines)
    if crash is None or crash.frame is None:
        crash = find_native_message(lines[-_NEAR:])
    if crash is None:
        return None
    told = f"{crash.text}, in a child process"
    if dump is None:
        return told, crash.lines
    if dump.message not in crash.message:
        place = f" ({crash.frame})" if crash.frame else ""
        told = f"{replace(crash, frame=None).text}: {dump.message}{place}, in a child process"
    elif crash.message == dump.message and (words := words_before_crash(lines)) is not None:
        return f"{words}: {told}", (words, *crash.lines)
    return told, crash.lines


def error_of_loader(chain: Sequence[Raised], lines: Sequence[str]) -> str | None:
    """Return the last line in which a data loader's worker has written that a signal ended it.

    torch's worker writes it in its signal handler. The parent may get no more than a closed
    connection.
    """
    if not any(map(is_report_of_another_end, chain)):
        return None
    return next((line for line in reversed(lines) if _LOADER_ERROR.search(line)), None)


def limit_of_library(lines: Sequence[str]) -> str | None:
    """Return the first line of a library that could not start its threads, if there is one."""
    return next((line for line in lines if line.startswith(_LIMITS)), None)


def device_assertion(lines: Sequence[str]) -> str | None:
    """Return the first device-side assertion, if there is one: its file, kernel and condition."""
    for line in lines:
        if "Assertion" in line and (match := _DEVICE_ASSERT.search(line)) is not None:
            return f"{match[1]}:{match[2]} in {match[3]}: assertion `{match[4]}` failed"
    return None
