"""Typed access to variables that a system sets, with errors that quote name and value. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable, quoted
from distlaunch.planning.allocation import Host, Origin, Unit, ValueName

Environ = Mapping[str, str]
Texts = Mapping[str, str | None]
"""Contents of files by path; None for an unreadable one."""

MOST_HOSTS = 1 << 17
"""Largest number of hosts of a job. A larger one counts as a mistake."""

_HOST_PUNCTUATION = frozenset("._-:%")
_LONGEST_NAME = 255
_JOB_PUNCTUATION = frozenset("._-")
_LONGEST_JOB_ID = 64
T = TypeVar("T")


def ignore_hint() -> str:
    """Return what to do about a variable that means something else."""
    return (
        "if it is left over from something else, unset it, or use "
        f"{Opt.SOURCE('flags')} to read nothing from the environment"
    )


class IncompleteError(ConfigError):
    """Some variables of a system are set, but not all that are required.

    If the variables prove that this launcher is one ``of_several``, this is an error unless another
    system determines the nodes, because each launcher would train alone. Otherwise it is a note,
    and an error only if ``--source`` names this system.
    """

    def __init__(self, message: str, *, hint: str | None = "", of_several: bool = False) -> None:
        super().__init__(message, hint=ignore_hint() if hint == "" else hint)
        self.of_several = of_several


def text(environ: Environ, name: str) -> str | None:
    """Return the stripped value of a variable; None if it is unset or blank."""
    value = environ.get(name)
    return (value.strip() or None) if value is not None else None


def shown(environ: Environ, name: str) -> str:
    """Return a variable and its value for a message: ``RANK='3'`` or ``RANK (not set)``."""
    return f"{name}={quoted(environ[name])}" if name in environ else f"{name} (not set)"


def number(environ: Environ, name: str, *, least: int = 0, most: int = MOST_HOSTS) -> int | None:
    """Return the integer in a variable; None if the variable is unset or blank.

    Raises ConfigError if it is not a number between ``least`` and ``most``.
    """
    value = text(environ, name)
    if value is None:
        return None
    if not (
        value.isascii() and value.isdecimal() and len(value) < 19 and least <= int(value) <= most
    ):
        raise ConfigError(
            f"{shown(environ, name)}: expected a number from {least} to {most}", hint=ignore_hint()
        )
    return int(value)


def needed(
    environ: Environ,
    name: str,
    read: Callable[..., T | None],
    because: str,
    *,
    of_several: bool = False,
    **limits: int,
) -> T:
    """Return the value of a required variable, read by ``read``.

    ``because`` is the variable that makes it required. Raises IncompleteError, which names both, if
    it is not set.
    """
    value = read(environ, name, **limits)
    if value is None:
        raise IncompleteError(
            f"{shown(environ, because)}, but {name} is not set", of_several=of_several
        )
    return value


def is_several(environ: Environ, *names: str) -> bool:
    """Return whether one of these variables holds a number above one."""
    values = (text(environ, name) or "" for name in names)
    return any(
        value.isascii() and value.isdecimal() and value.lstrip("0") not in {"", "1"}
        for value in values
    )


def contradiction_error(environ: Environ, first: str, second: str, why: str) -> ConfigError:
    """Return the error for two variables that contradict each other. ``why`` explains it."""
    return ConfigError(
        f"{shown(environ, first)} and {shown(environ, second)} contradict each other: {why}",
        hint=ignore_hint(),
    )


def host_name(name: str, where: str, *, hint: str | None = None) -> str:
    """Return ``name`` if it is a host name or address. Raises ConfigError, with ``where`` as
    source, otherwise.

    The check matters because names become arguments of other programs. ``hint`` is by default
    ``ignore_hint``.
    """
    usable = all(char.isascii() and (char.isalnum() or char in _HOST_PUNCTUATION) for char in name)
    if not usable or not name or name.startswith("-") or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"{where}: {quoted(name)} is not a host name or address", hint=hint or ignore_hint()
        )
    return name


def host_or_address(name: str, where: str, *, hint: str) -> str:
    """Return ``name`` if it is a host name or a valid IP address.

    Unlike ``host_name``, refuses texts such as ``1.2.3.999``. Raises ConfigError with ``where`` as
    source and with ``hint``.
    """
    host_name(name, where, hint=hint)
    if ":" in name or "%" in name or ("." in name and name.rpartition(".")[2].isdecimal()):
        import ipaddress

        try:
            ipaddress.ip_address(name)
        except ValueError as error:
            raise ConfigError(f"{where}: {quoted(name)} is not an IP address", hint=hint) from error
    return name


def host_and_port(environ: Environ, name: str) -> tuple[str | None, int | None]:
    """Return host and port of a variable: ``host``, ``host:port``, ``[v6]:port`` or a bare IPv6
    address.

    Both are None if it is not set. Raises ConfigError for another form.
    """
    value = text(environ, name)
    if value is None:
        return None, None
    host, port = value, ""
    if value.startswith("["):
        host, bracket, rest = value[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ConfigError(
                f"{shown(environ, name)}: expected HOST, HOST:PORT or [IPv6]:PORT",
                hint=ignore_hint(),
            )
        port = rest[1:]
    elif value.count(":") == 1:
        host, _, port = value.partition(":")
    return host_name(host, shown(environ, name)), number({name: port}, name, least=1, most=65535)


def host_list(environ: Environ, name: str) -> tuple[str, ...]:
    """Return the hosts in a variable, perhaps none: a JSON list, or names separated by blanks,
    newlines or commas. Raises ConfigError."""
    value = text(environ, name)
    if value is None:
        return ()
    if value.startswith("["):
        items: Sequence[object] = json_list(value, shown(environ, name))
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(
                f"{shown(environ, name)}: expected a list of host names", hint=ignore_hint()
            )
    else:
        items = value.replace(",", " ").split()
    if len(items) > MOST_HOSTS:
        raise ConfigError(
            f"{name} names {len(items):,} hosts, more than {MOST_HOSTS:,}", hint=ignore_hint()
        )
    where = shown(environ, name)
    return tuple(host_name(str(item), where) for item in items)


def json_list(value: str, where: str) -> list[object]:
    """Return the list in a JSON text. Raises ConfigError, which starts with ``where``."""
    found = json_value(value, where)
    if not isinstance(found, list):
        raise ConfigError(f"{where}: expected a JSON list", hint=ignore_hint())
    return found


def json_object(value: str, where: str) -> dict[str, object]:
    """Return the object in a JSON text. Raises ConfigError, which starts with ``where``."""
    found = json_value(value, where)
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: expected a JSON object", hint=ignore_hint())
    return found


def json_value(value: str, where: str) -> object:
    """Return the value of a JSON text. Raises ConfigError, with ``where`` as source, if it is no
    JSON or nested too deeply."""
    import json

    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: not valid JSON: {printable(str(error))}", hint=ignore_hint()
        ) from error


def job_id(value: str | None) -> str | None:
    """Return a scheduler's job id as a directory name: ``123[4].server`` becomes ``123-4-.server``.
    None if nothing usable is left."""
    if value is None:
        return None
    safe = "".join(
        char if char.isascii() and (char.isalnum() or char in _JOB_PUNCTUATION) else "-"
        for char in value
    )
    safe = safe[:_LONGEST_JOB_ID].lstrip(".-")
    # The link to the last job is called "latest".
    return f"{safe}-" if safe == "latest" else safe or None


def lines_of(texts: Texts, path: str, variable: str) -> list[tuple[str, str]]:
    """Return the lines of a system's file that are not blank, each as (``path:line``, text).

    ``variable`` names the file. Raises ConfigError if the file is missing or blank.
    """
    content = texts.get(path)
    if content is None:
        raise ConfigError(
            f"{variable} names {quoted(path)}, which cannot be read", hint=ignore_hint()
        )
    numbered = enumerate(content.removeprefix("\ufeff").split("\n"), 1)
    lines = [(f"{printable(path)}:{at}", line.strip()) for at, line in numbered if line.strip()]
    if not lines:
        raise ConfigError(
            f"{printable(path)} (named by {variable}) names no host", hint=ignore_hint()
        )
    return lines


def numbered_hosts(
    first: str | None,
    count: int,
    *,
    name: Callable[[int], str] | None = None,
    slots: int | None = None,
    unit: Unit = "workers",
) -> tuple[Host, ...]:
    """Return ``count`` hosts, the first with this name, the others by ``name``.

    Without ``name`` they get placeholders and are not ``known``.
    """
    make = name or "node-{}".format
    names = (first if index == 0 and first else make(index) for index in range(count))
    known = (name is not None or (index == 0 and bool(first)) for index in range(count))
    return tuple(
        Host(name=n, known=k, slots=slots, unit=unit) for n, k in zip(names, known, strict=True)
    )


def same_slots(
    names: Sequence[str], slots: int | None = None, unit: Unit = "workers"
) -> tuple[Host, ...]:
    """Return hosts with these names, each with the same number of slots."""
    return tuple(Host(name=name, slots=slots, unit=unit) for name in names)


class Origins:
    """Collects the source of each value of an allocation."""

    def __init__(self, environ: Environ) -> None:
        self._environ = environ
        self._found: list[Origin] = []

    def add(self, value: ValueName, what: object, source: str, *instead_of: str) -> None:
        """Record where a value of the plan comes from.

        ``what`` is the value, ``source`` the variable or option that has it. Each of ``instead_of``
        is another source with the reason why it is not used.
        """
        lost = tuple(printable(each) for each in instead_of)
        self._found.append(
            Origin(value=value, shown=printable(str(what)), source=source, instead_of=lost)
        )

    def lost(self, name: str, why: str) -> tuple[str, ...]:
        """Return (one text with the reason ``why`` a variable is not used,) if the variable is set,
        else ()."""
        return (f"{shown(self._environ, name)}: {why}",) if name in self._environ else ()

    def add_port(self, port: int | None, *names: str) -> None:
        """Add the master port, if there is one. Its source is the first of these variables that is
        set."""
        if port is not None:
            self.add(
                "master port",
                port,
                next(each for each in names if text(self._environ, each) is not None),
            )

    def all(self) -> tuple[Origin, ...]:
        """Return the collected values."""
        return tuple(self._found)
