"""Layer ui: the one table of options, from which the quick parser, the typer commands and the help are made.

A row says everything about an option except its default, which is the field's own in ``TrainOptions``. A default may
also come from the environment (``Option.variable``). None of those variables is one that workers get from us, so that
a launcher that is started by a worker never takes its parent's settings for a wish of the user.
"""

from __future__ import annotations

from typing import Literal

from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.record import Record, defaults_of
from distlaunch.core.model.text import quoted
from distlaunch.resolve.options import TrainOptions

Kind = Literal["text", "count", "count or auto", "count or range", "whole", "port", "seconds", "choice", "flag"]
Group = Literal["script", "size", "nodes", "rendezvous", "backend", "workers", "failure", "output"]

GROUP_TITLES: dict[Group, str] = {
    "script": "What runs",
    "size": "Size",
    "nodes": "Nodes",
    "rendezvous": "Rendezvous",
    "backend": "Backend",
    "workers": "Workers",
    "failure": "Failure (times in seconds, or as 30s, 5m, 2h)",
    "output": "Output",
}

_DEFAULTS = defaults_of(TrainOptions)
HELP_FLAGS = ("--help", "-h")
MOST_COUNTED = 1_000_000
LONGEST_S = 1e9
LEAST_SILENCE_S = 1.5
"""Signs of life are told once a second: no shorter silence can be seen."""
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Option(Record):
    """One option: how it is written, what it takes, which ``TrainOptions`` field it fills.

    The last of ``flags`` is the long one, written with dashes; the same with underscores is accepted everywhere.
    """

    flags: tuple[str, ...]
    field: str
    kind: Kind
    default: object
    help: str
    group: Group
    variable: str | None
    metavar: str = ""
    choices: tuple[str, ...] = ()
    repeatable: bool = False
    least_s: float = 0.0
    """The shortest time that it takes; to do without, it is left out."""

    @property
    def name(self) -> str:
        """The spelling that messages use."""
        return self.flags[-1]

    @property
    def negation(self) -> str | None:
        """The flag that undoes a switch which a variable may have set: ``--no-quiet``."""
        return "--no-" + self.name[2:] if self.kind == "flag" and self.variable is not None else None

    @property
    def all_flags(self) -> tuple[str, ...]:
        """Every spelling, the negation's too."""
        return self.flags if self.negation is None else (*self.flags, self.negation)


def _row(
    flags: str,
    kind: Kind,
    group: Group,
    help: str,  # noqa: A002 - named as the field that it fills
    *,
    field: str | None = None,
    metavar: str = "",
    choices: tuple[str, ...] = (),
    variable: str | None = "",
    repeatable: bool = False,
    least_s: float = 0.0,
) -> Option:
    """Make the row of a ``TrainOptions`` field; field and variable follow from the long flag unless given."""
    words = tuple(flags.split())
    stem = words[-1][2:].replace("-", "_")
    field = field or stem
    return Option(
        flags=words,
        field=field,
        kind=kind,
        default=_DEFAULTS[field],
        help=help,
        group=group,
        variable="DISTLAUNCH_" + stem.upper() if variable == "" else variable,
        metavar="|".join(choices) or metavar,
        choices=choices,
        repeatable=repeatable,
        least_s=least_s,
    )


TRAIN_OPTIONS: tuple[Option, ...] = (
    _row(
        "--script",
        "text",
        "script",
        "The training script; options go on until the first other word.",
        metavar="PATH",
        variable=None,
    ),
    _row(
        "-m --module",
        "flag",
        "script",
        "SCRIPT is the name of a module, as with python -m.",
        variable=None,
    ),
    _row(
        "--no-python",
        "flag",
        "script",
        "SCRIPT is a program of its own, not run by Python.",
        variable=None,
    ),
    _row(
        "--num-gpus",
        "count or auto",
        "size",
        "Workers in all, one per GPU; auto is every visible GPU.",
        metavar="N|auto",
    ),
    _row("--gpus-per-node", "count", "size", "Workers on each node, one per GPU.", metavar="N"),
    _row(
        "--num-procs",
        "count",
        "size",
        "CPU workers in all; GPUs are hidden unless --device cuda shares them.",
        metavar="N",
    ),
    _row("--procs-per-node", "count", "size", "CPU workers on each node.", metavar="N"),
    _row("--device", "choice", "size", "What the workers compute on.", choices=("auto", "cuda", "cpu")),
    _row("--gpus", "text", "size", "Which GPUs: indices or UUIDs, in this order.", metavar="0,2|UUID,..."),
    _row(
        "--num-nodes",
        "count or range",
        "nodes",
        "Nodes that take part; MIN:MAX lets nodes come and go.",
        metavar="N|MIN:MAX",
    ),
    _row("--hosts", "text", "nodes", "The hosts, and how many workers each takes.", metavar="a:4,n[01-04]:8,..."),
    _row(
        "--hostfile",
        "text",
        "nodes",
        "The same from a file of Open MPI, Horovod, DeepSpeed, MPICH or PBS.",
        metavar="FILE",
    ),
    _row(
        "--discover",
        "text",
        "nodes",
        "The same from a command that prints HOST or HOST:SLOTS lines.",
        metavar="COMMAND",
    ),
    _row("--include", "text", "nodes", "Only these hosts, or slots of them.", metavar="w0@w1:0,2"),
    _row("--exclude", "text", "nodes", "All but these hosts, or slots of them.", metavar="w0@w1:0,2"),
    _row("--spread", "flag", "nodes", "Deal workers out to the nodes in turn, instead of filling each."),
    _row("--node-rank", "whole", "nodes", "Which of the nodes this machine is, counted from 0.", metavar="N"),
    _row(
        "--source",
        "text",
        "nodes",
        "Who says which nodes there are; flags reads nothing from the environment.",
        metavar="auto|flags|slurm|...",
    ),
    _row("--explain", "flag", "nodes", "Say for each value where it came from, and why others lost."),
    _row("--master-addr", "text", "rendezvous", "Address of rank 0's node for the workers.", metavar="HOST"),
    _row(
        "--master-port",
        "port",
        "rendezvous",
        "Port of rank 0's store; otherwise a free one is held.",
        metavar="PORT",
    ),
    _row(
        "--job-id",
        "text",
        "rendezvous",
        "Name of the job and of its directory.",
        metavar="ID",
        variable="DISTLAUNCH_TRAIN_JOB_ID",
    ),
    _row(
        "--backend",
        "text",
        "backend",
        "The training framework that the workers use.",
        metavar="NAME",
        variable="DISTLAUNCH_TRAIN_BACKEND",
    ),
    _row(
        "-x --env",
        "text",
        "workers",
        "Set a variable for the workers, or pass ours on; may be repeated.",
        metavar="NAME[=VALUE]",
        repeatable=True,
    ),
    _row(
        "--env-file",
        "text",
        "workers",
        "Read NAME=VALUE lines for the workers; may be repeated.",
        metavar="FILE",
        repeatable=True,
    ),
    _row("--workdir", "text", "workers", "The workers' working directory.", metavar="DIR"),
    _row("--python", "text", "workers", "The workers' Python interpreter.", metavar="PATH"),
    _row(
        "--setup",
        "text",
        "workers",
        "Run this in bash -l before the workers, for example a module load.",
        metavar="COMMAND",
    ),
    _row("--bind", "choice", "workers", "Bind each worker to CPUs.", choices=("none", "cores", "numa")),
    _row("--isolate-gpus", "flag", "workers", "Each worker sees only its own GPU, as device 0."),
    _row(
        "--preload",
        "text",
        "workers",
        "Import these once, and fork workers from there at each start.",
        metavar="MODULE,...",
    ),
    _row("--max-restarts", "whole", "failure", "How often the job may be started again.", metavar="N"),
    _row(
        "--restart-window",
        "seconds",
        "failure",
        "Count only the restarts of this last time.",
        metavar="SECONDS",
    ),
    _row(
        "--min-uptime",
        "seconds",
        "failure",
        "A failure before this that would repeat is not retried.",
        metavar="SECONDS",
    ),
    _row("--grace", "seconds", "failure", "Time to save and leave when told to stop.", metavar="SECONDS"),
    _row(
        "--failure-grace",
        "seconds",
        "failure",
        "The same for the others when one worker fails.",
        metavar="SECONDS",
    ),
    _row(
        "--hang-timeout",
        "seconds",
        "failure",
        "End an attempt that shows no sign of life for so long.",
        metavar="SECONDS",
        least_s=LEAST_SILENCE_S,
    ),
    _row("--log-dir", "text", "output", "Where the job's directory is made.", metavar="DIR"),
    _row(
        "--output",
        "text",
        "output",
        "Whose output the console shows; files get all of it.",
        metavar="all|none|RANKS",
    ),
    _row(
        "--format",
        "choice",
        "output",
        "How the console shows it: rich on a terminal, else plain.",
        choices=("rich", "plain", "jsonl"),
    ),
    _row("--quiet", "flag", "output", "None of our own lines, except warnings and errors."),
    _row("--dry-run", "flag", "output", "Print the plan, start nothing.", variable=None),
)
"""Every option of ``train``."""

PLAN_OPTIONS: tuple[Option, ...] = (
    *(option for option in TRAIN_OPTIONS if option.field != "format"),
    Option(
        flags=("--format",),
        field="plan_format",
        kind="choice",
        default="table",
        help="How the plan is printed.",
        group="output",
        variable=None,
        metavar="table|json",
        choices=("table", "json"),
    ),
    Option(
        flags=("--expand",),
        field="expand",
        kind="flag",
        default=False,
        help="With json, repeat for each worker what is the same for all.",
        group="output",
        variable=None,
    ),
)
"""Every option of ``plan``: those of ``train``, with a ``--format`` of its own."""


def option_error(source: str, message: str, *, hint: str | None = None) -> ConfigError:
    """Make the error for a setting: a UsageError where ``source`` is a flag, a ConfigError where it is a variable."""
    kind = UsageError if source.startswith("-") else ConfigError
    return kind(f"{source} {message}", hint=hint)


def convert(option: Option, text: str, source: str) -> object:
    """Turn the text of a setting into the field's value; ``source`` (flag or variable) is named in errors."""
    match option.kind:
        case "text":
            if not text:
                raise option_error(source, f"needs a value ({option.metavar}), and got an empty one")
            return text
        case "count":
            return _whole(text, source, least=1, most=MOST_COUNTED)
        case "count or auto":
            return "auto" if text == "auto" else _whole(text, source, least=1, most=MOST_COUNTED, also=" or 'auto'")
        case "count or range":
            return _count_or_range(text, source)
        case "whole":
            return _whole(text, source, least=0, most=MOST_COUNTED)
        case "port":
            return _whole(text, source, least=1, most=65535)
        case "seconds":
            return _seconds(text, source, least_s=option.least_s)
        case "choice":
            if text not in option.choices:
                listed = ", ".join(option.choices[:-1]) + " or " + option.choices[-1]
                raise option_error(source, f"takes {listed}, not {quoted(text)}")
            return text
        case "flag":
            value = _WORDS.get(text.lower())
            if value is None:
                raise option_error(source, f"takes 1, true, yes, on or 0, false, no, off, not {quoted(text)}")
            return value


def _whole(text: str, source: str, *, least: int, most: int, also: str = "") -> int:
    """Read a whole number written in plain digits: no sign, no underscore, no other script's digits."""
    if not (text.isascii() and text.isdigit()):
        raise option_error(source, f"takes a whole number >= {least}{also}, not {quoted(text)}")
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)) or int(digits) > most:
        raise option_error(source, f"takes a whole number of at most {most}{also}, not {quoted(text)}")
    if int(digits) < least:
        raise option_error(source, f"takes a whole number >= {least}{also}, not {quoted(text)}")
    return int(digits)


def _count_or_range(text: str, source: str) -> int | tuple[int, int]:
    """Read ``4`` or ``2:4``; of the latter both ends, or one number if they are the same."""
    least, colon, most = text.partition(":")
    if not colon:
        return _whole(text, source, least=1, most=MOST_COUNTED, also=" or MIN:MAX")
    ends = [_whole(end, source, least=1, most=MOST_COUNTED, also=" on both sides of MIN:MAX") for end in (least, most)]
    if ends[0] > ends[1]:
        raise option_error(source, f"takes MIN:MAX, and in {quoted(text)} the first is the larger")
    return ends[0] if ends[0] == ends[1] else (ends[0], ends[1])


def _seconds(text: str, source: str, *, least_s: float) -> float:
    """Read a time: digits with at most one point, then nothing or a unit (s, m, h)."""
    unit_s = _UNITS_S.get(text[-1:])
    number = text if unit_s is None else text[:-1]
    whole, _, fraction = number.partition(".")
    digits = whole + fraction
    if not (digits.isascii() and digits.isdigit()):
        raise option_error(source, f"takes a time >= 0 like 30, 2.5, 30s, 5m or 2h, not {quoted(text)}")
    value_s = float(number) * (unit_s or 1.0)
    if value_s > LONGEST_S:
        raise option_error(source, f"takes a time of at most {LONGEST_S:.0f} seconds, not {quoted(text)}")
    if value_s < least_s:
        raise option_error(
            source,
            f"takes a time of at least {least_s:g} seconds, not {quoted(text)}",
            hint="it is off where it is not set",
        )
    return value_s
