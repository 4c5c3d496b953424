"""Layer ui: ``distlaunch backends``: which there are, what of them is installed here, and the options they take."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from distlaunch.backends.base import Backend
from distlaunch.backends.choosing import shape
from distlaunch.backends.registry import backend_names, find_backend, other_backends
from distlaunch.backends.requirements import Found, install_words, look_for
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import printable

_INDENT = 2


def backends(name: str | None, fmt: Literal["table", "json"]) -> int:
    """Print all backends, or one of them with its options; returns the exit code. Raises ConfigError."""
    records = [_record(find_backend(name))] if name is not None else list(_all())
    if fmt == "json":
        sys.stdout.write(json.dumps(records if name is None else records[0], indent=_INDENT) + "\n")
        return 0
    lines = [line for record in records for line in _lines(record, options=name is not None)]
    sys.stdout.write("\n".join(lines) + "\n")
    if name is None:
        sys.stdout.write("\ndistlaunch backends NAME shows the options of one, for -o\n")
    return 0


def _all() -> Iterator[dict[str, Any]]:
    """Give a record of each: ours, then those of other packages, also where one cannot be loaded."""
    for name in backend_names():
        yield _record(find_backend(name))
    for name, points in sorted(other_backends().items()):
        if name in backend_names():
            packages = ", ".join(str(point.dist.name) if point.dist else point.value for point in points)
            yield _broken(name, f"not used: {packages} has one of this name, which is ours")
            continue
        try:
            yield _record(find_backend(name))
        except ConfigError as exc:
            yield _broken(name, exc.message.partition(": ")[2])


def _record(backend: type[Backend]) -> dict[str, Any]:
    found = list(look_for(backend))
    return {
        "name": backend.name,
        "about": backend.about,
        "installed": all(each.is_met for each in found),
        "requires": [_requirement(each) for each in found],
        "options": [
            {"name": option.name, "takes": shape(option), "about": option.about} for option in backend.options()
        ],
        "problem": None,
    }


def _broken(name: str, problem: str) -> dict[str, Any]:
    return {"name": name, "about": "", "installed": False, "requires": [], "options": [], "problem": problem}


def _requirement(found: Found) -> dict[str, Any]:
    wanted = found.requirement
    return {
        "module": wanted.module,
        "package": wanted.package,
        "at_least": wanted.at_least or None,
        "version": found.version,
        "install": None if found.is_met else install_words(sys.executable, found),
    }


def _lines(record: dict[str, Any], *, options: bool) -> Iterator[str]:
    """Lay one record out for people."""
    yield f"{printable(record['name']):<14}{printable(record['about'] or record['problem'])}"
    margin = " " * 14
    there = [
        f"{each['package']} {each['version'] or '(no version)'}" for each in record["requires"] if not each["install"]
    ]
    if there:
        yield f"{margin}installed: {', '.join(there)}"
    for each in record["requires"]:
        if each["install"]:
            said = (
                f"{each['package']} {each['version']} is too old"
                if each["version"]
                else f"{each['package']} is missing"
            )
            yield f"{margin}{said}: {each['install']}"
    if options:
        yield from _options(record["options"])


def _options(options: Sequence[dict[str, str]]) -> Iterator[str]:
    if not options:
        yield "it has no options"
        return
    yield "options, each as -o NAME=VALUE:"
    written = [f"{each['name']}={each['takes']}" for each in options]
    width = min(44, max(map(len, written)) + 2)
    for text, each in zip(written, options, strict=True):
        own_line = len(text) + 2 > width
        if own_line:
            yield f"  {text}"
        yield f"  {'' if own_line else text:<{width}}{each['about']}"
