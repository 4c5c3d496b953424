"""The records of options, and the conversion of their texts to values.

Functions that read a text raise UsageError if it is from the command line, and ConfigError if it is
from a variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import near_choices, quoted

Kind = Literal[
    "text",
    "count",
    "count or auto",
    "count or range",
    "whole",
    "size",
    "port",
    "seconds",
    "delay",
    "choice",
    "backend",
    "flag",
]
Group = Literal[
    "script",
    "size",
    "nodes",
    "ssh",
    "slurm",
    "rendezvous",
    "backend",
    "workers",
    "failure",
    "output",
    "render",
    "no effect",
    "refused",
]

Place = Literal[
    "slurm",
    "kubernetes",
    "pytorchjob",
    "trainjob",
    "torchrun",
    "accelerate",
    "deepspeed",
    "horovodrun",
]
"""Commands and file formats to which an option of train may not apply."""

MOST_COUNTED = 1_000_000
LONGEST_S = 1e9
_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


class Absence(Record):
    """Why an option does not apply to a command or file format, and what to use instead."""

    why: str
    hint: str = ""
    instead: str = ""
    """The option or variable with the same effect there."""


class Spelling(Record):
    """The names of an option, and whether it takes a value.

    The last of ``flags`` is the long one, with dashes. Underscores are accepted too. ``kind`` is
    ``flag`` for an option without a value.
    """

    flags: tuple[str, ...]
    field: str
    kind: str
    metavar: str = ""
    repeatable: bool = False
    """Whether all values are kept. Otherwise the last one counts."""
    once: bool = False
    """Whether two different values on one command line are an error."""
    shown: str = ""
    """The name in messages, if not the last of ``flags``."""

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.shown or self.flags[-1]

    @property
    def negation(self) -> str | None:
        """The flag that turns a switch off; None here, for options of other launchers."""
        return None

    @property
    def all_flags(self) -> tuple[str, ...]:
        """All flags of the option, including the negation."""
        return self.flags if self.negation is None else (*self.flags, self.negation)


class Option(Spelling):
    """One row of the option table. ``field`` is the field of ``TrainOptions`` that it sets."""

    kind: Kind
    default: object
    help: str
    group: Group
    variable: str | None
    unset: str = ""
    """What applies if the option is not given, for the help, if ``default`` does not say so."""
    choices: tuple[str, ...] = ()
    least_s: float = 0.0
    """The shortest time that the option accepts."""
    absent: Mapping[Place, Absence] = {}
    """Commands and file formats without this option."""
    unset_at: Mapping[Place, str] = {}
    """``unset`` by command, where it differs."""

    @property
    def negation(self) -> str | None:
        """The flag that turns off a switch which a variable may have turned on: ``--no-quiet``;
        None for other options."""
        return (
            "--no-" + self.flags[-1][2:]
            if self.kind == "flag" and self.variable is not None
            else None
        )


def option_error(source: str, message: str, *, hint: str | None = None) -> ConfigError:
    """Return a UsageError if ``source`` is a flag, a ConfigError if it is a variable."""
    kind = UsageError if source.startswith("-") else ConfigError
    return kind(f"{source} {message}", hint=hint)


def convert(option: Option, text: str, source: str) -> object:
    """Return the value of a field for a text. ``source`` is the flag or variable, for errors.

    Raises UsageError or ConfigError.
    """
    match option.kind:
        case "text":
            if not text:
                raise option_error(
                    source, f"needs a value ({option.metavar}), and got an empty one"
                )
            return text
        case "count":
            return _read_whole(text, source, least=1, most=MOST_COUNTED)
        case "count or auto":
            return (
                "auto"
                if text == "auto"
                else _read_whole(text, source, least=1, most=MOST_COUNTED, also=" or 'auto'")
            )
        case "count or range":
            return _read_count_or_range(text, source)
        case "whole":
            return _read_whole(text, source, least=0, most=MOST_COUNTED)
        case "size":
            return _read_size(text, source)
        case "port":
            return _read_whole(text, source, least=1, most=65535)
        case "seconds":
            default_s = option.default if isinstance(option.default, float) else None
            return _read_seconds(text, source, least_s=option.least_s, default_s=default_s)
        case "delay":
            return _read_delay(text, source)
        case "choice":
            return read_choice(text, option.choices, source)
        case "backend":
            return _read_backend(text, source)
        case "flag":
            return read_switch(text, source)


def read_choice(text: str, choices: tuple[str, ...], source: str) -> str:
    """Return ``text`` if it is in ``choices``. Otherwise raise ``option_error``."""
    if text not in choices:
        listed = ", ".join(choices[:-1]) + " or " + choices[-1]
        near = near_choices(text, choices)
        hint = f"did you mean {near[0]}?" if near else None
        raise option_error(source, f"takes {listed}, not {quoted(text)}", hint=hint)
    return text


def _read_backend(text: str, source: str) -> str:
    """Return a backend's name. Names of our own may have capitals, or underscores for dashes."""
    if not text:
        raise option_error(source, "needs a name, and got an empty one")
    if text.islower() and "_" not in text:
        return text
    from distlaunch.backends.registry import spelled_backend

    return spelled_backend(text)


def read_switch(text: str, source: str) -> bool:
    """Return True or False for a word such as ``yes`` or ``off``. Otherwise raise ``option_error``."""
    value = _WORDS.get(text.lower())
    if value is None:
        raise option_error(
            source, f"takes 1, true, yes, on or 0, false, no, off, not {quoted(text)}"
        )
    return value


def _read_whole(text: str, source: str, *, least: int, most: int, also: str = "") -> int:
    """Read plain digits: no sign, no underscore, no digits of other scripts.

    ``also`` names other forms of the option. Raises UsageError or ConfigError.
    """
    if not (text.isascii() and text.isdigit()):
        raise option_error(source, f"takes a whole number >= {least}{also}, not {quoted(text)}")
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)) or int(digits) > most:
        raise option_error(
            source, f"takes a whole number of at most {most}{also}, not {quoted(text)}"
        )
    if int(digits) < least:
        raise option_error(source, f"takes a whole number >= {least}{also}, not {quoted(text)}")
    return int(digits)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 1 << 50


def _read_size(text: str, source: str) -> int:
    """Return the bytes of a size such as ``64M``."""
    digits = text.rstrip("KMGTkmgtiBb")
    unit = text[len(digits) :].upper().removesuffix("IB").removesuffix("B")
    if unit not in _UNITS or not (digits.isascii() and digits.isdigit()) or len(digits) > 16:
        raise option_error(source, f"takes a size like 64M or 2G, not {quoted(text)}")
    size = int(digits) * _UNITS[unit]
    if not _LEAST_BYTES <= size <= _MOST_BYTES:
        raise option_error(source, f"takes a size from 64K to 1024T, not {quoted(text)}")
    return size


def _read_count_or_range(text: str, source: str) -> int | tuple[int, int]:
    """Read ``4`` or ``2:4``. Equal ends give one number."""
    least, colon, most = text.partition(":")
    if not colon:
        return _read_whole(text, source, least=1, most=MOST_COUNTED, also=" or MIN:MAX")
    ends = [
        _read_whole(end, source, least=1, most=MOST_COUNTED, also=" on both sides of MIN:MAX")
        for end in (least, most)
    ]
    if ends[0] > ends[1]:
        raise option_error(source, f"takes MIN:MAX, and in {quoted(text)} the first is the larger")
    return ends[0] if ends[0] == ends[1] else (ends[0], ends[1])


def _read_delay(text: str, source: str) -> tuple[float, float]:
    """Read ``8:60``, the first and the longest delay in seconds, or ``8``, which is both."""
    first, colon, most = text.partition(":")
    first_s = _read_seconds(first, source, also=" or S:MAX")
    if not colon:
        return first_s, first_s
    most_s = _read_seconds(most, source, also=" on both sides of S:MAX")
    if not 0 < first_s <= most_s:
        raise option_error(source, f"takes S:MAX with 0 < S <= MAX, not {quoted(text)}")
    return first_s, most_s


def _read_seconds(
    text: str,
    source: str,
    *,
    least_s: float = 0.0,
    default_s: float | None = None,
    also: str = "",
) -> float:
    from distlaunch.core.model.duration import read_duration

    value_s = read_duration(text)
    if value_s is None:
        raise option_error(
            source, f"takes a time >= 0 like 30, 2.5, 30s, 5m or 2h{also}, not {quoted(text)}"
        )
    if value_s > LONGEST_S:
        raise option_error(
            source, f"takes a time of at most {LONGEST_S:.0f} seconds, not {quoted(text)}"
        )
    if value_s < least_s:
        raise option_error(
            source,
            f"takes a time of at least {least_s:g} seconds, not {quoted(text)}",
            hint=f"it is {'off' if default_s is None else f'{default_s:g} s'} where it is not set",
        )
    return value_s
