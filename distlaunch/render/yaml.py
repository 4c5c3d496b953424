"""Write YAML with comments, in which every reader sees text as text. No I/O.

Text that YAML 1.1 or 1.2 reads otherwise (``no``, ``1e3``, ``012``) is in double quotes.
Unprintable characters are escaped as in YAML, not as JSON's surrogate pairs. PyYAML's ``safe_dump``
cannot write comments, and writes ``y``, ``1e3`` and ``0o17`` without quotes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Union

from distlaunch.core.model.record import Record

_UNQUOTED = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_AMBIGUOUS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_WIDTH = 110

Value = Union[str, int, "Commented", Mapping[str, "Value"], Sequence["Value"]]
"""Content of a manifest, in the order of writing. ``bool`` is an ``int``."""


class Commented(Record):
    """A value with a comment above it."""

    value: Value
    why: str


def write_documents(head: Iterable[str], documents: Sequence[Mapping[str, Value]]) -> str:
    """Return documents as one file, with comments before the first."""
    bodies = [
        "".join(f"{line}\n" for line in _mapping_lines(document, "")) for document in documents
    ]
    return "".join(f"{line}\n" for line in comment(head)) + "---\n".join(bodies)


def comment(texts: Iterable[str], pad: str = "") -> Iterator[str]:
    """Yield texts as comment lines. Indented texts are commands, and are not wrapped."""
    for text in texts:
        if text.startswith(" "):
            yield f"{pad}# {text}"
            continue
        width = max(40, _WIDTH - len(pad))
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
        yield from (f"{pad}# {line}".rstrip() for line in lines)


def plain(value: Value) -> Value:
    """Return a value without its comments."""
    value = _uncommented(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def _uncommented(value: Value) -> Value:
    return value.value if isinstance(value, Commented) else value


def _mapping_lines(mapping: Mapping[str, Value], pad: str) -> Iterator[str]:
    for key, item in mapping.items():
        if isinstance(item, Commented):
            yield from comment([item.why], pad)
        value = _uncommented(item)
        inline = _inline(value)
        yield f"{pad}{_quote_if_needed(key)}:" + ("" if inline is None else f" {inline}")
        if inline is None:
            yield from _nested_lines(value, pad + "  ")


def _nested_lines(value: Value, pad: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _mapping_lines(value, pad)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _item_lines(item, pad)


def _item_lines(item: Value, pad: str) -> Iterator[str]:
    """Yield the lines of an item of a list. The first nested line stands behind the dash."""
    if isinstance(item, Commented):
        yield from comment([item.why], pad)
    value = _uncommented(item)
    inline = _inline(value)
    if inline is not None:
        yield f"{pad}- {inline}"
        return
    has_begun = False
    for line in _nested_lines(value, pad + "  "):
        if has_begun or line.lstrip().startswith("# "):
            yield line
        else:
            has_begun = True
            yield f"{pad}- {line[len(pad) + 2 :]}"


def _inline(value: Value) -> str | None:
    """Return a value for the line of its key; None if it needs lines of its own."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _quote_if_needed(value)
    if isinstance(value, Mapping):
        return None if value else "{}"
    if isinstance(value, Sequence):
        if all(isinstance(item, int) for item in value):
            return f"[{', '.join(str(item) for item in value)}]"
        return None
    return None


def _quote_if_needed(text: str) -> str:
    if _UNQUOTED.fullmatch(text) and text.lower() not in _AMBIGUOUS:
        return text
    return '"' + "".join(map(_escape_character, text)) + '"'


def _escape_character(char: str) -> str:
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
