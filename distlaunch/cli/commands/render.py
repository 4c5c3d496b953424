"""The command ``render``: its options, and writing the file or printing it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from distlaunch.backends.base import option_name
from distlaunch.backends.registry import backend_names, find_backend
from distlaunch.cli import parser
from distlaunch.cli.option import Absence, Kind, Option, Spelling
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import defaults_of, fields_of
from distlaunch.core.model.text import printable, quoted
from distlaunch.planning.train_options import TrainOptions
from distlaunch.render.request import RenderOptions, RenderRequest, Target

TARGETS: tuple[Target, ...] = ("slurm", "kubernetes", "pytorchjob", "trainjob")
_PODS: tuple[Target, ...] = ("kubernetes", "pytorchjob", "trainjob")
_EVERYWHERE: tuple[Target, ...] = ("slurm", *_PODS)
_DEFAULTS = defaults_of(RenderOptions)
_SUFFIXES = (".sh", ".sbatch", ".slurm", ".yaml", ".yml", ".json")
"""Suffixes of files that ``render`` writes."""


def _make_row(
    flags: str,
    kind: Kind,
    targets: Sequence[Target],
    help: str,  # noqa: A002 - named as the field that it fills
    metavar: str,
    *,
    unset: str = "",
    repeatable: bool = False,
    variable: bool = True,
) -> Option:
    words = tuple(flags.split())
    field = words[-1][2:].replace("-", "_")
    elsewhere = Absence(
        why="it has no meaning there", hint=f"it is for render {', '.join(targets)}"
    )
    return Option(
        flags=words,
        field=field,
        kind=kind,
        default=_DEFAULTS[field],
        help=help,
        group="render",
        variable=f"DISTLAUNCH_RENDER_{field.upper()}" if variable else None,
        metavar=metavar,
        unset=unset,
        repeatable=repeatable,
        absent={target: elsewhere for target in TARGETS if target not in targets},
    )


_ROWS = (
    _make_row(
        "--out",
        "text",
        _EVERYWHERE,
        "Write to this file instead of stdout. -o FILE does the same if FILE has no =.",
        "FILE",
        variable=False,
        unset="stdout",
    ),
    _make_row(
        "--force",
        "flag",
        _EVERYWHERE,
        "Replace the file if it exists with other content.",
        "",
        variable=False,
    ),
    _make_row(
        "--name",
        "text",
        _EVERYWHERE,
        "Name of the job.",
        "NAME",
        unset="the name of the script",
    ),
    _make_row(
        "--time",
        "text",
        _EVERYWHERE,
        "Time limit of the job; under Slurm, of each turn. A number alone is in "
        "minutes, as for sbatch.",
        "120|90m|12h|D-HH:MM:SS",
        unset="the cluster's limit",
    ),
    _make_row(
        "--usr1-before",
        "seconds",
        ("slurm",),
        "Send USR1 to the workers this long before the time limit, so that they can save.",
        "SECONDS",
        unset="60 s, or --grace and 30 s, but at most half of --time",
    ),
    _make_row(
        "--cpus-per-task --cpus",
        "count",
        _EVERYWHERE,
        "Number of CPUs on each node.",
        "N",
        unset="under Slurm all CPUs of the node, in a pod no request",
    ),
    _make_row(
        "--memory",
        "text",
        _EVERYWHERE,
        "Memory on each node.",
        "64Gi",
        unset="the cluster's choice",
    ),
    _make_row(
        "--exclusive",
        "flag",
        ("slurm",),
        "Request whole nodes.",
        "",
        unset="on, unless --cpus is given",
    ),
    _make_row(
        "--partition",
        "text",
        ("slurm",),
        "Slurm partition.",
        "NAME",
        unset="the cluster's choice",
    ),
    _make_row(
        "--account",
        "text",
        ("slurm",),
        "Slurm account that is charged.",
        "NAME",
        unset="the user's default account",
    ),
    _make_row(
        "--image",
        "text",
        _PODS,
        "Container image with Python, distlaunch and the script.",
        "NAME",
        unset="none; required",
    ),
    _make_row(
        "--namespace",
        "text",
        _PODS,
        "Kubernetes namespace of the objects.",
        "NAME",
        unset="kubectl's current namespace",
    ),
    _make_row("--gpus-resource", "text", _PODS, "Resource name of the cluster's GPUs.", "NAME"),
    _make_row("--efa", "count", _PODS, "Number of EFA interfaces of each pod (AWS).", "N"),
    _make_row(
        "--shm",
        "text",
        _PODS,
        "Size limit of /dev/shm.",
        "16Gi",
        unset="the pod's memory",
    ),
    _make_row(
        "--pvc",
        "text",
        _PODS,
        "Mount this PersistentVolumeClaim at PATH. May be repeated.",
        "NAME:PATH",
        repeatable=True,
        unset="none",
    ),
    _make_row(
        "--token-secret",
        "text",
        _PODS,
        "Secret whose key token holds the secret that the launchers share.",
        "NAME",
        unset="none",
    ),
    _make_row(
        "--queue",
        "text",
        _PODS,
        "Kueue queue of the job.",
        "NAME",
        unset="none",
    ),
    _make_row(
        "--runtime", "text", ("trainjob",), "ClusterTrainingRuntime of the TrainJob.", "NAME"
    ),
)

ALL_OPTIONS: tuple[Option, ...] = (*TRAIN_OPTIONS, *_ROWS)


def options_of(target: Target) -> tuple[Option, ...]:
    """Return the options of one file format."""
    return (*TRAIN_OPTIONS, *(option for option in _ROWS if target not in option.absent))


def parse_render(
    target: Target, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[TrainOptions, RenderOptions]:
    """Parse the arguments of ``distlaunch render TARGET``.

    Raises UsageError, and ConfigError for an option of train that does not apply to this file
    format.
    """
    given, rest = parser.scan(
        argv, ALL_OPTIONS, unknown=_refuse_option_of_sbatch if target == "slurm" else None
    )
    _refuse_foreign(target, given)
    options, more = _split_options(parser.build(given, rest, environ, options_of(target)))
    _refuse_absent(target, options)
    return options, more


def _refuse_option_of_sbatch(
    flag: str, word: str, by_flag: Mapping[str, Spelling], given: parser.Given, rest: Sequence[str]
) -> NoReturn:
    from distlaunch.cli.suggestions import is_sbatch_option, replace_sbatch_option

    if is_sbatch_option(flag):
        raise UsageError(
            f"unknown option {quoted(flag)}",
            hint=f"give it to sbatch: sbatch {flag} ... FILE; options of sbatch win over the file",
        )
    if (instead := replace_sbatch_option(flag)) is None:
        parser.refuse_unknown(flag, word, by_flag, given, rest)
    raise UsageError(
        f"unknown option {quoted(flag)}",
        hint=f"{instead}; or give it to sbatch: sbatch {flag} ... FILE",
    )


def _refuse_foreign(target: Target, fields: Mapping[str, object]) -> None:
    for option in _ROWS:
        if option.field in fields and (absence := option.absent.get(target)) is not None:
            raise UsageError(f"{option.name} has no meaning in render {target}", hint=absence.hint)


def _refuse_absent(target: Target, options: TrainOptions) -> None:
    for option in TRAIN_OPTIONS:
        if (absence := option.absent.get(target)) is not None and _is_set(option, options):
            raise ConfigError(
                f"{options.named(option.field)} cannot be rendered: {absence.why}",
                hint=absence.hint or "leave it out",
            )


def _split_options(values: dict[str, Any]) -> tuple[TrainOptions, RenderOptions]:
    """Split the options into those of train and those of render.

    A value of ``-o`` without ``=`` is the name of the file, unless the backend has such an option.
    Raises UsageError if several files are named, or for an option that the backend lacks.
    """
    own = fields_of(RenderOptions)
    backend = values.get("backend", TrainOptions().backend)
    more = {field: value for field, value in values.items() if field in own}
    named = _backend_names(backend)
    for word in values.get("opt", ()):
        if named and "=" in word and option_name(word) not in named and _is_file_name(word):
            raise UsageError(
                f"-o {quoted(word)}: {backend} has no option {quoted(word.partition('=')[0])}",
                hint=f"if it is the file to write: --out {quoted(word)}",
            )
    files = [
        word for word in values.get("opt", ()) if "=" not in word and option_name(word) not in named
    ]
    if files:
        values = {**values, "opt": tuple(word for word in values["opt"] if word not in files)}
        if not values["opt"]:
            values["given"] = {
                field: who for field, who in values["given"].items() if field != "opt"
            }
        files = list(dict.fromkeys([*files, *([more["out"]] if "out" in more else [])]))
        if len(files) > 1:
            raise UsageError(
                f"-o {quoted(files[0])} and -o {quoted(files[1])} are two files",
                hint="render writes one: give one",
            )
        more["out"] = files[0]
    return TrainOptions(
        **{field: value for field, value in values.items() if field not in own}
    ), RenderOptions(**more)


def _is_file_name(word: str) -> bool:
    return "/" in word.partition("=")[0] or word.endswith(_SUFFIXES)


def _backend_names(backend: object) -> set[str]:
    if backend not in backend_names():
        return set()
    return {option.name for option in find_backend(str(backend)).options()}


def render_file(target: Target, options: TrainOptions, more: RenderOptions) -> int:
    """Print the file, or write it to ``--out``. Return the exit code.

    Raises ConfigError if the options cannot be rendered or the file cannot be written.
    """
    from distlaunch.render.targets import render

    request = RenderRequest(target=target, train=options, more=more, words=spell(options))
    text = render(request)
    data = text.encode(errors="surrogateescape")
    if more.out is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        _write_file(more.out, data, replace=more.force)
        sys.stderr.write(f"distlaunch: {printable(os.path.abspath(more.out))} is written\n")
    if (divided := _divided_total(request)) is not None:
        sys.stderr.write(f"distlaunch: {divided}\n")
    if target == "slurm" and (missing := _missing_script(options)) is not None:
        sys.stderr.write(f"distlaunch: {missing}\n")
    return 0


def _divided_total(request: RenderRequest) -> str | None:
    """Return a notice if a total was divided among nodes: launchers that start on each node take
    the number of one node."""
    from distlaunch.render.shape import job_shape

    options = request.train
    if options.gpus_per_node is not None or options.procs_per_node is not None:
        return None
    shape = job_shape(request)
    if shape.max_nodes == 1 or shape.workers == 1:
        return None
    total, each, workers = (
        (Opt.NUM_GPUS, Opt.GPUS_PER_NODE, "GPUs")
        if shape.gpus
        else (Opt.NUM_PROCS, Opt.PROCS_PER_NODE, "workers")
    )
    number = shape.workers * shape.max_nodes
    return (
        f"{total(number)} is the number of the whole job: {shape.workers} {workers} on each of "
        f"{shape.max_nodes} nodes. For {number} on each node, give {each(number)}."
    )


def _write_file(path: str, data: bytes, *, replace: bool) -> None:
    """Write the file. Raises ConfigError if a regular file with other content exists, unless
    ``replace``."""
    try:
        if not replace and os.path.isfile(path) and not _has_content(path, data):
            raise ConfigError(
                f"--out {quoted(path)}: the file exists, and has other content",
                hint="--force replaces it; without --out the new file goes to stdout, to compare",
            )
        with open(path, "wb") as file:
            file.write(data)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a name of a file has no NUL"
        raise ConfigError(f"--out {quoted(path)}: {reason}") from error


def _has_content(path: str, data: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(data) + 1) == data


def _missing_script(options: TrainOptions) -> str | None:
    """Return a notice if the script is not here: a batch script is mostly submitted on the machine
    where it was rendered. Else return None."""
    from distlaunch.launch.script_source import missing_script

    missing = missing_script(options, os.getcwd())
    return missing and f"{missing}; the job needs it where it is submitted"


Spelled = tuple[str, tuple[str, ...]]
"""The field of an option, and the words that set it."""


def spell(options: TrainOptions) -> tuple[Spelled, ...]:
    """Return each option that is set, in the order of the table.

    Includes options set by variables; excludes SCRIPT and its arguments. Parsing the words gives
    the same options again.
    """
    chosen = [option for option in TRAIN_OPTIONS if option.field != "script"]
    return tuple(
        (option.field, _option_words(option, options))
        for option in chosen
        if _is_set(option, options)
    )


def _is_set(option: Option, options: TrainOptions) -> bool:
    value: object = getattr(options, option.field)
    return value != option.default or (
        option.field in options.given and not (option.kind == "flag" and not value)
    )


def _option_words(option: Option, options: TrainOptions) -> tuple[str, ...]:
    value: object = getattr(options, option.field)
    if option.kind == "flag":
        return (option.name if value else option.negation or option.name,)
    if option.repeatable and isinstance(value, Sequence):
        return tuple(f"{option.name}={each}" for each in value)
    return (f"{option.name}={_option_text(value)}",)


def _option_text(value: object) -> str:
    """Return a value as the text of an option: ``0.5``; ``2:4`` for a range. Raises ConfigError for
    another kind of value."""
    match value:
        case int() | str():
            return str(value)
        case float():
            # Never with an exponent, which no option takes.
            return f"{value:.9f}".rstrip("0").rstrip(".")
        case (least, most):
            return (
                _option_text(least)
                if least == most
                else f"{_option_text(least)}:{_option_text(most)}"
            )
        case _:
            raise ConfigError(f"{value!r} cannot be written as an option")
