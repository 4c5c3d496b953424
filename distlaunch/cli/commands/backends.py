"""``distlaunch backends``: print the backends, their packages and their options."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from distlaunch.backends.backend_options import value_form
from distlaunch.backends.base import Backend, BackendError, Requirement
from distlaunch.backends.registry import (
    backend_names,
    find_backend,
    other_backends,
    package_of,
    spelled_backend,
)
from distlaunch.backends.requirements import (
    Found,
    Installed,
    find_modules,
    install_command,
    installed_for,
)
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable

_INDENT = 2
_NAMES, _OPTIONS = 14, 44
"""Width of the column of names, and largest width of the column of options."""
_LEAST_COLUMNS = 40


class _Broken(Record):
    name: str
    problem: str


def backends(
    name: str | None, fmt: Literal["table", "json"], *, python: tuple[str, str] | None = None
) -> int:
    """Print all backends, or one with its options. Return the exit code.

    ``python``: the option that names an interpreter, and the interpreter whose packages are listed.
    Raises ConfigError if ``name`` is unknown or the interpreter cannot be run.
    """
    found = [find_backend(spelled_backend(name))] if name is not None else list(_all_backends())
    kinds = [each for each in found if not isinstance(each, _Broken)]
    installed = (
        None
        if python is None
        else _ask_interpreter(*python, [each for kind in kinds for each in kind.requires])
    )
    path = sys.executable if python is None else python[1]
    make = _record_or_problem if name is None else _backend_record
    records = [make(each, path, installed) for each in found]
    if fmt == "json":
        sys.stdout.write(json.dumps(records if name is None else records[0], indent=_INDENT) + "\n")
        return 0
    width = _terminal_width()
    lines = [
        line for record in records for line in _text_lines(record, width, options=name is not None)
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if name is None:
        sys.stdout.write("\ndistlaunch backends NAME shows the options of one, for -o\n")
    return 0


def _terminal_width() -> int | None:
    """Return the width of a line; None if stdout is no terminal, so that programs read whole lines."""
    try:
        return max(_LEAST_COLUMNS, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError):
        return None


def _ask_interpreter(who: str, python: str, requirements: Sequence[Requirement]) -> Installed:
    if shutil.which(python) is None:
        raise ConfigError(f"{who} {printable(python)}: no such executable")
    installed = installed_for(python, requirements, (), environ=os.environ, cwd=os.curdir)
    if installed is None:
        raise ConfigError(f"{who} {printable(python)}: it did not answer as a Python does")
    return installed


def _all_backends() -> Iterator[type[Backend] | _Broken]:
    """Yield distlaunch's own backends, then those of other packages, broken ones too."""
    yield from map(find_backend, backend_names())
    for name, points in sorted(other_backends().items()):
        if name in backend_names():
            packages = ", ".join(map(package_of, points))
            yield _Broken(
                name=name, problem=f"not used: {packages} has one of this name, which is ours"
            )
            continue
        try:
            yield find_backend(name)
        except BackendError as exc:
            yield _Broken(name=name, problem=exc.problem)


def _record_or_problem(
    found: type[Backend] | _Broken, python: str, installed: Installed | None
) -> dict[str, Any]:
    try:
        return _backend_record(found, python, installed)
    except ConfigError as exc:
        problem = exc.problem if isinstance(exc, BackendError) else exc.message
        return _backend_record(_Broken(name=found.name, problem=problem), python, installed)


def _backend_record(
    backend: type[Backend] | _Broken, python: str, installed: Installed | None
) -> dict[str, Any]:
    if isinstance(backend, _Broken):
        nothing: dict[str, Any] = {"about": "", "installed": False, "requires": [], "options": []}
        return {"name": backend.name, **nothing, "problem": backend.problem}
    found = list(find_modules(backend.requires, installed=installed))
    return {
        "name": backend.name,
        "about": backend.about,
        "installed": all(each.is_met or not each.requirement.demanded for each in found),
        "requires": [_requirement_record(each, python) for each in found],
        "options": [
            {"name": option.name, "takes": value_form(option), "about": option.about}
            for option in backend.options()
        ],
        "problem": None,
    }


def _requirement_record(found: Found, python: str) -> dict[str, Any]:
    wanted = found.requirement
    return {
        "module": wanted.module,
        "package": found.package,
        "demanded": wanted.demanded,
        "at_least": wanted.at_least or None,
        "version": found.version,
        "install": None if found.is_met else install_command(python, wanted, found.release),
        "see": wanted.see or None,
    }


def _text_lines(record: dict[str, Any], width: int | None, *, options: bool) -> Iterator[str]:
    """Yield the lines about one backend. Commands are not wrapped, so that they can be copied."""
    name, about = printable(record["name"]), printable(record["about"] or record["problem"])
    first, *more = _wrap(about, _NAMES, width)
    yield f"{name:<{_NAMES - 1}} {first}"
    margin = " " * _NAMES
    for line in more:
        yield margin + line
    there = [
        f"{each['package']} {each['version'] or '(no version)'}"
        for each in record["requires"]
        if not each["install"]
    ]
    if there:
        for line in _wrap(f"installed: {', '.join(there)}", _NAMES, width):
            yield margin + line
    for each in record["requires"]:
        if each["install"]:
            known = f"{each['version']} is too old" if each["version"] else "is missing"
            said, command = f"{margin}{each['package']} {known}:", each["install"]
            fits = width is None or len(said) + 1 + len(command) <= width
            yield from [f"{said} {command}"] if fits else [said, f"  {command}"]
            if each["see"]:
                for line in _wrap(f"({each['see']})", _NAMES, width):
                    yield margin + line
    if options:
        yield from _option_lines(record["options"], width)


def _option_lines(options: Sequence[dict[str, str]], width: int | None) -> Iterator[str]:
    if not options:
        yield "it has no options"
        return
    yield "options, each as -o NAME=VALUE:"
    written = [f"{each['name']}={each['takes']}" for each in options]
    most = _OPTIONS if width is None else min(_OPTIONS, width // 2 - _INDENT)
    column = min(most, max(map(len, written)) + 2)
    margin = " " * (column + _INDENT)
    for text, each in zip(written, options, strict=True):
        lines = _wrap(each["about"], len(margin), width)
        if len(text) + 2 > column:
            yield f"  {text}"
        else:
            yield f"  {text:<{column}}{lines.pop(0)}"
        for line in lines:
            yield margin + line


def _wrap(text: str, margin: int, width: int | None) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, width - margin, break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
