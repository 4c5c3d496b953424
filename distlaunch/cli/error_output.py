"""Print errors, and prepare signals and standard streams for it.

An expected error takes one or two lines. An internal error takes one line, and a file has its
traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable

from distlaunch.core.errors import EXIT_SOFTWARE, LaunchError
from distlaunch.core.model.text import printable

# For annotations alone; importing it costs start-up time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
EXIT_INTERRUPTED = 130
EXIT_UNWRITABLE = 1
"""Standard output cannot be written, as on a full disk."""


def interruptible() -> None:
    """Make Ctrl-C raise KeyboardInterrupt from now on, unless SIGINT is ignored.

    If Ctrl-C arrives in one of Python's callbacks, such as those of the import system, Python would
    print the exception and continue. The process then exits instead.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        sys.unraisablehook = _end_if_interrupted
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_if_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
    if unraisable.exc_type is KeyboardInterrupt:
        os._exit(EXIT_INTERRUPTED)
    sys.__unraisablehook__(unraisable)


def ignore_signals() -> None:
    """Ignore INT, TERM, HUP, QUIT, USR1 and USR2 from now on, so that they do not change the exit
    code."""
    for number in (*ENDING, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def repair_standard_streams() -> None:
    """Open /dev/null on each of the descriptors 0, 1 and 2 that is closed.

    Otherwise the next opened file would get the number, and output of workers. Also create the
    stream objects that are None.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if fd == 0 else os.O_WRONLY)
            os.set_inheritable(opened, True)  # noqa: FBT003 - positional-only in the standard library
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as above
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as above


def guarded(work: Callable[[], int]) -> int:
    """Run a command and return its exit code. Print an expected error, save the traceback of any
    other.

    Standard output is flushed here: a reader that has gone (``distlaunch plan | head``) has read
    what it wanted, and does not change the exit code.
    """
    code = 0
    try:
        code = work()
        sys.stdout.flush()
    except LaunchError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as left:
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        _drop_output(sys.stdout)  # typer or rich has turned the BrokenPipeError into SystemExit
    except Exception as error:  # noqa: BLE001 - the last handler: whatever comes here is a fault of ours
        if isinstance(error, OSError) and (reason := _why_unwritable(error)):
            _drop_output(sys.stdout)
            if isinstance(error, BrokenPipeError):
                return code
            _to_stderr([f"distlaunch: error: cannot write to stdout: {reason}"])
            return EXIT_UNWRITABLE
        report_fault(error)
        return EXIT_SOFTWARE
    return code


def print_warnings(warnings: Iterable[str]) -> None:
    """Write a line ``distlaunch: warning: ...`` to stderr for each warning."""
    if lines := [f"distlaunch: warning: {_indent(warning)}" for warning in warnings]:
        _to_stderr(lines)


def print_notice(text: str) -> None:
    """Write ``distlaunch: ...`` to stderr."""
    _to_stderr([f"distlaunch: {_indent(text)}"])


def print_error(error: LaunchError) -> None:
    """Write ``distlaunch: error: ...`` and its hint to stderr."""
    lines = [f"distlaunch: error: {_indent(error.message)}"]
    if error.hint:
        lines.append(f"  hint: {_indent(error.hint)}")
    _to_stderr(lines)


def report_fault(error: BaseException) -> None:
    """Print one line about an unexpected error, with the path of a file, readable by the user
    alone, that has the traceback."""
    import tempfile
    import traceback

    name = type(error).__name__
    text = "".join(traceback.format_exception(error))
    first = (str(error).strip().splitlines() or [""])[0]
    lines = [f"distlaunch: internal error: {printable(f'{name}: {first}' if first else name)}"]
    try:
        fd, path = tempfile.mkstemp(prefix="distlaunch-traceback-", suffix=".txt")
        os.fchmod(fd, 0o600)  # regardless of the umask
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as problem:
        lines.append(
            printable(
                f"  raised at {_place_of(error)}; the traceback could not be saved: {problem}"
            )
        )
    else:
        lines.append(f"  please report it with the traceback, saved in {path}")
    _to_stderr(lines)


def _indent(text: str) -> str:
    return printable(text, keep="\n").replace("\n", "\n  ")


def _place_of(error: BaseException) -> str:
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    frame = next(
        (frame for frame in reversed(frames) if frame.filename.startswith(ours)),
        frames[-1] if frames else None,
    )
    return f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else "an unknown place"


def _to_stderr(lines: list[str]) -> None:
    try:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        _drop_output(sys.stderr)  # stderr is closed, so only the exit code shows the error


def _why_unwritable(error: OSError) -> str | None:
    """Return why standard output cannot be written; None if the error has another cause. Write
    again to find out: the write fails with the same error."""
    if error.filename is not None:
        return None
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as again:
        return again.strerror if again.errno == error.errno else None
    except ValueError:
        return None
    return None


def _drop_output(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that the interpreter's last flush does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    except (OSError, ValueError):
        return  # an embedding program's stream has no descriptor, so no pipe is flushed
    finally:
        os.close(null)
