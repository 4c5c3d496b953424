"""The help of each command, made from the option tables without typer.

``distlaunch help WORD`` also prints pages of documentation, and options that mention a word.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TextIO

import distlaunch
from distlaunch.cli.completions import SHELLS
from distlaunch.cli.help_layout import (
    HelpPage,
    Row,
    format_page,
    option_sections,
    terminal_columns,
)
from distlaunch.cli.option import Option, Place
from distlaunch.cli.option_table import HELP_FLAGS, PLAN_OPTIONS, TRAIN_OPTIONS
from distlaunch.core.errors import UsageError
from distlaunch.core.model.text import quoted

Words = tuple[str, ...]

ABOUT = "Start, watch, explain and restart distributed training."
FILES: dict[Words, str] = {
    ("render", "slurm"): "Print a batch script for Slurm.",
    ("render", "kubernetes"): "Print an Indexed Job and its Service for Kubernetes.",
    ("render", "pytorchjob"): "Print a PyTorchJob for Kubeflow's Training Operator.",
    ("render", "trainjob"): "Print a TrainJob for Kubeflow Trainer.",
}
PURPOSES: dict[str, dict[Words, str]] = {
    "Run": {("train",): "Run a training job."},
    "Look": {
        ("plan",): "Print what train would do. Start nothing.",
        ("backends",): "List the training frameworks, what is installed, and their options.",
        ("help",): "Show the help of a command, an option or a topic.",
        ("version",): "Print the versions of distlaunch and Python.",
        ("completion",): "Print the completion script of a shell.",
    },
    "Drop-ins for other launchers": {
        ("torchrun",): "Run a command line of torchrun.",
        ("torch.distributed.launch",): "Run a command line of torch.distributed.launch.",
        ("deepspeed",): "Run a command line of deepspeed.",
        ("horovodrun",): "Run a command line of horovodrun.",
        ("accelerate", "launch"): "Run a command line of accelerate launch.",
    },
    "Files": FILES,
}
"""Purpose -> commands with that purpose, each with its summary."""
SUMMARIES = {words: text for commands in PURPOSES.values() for words, text in commands.items()}
BACKENDS_FORMATS = ("table", "json")
BACKENDS_OPTIONS: dict[str, Row] = {
    "format": ("--format table|json", "Format of the list. Default: table."),
    "python": (
        "--python PATH",
        (
            "Interpreter of the workers. What it has installed is listed. Default: the interpreter "
            "that runs distlaunch."
        ),
    ),
}
_MANY = 10
"""If more options than this have no variable, they are not listed."""
_TRAIN_EXAMPLES: tuple[Row, ...] = (
    ("distlaunch train train.py --lr 0.1", "One worker per GPU of this machine."),
    ("distlaunch train --num-gpus 4 train.py", "Four workers on this machine."),
    ("distlaunch train --hosts node1:8,node2:8 train.py", "Eight workers on each of two hosts."),
    (
        "distlaunch train --max-restarts 3 --hang-timeout 10min train.py",
        "Restart up to three times after a failure or a hang.",
    ),
)
_PLAN_EXAMPLES: tuple[Row, ...] = (
    ("distlaunch plan --num-gpus 4 train.py", "The ranks, devices and variables of four workers."),
    ("distlaunch plan --explain train.py", "Also where each value comes from."),
    ("distlaunch plan --format json train.py", "The same for programs."),
)
_RENDER_EXAMPLES: dict[str, tuple[Row, ...]] = {
    "slurm": (
        (
            "distlaunch render slurm --num-nodes 4 --gpus-per-node 8 --time 12h --out job.sbatch train.py",
            "Then: sbatch job.sbatch",
        ),
    ),
    **{
        kind: (
            (
                f"distlaunch render {kind} --num-nodes 2 --gpus-per-node 8 --image NAME train.py",
                "Then: kubectl apply -f FILE",
            ),
        )
        for kind in ("kubernetes", "pytorchjob", "trainjob")
    },
}
_SCRIPTS = (
    ("bash", "~/.distlaunch-completion.bash", "Then: source it in ~/.bashrc"),
    ("zsh", "~/.distlaunch-completion.zsh", "Then: source it in ~/.zshrc"),
    ("fish", "~/.config/fish/completions/distlaunch.fish", "fish finds it there."),
)
"""Shell, file of its completion script, and what the user has to do after installing the file."""
_DROP_INS: dict[Words, tuple[str, tuple[Row, ...]]] = {
    ("deepspeed",): (
        "SCRIPT",
        (("distlaunch deepspeed --num_gpus 4 train.py --deepspeed ds.json", "Four workers here."),),
    ),
    ("horovodrun",): (
        "COMMAND",
        (("distlaunch horovodrun -np 4 -H a:2,b:2 python train.py", "Two workers on each host."),),
    ),
    ("accelerate", "launch"): (
        "SCRIPT",
        (("distlaunch accelerate launch --num_processes 4 train.py", "Four workers here."),),
    ),
}


def print_help(
    words: Sequence[str], environ: Mapping[str, str], *, to: TextIO | None = None
) -> int:
    """Print the help of the command that ``words`` begin with. Return the exit code.

    The help goes to ``to``, by default stdout.
    """
    (to or sys.stdout).write(help_text(words, terminal_columns(environ)))
    return 0


def help_text(words: Sequence[str], columns: int) -> str:
    """Return the help of the command that ``words`` begin with; the help of distlaunch if no
    command matches."""
    command = tuple(words[:2])
    while command not in _PAGES:
        command = command[:-1]
    return format_page(help_page(command), columns)


def help_page(command: Words) -> HelpPage:
    """Return the help of a command. Raises KeyError if there is no such command."""
    return _PAGES[command]()


def answer_help(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``distlaunch help WORDS``: print the help of a command, a page, or search results.

    Return the exit code. Raises UsageError if nothing is found.
    """
    asked = [word for word in words if word not in HELP_FLAGS]
    if words and not asked:
        asked = ["help"]
    if not asked or (asked[0],) in _PAGES:
        _check_subcommand(asked)
        return print_help(asked, environ)
    from distlaunch.cli.pages import show_page, topics

    if asked[0] in topics():
        show_page(asked[0], terminal_columns(environ))
        return 0
    from distlaunch.cli.search import find_option, find_word

    if (found := find_option(asked[0]) or find_word(asked[0])) is not None:
        sys.stdout.write(format_page(found, terminal_columns(environ)))
        return 0
    from difflib import get_close_matches

    commands = dict.fromkeys(words[0] for words in SUMMARIES)
    near = get_close_matches(asked[0], [*commands, *topics()], n=1, cutoff=0.5)
    guess = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"there is no command or page {quoted(asked[0])}",
        hint=f"{guess}commands: {', '.join(commands)}; pages: {', '.join(topics())}",
    )


def print_short_version() -> int:
    """Print the version of distlaunch. Return the exit code."""
    sys.stdout.write(f"distlaunch {distlaunch.__version__}\n")
    return 0


def print_version() -> int:
    """Print the versions and paths of distlaunch and Python. Return the exit code."""
    folder = os.path.dirname(os.path.abspath(distlaunch.__file__))
    sys.stdout.write(
        f"distlaunch {distlaunch.__version__} ({folder})\n"
        f"Python {sys.version.partition(' ')[0]} ({sys.executable})\n"
    )
    return 0


def _check_subcommand(words: Sequence[str]) -> None:
    """Raise UsageError for ``help render X`` if render has no file format X."""
    there = [path[1] for path in _PAGES if path[:1] == tuple(words[:1]) and len(path) > 1]
    if there and len(words) > 1 and words[1] not in there:
        raise UsageError(
            f"there is no command {quoted(' '.join(words[:2]))}",
            hint=f"there is {', '.join(f'{words[0]} {each}' for each in there)}",
        )


def _root() -> HelpPage:
    from distlaunch.cli.pages import topics

    return HelpPage(
        usage="distlaunch COMMAND [OPTIONS] [SCRIPT] [ARGS]...",
        about=ABOUT,
        examples=_TRAIN_EXAMPLES,
        lists=[
            (f"{purpose}:", [(" ".join(words), text) for words, text in commands.items()])
            for purpose, commands in PURPOSES.items()
        ],
        sections=[
            (
                "Options:",
                [
                    ("--version", "Print the version and exit."),
                ],
            )
        ],
        closing=(
            (
                "distlaunch help COMMAND shows the options of a command. distlaunch help WORD shows the "
                "options and pages that mention a word."
            ),
            f"distlaunch help PAGE shows a page of documentation: {', '.join(topics())}.",
        ),
    )


def _table(
    words: Words,
    options: Iterable[Option],
    *,
    place: Place | None = None,
    usage: str = "SCRIPT",
    about: str = "",
    examples: Sequence[Row] = (),
) -> HelpPage:
    options = tuple(option for option in options if place not in option.absent)
    return HelpPage(
        usage=f"distlaunch {' '.join(words)} [OPTIONS] {usage} [ARGS]...",
        about=about or SUMMARIES[words],
        examples=examples,
        sections=list(option_sections(options, place)),
        closing=_closing(options, usage),
    )


def _closing(options: Sequence[Option], usage: str) -> tuple[str, ...]:
    """Return the paragraphs about times, variables and arguments."""
    variables = {each.field: each.variable for each in options if each.variable is not None}
    first = "num_gpus" if "num_gpus" in variables else "hosts"
    odd = [
        f"--{field.replace('_', '-')} in {variables[field]}"
        for field in ("job_id", "backend")
        if field in variables
    ]
    own = (
        "; the options of render in DISTLAUNCH_RENDER_<NAME>"
        if any(each.group == "render" for each in options)
        else ""
    )
    without = [each.name for each in options if each.variable is None]
    none = ", ".join(without) if len(without) < _MANY else "Options that distlaunch train lacks"
    defaults = (
        f"Defaults may be set in the environment: --{first.replace('_', '-')} in "
        f"{variables[first]}, and so on; {', '.join(odd)}{own}. The command line wins. {none} have "
        "no variable."
    )
    return (
        "Times are in seconds, or with a unit: 90s, 10min, 2h, 1h30m.",
        defaults,
        f"Everything after {usage}, or after --, goes to the {usage.lower()} unchanged.",
    )


def _render_kind(words: Words) -> HelpPage:
    from distlaunch.cli.commands.render import TARGETS, options_of

    target = next(each for each in TARGETS if each == words[1])
    return _table(words, options_of(target), place=target, examples=_RENDER_EXAMPLES[target])


def _render() -> HelpPage:
    return HelpPage(
        usage="distlaunch render KIND [OPTIONS] SCRIPT [ARGS]...",
        about="Print a file that runs a training job on a cluster. The options are those of "
        "distlaunch train, and some that only the file needs.",
        examples=[each for examples in _RENDER_EXAMPLES.values() for each in examples[:1]][:2],
        lists=[("Kinds of files:", [(words[1], text) for words, text in FILES.items()])],
        closing=("distlaunch help render KIND shows the options.",),
    )


def _accelerate() -> HelpPage:
    words = ("accelerate", "launch")
    return HelpPage(
        usage="distlaunch accelerate launch [OPTIONS] SCRIPT [ARGS]...",
        about="Run a command line of accelerate launch. The other commands of accelerate are not "
        "here.",
        examples=_DROP_INS[words][1],
        lists=[("Commands:", [("launch", SUMMARIES[words])])],
        closing=("distlaunch help accelerate launch shows the options.",),
    )


def _drop_in(words: Words) -> HelpPage:
    usage, examples = _DROP_INS[words]
    options = import_module(f"distlaunch.cli.compat.{words[0]}.options").OPTIONS
    about = f"{SUMMARIES[words]} Options of distlaunch train are accepted, too."
    return _table(words, options, usage=usage, about=about, examples=examples)


def _torchrun(name: str) -> HelpPage:
    from distlaunch.cli.compat.torchrun.help import help_page

    return help_page(name)


def _backends() -> HelpPage:
    return HelpPage(
        usage="distlaunch backends [OPTIONS] [NAME]",
        about="List the training frameworks that --backend takes, and what is installed. With "
        "NAME, list only that one and its options.",
        examples=(("distlaunch backends deepspeed", "What -o NAME=VALUE takes for DeepSpeed."),),
        sections=(("Options:", list(BACKENDS_OPTIONS.values())),),
    )


def _help() -> HelpPage:
    from distlaunch.cli.pages import topics

    return HelpPage(
        usage="distlaunch help [COMMAND | PAGE | WORD]",
        about="Show the help of a command, a page of documentation, or the options and pages that "
        "mention a word.",
        examples=(
            ("distlaunch help render slurm", "The options of a command."),
            ("distlaunch help --hang-timeout", "One option."),
            ("distlaunch help restarts", "A page."),
            ("distlaunch help hang", "Options and pages that mention a word."),
        ),
        closing=(f"Pages: {', '.join(topics())}.",),
    )


def _version() -> HelpPage:
    return HelpPage(usage="distlaunch version", about=SUMMARIES[("version",)])


def _completion() -> HelpPage:
    return HelpPage(
        usage=f"distlaunch completion {'|'.join(SHELLS)}",
        about="Print the completion script of a shell, for the file that the shell reads at its start.",
        examples=tuple(
            (f"distlaunch completion {shell} > {path}", text) for shell, path, text in _SCRIPTS
        ),
        closing=(
            (
                "The script completes commands, options, their choices, backends, files and "
                "directories. It asks the installed distlaunch, and is the same for each version."
            ),
            "distlaunch help install has the commands for each shell.",
        ),
    )


_PAGES: dict[Words, Callable[[], HelpPage]] = {
    (): _root,
    ("train",): lambda: _table(("train",), TRAIN_OPTIONS, examples=_TRAIN_EXAMPLES),
    ("plan",): lambda: _table(("plan",), PLAN_OPTIONS, examples=_PLAN_EXAMPLES),
    ("backends",): _backends,
    ("help",): _help,
    ("version",): _version,
    ("completion",): _completion,
    ("render",): _render,
    ("accelerate",): _accelerate,
    **{words: partial(_render_kind, words) for words in FILES},
    **{words: partial(_drop_in, words) for words in _DROP_INS},
    **{(name,): partial(_torchrun, name) for name in ("torchrun", "torch.distributed.launch")},
}
"""Command -> its help."""
