"""Layer ui: the command ``distlaunch deepspeed``: parse, understand, run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from distlaunch.core.errors import ConfigError, LaunchError
from distlaunch.ui.deepspeed.meaning import understand
from distlaunch.ui.deepspeed.options import OPTIONS
from distlaunch.ui.errors import print_warnings
from distlaunch.ui.quick import Given, scan, unknown_variables
from distlaunch.ui.run import train

PID_FOLDER = "/tmp"  # noqa: S108 - where DeepSpeed's users look for it


def deepspeed(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run what follows ``deepspeed`` on the command line; return the exit code.

    Raises HelpRequested, or a LaunchError before the start.
    """
    return run(*scan(argv, OPTIONS), environ)


def run(given: Given, rest: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command line that was taken apart; return the exit code. Raises LaunchError before the start."""
    meaning = understand(given, rest, environ)
    options = meaning.options
    if not options.quiet:
        print_warnings([*unknown_variables(environ), *meaning.remarks])
    try:
        with pid_file(PID_FOLDER) if meaning.save_pid and not options.dry_run else nullcontext():
            return train(options)
    except LaunchError as error:
        spelt = options.dialect.spelt
        raise type(error)(spelt(error.message), hint=spelt(error.hint) if error.hint else None) from error


@contextmanager
def pid_file(folder: str) -> Iterator[None]:
    """Keep a file, named by our process id, with that id in it. Raises ConfigError if there is one already."""
    path = os.path.join(folder, f"{os.getpid()}.deepspeed")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise ConfigError(f"--save_pid: {path}: {exc.strerror}", hint="leave --save_pid out") from exc
    with os.fdopen(fd, "w") as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        os.unlink(path)
