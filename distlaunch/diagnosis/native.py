"""Read the last messages of native code (C++, glibc, faulthandler), and describe signals."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from distlaunch.core.model.record import Record, replace
from distlaunch.diagnosis.last_lines import PROBLEM, is_logged_below_error, last_lines
from distlaunch.diagnosis.tracebacks import Frame

_MEANING = {
    "SIGHUP": "terminal or session gone",
    "SIGINT": "interrupt",
    "SIGQUIT": "quit",
    "SIGILL": "illegal instruction",
    "SIGTRAP": "trace trap",
    "SIGABRT": "abort",
    "SIGBUS": "bus error",
    "SIGFPE": "arithmetic error",
    "SIGSEGV": "segmentation fault",
    "SIGPIPE": "wrote to a closed pipe",
    "SIGALRM": "alarm clock",
    "SIGTERM": "terminate",
    "SIGXCPU": "CPU time limit reached",
    "SIGXFSZ": "file size limit reached",
    "SIGSYS": "forbidden system call",
}
_FATAL = (
    "double free or corruption",
    "free(): ",
    "malloc(): ",
    "malloc_consolidate(): ",
    "realloc(): ",
    "munmap_chunk(): ",
    "corrupted size vs. prev_size",
    "*** stack smashing detected ***",
    "*** buffer overflow detected ***",
    "thread '",
    "memory allocation of ",
    "pure virtual method called",
    "libc++abi: ",
)
_TERMINATE = re.compile(
    r"terminate called (?:after throwing an instance of '(.+)'|without an active exception)"
)
_ASSERT = re.compile(r"(?:.+: )?(\S+):(\d+): .+: Assertion [`'](.+)' failed\.?")
_CHECK = re.compile(r"F(?:\d{4} \d\d:|\d{8} ).*\] (.+)")
_WORDS_WITHIN = 3
_C_STACK = "Current thread's C stack trace (most recent call first):"
_C_FRAME = re.compile(
    # CPython 3.14: '  Binary file "/v/lib/libtorch_cpu.so", at _ZN2at6nativeE+0x42 [0x795fb73eb520]'
    r'  Binary file "(?:.*/)?([^/"]+)", at (?:([^\s+]\S*?))\+0x[0-9a-f]+ \['
)
_OF_THE_DUMP = ("_Py_Dump", "faulthandler_", "__restore_rt", "killpg", "gsignal", "raise", "abort")
"""C functions that write the dump or raise the signal."""
DUMP_BEGINS = "Fatal Python error: "
"""First words of faulthandler's dump."""
_DUMP = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class NativeMessage(Record):
    """The last message that native code printed before it ended the process."""

    type: str | None
    message: str
    frame: Frame | None = None
    lines: tuple[str, ...] = ()
    at_exit: bool = False
    """Whether the runtime ended the process while it was exiting, so that the message names no
    cause."""

    @property
    def text(self) -> str:
        """The message and the frame, in one line."""
        type_ = f"{self.type}: " if self.type else ""
        return f"{type_}{self.message}" + (f" ({self.frame})" if self.frame else "")


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGSEGV``, or ``signal 35`` for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_signal(number: int, *, oom_kills: int) -> str:
    """Return one line on what killed a process. ``oom_kills`` is the kernel's number of
    out-of-memory kills."""
    name = signal_name(number)
    if name == "SIGKILL":
        if oom_kills:
            return "killed by SIGKILL: killed by the kernel, out of host memory"
        return "killed by SIGKILL (from outside: no out-of-memory kill was counted)"
    if name in ("SIGTERM", "SIGINT", "SIGHUP"):
        return f"killed by {name} (from outside: not sent by us)"
    return f"killed by {name} ({_MEANING[name]})" if name in _MEANING else f"killed by {name}"


def find_native_message(lines: Sequence[str]) -> NativeMessage | None:
    """Return the first fatal message of native code among the last 400 lines; None if there is
    none.

    If a dump of faulthandler follows, the result has its Python frame.
    """
    first = max(0, len(lines) - 400)
    found: NativeMessage | None = None
    for at in range(first, len(lines)):
        if lines[at].startswith(DUMP_BEGINS):
            dump = _fatal_python(lines, at)
            return dump if found is None else _with_frame(found, dump)
        found = found or _message_at(lines, at)
    return found


def words_before_crash(lines: Sequence[str]) -> str | None:
    """Return what a process has written just before faulthandler's last dump, if it names a
    problem."""
    at = next((n for n in reversed(range(len(lines))) if lines[n].startswith(DUMP_BEGINS)), 0)
    above = last_lines(lines[max(0, at - _WORDS_WITHIN) : at], 1)
    if above and PROBLEM.search(above[0]) and not is_logged_below_error(above[0]):
        return above[0].strip()
    return None


def find_crash(lines: Sequence[str]) -> NativeMessage | None:
    """Return the last dump of faulthandler about a crash, perhaps of a process that forked from the
    worker."""
    first = max(0, len(lines) - 400)
    for at in range(len(lines) - 1, first - 1, -1):
        if lines[at].startswith(DUMP_BEGINS):
            return _fatal_python(lines, at)
    return None


def _message_at(lines: Sequence[str], at: int) -> NativeMessage | None:
    line = lines[at]
    if match := _TERMINATE.match(line):
        return _terminate(match[1], lines, at)
    if "Assertion" in line and _ASSERT.match(line):
        return NativeMessage(type=None, message=line, lines=(line,))
    if match := _CHECK.match(line):
        return NativeMessage(type=None, message=match[1], lines=(line,))
    if line.startswith(_FATAL) and (not line.startswith("thread '") or "panicked at" in line):
        # Rust 1.73 and newer: "thread 'main' panicked at src/lib.rs:4:5:", and the text below
        text = " ".join(lines[at : at + 2]) if line.endswith(":") else line
        return NativeMessage(type=None, message=text, lines=tuple(lines[at : at + 3]))
    return None


def _with_frame(message: NativeMessage, dump: NativeMessage) -> NativeMessage:
    """Return ``message`` with the frame and the lines of the dump that follows it."""
    own = tuple(line for line in message.lines if not line.startswith(DUMP_BEGINS) and line)
    return replace(message, frame=dump.frame, lines=(*own, *dump.lines[1:]))


def _terminate(type_: str | None, lines: Sequence[str], at: int) -> NativeMessage:
    """Return the message of an uncaught C++ exception, whose ``what()`` may follow the line at
    ``at``."""
    what = ""
    end = at + 1
    if end < len(lines) and (text := lines[end].strip()).startswith("what():"):
        what = text.removeprefix("what():").strip()
        end += 1
    message = what or ("" if type_ else "C++ terminate was called")
    shown = tuple(lines[at:end])
    return NativeMessage(type=type_, message=message, lines=shown, at_exit=type_ is None)


def _native_frame(lines: Sequence[str]) -> str | None:
    """Return the C function that crashed, with its library, if the dump has C stacks."""
    if _C_STACK not in lines:
        return None
    for line in lines[lines.index(_C_STACK) + 1 :]:
        match = _C_FRAME.match(line)
        if match is None:
            if not line.startswith("  "):
                return None
        elif not match[2].startswith(_OF_THE_DUMP):
            return f"{match[2]} ({match[1]})"
    return None


def _fatal_python(lines: Sequence[str], at: int) -> NativeMessage:
    """Return the message in a dump of faulthandler, which lists the current thread's frames,
    innermost first."""
    frames: list[Frame] = []
    shown = [lines[at]]
    current = False
    for line in lines[at + 1 : at + 120]:
        if line.startswith(("Current thread", "Thread 0x", "Stack (most recent")):
            current = not line.startswith("Thread")
        elif current and (match := _DUMP.match(line)):
            frames.append(Frame(file=match[1], line=int(match[2][:9]), function=match[3]))
            if len(shown) < 10:
                shown.append(line)
        elif frames and not line:
            break
    frame = next((frame for frame in frames if frame.of_user), frames[0] if frames else None)
    message = lines[at].removeprefix(DUMP_BEGINS)
    if (native := _native_frame(lines[at:])) is not None:
        message += f" in {native}"
    return NativeMessage(type=None, message=message, frame=frame, lines=tuple(shown))
