"""Read the stacks of a running worker by faulthandler or py-spy.

Formats: faulthandler of Python 3.8 to 3.14 (thread names since 3.14, free-threaded builds, C stacks
at the end) and ``py-spy dump --full-filenames``. The beginning or the end may be missing, or all
stacks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from distlaunch.core.model.record import Record, replace
from distlaunch.diagnosis.clean_text import shorten, without_escapes
from distlaunch.diagnosis.tracebacks import Frame

_READ_CHARS = 1 << 20
_THREADS = 256
_FRAMES = 512
_DEPTH = 100
"""Number of frames of a thread that faulthandler prints. Python 3.13 does not say that frames are
omitted."""
_PATH_CHARS = 1000
_NAME_CHARS = 80
_HEADER = re.compile(
    r"(?P<kind>Current thread|Thread|Stack)(?: (?P<ident>0x[0-9a-f]+)(?: \[(?P<name>.*)\])?)?"
    r" \(most recent call first\):"
)
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d{1,9}|\?\?\?) in (.*)')
_SPY_PROCESS = re.compile(r"Process (\d+)\b")
_SPY_HEADER = re.compile(r"Thread (\S+) \([\w+]+\)(?:: \"(.*)\")?")
_SPY_FRAME = re.compile(r"    (.+) \((.*?)(?::(\d{1,9}))?\)")
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_MAIN = "MainThread"
_OUR_FILE = "<frozen _distlaunch_groups>"
_START, _START_FILE = "_bootstrap", "/threading.py"
"""Function and file of the outermost frame of every thread that ``threading`` starts."""
_WHOLE = 3
"""Up to this many consecutive library frames are all shown."""
_WRAPPERS = {
    ("c10d_logger.py", "wrapper"),
    ("module.py", "_wrapped_call_impl"),
    ("module.py", "_call_impl"),
    ("module.py", "inner"),
    ("_contextlib.py", "decorate_context"),
    ("_contextlib.py", "generator_context"),
    ("contextlib.py", "inner"),
    ("eval_frame.py", "_fn"),
    ("eval_frame.py", "compile_wrapper"),
}
"""Library frames between a caller and its function that carry no information."""
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+?)(?:\.py)?(?:/|$)")
STDLIB = "the standard library"
IMPORTS = "importlib"


class ThreadStack(Record):
    """The frames of one thread, innermost first."""

    frames: tuple[Frame, ...]
    name: str | None = None
    current: bool = False
    """The thread that handled the signal (faulthandler), or the main thread (py-spy)."""
    cut: bool = False
    """The outermost frames are missing, because faulthandler prints only a hundred."""
    ident: str | None = None
    """Distinguishes the worker's threads in all of its dumps."""


def parse_stacks(text: str) -> list[ThreadStack]:
    """Return all threads in ``text``; if it has several dumps, the threads of the last."""
    lines = text[-_READ_CHARS:].split("\n")
    if not lines[-1].endswith(
        ")"
    ):  # empty, or a line that was torn: every whole one of faulthandler has its newline
        lines.pop()
    threads = _read_faulthandler(lines) or _read_py_spy(lines)
    return [thread for thread in threads if not _is_ours(thread)]


def main_thread(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """Return the main thread, which runs the script, if it is among ``threads``.

    A process handles a signal in its main thread, so that is the current thread of the dump, unless
    it blocks the signal. faulthandler lists the newest thread first, and omits the main thread of
    more than a hundred.
    """
    candidates = [thread for thread in threads if not _is_started(thread)]
    return next(
        (thread for thread in candidates if thread.current), candidates[-1] if candidates else None
    )


class StackView:
    """A main thread's stack for the report: the frames of the script, and the library frames that
    they have called."""

    __slots__ = ("below", "cut", "frames", "source", "users")

    def __init__(self, thread: ThreadStack, script_dir: str, source: str = "") -> None:
        self.source = source
        """The line of source at the innermost frame; may be empty."""
        frames = [frame for frame in thread.frames if not _is_wrapper(frame)] or list(thread.frames)
        marks = [is_users(frame, script_dir) for frame in frames]
        first = marks.index(True) if True in marks else None
        self.below: tuple[Frame, ...] = tuple(frames if first is None else frames[:first])
        """The library frames called by the script's innermost frame, innermost first."""
        last = len(marks) - marks[::-1].index(True) if first is not None else 0
        self.frames: tuple[Frame, ...] = tuple(frames[first:last])
        """The frames of the script, innermost first, with library frames between them."""
        self.users: tuple[bool, ...] = tuple(marks[first:last])
        """Whether each of ``frames`` is the script's, and not a library's in between, such as a
        trainer."""
        self.cut = thread.cut

    @property
    def place(self) -> Frame | None:
        """The innermost frame of the user's code; without user code, the innermost frame."""
        return self.frames[0] if self.frames else self.below[0] if self.below else None

    def key(self, waits_in: str | None, call: Frame | None = None) -> tuple[object, ...]:
        """Return a value that is equal for ranks at the same place.

        Frames of the script are compared with their lines. The libraries below poll and loop, so of
        each package only the first function counts, down to the call that waits. ``waits_in``, the
        name of that wait, is compared as well.
        """
        entries: list[tuple[str, str | None]] = []
        package = None
        for frame in reversed(self.below):
            if frame is call:
                break
            if (entered := package_of(frame.file)) not in (package, STDLIB):
                package = entered
                entries.append((frame.file, frame.function))
                if entered == IMPORTS:  # the frames below an import change all the time
                    break
        if not entries and self.below and call is None:
            entries.append((self.below[-1].file, self.below[-1].function))
        return (_without_recursion(self.frames), tuple(entries), waits_in)

    def shown(self, limit: int, *, brief: bool = False, source: bool = False) -> list[str]:
        """Return the stack as at most ``limit`` lines, innermost first, with long stretches of
        library frames shortened.

        ``brief``: of the frames below the script, show only the first call. ``source``: show the
        line at the innermost frame of the script if it has called native code, which has no frame.
        """
        lines = (
            [str(self.below[-1])]
            if brief and self.below
            else _format_library_frames(self.below, inner=True)
        )
        start = 0
        while start < len(self.frames):
            end = start + 1
            while end < len(self.frames) and self.users[end] == self.users[start]:
                end += 1
            part = self.frames[start:end]
            lines += (
                _folded(part) if self.users[start] else _format_library_frames(part, inner=False)
            )
            start = end
        if self.cut:
            lines.append("…")
        if len(lines) > limit:
            lines[limit - 2 : -1] = [f"… {len(lines) - limit + 1} more lines"]
        if source and not self.below and lines and self.source.strip():
            lines.insert(1, f"  {self.source.strip()}")
        return lines


def is_users(frame: Frame, script_dir: str) -> bool:
    """Return whether a frame belongs to the user's code, as files beside the script do, even in
    ``site-packages``."""
    if frame.of_user:
        return True
    folder = script_dir.rstrip("/") + "/"
    return (
        len(folder) > 1
        and frame.file.startswith(folder)
        and replace(frame, file=frame.file[len(folder) :]).of_user
    )


def package_of(file: str) -> str:
    """Return the name of the package of a library's file: ``torch``, ``importlib``, ``the standard
    library``."""
    if match := _PACKAGE.search(file):
        return match[1]
    if file.startswith("<frozen importlib"):
        return IMPORTS
    return STDLIB


class _Threads:
    """The threads that have been read."""

    def __init__(self) -> None:
        self.done: list[ThreadStack] = []
        self._frames: list[Frame] | None = None
        self._name: str | None = None
        self._ident: str | None = None
        self._current = False
        self._cut = False

    def begin(self, name: str | None, *, current: bool, ident: str | None = None) -> None:
        self.end()
        if current and any(thread.current for thread in self.done):
            self.done.clear()  # a later dump
        if len(self.done) < _THREADS:
            self._frames = []
            self._name = shorten(without_escapes(name), _NAME_CHARS) if name else None
            self._ident = ident
            self._current = current
            self._cut = False

    def add(self, file: str | None, line: str | None, function: str) -> int:
        """Add a frame to the current thread. Return how many frames the thread has."""
        if self._frames is None:
            return 0
        if len(self._frames) < _FRAMES:
            self._frames.append(_frame(file, line, function))
        return len(self._frames)

    def cut(self) -> None:
        self._cut = True

    def end(self) -> None:
        if self._frames is not None:
            self.done.append(
                ThreadStack(
                    frames=tuple(self._frames),
                    name=self._name,
                    current=self._current,
                    cut=self._cut,
                    ident=self._ident,
                )
            )
        self._frames = None


def _read_faulthandler(lines: Sequence[str]) -> list[ThreadStack]:
    threads = _Threads()
    for line in lines:
        if match := _HEADER.fullmatch(line):
            threads.begin(match["name"], current=match["kind"] != "Thread", ident=match["ident"])
        elif match := _FRAME.fullmatch(line):
            if threads.add(match[1], match[2], match[3]) >= _DEPTH:
                threads.cut()
        elif line.startswith("  ..."):
            threads.cut()
        elif not line.startswith("  "):
            threads.end()
    threads.end()
    return threads.done


def _read_py_spy(lines: Sequence[str]) -> list[ThreadStack]:
    threads = _Threads()
    pid = None
    for line in lines:
        if match := _SPY_HEADER.fullmatch(line):
            threads.begin(match[2], current=match[2] == _MAIN or match[1] == pid, ident=match[1])
        elif match := _SPY_FRAME.fullmatch(line):
            threads.add(match[2], match[3], match[1].rpartition(".")[2])
        elif match := _SPY_PROCESS.match(line):
            pid = match[1]
    threads.end()
    return threads.done


def _frame(file: str | None, line: str | None, function: str) -> Frame:
    number = int(line) if line is not None and line.isdecimal() else 0
    return Frame(
        file=_plain(file or "???", _PATH_CHARS), line=number, function=_plain(function, _NAME_CHARS)
    )


def _plain(word: str, limit: int) -> str:
    """Return a word with faulthandler's ASCII escapes decoded, if the result is printable."""
    if "\\" in word:
        word = _ESCAPED.sub(_character, word)
    return shorten(without_escapes(word), limit)


def _character(match: re.Match[str]) -> str:
    """Return the character of an escape sequence; the sequence itself if the character is not
    printable."""
    code = int(match[1] or match[2] or match[3], 16)
    char = chr(code) if code <= sys.maxunicode else ""
    return char if char.isprintable() and char else match[0]


def _is_ours(thread: ThreadStack) -> bool:
    """Return whether distlaunch has started a thread in the worker
    (``boot/_distlaunch_groups``)."""
    return bool(thread.frames) and thread.frames[-1].file == _OUR_FILE


def _is_started(thread: ThreadStack) -> bool:
    """Return whether ``threading`` started a thread, so that it is not the main thread."""
    if thread.name == _MAIN or not thread.frames:
        return False
    outermost = thread.frames[-1]
    return outermost.function == _START and outermost.file.endswith(_START_FILE)


def _is_wrapper(frame: Frame) -> bool:
    return (frame.file.rpartition("/")[2], frame.function) in _WRAPPERS and not frame.of_user


def _without_recursion(frames: Sequence[Frame]) -> tuple[tuple[str, int, str | None], ...]:
    places = [(frame.file, frame.line, frame.function) for frame in frames]
    return tuple(
        place for number, place in enumerate(places) if number == 0 or place != places[number - 1]
    )


def _folded(frames: Sequence[Frame]) -> list[str]:
    """Return one line per frame. Repeated frames of a recursion are shown once, with their
    number."""
    lines: list[str] = []
    start = 0
    while start < len(frames):
        end = start + 1
        while end < len(frames) and frames[end] == frames[start]:
            end += 1
        again = end - start - 1
        lines.append(str(frames[start]))
        if again:
            lines.append(str(frames[start]) if again == 1 else f"… the same {again} more times")
        start = end
    return lines


def _format_library_frames(frames: Sequence[Frame], *, inner: bool) -> list[str]:
    """Return lines for consecutive library frames.

    Of a long innermost run the first and last frame are shown, of any other the number of frames.
    """
    if len(frames) <= (_WHOLE if inner else 1):
        return [str(frame) for frame in frames]
    hidden = frames[1:-1] if inner else frames
    packages = list(dict.fromkeys(package_of(frame.file) for frame in hidden))
    named = (
        " and ".join(packages)
        if len(packages) < _WHOLE
        else f"{', '.join(packages[:2])} and others"
    )
    line = f"… {len(hidden)} frames of {named}"
    return [str(frames[0]), line, str(frames[-1])] if inner else [line]
