"""``-o NAME=VALUE`` as a backend's own table of options understands it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from distlaunch.backends.base import BackendOption, Value, option_name
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import printable, quoted

if TYPE_CHECKING:
    from distlaunch.planning.train_options import TrainOptions

_SWITCH = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_MOST = 1 << 40
_ADDRESS = "address"


def given_words(
    options: TrainOptions, known: Sequence[BackendOption], backend: str
) -> tuple[str, ...]:
    """Return the words of ``-o``, with ``--address`` as one of them.

    Where the two differ, one on the command line wins over one from the environment. Raises
    ConfigError for two on the same side, and for an address where the backend has no option of this
    name.
    """
    if options.address is None:
        return options.opt
    named = options.named("address")
    if all(option.name != _ADDRESS for option in known):
        raise ConfigError(
            f"{named} {quoted(options.address)}: --backend {backend} connects to no cluster",
            hint="it names the Ray cluster of --backend ray; --hosts names machines to reach by "
            "SSH",
        )
    word = f"{_ADDRESS}={options.address}"
    others = [
        each
        for each in options.opt
        if option_name(each) == _ADDRESS and each.partition("=")[2] != options.address
    ]
    if not others:
        return (*options.opt, word)
    typed, other_typed = named.startswith("-"), options.named("opt").startswith("-")
    if typed == other_typed:
        raise ConfigError(
            f"{named} {quoted(options.address)} and -o {quoted(others[0])} contradict each other",
            hint="give one of them",
        )
    return (*(each for each in options.opt if each not in others), word) if typed else options.opt


def chosen_options(
    given: Sequence[str], options: Sequence[BackendOption], backend: str
) -> dict[str, Value]:
    """Take the words that were given apart, and convert them. Raises ConfigError that names what
    there is."""
    by_name = {option.name: option for option in options}
    chosen: dict[str, Value] = {}
    texts: dict[str, str] = {}
    for word in given:
        written, equals, text = word.partition("=")
        name = option_name(word)
        option = by_name.get(name)
        if option is None:
            raise ConfigError(
                f"-o {quoted(word)}: {backend} has no option {quoted(written)}",
                hint=_there(name, by_name),
            )
        if not equals:
            if option.kind != "flag":
                raise ConfigError(
                    f"-o {quoted(word)}: a value is missing", hint=f"-o {name}={shape(option)}"
                )
            text = "on"
        value = converted(option, text)
        if value is None:
            near = get_close_matches(text.lower(), option.choices, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else None
            bounds = f", a whole number from 0 to {_MOST}" if option.kind == "count" else ""
            raise ConfigError(
                f"-o {quoted(word)}: {option.name} takes {shape(option)}{bounds}", hint=hint
            )
        if chosen.get(name, value) != value:
            raise ConfigError(
                f"-o {name} is given twice: {printable(texts[name])} and {printable(text)}"
            )
        chosen[name], texts[name] = value, text
    return chosen


def shape(option: BackendOption) -> str:
    """Show what an option takes: ``full|grad``, ``N``, ``FILE``."""
    kinds = {
        "flag": "on|off",
        "count": "N",
        "number": "NUMBER",
        "seconds": "SECONDS",
        "file": "FILE",
        "text": "TEXT",
    }
    return "|".join(option.choices) or option.metavar or kinds[option.kind]


def _there(name: str, by_name: Mapping[str, BackendOption]) -> str:
    from distlaunch.backends.registry import backend_names, find_backend

    others = [
        each
        for each in backend_names()
        if name in {option.name for option in find_backend(each).options()}
    ]
    near = get_close_matches(name, by_name, n=1, cutoff=0.6)
    if others:
        return f"it is an option of --backend {' and '.join(others)}" + (
            f"; here there is {near[0]}" if near else ""
        )
    if near:
        return f"did you mean {near[0]}?"
    return (
        f"there {'is' if len(by_name) == 1 else 'are'} {', '.join(by_name)}"
        if by_name
        else "it has none"
    )


def meant_option(flag: str, backend: str) -> str | None:
    """Return the words of ``-o`` that an option of the launcher's, which it does not have, was most
    likely meant as."""
    from distlaunch.backends.registry import backend_names, find_backend

    if backend not in backend_names():
        return None
    known = {option.name: option for option in find_backend(backend).options()}
    name = option_name(flag.lstrip("-"))
    found = [name] if name in known else get_close_matches(name, known, n=1, cutoff=0.7)
    return f"-o {found[0]}={shape(known[found[0]])}" if found else None


def converted(option: BackendOption, text: str) -> Value | None:
    """Turn a text into the option's value; None if it is none."""
    match option.kind:
        case "choice":
            return next(
                (choice for choice in option.choices if choice.lower() == text.lower()), None
            )
        case "flag":
            return _SWITCH.get(text.lower())
        case "count":
            return (
                int(text)
                if text.isascii() and text.isdigit() and len(text) < 15 and int(text) <= _MOST
                else None
            )
        case "number":
            return _number(text)
        case "seconds":
            return _seconds(text)
        case "text" | "file":
            return text if text and "\0" not in text else None


def _seconds(text: str) -> float | None:
    unit_s = _UNITS_S.get(text[-1:])
    number = _number(text if unit_s is None else text[:-1])
    return None if number is None else number * (unit_s or 1.0)


def _number(text: str) -> float | None:
    """Read a number >= 0, with a decimal point or without."""
    digits = text.replace(".", "", 1)
    return float(text) if digits.isascii() and digits.isdigit() and len(digits) <= 12 else None
