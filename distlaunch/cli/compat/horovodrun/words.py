"""The command that ``distlaunch horovodrun`` is to run, taken apart."""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from distlaunch.core.model.record import Record


class Command(Record):
    """What the workers run."""

    words: tuple[str, ...]
    """Script or module and its arguments, or any command."""
    python: str | None = None
    """The interpreter, if it is a Python that runs a script or module."""
    module: bool = False


def understand_command(rest: Sequence[str]) -> Command:
    """Tell whether a Python is to run a script or a module: these can be checked, warmed and asked for stacks."""
    if rest and _is_python(rest[0]):
        after = list(rest[1:])
        if after[:1] == ["-u"]:  # so it is anyway
            after = after[1:]
        if after[:1] == ["-m"] and len(after) > 1:
            return Command(words=tuple(after[1:]), python=rest[0], module=True)
        if after and after[0] and after[0][0] != "-":
            return Command(words=tuple(after), python=rest[0])
    return Command(words=tuple(rest))


def _is_python(word: str) -> bool:
    version = os.path.basename(word).removeprefix("python")
    return version != os.path.basename(word) and all(part.isdecimal() for part in version.split(".") if version)
