"""The parser of command lines, driven by option tables.

It is our own because typer takes longer to load than a worker takes to start. It imports neither re
nor argparse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, cast

from distlaunch.cli.option import Option, Spelling, convert, option_error
from distlaunch.cli.option_table import HELP_FLAGS, PLAN_OPTIONS, TRAIN_OPTIONS
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import quoted
from distlaunch.planning.train_options import TrainOptions

PlanFormat = Literal["table", "json"]
Given = dict[str, list[str]]
"""Texts by field, in the order of the command line. A switch has the text ``1`` or ``0``."""

_GPU_SIZES = ("num_gpus", "gpus_per_node")
_PROC_SIZES = ("num_procs", "procs_per_node")
_HOST_LISTS = ("hosts", "hostfile", "discover")
_OTHER_VARIABLES = ("DISTLAUNCH_TOKEN", "DISTLAUNCH_TEST", "DISTLAUNCH_RENDER")
"""Prefixes of variables that belong neither to options nor to workers."""
_ATTEMPT = "DISTLAUNCH_ATTEMPT"
"""Every worker has it, and so has a launcher started by a worker."""


class HelpRequested(Exception):  # noqa: N818 - not an error: help was asked for before the script
    """The command line asks for the help of the command."""


def parse_train(argv: Sequence[str], environ: Mapping[str, str]) -> TrainOptions:
    """Parse the arguments of ``train``.

    Raises UsageError for the command line, ConfigError for a variable, and HelpRequested.
    """
    given, rest = scan(argv, TRAIN_OPTIONS)
    return TrainOptions(**build(given, rest, environ, TRAIN_OPTIONS))


def parse_plan(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[TrainOptions, PlanFormat, bool]:
    """Parse the arguments of ``plan``. Return the options, the format, and whether ``--expand`` was
    given.

    Raises as ``parse_train``.
    """
    given, rest = scan(argv, PLAN_OPTIONS)
    values = build(given, rest, environ, PLAN_OPTIONS)
    plan_format = cast("PlanFormat", values.pop("plan_format", "table"))
    expand = bool(values.pop("expand", False))
    return TrainOptions(**values), plan_format, expand


Unknown = Callable[[str, str, Mapping[str, Spelling], Given, Sequence[str]], NoReturn]
"""Raises UsageError for an unknown flag. Gets the flag, the word that contains it, the command's
options by flag, the options before it, and the words after it."""


def scan(
    argv: Sequence[str],
    options: Iterable[Spelling],
    *,
    abbreviated: Iterable[Spelling] = (),
    drops_dashes: bool = False,
    dashed_values: bool = True,
    unknown: Unknown | None = None,
) -> tuple[Given, tuple[str, ...]]:
    """Split ``argv`` into the texts of the options before the first positional word or ``--``, and
    the words from there on without that ``--``.

    A word that looks like an option is never the value of the option before it: ``--log-dir
    --quiet`` is an error, ``--log-dir=--quiet`` is not. Raises UsageError and HelpRequested.

    Other launchers' rules: ``abbreviated``: options whose long names may be abbreviated.
    ``drops_dashes``: one ``--`` directly after the script is dropped. ``dashed_values``: words with
    one dash are values, unless they are an option. ``unknown``: raises the error for an unknown
    option.
    """
    by_flag = {flag: option for option in options for flag in option.all_flags}
    long = {flag: option for option in abbreviated for flag in option.flags if flag[1] == "-"}
    given: Given = {}
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return given, tuple(argv[at + 1 :])
        if len(word) < 2 or word[0] != "-":
            dashes = drops_dashes and len(argv) > at + 1 and argv[at + 1] == "--"
            return given, (word, *argv[at + (2 if dashes else 1) :])
        at += 1
        steps = _long_step(word, by_flag, long) if word[1] == "-" else _short_steps(word, by_flag)
        for number, (flag, attached) in enumerate(steps, 1):
            if (
                flag in HELP_FLAGS
                and attached is None
                and (word[1] == "-" or len(word) == number + 1)
            ):
                # -h is the last letter, as in ``-mh``, not the first one, as in ``-hostfile``
                raise HelpRequested
            option = by_flag.get(flag)
            if option is None:
                (unknown or refuse_unknown)(flag, word, by_flag, given, argv[at:])
            if option.kind == "flag":
                if attached is not None:
                    raise UsageError(
                        f"{_name_in_message(flag, option)} takes no value, and got {quoted(attached)}"
                    )
                given[option.field] = ["0" if flag == option.negation else "1"]
                continue
            text = attached
            if text is None:
                after = argv[at] if at < len(argv) else None
                text = _next_value(after, flag, option, by_flag, dashed_values=dashed_values)
                at += 1
            if option.once and given.get(option.field, [text]) != [text]:
                raise UsageError(
                    f"{_name_in_message(flag, option)} is given twice",
                    hint=f"one list has all: {option.name} {given[option.field][0]},{text}",
                )
            if option.repeatable:
                given.setdefault(option.field, []).append(text)
            else:
                given[option.field] = [text]
    return given, ()


def _name_in_message(flag: str, option: Spelling) -> str:
    """Return the flag as the user typed it. The last flag of an option is written as its name."""
    return option.name if flag == option.flags[-1] else flag


Step = tuple[str, str | None]
"""A flag, and the value attached to it, if any."""


def _long_step(
    word: str, by_flag: Mapping[str, Spelling], long: Mapping[str, Spelling]
) -> list[Step]:
    flag, equals, value = word.partition("=")
    dashed = _with_dashes(flag)
    if long and dashed not in by_flag:
        dashed = _with_dashes(whole_name(flag, long))
    return [(dashed, value if equals else None)]


def whole_name(flag: str, options: Mapping[str, Spelling]) -> str:
    """Return the long name that ``flag`` abbreviates, or ``flag`` itself.

    Raises UsageError if several options have this beginning.
    """
    dashed = _with_dashes(flag)
    if dashed in options or dashed == HELP_FLAGS[0]:
        return dashed
    begun = [name for name in (*options, HELP_FLAGS[0]) if name.startswith(dashed)]
    if len({options[name].field if name in options else name for name in begun}) > 1:
        names = [
            _name_in_message(name, options[name]) if name in options else name for name in begun
        ]
        raise UsageError(f"{quoted(flag)} is the beginning of several options: {', '.join(names)}")
    return begun[0] if begun else flag


def _with_dashes(flag: str) -> str:
    return "--" + flag[2:].replace("_", "-")


def _short_steps(word: str, by_flag: Mapping[str, Spelling]) -> list[Step]:
    """Split ``-m``, ``-xNAME=1``, ``-mxNAME=1`` or ``-H=a:2`` into flags and values."""
    name = _one_dash_name(word, by_flag)
    if name is not None:
        return [name]
    steps: list[Step] = []
    for index, letter in enumerate(word[1:], start=2):
        flag, behind = "-" + letter, word[index:]
        option = by_flag.get(flag)
        if option is not None and (option.kind != "flag" or behind[:1] == "="):
            steps.append((flag, behind.removeprefix("=") if behind else None))
            break
        steps.append((flag, None))
        if option is None:
            break
    return steps


def _one_dash_name(word: str, by_flag: Mapping[str, Spelling]) -> Step | None:
    """Read a name with one dash, such as ``-np``, abbreviated, or with a number attached; None for
    another word.

    If the first letter is itself an option, only the complete name is accepted.
    """
    names = {
        flag: each.flags[-1] for flag, each in by_flag.items() if flag[1] != "-" and len(flag) > 2
    }
    if not names:
        return None
    flag, equals, value = word.partition("=")
    if flag in names:
        return names[flag], value if equals else None
    if flag[:2] in by_flag or flag in HELP_FLAGS:
        return None
    begun = {names[name] for name in names if name.startswith(flag)}
    if len(begun) == 1:
        return begun.pop(), value if equals else None
    for begin, name in names.items():
        if flag.startswith(begin) and flag[len(begin) :].isdigit() and not equals:
            return name, flag[len(begin) :]
    return None


def _next_value(
    word: str | None,
    flag: str,
    option: Spelling,
    by_flag: Iterable[str],
    *,
    dashed_values: bool,
) -> str:
    """Return the word after an option as its value. Raises UsageError if it is missing or looks
    like an option."""
    name = _name_in_message(flag, option)
    if word is None or word == "--":
        raise UsageError(f"{name} needs a value: {name} {option.metavar}")
    dashed = len(word) > 1 and word[0] == "-" and " " not in word
    is_number = word[1:2].isdigit() or word[1:2] == "."
    if (
        (dashed and (word[1] == "-" or not (dashed_values or is_number)))
        or word in by_flag
        or word in HELP_FLAGS
    ):
        raise UsageError(
            f"{name} needs a value: {name} {option.metavar}",
            hint=f"if {quoted(word)} is that value, write {option.name}={word}"
            if word.isprintable()
            else None,
        )
    return word


def refuse_unknown(
    flag: str, word: str, by_flag: Mapping[str, Spelling], given: Given, rest: Sequence[str]
) -> NoReturn:
    """Raise UsageError for an unknown option.

    The hint names the replacement of another program's option, an option of the backend, or else
    the most similar option.
    """
    from difflib import get_close_matches

    from distlaunch.cli.suggestions import (
        drop_in_note,
        replace_similar_option,
        replace_torchrun_option,
    )

    if flag in HELP_FLAGS:
        flag = word.partition("=")[0]
    script = given.get("script", [None])[-1]
    backend = given.get("backend", [_backend_in(rest)])[-1]
    if script is None:
        place = f"Options of the script go after {Opt.SCRIPT}."
    else:
        place = f"arguments of the script go after `--`: `--script {script} -- {flag} ...`"
    instead = replace_torchrun_option(flag)
    of_backend = None
    if backend is not None and flag[:2] == "--":
        from distlaunch.backends.backend_options import suggest_option

        of_backend = suggest_option(flag, backend)
    if of_backend is not None:
        hint = f"{Opt.BACKEND(backend)} takes it as {of_backend}. {place}"
    elif instead is not None:
        hint = instead + drop_in_note(flag)
        hint = hint if script is None else f"{hint}; {place}"
    elif (other := replace_similar_option(flag)) is not None:
        hint = f"{other}. {place}"
    else:
        # Without the dashes, which would make all short names alike; ``-np`` is a long one with one
        # dash.
        known = {name.lstrip("-"): name for name in sorted(by_flag, reverse=True) if len(name) > 2}
        near = get_close_matches(flag.lstrip("-"), known, n=1, cutoff=0.7)
        hint = place
        if near:
            name = known[near[0]]
            hint = f"did you mean {_name_in_message(name, by_flag[name])}? {place}"
    raise UsageError(f"unknown option {quoted(flag)}", hint=hint)


def _backend_in(words: Sequence[str]) -> str | None:
    """Return the value of ``--backend`` among words that may include words of the script; None if
    it is not there."""
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--backend":
            return value if equals else next(iter(words[place + 1 :]), None)
    return None


def build(
    given: Given, rest: Sequence[str], environ: Mapping[str, str], options: Iterable[Option]
) -> dict[str, Any]:
    """Convert and check the options, add defaults from the environment, and classify SCRIPT.

    Fields that are not set are left out. The key ``given`` has the flag or variable that set each
    field. A size on the command line overrides all sizes in the environment, and a host list all
    other host lists: they would contradict each other. Raises UsageError or ConfigError.
    """
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    dropped = _overridden_fields(given)
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
            f"-m and {Opt.NO_PYTHON} exclude each other", hint="a module needs Python to run it"
        )
    arguments = tuple(rest)
    if "script" not in values:
        if not arguments:
            raise UsageError(
                f"{Opt.SCRIPT} is missing",
                hint=f"it comes after our options: [OPTIONS] {Opt.SCRIPT} [ARGS]...",
            )
        if not arguments[0]:
            raise UsageError(f"{Opt.SCRIPT} is an empty word")
        values["script"], arguments = arguments[0], arguments[1:]
    values["script_args"] = arguments
    values["given"] = source
    return values


def _overridden_fields(given: Given) -> set[str]:
    dropped: set[str] = set()
    if any(field in given for field in (*_GPU_SIZES, *_PROC_SIZES)):
        dropped.update(_GPU_SIZES, _PROC_SIZES)
    if any(field in given for field in _HOST_LISTS):
        dropped.update(_HOST_LISTS, ("source",))
    elif given.get("source", ["auto"])[-1] not in {"auto", "flags"}:
        dropped.update(_HOST_LISTS)
    return dropped


def _split_variable(text: str, variable: str) -> tuple[str, ...]:
    """Split at white space, as a shell does: words may have quotes. Raises UsageError or
    ConfigError."""
    import shlex

    try:
        return tuple(word for word in shlex.split(text) if word)
    except ValueError as exc:
        raise option_error(variable, f"has an unfinished quote: {quoted(text)}") from exc


def _check_sizes(source: Mapping[str, str]) -> None:
    gpu = next((source[field] for field in _GPU_SIZES if field in source), None)
    proc = next((source[field] for field in _PROC_SIZES if field in source), None)
    if gpu is not None and proc is not None:
        kind = UsageError if gpu.startswith("-") else ConfigError
        raise kind(
            f"{gpu} and {proc} exclude each other",
            hint="one worker per GPU, or CPU workers (which share the GPUs with "
            f"{Opt.DEVICE('cuda')})",
        )


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each DISTLAUNCH_ variable that has no effect; most are misspelt.

    This includes variables that workers get, set by a user who means an option.
    """
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
