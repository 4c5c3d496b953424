"""What ``distlaunch torchrun --help`` prints, made from the option table."""

from __future__ import annotations

import shutil
import sys
import textwrap

from distlaunch.cli.compat.torchrun.options import BY_VARIABLE, OPTIONS, TorchrunOption

_INDENT = 6
_WIDEST = 100


def print_help(*, legacy: bool = False) -> None:
    """Print it to stdout."""
    sys.stdout.write(help_text(shutil.get_terminal_size().columns, legacy=legacy))


def help_text(columns: int, *, legacy: bool = False) -> str:
    """Make the text, for a terminal of this width. ``legacy``: of ``torch.distributed.launch``."""
    command = "torch.distributed.launch" if legacy else "torchrun"
    width = max(40, min(columns, _WIDEST))

    def wrapped(text: str, indent: int = 0) -> str:
        return textwrap.fill(
            text, width, initial_indent=" " * indent, subsequent_indent=" " * indent
        )

    lines = [
        f"Usage: distlaunch {command} [OPTIONS] SCRIPT [ARGS]...",
        "",
        wrapped(
            f"Run a command line of {command} with distlaunch: the same options, log files and "
            "output, a sooner start, "
            "the workers' own exit codes, and failures explained."
        ),
        "",
        "Options:",
    ]
    for option in OPTIONS:
        lines.append("  " + _head(option))
        lines.append(wrapped(option.here + _notes(option), _INDENT))
    lines += ["  -h, --help", wrapped("Show this and exit.", _INDENT), ""]
    variables = [option.variable for option in BY_VARIABLE if option.variable]
    lines += [
        wrapped(
            "Underscores do for dashes, and the beginning of a name for the name. Defaults come "
            "from PET_<OPTION>, as "
            "PET_NPROC_PER_NODE; the command line wins. What follows SCRIPT reaches it byte for "
            "byte, but for one -- "
            "directly behind it; ${local_rank} in it is each worker's."
        ),
        "",
        wrapped(
            "Of distlaunch's own options these work here, as variables (see distlaunch train "
            "--help):"
        ),
        wrapped(", ".join(variables), 2),
        "",
        wrapped("distlaunch help from-torchrun lists all differences from torchrun."),
    ]
    return "\n".join(lines) + "\n"


def _head(option: TorchrunOption) -> str:
    return f"{', '.join(option.flags)} {option.metavar}".rstrip()


def _notes(option: TorchrunOption) -> str:
    notes = [f"default {option.default}"] if option.default else []
    notes += ["no effect"] if option.effect == "accepted" else []
    return f" ({'; '.join(notes)})" if notes else ""
