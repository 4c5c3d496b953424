"""Options as words again, as somebody would have typed them."""

from __future__ import annotations

from collections.abc import Sequence

from distlaunch.cli.option import Option
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.core.errors import ConfigError
from distlaunch.planning.train_options import TrainOptions

Spelled = tuple[str, tuple[str, ...]]
"""A field, and the words that set it."""


def spell(options: TrainOptions) -> tuple[Spelled, ...]:
    """Give the words of all options that were set, in the table's order, but for SCRIPT and its arguments.

    Also of those that a variable set. Parsed again, they give the same options.
    """
    chosen = [option for option in TRAIN_OPTIONS if option.field != "script"]
    return tuple((option.field, _words(option, options)) for option in chosen if _is_set(option, options))


def _is_set(option: Option, options: TrainOptions) -> bool:
    value: object = getattr(options, option.field)
    return value != option.default or (option.field in options.given and not (option.kind == "flag" and not value))


def _words(option: Option, options: TrainOptions) -> tuple[str, ...]:
    value: object = getattr(options, option.field)
    if option.kind == "flag":
        return (option.name if value else option.negation or option.name,)
    if option.repeatable and isinstance(value, Sequence):
        return tuple(f"{option.name}={each}" for each in value)
    return (f"{option.name}={_text(value)}",)


def _text(value: object) -> str:
    match value:
        case int() | str():
            return str(value)
        case float():
            # Never with an exponent, which no option takes.
            return f"{value:.9f}".rstrip("0").rstrip(".")
        case (least, most):
            return f"{least}:{most}"
        case _:
            raise ConfigError(f"{value!r} cannot be written as an option")
