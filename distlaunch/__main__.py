"""The command ``distlaunch``; also ``python -m distlaunch``.

Loading typer takes longer than starting a worker. So this module runs the commands that start or
plan a job, completes words for shells, and prints the help of all commands, without typer. typer
runs ``backends``, and handles unknown commands.

Ctrl-C never shows a traceback, and the exit code is 130:

* While the program is being imported, Ctrl-C ends the process silently
  (``distlaunch/__init__.py``).
* While a command runs, Ctrl-C raises KeyboardInterrupt.
* While a job runs, the coordinator handles Ctrl-C.
* When the exit code is known, the process ignores INT, TERM, HUP, QUIT, USR1 and USR2.
"""

from __future__ import annotations

import os
import sys

from distlaunch import _end_at_interrupt

_end_at_interrupt()  # a link with another launcher's name imports this module first

# For annotations alone; importing these modules costs start-up time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from distlaunch.planning.train_options import TrainOptions


_LEGACY = "torch.distributed.launch"
_LINKS = {
    "torchrun": ("torchrun",),
    _LEGACY: (_LEGACY,),
    "deepspeed": ("deepspeed",),
    "deepspeed.pt": ("deepspeed",),
    "ds": ("deepspeed",),
    "horovodrun": ("horovodrun",),
    "accelerate": ("accelerate",),
    "accelerate-launch": ("accelerate", "launch"),
}
"""Name of a link to distlaunch -> the command that the link runs."""
_ANSWERED = ("help", "version", "--version")
_COMMANDS = (
    "render",
    "backends",
    "torchrun",
    _LEGACY,
    "deepspeed",
    "horovodrun",
    "accelerate",
    "completion",
)
"""Commands whose help is printed without loading the modules that parse their other words."""


_JOB_COMMANDS = (
    "ps",
    "status",
    "logs",
    "events",
    "report",
    "top",
    "stack",
    "attach",
    "wait",
    "stop",
    "rm",
)


def main() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    from distlaunch.cli.error_output import (
        EXIT_INTERRUPTED,
        guarded,
        ignore_signals,
        interruptible,
        repair_standard_streams,
    )

    repair_standard_streams()
    code = EXIT_INTERRUPTED
    try:
        interruptible()
        code = guarded(lambda: run(_words(sys.argv), os.environ))
        ignore_signals()
    except KeyboardInterrupt:
        ignore_signals()
    except SystemExit:
        ignore_signals()
        raise
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit with ``code``.

    If other threads still run (of a library, or waiting for a file server), the interpreter's usual
    exit may abort the process. In this case, flush the output and exit at once. Everything else has
    been written by now.
    """
    from contextlib import suppress

    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _words(argv: list[str]) -> list[str]:
    """Return the words of the command line.

    distlaunch may be called by a link with the name of another launcher. The command of that link
    is then put before the words.
    """
    name = os.path.basename(argv[0])
    return [*_LINKS.get(name, ()), *argv[1:]]


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run one command line and return its exit code.

    Raises LaunchError for errors that the user can correct.
    """
    from distlaunch.cli import parser

    if (code := _answer(argv, environ)) is not None:
        return code
    try:
        if argv[:1] == ["train"]:
            options = parser.parse_train(argv[1:], environ)
            _warn(options, environ)
            from distlaunch.cli.commands.train import train

            return train(options)
        if argv[:1] == ["plan"]:
            options, plan_format, expand = parser.parse_plan(argv[1:], environ)
            _warn(options, environ)
            from distlaunch.cli.commands.train import plan

            return plan(options, plan_format, expand=expand)
        if argv[:1] == ["render"]:
            from distlaunch.cli.commands.render import TARGETS, parse_render, render_file

            target = next((each for each in TARGETS if argv[1:2] == [each]), None)
            if target is not None:
                return render_file(target, *parse_render(target, argv[2:], environ))
        if argv[0] in _JOB_COMMANDS:
            from distlaunch.cli.commands.jobs import run_job_command

            return run_job_command(argv, environ)
        if argv[:1] == ["torchrun"] or argv[:1] == [_LEGACY]:
            from distlaunch.cli.compat.torchrun.command import torchrun

            return torchrun(argv[1:], environ, legacy=argv[0] == _LEGACY)
        if argv[:1] == ["deepspeed"]:
            from distlaunch.cli.compat.deepspeed.command import deepspeed

            return deepspeed(argv[1:], environ)
        if argv[:1] == ["horovodrun"]:
            from distlaunch.cli.compat.horovodrun.command import horovodrun

            return horovodrun(argv[1:], environ)
        if argv[:1] == ["completion"]:
            from distlaunch.cli.completion import completion

            return completion(argv[1:], environ)
        if argv[:1] == ["accelerate"]:
            from distlaunch.cli.compat.accelerate.command import accelerate

            return accelerate(argv[1:], environ)
    except parser.HelpRequested:
        from distlaunch.cli.help import print_help

        return print_help(argv, environ)
    from distlaunch.cli.app import run_app

    return run_app(argv, environ)


def _answer(argv: list[str], environ: Mapping[str, str]) -> int | None:
    """Print help or the version if the first words ask for that, and return the exit code. Return
    None if they do not."""
    from distlaunch.cli.option_table import HELP_FLAGS

    words = argv or ["--help"]
    asks_for_help = words == ["render"] or (
        words[0] in (*_COMMANDS, *_JOB_COMMANDS) and len(words) > 1 and words[1] in HELP_FLAGS
    )
    if words[0] not in (*HELP_FLAGS, *_ANSWERED) and not asks_for_help:
        return None
    from distlaunch.cli import help as answers
    from distlaunch.core.errors import EXIT_USAGE

    match words:
        case ["help", *rest]:
            return answers.answer_help(rest, environ)
        case ["version", *rest] if not any(word in HELP_FLAGS for word in rest):
            return answers.print_version()
        case ["--version", *_]:
            return answers.print_short_version()
        case ["render"]:
            answers.print_help(words, environ, to=sys.stderr)
            return EXIT_USAGE
        case _:
            return answers.print_help(words, environ)


def _warn(options: TrainOptions, environ: Mapping[str, str]) -> None:
    from distlaunch.cli.error_output import print_warnings
    from distlaunch.cli.parser import unknown_variables

    if not options.quiet:
        print_warnings(unknown_variables(environ))
    if options.script_args:
        from distlaunch.cli.misplaced_options import misplaced_options
        from distlaunch.cli.option_table import TRAIN_OPTIONS

        names = (flag for option in TRAIN_OPTIONS for flag in option.all_flags)
        print_warnings(misplaced_options(options, names, environ))


if __name__ == "__main__":
    main()
