r"""Write YAML with comments, so that every reader takes a text for that text; pure.

Only what any YAML reader, of 1.1 or 1.2, takes for a text stands bare; the rest is in double
quotes: ``no``, ``1e3`` and ``012`` are texts. What cannot be printed is escaped as YAML does it
(JSON's pairs for ``\U0001f600`` are not YAML). PyYAML's ``safe_dump`` is not used, since it writes
no comments, and writes the texts ``y``, ``1e3`` and ``0o17`` bare, which other readers take for a
switch and for numbers.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Union

from distlaunch.core.model.record import Record

_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_TAKEN = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_WIDTH = 110

Value = Union[str, int, "Noted", Mapping[str, "Value"], Sequence["Value"]]
"""What a manifest is made of; in the order in which it is written. ``bool`` is an ``int``."""


class Noted(Record):
    """A value, and what the comment above it says."""

    value: Value
    why: str


def written(head: Iterable[str], documents: Sequence[Mapping[str, Value]]) -> str:
    """Write documents as one file, with comments before the first."""
    bodies = ["".join(f"{line}\n" for line in _mapping(document, "")) for document in documents]
    return "".join(f"{line}\n" for line in comment(head)) + "---\n".join(bodies)


def comment(texts: Iterable[str], pad: str = "") -> Iterator[str]:
    """Write texts as comments, long ones in several lines; one that is indented is a command, and
    stays whole."""
    for text in texts:
        if text.startswith(" "):
            yield f"{pad}# {text}"
            continue
        width = max(40, _WIDTH - len(pad))
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
        yield from (f"{pad}# {line}".rstrip() for line in lines)


def plain(value: Value) -> Value:
    """Return a value without its comments."""
    value = _bare(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def _bare(value: Value) -> Value:
    return value.value if isinstance(value, Noted) else value


def _mapping(mapping: Mapping[str, Value], pad: str) -> Iterator[str]:
    for key, item in mapping.items():
        if isinstance(item, Noted):
            yield from comment([item.why], pad)
        value = _bare(item)
        short = _short(value)
        yield f"{pad}{_text(key)}:" + ("" if short is None else f" {short}")
        if short is None:
            yield from _nested(value, pad + "  ")


def _nested(value: Value, pad: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _mapping(value, pad)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _item(each, pad)


def _item(each: Value, pad: str) -> Iterator[str]:
    """Write an item of a list: what it nests begins on the line of its dash."""
    if isinstance(each, Noted):
        yield from comment([each.why], pad)
    value = _bare(each)
    short = _short(value)
    if short is not None:
        yield f"{pad}- {short}"
        return
    begun = False
    for line in _nested(value, pad + "  "):
        if begun or line.lstrip().startswith("# "):
            yield line
        else:
            begun = True
            yield f"{pad}- {line[len(pad) + 2 :]}"


def _short(value: Value) -> str | None:
    """Write what fits on the line of its key; None for what does not."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return None if value else "{}"
    if isinstance(value, Sequence):
        if all(isinstance(each, int) for each in value):
            return f"[{', '.join(str(each) for each in value)}]"
        return None
    return None


def _text(text: str) -> str:
    if _BARE.fullmatch(text) and text.lower() not in _TAKEN:
        return text
    return '"' + "".join(map(_char, text)) + '"'


def _char(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
