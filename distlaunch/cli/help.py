"""The help of each command, made from the option tables without typer."""

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
    option_row,
    option_sections,
    terminal_columns,
)
from distlaunch.cli.option import Option, Place
from distlaunch.cli.option_table import HELP_FLAGS, PLAN_OPTIONS, TRAIN_OPTIONS
from distlaunch.core.errors import UsageError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import quoted

Words = tuple[str, ...]

ABOUT = "Start, watch, explain and restart distributed training."
_DROP_INS = "Drop-ins for other launchers"
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


class CommandHelp(Record):
    """One row of the table of commands."""

    words: Words
    purpose: str
    """The heading in ``distlaunch --help``."""
    summary: str
    page: Callable[[CommandHelp], HelpPage]
    examples: tuple[Row, ...] = ()
    argument: str = "SCRIPT"
    """The argument after the options. distlaunch does not parse it, nor anything after it."""


def print_help(
    words: Sequence[str], environ: Mapping[str, str], *, to: TextIO | None = None
) -> int:
    """Print the help of the command that ``words`` begin with, else the help of distlaunch. Return
    0."""
    (to or sys.stdout).write(help_text(words, terminal_columns(environ)))
    return 0


def help_text(words: Sequence[str], columns: int) -> str:
    """Return the help of the command that ``words`` begin with, else the help of distlaunch."""
    command = tuple(words[:2])
    while command not in _PAGES:
        command = command[:-1]
    return format_page(help_page(command), columns)


def help_page(command: Words) -> HelpPage:
    """Return the help of a command. Raises KeyError if there is no such command."""
    return _PAGES[command]()


def answer_help(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the help of a command, a page, an option, or search results. Return 0.

    Raises UsageError if nothing is found.
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
    """Print the version of distlaunch. Return 0."""
    sys.stdout.write(f"distlaunch {distlaunch.__version__}\n")
    return 0


def print_version() -> int:
    """Print the versions and paths of distlaunch and Python. Return 0."""
    folder = os.path.dirname(os.path.abspath(distlaunch.__file__))
    sys.stdout.write(
        f"distlaunch {distlaunch.__version__} ({folder})\n"
        f"Python {sys.version.partition(' ')[0]} ({sys.executable})\n"
    )
    return 0


def _check_subcommand(words: Sequence[str]) -> None:
    there = [path[1] for path in _PAGES if path[:1] == tuple(words[:1]) and len(path) > 1]
    if there and len(words) > 1 and words[1] not in there:
        raise UsageError(
            f"there is no command {quoted(' '.join(words[:2]))}",
            hint=f"there is {', '.join(f'{words[0]} {each}' for each in there)}",
        )


def _root_page() -> HelpPage:
    from distlaunch.cli.pages import topics

    return HelpPage(
        usage="distlaunch COMMAND [OPTIONS] [SCRIPT] [ARGS]...",
        about=ABOUT,
        examples=_COMMANDS["train",].examples,
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


def _options_page(
    command: CommandHelp, options: Iterable[Option], *, place: Place | None = None, about: str = ""
) -> HelpPage:
    options = tuple(option for option in options if place not in option.absent)
    return HelpPage(
        usage=f"distlaunch {' '.join(command.words)} [OPTIONS] {command.argument} [ARGS]...",
        about=about or command.summary,
        examples=command.examples,
        sections=list(option_sections(options, place)),
        closing=_closing_texts(options, command.argument),
    )


def _closing_texts(options: Sequence[Option], usage: str) -> tuple[str, ...]:
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


def _render_kind_page(command: CommandHelp) -> HelpPage:
    from distlaunch.cli.commands.render import TARGETS, options_of

    target = next(each for each in TARGETS if each == command.words[1])
    return _options_page(command, options_of(target), place=target)


def _render_page() -> HelpPage:
    return HelpPage(
        usage="distlaunch render KIND [OPTIONS] SCRIPT [ARGS]...",
        about="Print a file that runs a training job on a cluster. The options are those of "
        "distlaunch train, and some that only the file needs.",
        examples=[kind.examples[0] for kind in _FILE_KINDS[:2]],
        lists=[("Kinds of files:", [(kind.words[1], kind.summary) for kind in _FILE_KINDS])],
        closing=("distlaunch help render KIND shows the options.",),
    )


def _accelerate_page() -> HelpPage:
    launch = _COMMANDS["accelerate", "launch"]
    return HelpPage(
        usage="distlaunch accelerate launch [OPTIONS] SCRIPT [ARGS]...",
        about="Run a command line of accelerate launch. The other commands of accelerate are not "
        "here.",
        examples=launch.examples,
        lists=[("Commands:", [("launch", launch.summary)])],
        closing=("distlaunch help accelerate launch shows the options.",),
    )


def _drop_in_page(command: CommandHelp) -> HelpPage:
    options = import_module(f"distlaunch.cli.compat.{command.words[0]}.options").OPTIONS
    about = f"{command.summary} Options of distlaunch train are accepted, too."
    return _options_page(command, options, about=about)


def _torchrun_page(command: CommandHelp) -> HelpPage:
    from distlaunch.cli.compat.torchrun.help import help_page

    return help_page(command.words[0])


def _backends_page(command: CommandHelp) -> HelpPage:
    return HelpPage(
        usage="distlaunch backends [OPTIONS] [NAME]",
        about="List the training frameworks that --backend takes, and what is installed. With "
        "NAME, list only that one and its options.",
        examples=command.examples,
        sections=(("Options:", list(BACKENDS_OPTIONS.values())),),
    )


def _help_command_page(command: CommandHelp) -> HelpPage:
    from distlaunch.cli.pages import topics

    return HelpPage(
        usage="distlaunch help [COMMAND | PAGE | WORD]",
        about="Show the help of a command, a page of documentation, or the options and pages that "
        "mention a word.",
        examples=command.examples,
        closing=(f"Pages: {', '.join(topics())}.",),
    )


def _version_page(command: CommandHelp) -> HelpPage:
    return HelpPage(usage="distlaunch version", about=command.summary)


def _completion_page(command: CommandHelp) -> HelpPage:
    return HelpPage(
        usage=f"distlaunch completion {'|'.join(SHELLS)}",
        about="Print the completion script of a shell, for the file that the shell reads at its start.",
        examples=command.examples,
        closing=(
            (
                "The script completes commands, options, their choices, backends, files and "
                "directories. It asks the installed distlaunch, and is the same for each version."
            ),
            "distlaunch help install has the commands for each shell.",
        ),
    )


def _job_command_page(command: CommandHelp) -> HelpPage:
    from distlaunch.cli.commands.jobs_options import JOB_OPTIONS

    (name,) = command.words
    return HelpPage(
        usage=f"distlaunch {name} [OPTIONS] {command.argument}".rstrip(),
        about=command.summary,
        examples=command.examples,
        sections=(("Options:", [option_row(option) for option in JOB_OPTIONS[name]]),),
        closing=(_JOB_IS,) if command.argument else (),
    )


def _job_command_help(
    name: str, summary: str, *examples: Row, argument: str = "JOB"
) -> CommandHelp:
    return CommandHelp(
        words=(name,),
        purpose="Jobs",
        summary=summary,
        page=_job_command_page,
        examples=examples,
        argument=argument,
    )


_JOB_IS = (
    "JOB is the id of a job or its beginning, a --job-id, latest, or the path of a run directory."
)
_JOB_COMMANDS = (
    _job_command_help(
        "ps",
        "List the jobs that run.",
        ("distlaunch ps --all", "All jobs, the newest first."),
        argument="",
    ),
    _job_command_help(
        "status",
        "Show what a job does now.",
        ("distlaunch status latest", "The newest job."),
        ("distlaunch status 20261129-21 --format json", "A job by the beginning of its id."),
    ),
    _job_command_help(
        "logs",
        "Print the output of the ranks of a job.",
        ("distlaunch logs latest --follow", "The output of all ranks, as it is written."),
        ("distlaunch logs latest --rank 0 --tail 20", "The last lines of rank 0."),
        (
            "distlaunch logs latest --grep 'loss|nan' --since 10min",
            "Some lines of the last minutes.",
        ),
    ),
    _job_command_help(
        "events",
        "Print what happened in a job.",
        ("distlaunch events latest --type failure,hang --tail 5", "The last failures and hangs."),
        ("distlaunch events latest --format json | jq .type", "For programs."),
    ),
    _job_command_help(
        "report",
        "Write a report of a job, or compare two jobs.",
        ("distlaunch report latest", "An HTML file: times, failures, step times, losses."),
        ("distlaunch report latest --format md", "As text, on stdout."),
        ("distlaunch report exp exp-2 -o compared.html", "Two jobs side by side."),
        argument="JOB [JOB]",
    ),
    _job_command_help(
        "top",
        "Show what each rank of a running job uses, and which ranks are slow.",
        ("distlaunch top latest", "? shows the keys, q ends."),
        ("distlaunch top latest --once --format json", "For programs."),
    ),
    _job_command_help(
        "stack",
        "Show where in their code the ranks of a running job are.",
        ("distlaunch stack latest", "Equal stacks are shown once, those that differ first."),
        ("distlaunch stack latest --rank 3", "The stack of one rank."),
    ),
    _job_command_help(
        "attach",
        "Show the console of a job that was started with --detach. Ctrl-C asks: detach or stop?",
        ("distlaunch attach latest", "From the last screenful, until the job has ended."),
    ),
    _job_command_help(
        "wait",
        "Wait until a job has ended. Exit with its exit code.",
        ("distlaunch wait latest && ./upload.sh", "Continue after a job that succeeds."),
    ),
    _job_command_help(
        "stop",
        "Stop a job: send SIGTERM to its launcher, and wait for the end.",
        ("distlaunch stop latest", "The workers have the time of --grace to save."),
    ),
    _job_command_help(
        "rm",
        "Remove the files of a job that has ended. Files of other programs stay.",
        ("distlaunch rm 20261129-211237-eaa322", "Its logs, events and plans."),
        argument="JOB [JOB ...]",
    ),
)


def _manifest_help(kind: str, summary: str) -> CommandHelp:
    return CommandHelp(
        words=("render", kind),
        purpose="Files",
        summary=summary,
        page=_render_kind_page,
        examples=(
            (
                f"distlaunch render {kind} --num-nodes 2 --gpus-per-node 8 --image NAME train.py",
                "Then: kubectl apply -f FILE",
            ),
        ),
    )


_FILE_KINDS = (
    CommandHelp(
        words=("render", "slurm"),
        purpose="Files",
        summary="Print a batch script for Slurm.",
        page=_render_kind_page,
        examples=(
            (
                "distlaunch render slurm --num-nodes 4 --gpus-per-node 8 --time 12h --out job.sbatch train.py",
                "Then: sbatch job.sbatch",
            ),
        ),
    ),
    _manifest_help("kubernetes", "Print an Indexed Job and its Service for Kubernetes."),
    _manifest_help("pytorchjob", "Print a PyTorchJob for Kubeflow's Training Operator."),
    _manifest_help("trainjob", "Print a TrainJob for Kubeflow Trainer."),
)
_TABLE = (
    CommandHelp(
        words=("train",),
        purpose="Run",
        summary="Run a training job.",
        page=lambda command: _options_page(command, TRAIN_OPTIONS),
        examples=(
            ("distlaunch train train.py --lr 0.1", "One worker per GPU of this machine."),
            ("distlaunch train --num-gpus 4 train.py", "Four workers on this machine."),
            (
                "distlaunch train --hosts node1:8,node2:8 train.py",
                "Eight workers on each of two hosts.",
            ),
            (
                "distlaunch train --max-restarts 3 --hang-timeout 1h --hang-action restart train.py",
                "Restart up to three times after a failure or a hang.",
            ),
        ),
    ),
    *_JOB_COMMANDS,
    CommandHelp(
        words=("plan",),
        purpose="Look",
        summary="Print what train would do. Start nothing.",
        page=lambda command: _options_page(command, PLAN_OPTIONS),
        examples=(
            (
                "distlaunch plan --num-gpus 4 train.py",
                "The ranks, devices and variables of four workers.",
            ),
            ("distlaunch plan --explain train.py", "Also where each value comes from."),
            ("distlaunch plan --format json train.py", "The same for programs."),
        ),
    ),
    CommandHelp(
        words=("backends",),
        purpose="Look",
        summary="List the training frameworks, what is installed, and their options.",
        page=_backends_page,
        examples=(("distlaunch backends deepspeed", "What -o NAME=VALUE takes for DeepSpeed."),),
    ),
    CommandHelp(
        words=("help",),
        purpose="Look",
        summary="Show the help of a command, an option or a topic.",
        page=_help_command_page,
        examples=(
            ("distlaunch help render slurm", "The options of a command."),
            ("distlaunch help --hang-timeout", "One option."),
            ("distlaunch help restarts", "A page."),
            ("distlaunch help hang", "Options and pages that mention a word."),
        ),
    ),
    CommandHelp(
        words=("version",),
        purpose="Look",
        summary="Print the versions of distlaunch and Python.",
        page=_version_page,
    ),
    CommandHelp(
        words=("completion",),
        purpose="Look",
        summary="Print the completion script of a shell.",
        page=_completion_page,
        examples=(
            (
                "distlaunch completion bash > ~/.distlaunch-completion.bash",
                "Then: source it in ~/.bashrc",
            ),
            (
                "distlaunch completion zsh > ~/.distlaunch-completion.zsh",
                "Then: source it in ~/.zshrc",
            ),
            (
                "distlaunch completion fish > ~/.config/fish/completions/distlaunch.fish",
                "fish finds it there.",
            ),
        ),
    ),
    CommandHelp(
        words=("torchrun",),
        purpose=_DROP_INS,
        summary="Run a command line of torchrun.",
        page=_torchrun_page,
    ),
    CommandHelp(
        words=("torch.distributed.launch",),
        purpose=_DROP_INS,
        summary="Run a command line of torch.distributed.launch.",
        page=_torchrun_page,
    ),
    CommandHelp(
        words=("deepspeed",),
        purpose=_DROP_INS,
        summary="Run a command line of deepspeed.",
        page=_drop_in_page,
        examples=(
            (
                "distlaunch deepspeed --num_gpus 4 train.py --deepspeed ds.json",
                "Four workers here.",
            ),
        ),
    ),
    CommandHelp(
        words=("horovodrun",),
        purpose=_DROP_INS,
        summary="Run a command line of horovodrun.",
        page=_drop_in_page,
        examples=(
            (
                "distlaunch horovodrun -np 4 -H a:2,b:2 python train.py",
                "Two workers on each host.",
            ),
        ),
        argument="COMMAND",
    ),
    CommandHelp(
        words=("accelerate", "launch"),
        purpose=_DROP_INS,
        summary="Run a command line of accelerate launch.",
        page=_drop_in_page,
        examples=(
            ("distlaunch accelerate launch --num_processes 4 train.py", "Four workers here."),
        ),
    ),
    *_FILE_KINDS,
)
"""All commands, in the order of the help."""
_COMMANDS = {command.words: command for command in _TABLE}
SUMMARIES = {command.words: command.summary for command in _TABLE}
PURPOSES = {
    command.purpose: {
        each.words: each.summary for each in _TABLE if each.purpose == command.purpose
    }
    for command in _TABLE
}
"""Purpose -> commands with that purpose, each with its summary."""
_PAGES: dict[Words, Callable[[], HelpPage]] = {
    (): _root_page,
    **{command.words: partial(command.page, command) for command in _TABLE},
    ("render",): _render_page,
    ("accelerate",): _accelerate_page,
}
"""Command -> its help."""
