"""The help of ``distlaunch torchrun``."""

from __future__ import annotations

from distlaunch.cli.compat.torchrun.options import BY_VARIABLE, OPTIONS, TorchrunOption
from distlaunch.cli.help_layout import HelpPage, Row


def help_page(command: str) -> HelpPage:
    """Return the help of ``torchrun`` or ``torch.distributed.launch``."""
    variables = [option.variable for option in BY_VARIABLE if option.variable]
    return HelpPage(
        usage=f"distlaunch {command} [OPTIONS] SCRIPT [ARGS]...",
        about=f"Run a command line of {command}. Options, log files and output are the same. Jobs "
        "start sooner, exit with the worker's own exit code, and explain failures.",
        examples=(
            (f"distlaunch {command} --nproc-per-node 4 train.py", "Four workers on this machine."),
            (
                (
                    f"distlaunch {command} --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d "
                    "--rdzv-endpoint node1:29400 train.py"
                ),
                "The same command on each of two nodes.",
            ),
        ),
        sections=(
            ("Options:", [_help_row(option) for option in OPTIONS if option.effect == "does"]),
            (
                "Accepted without effect:",
                [_help_row(option) for option in OPTIONS if option.effect == "accepted"],
            ),
        ),
        closing=(
            (
                "Options may be written with underscores, and shortened as long as they stay unique. "
                "Defaults may be set in the environment: --nproc-per-node in PET_NPROC_PER_NODE, and "
                "so on. The command line wins."
            ),
            (
                "Everything after SCRIPT goes to the script unchanged, except one -- directly after "
                "SCRIPT. ${local_rank} in it becomes the worker's local rank."
            ),
            (
                "These options of distlaunch train can be set here by their variables (see distlaunch "
                f"train --help): {', '.join(variables)}."
            ),
            "distlaunch help from-torchrun lists all differences from torchrun.",
        ),
    )


def _help_row(option: TorchrunOption) -> Row:
    note = f" Default: {option.default}." if option.default else ""
    return f"{', '.join(option.flags)} {option.metavar}".rstrip(), option.here + note
