"""Layer ui: the command ``distlaunch deepspeed``: parse, understand, run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from distlaunch.core.errors import ConfigError
from distlaunch.ui.deepspeed.meaning import understand
from distlaunch.ui.deepspeed.options import OPTIONS, THEIRS
from distlaunch.ui.drop_in import plain_words, run_drop_in
from distlaunch.ui.quick import Given, scan

PID_FOLDER = "/tmp"  # noqa: S108 - where DeepSpeed's users look for it


def deepspeed(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run what follows ``deepspeed`` on the command line; return the exit code.

    Raises HelpRequested, or a LaunchError before the start.
    """
    return run(*scan(plain_words(argv, OPTIONS, THEIRS), OPTIONS), environ)


def run(given: Given, rest: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command line that was taken apart; return the exit code. Raises LaunchError before the start."""
    meaning = understand(given, rest, environ)
    pid = pid_file(PID_FOLDER) if meaning.save_pid and not meaning.options.dry_run else None
    return run_drop_in(meaning.options, meaning.remarks, environ, around=pid)


@contextmanager
def pid_file(folder: str) -> Iterator[None]:
    """Keep a file, named by our process id, with that id in it.

    Raises ConfigError if there is one already, or it cannot be written. That it cannot be removed is no failure.
    """
    path = os.path.join(folder, f"{os.getpid()}.deepspeed")
    ours = False
    try:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            ours = True
            with os.fdopen(fd, "w") as file:
                file.write(str(os.getpid()))
        except OSError as exc:
            raise ConfigError(f"--save_pid: {path}: {exc.strerror}", hint="leave --save_pid out") from exc
        yield
    finally:
        if ours:
            with suppress(OSError):
                os.unlink(path)
