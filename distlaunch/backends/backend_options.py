"""Parse ``-o NAME=VALUE`` with a backend's option table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from distlaunch.backends.base import BackendOption, Value, option_name
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.duration import read_duration
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import near_choices, printable, quoted

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
_MAX_COUNT = 1 << 40
_ADDRESS_OPTION = "address"


def given_options(
    options: TrainOptions, known: Sequence[BackendOption], backend: str
) -> tuple[str, ...]:
    """Return the values of ``-o``, with ``--address`` added as ``address=...`` if it is given.

    If both set different addresses, the command line overrides the environment. Raises ConfigError
    if both are from the same source, or if the backend has no address.
    """
    if options.address is None:
        return options.opt
    named = options.named("address")
    if all(option.name != _ADDRESS_OPTION for option in known):
        raise ConfigError(
            f"{named} {quoted(options.address)}: {Opt.BACKEND(backend)} does not connect to a "
            "cluster",
            hint=f"{Opt.ADDRESS} is for {Opt.BACKEND} ray; for machines that are reached by "
            f"SSH, use {Opt.HOSTS}",
        )
    item = f"{_ADDRESS_OPTION}={options.address}"
    others = [
        each
        for each in options.opt
        if option_name(each) == _ADDRESS_OPTION and each.partition("=")[2] != options.address
    ]
    if not others:
        return (*options.opt, item)
    is_from_command_line, other_is_from_command_line = (
        named.startswith("-"),
        options.named("opt").startswith("-"),
    )
    if is_from_command_line == other_is_from_command_line:
        raise ConfigError(
            f"{named} {quoted(options.address)} and {Opt.OPT(quoted(others[0]))} contradict each "
            "other",
            hint="give one of them",
        )
    return (
        (*(each for each in options.opt if each not in others), item)
        if is_from_command_line
        else options.opt
    )


def chosen_options(
    given: Sequence[str], options: Sequence[BackendOption], backend: str
) -> dict[str, Value]:
    """Parse and convert values of ``-o``.

    Raises ConfigError for an unknown option or an invalid value.
    """
    by_name = {option.name: option for option in options}
    chosen: dict[str, Value] = {}
    texts: dict[str, str] = {}
    for item in given:
        written, equals, text = item.partition("=")
        name = option_name(item)
        option = by_name.get(name)
        if option is None:
            raise ConfigError(
                f"{Opt.OPT(quoted(item))}: {backend} has no option {quoted(written)}",
                hint=_known_options_hint(name, by_name),
            )
        if not equals:
            if option.kind != "flag":
                raise ConfigError(
                    f"{Opt.OPT(quoted(item))}: a value is missing",
                    hint=f"{Opt.OPT} {name}={value_form(option)}",
                )
            text = "on"
        value = convert_value(option, text)
        if value is None:
            near = near_choices(text, option.choices)
            hint = f"did you mean {near[0]}?" if near else None
            bounds = f", a whole number from 0 to {_MAX_COUNT}" if option.kind == "count" else ""
            raise ConfigError(
                f"{Opt.OPT(quoted(item))}: {option.name} takes {value_form(option)}{bounds}",
                hint=hint,
            )
        if chosen.get(name, value) != value:
            raise ConfigError(
                f"{Opt.OPT(name)} is given twice: {printable(texts[name])} and {printable(text)}"
            )
        chosen[name], texts[name] = value, text
    return chosen


def value_form(option: BackendOption) -> str:
    """Return what an option accepts, as in ``full|grad``, ``N`` or ``FILE``."""
    kinds = {
        "flag": "on|off",
        "count": "N",
        "number": "NUMBER",
        "seconds": "SECONDS",
        "file": "FILE",
        "text": "TEXT",
    }
    return "|".join(option.choices) or option.metavar or kinds[option.kind]


def _known_options_hint(name: str, by_name: Mapping[str, BackendOption]) -> str:
    from distlaunch.backends.registry import backend_names, find_backend

    others = [
        each
        for each in backend_names()
        if name in {option.name for option in find_backend(each).options()}
    ]
    near = get_close_matches(name, by_name, n=1, cutoff=0.6)
    if others:
        return f"it is an option of {Opt.BACKEND(' and '.join(others))}" + (
            f"; here there is {near[0]}" if near else ""
        )
    if near:
        return f"did you mean {near[0]}?"
    return (
        f"there {'is' if len(by_name) == 1 else 'are'} {', '.join(by_name)}"
        if by_name
        else "it has no options"
    )


def suggest_option(flag: str, backend: str) -> str | None:
    """Return the ``-o`` that the user probably meant by an unknown option of the launcher; None if
    no option is similar."""
    from distlaunch.backends.registry import backend_names, find_backend

    if backend not in backend_names():
        return None
    known = {option.name: option for option in find_backend(backend).options()}
    name = option_name(flag.lstrip("-"))
    found = [name] if name in known else get_close_matches(name, known, n=1, cutoff=0.7)
    return f"{Opt.OPT} {found[0]}={value_form(known[found[0]])}" if found else None


def convert_value(option: BackendOption, text: str) -> Value | None:
    """Return the option's value for ``text``; None if the text is invalid."""
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
                if text.isascii() and text.isdigit() and len(text) < 15 and int(text) <= _MAX_COUNT
                else None
            )
        case "number":
            return _parse_number(text)
        case "seconds":
            duration_s = read_duration(text)
            return None if duration_s is None or duration_s > _MAX_COUNT else duration_s
        case "text" | "file":
            return text if text and "\0" not in text else None


def _parse_number(text: str) -> float | None:
    digits = text.replace(".", "", 1)
    return float(text) if digits.isascii() and digits.isdigit() and len(digits) <= 12 else None
