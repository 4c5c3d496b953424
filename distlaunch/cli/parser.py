"""The parser with which ``train`` and ``plan`` start, made from the option table alone.

Loading typer costs more time than starting a worker does, so the start path does without it (and
without re and argparse). The typer commands in ``ui/cli.py`` check their words with the same
``scan`` and end in the same ``build``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, cast

from distlaunch.cli.option import Option, convert, option_error
from distlaunch.cli.option_table import HELP_FLAGS, PLAN_OPTIONS, TRAIN_OPTIONS
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.text import quoted
from distlaunch.planning.train_options import TrainOptions

PlanFormat = Literal["table", "json"]
Given = dict[str, list[str]]
"""Texts by field, in the order they were given; a switch has one text, as its variable would: ``1``
or ``0``."""

_GPU_SIZES = ("num_gpus", "gpus_per_node")
_PROC_SIZES = ("num_procs", "procs_per_node")
_HOST_LISTS = ("hosts", "hostfile", "discover")
_OTHER_VARIABLES = ("DISTLAUNCH_TOKEN", "DISTLAUNCH_TEST", "DISTLAUNCH_RENDER")
"""First letters of variables that are neither an option's nor the workers'."""
_ATTEMPT = "DISTLAUNCH_ATTEMPT"
"""Every worker has it, and so do the launchers that it starts."""


class HelpRequested(Exception):  # noqa: N818 - not an error: help was asked for before the script
    """The words ask for help, which typer prints."""


def parse_train(argv: Sequence[str], environ: Mapping[str, str]) -> TrainOptions:
    """Parse what follows ``train``. Raises UsageError, ConfigError (a variable is wrong) or
    HelpRequested."""
    given, rest = scan(argv, TRAIN_OPTIONS)
    return TrainOptions(**build(given, rest, environ, TRAIN_OPTIONS))


def parse_plan(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[TrainOptions, PlanFormat, bool]:
    """Parse what follows ``plan``: the options of ``train`` but for ``--format``. Raises as
    ``parse_train``.

    Returned beside them: the plan's own format, and whether ``--expand`` was given.
    """
    given, rest = scan(argv, PLAN_OPTIONS)
    return split_plan(build(given, rest, environ, PLAN_OPTIONS))


def split_plan(values: dict[str, Any]) -> tuple[TrainOptions, PlanFormat, bool]:
    """Take what only ``plan`` has out of the values that ``build`` made of the plan's options."""
    plan_format = cast("PlanFormat", values.pop("plan_format", "table"))
    expand = bool(values.pop("expand", False))
    return TrainOptions(**values), plan_format, expand


def scan(argv: Sequence[str], options: Iterable[Option]) -> tuple[Given, tuple[str, ...]]:
    """Take our options off the front of ``argv``, up to the first positional word or ``--``; return
    both parts.

    A word that looks like an option is never taken for the value of the option before it:
    ``--log-dir --quiet`` is a value forgotten, and ``--log-dir=--quiet`` says that it is not.
    """
    by_flag = {flag: option for option in options for flag in option.all_flags}
    given: Given = {}
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--" or len(word) < 2 or word[0] != "-":
            return given, tuple(argv[at + 1 :] if word == "--" else argv[at:])
        at += 1
        if word[1] == "-":
            flag, equals, value = word.partition("=")
            steps = [(_dashed(flag), value if equals else None)]
        else:
            steps = _short_steps(word, by_flag)
        for number, (flag, attached) in enumerate(steps, 1):
            if (
                flag in HELP_FLAGS
                and attached is None
                and (word[1] == "-" or len(word) == number + 1)
            ):
                # the last letter, as in ``-mh``; not the first of ``-hostfile``
                raise HelpRequested
            option = by_flag.get(flag)
            if option is None:
                refuse_unknown(
                    word.partition("=")[0] if flag in HELP_FLAGS else flag,
                    by_flag,
                    script=given.get("script", [None])[-1],
                    backend=given.get("backend", [_backend_in(argv[at:])])[-1],
                )
            if option.kind == "flag":
                if attached is not None:
                    raise UsageError(f"{flag} takes no value, and got {quoted(attached)}")
                given[option.field] = ["0" if flag == option.negation else "1"]
                continue
            text = attached
            if text is None:
                text = _next_value(argv[at] if at < len(argv) else None, flag, option)
                at += 1
            if option.repeatable:
                given.setdefault(option.field, []).append(text)
            else:
                if option.field in _HOST_LISTS and given.get(option.field, [text]) != [text]:
                    raise UsageError(
                        f"{flag} is given twice",
                        hint=f"one list has all: {option.name} {given[option.field][0]},{text}",
                    )
                given[option.field] = [text]
    return given, ()


def build(
    given: Given, rest: Sequence[str], environ: Mapping[str, str], options: Iterable[Option]
) -> dict[str, Any]:
    """Convert and check what was given, add defaults from the environment, and settle what SCRIPT
    is.

    Returns values by field, without the fields that nobody set, and as ``given`` who set each. A
    size on the command line drops every size that the environment has, and a list of hosts every
    other list: the two together would be a contradiction that the user did not write.
    """
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    dropped = _dropped(given)
    for option in options:
        field = option.field
        if field in given:
            source[field] = option.name
            converted = [convert(option, text, option.name) for text in given[field]]
            values[field] = tuple(converted) if option.repeatable else converted[-1]
        elif option.variable is not None and environ.get(option.variable):
            if field in dropped:
                continue
            source[field] = option.variable
            text = environ[option.variable]
            values[field] = (
                _split_variable(text, option.variable)
                if option.repeatable
                else convert(option, text, option.variable)
            )
    _check_sizes(source)
    if values.get("module") and values.get("no_python"):
        raise UsageError(
            "-m and --no-python exclude each other", hint="a module needs Python to run it"
        )
    arguments = tuple(rest)
    if "script" not in values:
        if not arguments:
            raise UsageError(
                "SCRIPT is missing", hint="it comes after our options: [OPTIONS] SCRIPT [ARGS]..."
            )
        if not arguments[0]:
            raise UsageError("SCRIPT is an empty word")
        values["script"], arguments = arguments[0], arguments[1:]
    values["script_args"] = arguments
    values["given"] = source
    return values


def _dropped(given: Given) -> set[str]:
    """Name the fields whose variables the command line has made void."""
    dropped: set[str] = set()
    if any(field in given for field in (*_GPU_SIZES, *_PROC_SIZES)):
        dropped.update(_GPU_SIZES, _PROC_SIZES)
    if any(field in given for field in _HOST_LISTS):
        dropped.update(_HOST_LISTS, ("source",))
    elif given.get("source", ["auto"])[-1] not in {"auto", "flags"}:
        dropped.update(_HOST_LISTS)
    return dropped


def _dashed(flag: str) -> str:
    """Spell a long option with dashes."""
    return "--" + flag[2:].replace("_", "-")


def _short_steps(word: str, by_flag: Mapping[str, Option]) -> list[tuple[str, str | None]]:
    """Take a word like ``-m`` or ``-xNAME=1`` or ``-mxNAME=1`` apart into flags and an attached
    value."""
    steps: list[tuple[str, str | None]] = []
    for index, letter in enumerate(word[1:], start=2):
        flag = "-" + letter
        option = by_flag.get(flag)
        if option is not None and option.kind != "flag":
            steps.append((flag, word[index:] or None))
            break
        steps.append((flag, None))
        if option is None:
            break
    return steps


def _next_value(word: str | None, flag: str, option: Option) -> str:
    """Take ``word`` as the value of ``flag``, unless there is none or it looks like an option
    itself."""
    if word is None or word == "--":
        raise UsageError(f"{flag} needs a value: {flag} {option.metavar}")
    if (word.startswith("--") and " " not in word) or word in ("-h", "-m", "-x"):
        raise UsageError(
            f"{flag} needs a value: {flag} {option.metavar}",
            hint=f"if {quoted(word)} is that value, write {option.name}={word}"
            if word.isprintable()
            else None,
        )
    return word


def refuse_unknown(
    flag: str, by_flag: Iterable[str], *, script: str | None, backend: str | None = None
) -> NoReturn:
    """Raise for an option that is not ours, naming what stands for torchrun's, else the nearest one
    that is ours.

    ``script``: what ``--script`` named before; arguments of the script then need a ``--`` before
    them. ``backend``: what ``--backend`` names, whose options may be meant.
    """
    from difflib import get_close_matches

    from distlaunch.cli.suggestions import counterpart, meant, taken_as_it_is

    if script is None:
        place = "Options of the script go after SCRIPT."
    else:
        place = f"arguments of the script go after `--`: `--script {script} -- {flag} ...`"
    instead = counterpart(flag)
    of_backend = None
    if backend is not None and flag[:2] == "--":
        from distlaunch.backends.backend_options import meant_option

        of_backend = meant_option(flag, backend)
    if of_backend is not None:
        hint = f"--backend {backend} takes it as {of_backend}. {place}"
    elif instead is not None:
        hint = instead + taken_as_it_is(flag)
        hint = hint if script is None else f"{hint}; {place}"
    elif (other := meant(flag)) is not None:
        hint = f"{other}. {place}"
    else:
        # Without the dashes, which would make all short names alike; ``-np`` is a long one with one
        # dash.
        known = {name.lstrip("-"): name for name in sorted(by_flag, reverse=True) if len(name) > 2}
        near = get_close_matches(flag.lstrip("-"), known, n=1, cutoff=0.7)
        hint = f"did you mean {known[near[0]]}? {place}" if near else place
    raise UsageError(f"unknown option {quoted(flag)}", hint=hint)


def _backend_in(words: Sequence[str]) -> str | None:
    """Give what ``--backend`` names in words that have not been taken apart: the script's own may
    be among them."""
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--backend":
            return value if equals else next(iter(words[place + 1 :]), None)
    return None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that has our prefix and that nobody reads: a misspelt
    option, mostly."""
    known = {option.variable for option in TRAIN_OPTIONS if option.variable is not None}
    ours = [
        name
        for name, value in environ.items()
        if value and name.startswith("DISTLAUNCH_") and name not in known
    ]
    if not ours:
        return []
    from difflib import get_close_matches

    from distlaunch.core.model.variables import SET_FOR_WORKERS

    warnings = []
    for name in sorted(ours):
        option = name.replace("DISTLAUNCH_", "DISTLAUNCH_TRAIN_", 1)
        if name in SET_FOR_WORKERS and option in known and _ATTEMPT not in environ:
            warnings.append(
                f"the variable {quoted(name)} is what workers get, and no option: did you mean "
                f"{option}?"
            )
        elif name not in SET_FOR_WORKERS and not name.startswith(_OTHER_VARIABLES):
            near = get_close_matches(name, sorted(known), n=1, cutoff=0.8)
            ask = f": did you mean {near[0]}?" if near else ""
            warnings.append(
                f"the variable {quoted(name)} is not one of ours and changes nothing{ask}"
            )
    return warnings


def _split_variable(text: str, variable: str) -> tuple[str, ...]:
    """Split the variable of a repeatable option at white space, with a shell's quotes."""
    import shlex

    try:
        return tuple(word for word in shlex.split(text) if word)
    except ValueError as exc:
        raise option_error(variable, f"has an unfinished quote: {quoted(text)}") from exc


def _check_sizes(source: Mapping[str, str]) -> None:
    """Refuse a number of GPUs together with a number of processes."""
    gpu = next((source[field] for field in _GPU_SIZES if field in source), None)
    proc = next((source[field] for field in _PROC_SIZES if field in source), None)
    if gpu is not None and proc is not None:
        kind = UsageError if gpu.startswith("-") else ConfigError
        raise kind(
            f"{gpu} and {proc} exclude each other",
            hint="one worker per GPU, or CPU workers (which share the GPUs with --device cuda)",
        )
