"""Select the environment that workers inherit, read --env and --env-file, and check lengths.

No I/O: the texts of the files are facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.model.variables import DEVICE_MASKS, SET_FOR_WORKERS, without_outer_launchers
from distlaunch.planning.facts import Facts
from distlaunch.planning.train_options import TrainOptions

MOST_BYTES = 131_071
"""Limit of one argument or one variable (NAME=VALUE): MAX_ARG_STRLEN of execve(2), less the NUL."""
_FOR_EACH = 1 + 8
"""Additional bytes of each variable and argument: a NUL and a pointer."""


def base_environment(facts: Facts) -> dict[str, str]:
    """Return the environment that workers inherit: the launcher's, without variables of a launcher
    that has started it as a worker."""
    return without_outer_launchers(facts.environ)


def given_environment(options: TrainOptions, facts: Facts) -> dict[str, str]:
    """Return the variables of --env-file and --env. --env wins.

    ``--env NAME`` takes the launcher's value. Raises ConfigError with the option, or file and line.
    """
    given: dict[str, str] = {}
    for path in options.env_file:
        given.update(_parse_file(path, facts.texts[path]))
    for item in options.env:
        name, equals, value = item.partition("=")
        _check_name(name, Opt.ENV(name or item))
        if not equals:
            if name not in facts.environ:
                raise ConfigError(
                    f"{Opt.ENV(name)}: not set in this environment",
                    hint=f"give a value: {Opt.ENV(f'{name}=VALUE')}",
                )
            value = facts.environ[name]
        given[name] = value
    return given


def option_of(name: str, options: TrainOptions) -> str:
    """Return the option or the file that set a variable, for messages."""
    by_word = any(item.partition("=")[0] == name for item in options.env)
    return Opt.ENV(name) if by_word else f"{name} in {printable(' or '.join(options.env_file))}"


def byte_length(text: str) -> int:
    """Return the length of ``text`` in bytes, as the kernel counts."""
    return len(text.encode(errors="replace"))  # a surrogate stands for one byte


def check_length(
    name: str,
    value: str,
    who: str,
    *,
    hint: str = "put it into a file, and the file's name into the variable",
) -> None:
    """Raise ConfigError if a variable is too long for any program to start.

    ``who`` is the option or file that sets it.
    """
    length = byte_length(f"{name}={value}")
    if length > MOST_BYTES:
        raise ConfigError(
            f"{who}: it has {length:,} bytes, but Linux limits a variable (NAME=VALUE) to "
            f"{MOST_BYTES:,}",
            hint=hint,
        )


def check_total(environment: Mapping[str, str], argv: Sequence[str], most: int) -> None:
    """Raise ConfigError if all variables and arguments have more than ``most`` bytes, the limit of
    execve."""
    words = (*(f"{name}={value}" for name, value in environment.items()), *argv)
    total = sum(byte_length(word) + _FOR_EACH for word in words)
    if total > most:
        shown = [(len(value), printable(name)) for name, value in environment.items()]
        shown += [(len(word), f"the argument {quoted(word)}") for word in argv]
        longest = [each for _, each in sorted(shown, reverse=True)[:3]]
        raise ConfigError(
            f"the workers' variables and arguments are {total:,} bytes, the limit is {most:,}",
            hint=f"the longest are {', '.join(longest)}; ulimit -s raises the limit",
        )


def _parse_file(path: str, text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        entry = entry.removeprefix("export ").lstrip()
        name, equals, value = entry.partition("=")
        where = f"{path}:{number}"
        if not equals:
            raise ConfigError(f"{where}: expected NAME=VALUE, found {name[:40]!r}")
        name = name.strip()
        _check_name(name, where)
        if "\0" in value:
            raise ConfigError(
                f"{where}: the value of {name} holds a NUL byte, which no variable can"
            )
        values[name] = _unquote(value.strip())
    return values


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def _check_name(name: str, where: str) -> None:
    if (
        not name
        or not (name[0].isalpha() or name[0] == "_")
        or not name.replace("_", "a").isalnum()
        or not name.isascii()
    ):
        raise ConfigError(
            f"{where}: {name!r} is not a variable name",
            hint="letters, digits and _ only, not starting with a digit",
        )
    if name in DEVICE_MASKS:
        raise ConfigError(
            f"{where}: {name} is set for each worker",
            hint=f"choose devices with {Opt.GPUS}, or set it outside",
        )
    if name in SET_FOR_WORKERS:
        raise ConfigError(
            f"{where}: {name} is set by distlaunch for each worker and cannot be given"
        )


def unless_set(defaults: Mapping[str, str], *layers: Mapping[str, str]) -> dict[str, str]:
    """Return those of ``defaults`` that no layer has."""
    return {
        name: value
        for name, value in defaults.items()
        if not any(name in layer for layer in layers)
    }
