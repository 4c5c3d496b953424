"""The command ``distlaunch deepspeed``."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from distlaunch.cli.compat.deepspeed.options import COMMAND_OPTIONS, OPTIONS
from distlaunch.cli.compat.deepspeed.translate import NAMES, translate
from distlaunch.cli.compat.drop_in import run_drop_in
from distlaunch.cli.parser import scan
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import use_names

PID_FOLDER = "/tmp"  # noqa: S108 - where DeepSpeed's users look for it
_LONGEST_PID = 16


def deepspeed(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command and return the exit code.

    Raises HelpRequested, and LaunchError for an error before the job starts.
    """
    with use_names(NAMES):
        given, rest = scan(argv, OPTIONS, abbreviated=COMMAND_OPTIONS, drops_dashes=True)
        translation = translate(given, rest, environ)
    pid = pid_file(PID_FOLDER) if translation.save_pid and not translation.options.dry_run else None
    return run_drop_in(translation.options, translation.notices, environ, table=OPTIONS, around=pid)


@contextmanager
def pid_file(folder: str) -> Iterator[None]:
    """Keep a file ``<process id>.deepspeed`` in ``folder`` while the context lasts, as DeepSpeed's
    --save_pid does.

    Its content is the id, too. A file that another process has left behind is replaced. Raises
    ConfigError if the file cannot be written, or belongs to a live process.
    """
    path = os.path.join(folder, f"{os.getpid()}.deepspeed")
    ours = False
    try:
        try:
            if _is_left_over(path):
                os.unlink(path)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            ours = True
            with os.fdopen(fd, "w") as file:
                file.write(str(os.getpid()))
        except OSError as exc:
            raise ConfigError(
                f"--save_pid: {path}: {exc.strerror}", hint="leave --save_pid out"
            ) from exc
        yield
    finally:
        if ours:
            with suppress(OSError):
                os.unlink(path)


def _is_left_over(path: str) -> bool:
    """Return whether ``path`` is a regular file of this user whose process id is not in use, or is
    this process's own."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return False
        text = file.read(_LONGEST_PID).strip()
    return text.isdigit() and (int(text) == os.getpid() or not os.path.exists(f"/proc/{int(text)}"))
