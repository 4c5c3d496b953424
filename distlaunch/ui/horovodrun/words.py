"""Layer ui: ``distlaunch horovodrun``'s words as horovodrun writes them, made fit for our own parser."""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from distlaunch.core.errors import UsageError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import quoted
from distlaunch.ui.horovodrun.options import OPTIONS, OWN, SAME

_BY_FLAG = {flag: option for option in OPTIONS for flag in option.all_flags}
_ONE_DASH = {flag: option.name for flag, option in _BY_FLAG.items() if flag[1] != "-" and len(flag) > 2}
_LONG = sorted(flag for option in (*OWN, *SAME) for flag in option.flags if flag[:2] == "--")


def plain_words(argv: Sequence[str]) -> list[str]:
    """Spell out, up to the command: ``-np``, which a parser of letters takes apart, and beginnings of long names.

    Raises UsageError for a beginning of several.
    """
    words: list[str] = []
    at = 0
    while at < len(argv) and argv[at] != "--" and len(argv[at]) > 1 and argv[at][0] == "-":
        word = argv[at]
        at += 1
        flag, equals, value = word.partition("=")
        flag = _ONE_DASH.get(flag) or _whole(flag)
        option = _BY_FLAG.get(flag)
        if option is None:
            words.append(word)
            continue
        if equals and flag[1] != "-":  # -H=a:2
            words += [flag, value]
            continue
        words.append(flag + equals + value)
        if option.kind != "flag" and not equals and at < len(argv):
            words.append(argv[at])
            at += 1
    return [*words, *argv[at:]]


def _whole(flag: str) -> str:
    dashed = flag[:2] + flag[2:].replace("_", "-")
    if flag[:2] != "--" or dashed in _BY_FLAG:
        return dashed
    begun = [name for name in _LONG if name.startswith(dashed)]
    if len({_BY_FLAG[name].field for name in begun}) > 1:
        raise UsageError(f"{quoted(flag)} is the beginning of several options: {', '.join(begun)}")
    return begun[0] if begun else flag


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
