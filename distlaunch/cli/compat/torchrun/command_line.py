"""Parse the command line of ``distlaunch torchrun`` up to the script, as torchrun does.

Names may have dashes or underscores, short flags may be joined, long names may be abbreviated, and
defaults come from PET_<OPTION>. Unlike in torchrun, words after the script are never options of the
launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from distlaunch.cli.compat.torchrun.options import OPTIONS, TorchrunOption
from distlaunch.cli.option import MOST_COUNTED, Spelling, option_error, read_choice, read_switch
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.cli.parser import Given, scan
from distlaunch.core.errors import UsageError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import quoted

_PORTS = 65535
_ACCELERATORS = ("auto", "cpu", "gpu", "xpu")


class Parsed(Record):
    """A parsed command line. ``values`` has all options by field, ``given`` those on the command
    line, ``sources`` the flag or variable of each value."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    given: tuple[TorchrunOption, ...]
    script: str
    script_args: tuple[str, ...]


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Parse the arguments of ``torchrun``.

    Raises UsageError for the command line, ConfigError for a variable, and HelpRequested.
    """
    texts, rest = scan(
        argv,
        OPTIONS,
        abbreviated=OPTIONS,
        drops_dashes=True,
        dashed_values=False,
        unknown=_refuse_unknown,
    )
    if not rest:
        raise UsageError("SCRIPT is missing", hint="distlaunch torchrun [OPTIONS] SCRIPT [ARGS]...")
    if not rest[0]:
        raise UsageError("SCRIPT is an empty word")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in OPTIONS:
        field, text = option.field, option.default
        sources[field] = option.name
        if field in texts:
            text = texts[field][-1]
        elif environ.get(option.variable):
            text, sources[field] = environ[option.variable], option.variable
        elif not text:
            values[field] = False if option.kind == "flag" else None
            continue
        values[field] = convert(option, text, sources[field])
    given = tuple(option for option in OPTIONS if option.field in texts)
    return Parsed(
        values=values, sources=sources, given=given, script=rest[0], script_args=tuple(rest[1:])
    )


def _refuse_unknown(
    flag: str, word: str, by_flag: Mapping[str, Spelling], given: Given, rest: Sequence[str]
) -> NoReturn:
    del by_flag, given, rest
    if word[1] == "-":
        flag = word.partition("=")[0]
    elif word.startswith(flag):  # a long name with one dash
        flag = word
    from difflib import get_close_matches

    name = flag.lstrip("-").partition("=")[0].replace("_", "-")
    place = "options of the script go after SCRIPT"
    ours = next((option for option in TRAIN_OPTIONS if option.name == "--" + name), None)
    near = get_close_matches(name, [option.name[2:] for option in OPTIONS], n=1, cutoff=0.7)
    absence = None if ours is None else ours.absent.get("torchrun")
    if ours is not None and absence is None:
        hint = f"{ours.name} is train's; here it is the variable {ours.variable}"
    elif ours is not None and absence is not None and absence.instead:
        hint = f"{ours.name} is train's; here it is {absence.instead}"
    elif name in ("num-workers", "workers", "num-processes"):
        hint = f"did you mean --nproc-per-node? {place}"
    elif absence is not None and absence.hint:
        hint = absence.hint
    elif near:
        hint = f"did you mean --{near[0]}? {place}"
    elif ours is not None:
        hint = f"{ours.name} is an option of distlaunch train, not of torchrun"
    else:
        hint = f"{place}; distlaunch torchrun --help lists ours"
    raise UsageError(f"unknown option {quoted(flag)}", hint=hint)


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each unknown PET_ variable whose name is almost that of an option's
    variable."""
    known = {option.variable for option in OPTIONS}
    others = sorted(name for name in environ if name.startswith("PET_") and name not in known)
    if not others:
        return []
    from difflib import get_close_matches

    nearest = {name: get_close_matches(name, sorted(known), n=1, cutoff=0.85) for name in others}
    return [
        f"the variable {quoted(name)} changes nothing: did you mean {near[0]}?"
        for name, near in nearest.items()
        if near
    ]


def convert(option: TorchrunOption, text: str, source: str) -> object:
    """Return the value of an option for a text. An empty text of the kind ``text`` gives None.

    ``source`` is the flag or variable. Raises UsageError or ConfigError.
    """
    match option.kind:
        case "text":
            return text or None
        case "flag":
            return read_switch(text.strip(), source)
        case "whole":
            return _read_whole(text, source, most=MOST_COUNTED)
        case "port":
            return _read_whole(text, source, most=_PORTS)
        case "number":
            return _read_number(text, source)
        case "choice":
            return read_choice(text, option.choices, source)
        case "nodes":
            return _read_nodes(text, source)
        case "workers":
            if text in _ACCELERATORS:
                return text
            hint = "gpu counts CUDA and ROCm devices" if text in ("cuda", "rocm", "hip") else None
            return _read_whole(
                text, source, least=1, most=MOST_COUNTED, also=", auto, cpu, gpu or xpu", hint=hint
            )
        case "streams":
            return _read_streams(text, source)
        case "ranks":
            ranks = [_read_digits(part.strip(), most=MOST_COUNTED) for part in text.split(",")]
            if None in ranks:
                raise option_error(source, f"takes local ranks such as 0,1,2, not {quoted(text)}")
            return frozenset(ranks)
        case "list":
            return tuple(
                part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part
            )


def _read_whole(
    text: str, source: str, *, most: int, least: int = 0, also: str = "", hint: str | None = None
) -> int:
    number = _read_digits(text.strip(), most=most)
    if number is None or number < least:
        raise option_error(
            source,
            f"takes a whole number from {least} to {most}{also}, not {quoted(text)}",
            hint=hint,
        )
    return number


def _read_digits(text: str, *, most: int) -> int | None:
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    return number if len(digits) <= len(str(most)) and (number := int(digits)) <= most else None


def _read_number(text: str, source: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise option_error(source, f"takes a number of seconds >= 0, not {quoted(text)}")
    return value


def _read_nodes(text: str, source: str) -> tuple[int, int]:
    parts = [_read_digits(part.strip(), most=MOST_COUNTED) for part in text.split(":")]
    least, most = parts[0], parts[-1]
    if len(parts) > 2 or least is None or most is None:
        raise option_error(source, f"takes N or MIN:MAX, not {quoted(text)}")
    if not 0 < least <= most:
        raise option_error(source, f"takes MIN:MAX with 0 < MIN <= MAX, not {quoted(text)}")
    return least, most


def _read_streams(text: str, source: str) -> Mapping[int, int] | int:
    """Parse ``3``, or ``0:3,12:1`` by local rank: 1 stdout, 2 stderr, 3 both.

    Raises UsageError or ConfigError.
    """
    if text in ("0", "1", "2", "3"):
        return int(text)
    by_rank: dict[int, int] = {}
    for part in text.split(","):
        word, colon, value = part.partition(":")
        rank = _read_digits(word, most=MOST_COUNTED)
        if not colon or value not in ("0", "1", "2", "3") or rank is None:
            raise option_error(
                source,
                "takes 0 (neither), 1 (stdout), 2 (stderr), 3 (both), or local ranks with these: "
                "0:3,12:1; "
                f"not {quoted(text)}",
            )
        by_rank[rank] = int(value)
    return by_rank
