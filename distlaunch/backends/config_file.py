r"""A strict reader of configuration files: JSON, and of YAML what ``accelerate config`` writes.

PyYAML need not be where a job is launched from, and does not tell on which line a key stands. What
is read means what PyYAML makes of it (YAML 1.1: ``no`` is false); anchors, tags, block scalars and
nested flow collections, or those of several lines, are refused, and so are times, dates and keys
that are no text there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable, quoted

_NAME = r"""(?P<key>[A-Za-z_][\w.\-]*|'[^'"\\]+'|"[^'"\\]+")"""
_KEY = re.compile(rf"{_NAME} *:(?= |$) *")
_PLAIN = r"""[^\[\]{},?'"\t:# ](?:[^\[\]{},?'"\t:#]|(?<! )\#|:(?![ ,\]}]|$))*"""
_ITEM = re.compile(
    rf""" *(?:{_NAME} *: +)?(?P<word>'(?:[^']|'')*' *|"(?:[^"\\]|\\.)*" *|{_PLAIN}|)(?P<end>[,\]}}])"""
)
"""One of a list or mapping in one line, with what ends it."""
_EACH = "a line for each value"
_WORDS: Mapping[str, bool | None] = {
    **{form: True for word in ("yes", "true", "on") for form in (word, word.title(), word.upper())},
    **{
        form: False
        for word in ("no", "false", "off")
        for form in (word, word.title(), word.upper())
    },
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*|0[0-7_]+|0b[01_]+|0x[0-9a-fA-F_]+)")
_FLOAT = re.compile(
    r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_TIME = re.compile(
    r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"  # YAML 1.1 counts by sixty: 12:30 is 750
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt]|[ \t]+)[0-9]{1,2}:[0-9]{2}:[0-9]{2}(\.[0-9]*)?"
    r"([ \t]*(Z|[-+][0-9]{1,2}(:[0-9]{2})?))?"
)
_NOT_ALLOWED = re.compile(
    "[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)
"""What YAML allows nowhere, and three more ends of lines that it has."""
_MOST_LEVELS = 20
_MOST_LINES = 1000
"""Of one quoted value."""
_BLANK = " "
"""Between words; a tab is none in YAML outside quotes and comments."""
_ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b",
    " ": " ", '"': '"', "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029",
}  # fmt: skip
_ESCAPE = re.compile(
    r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|U0010[0-9a-fA-F]{4}|.)", re.DOTALL
)
_CLOSING = {
    "'": re.compile(r"([^']*(?:''[^']*)*)'(?!')"),
    '"': re.compile(r'([^"\\]*(?:\\.[^"\\]*)*)"'),
}
"""What of a line belongs to a value in these quotes that ends in it."""


class Document(Record):
    """What a file says: a mapping of text, numbers, switches, None, lists and mappings of these."""

    path: str
    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]
    """By the keys that lead there, the line (from 1); empty for JSON."""

    def where(self, *keys: str) -> str:
        """Name the place of a key for a message: ``FILE:LINE``."""
        line = self.lines.get(keys)
        return printable(self.path if line is None else f"{self.path}:{line}")


def read_document(text: str, path: str) -> Document:
    """Read a file's text. Raises ConfigError with file and line for what is not understood."""
    text = text.removeprefix("\ufeff")
    if (
        no_text := re.search("[\0\ud800-\udfff]", text)
    ) is not None:  # what is no UTF-8 has become surrogates
        line = text.count("\n", 0, no_text.start()) + 1
        raise ConfigError(
            f"{printable(path)}:{line}: not UTF-8 text", hint="is it the right file, or in UTF-16?"
        )
    if text.lstrip().startswith("{"):
        try:
            values = json.loads(text, object_pairs_hook=_without_twins)
        except json.JSONDecodeError as exc:
            raise ConfigError(f"{printable(path)}:{exc.lineno}: no JSON: {exc.msg}") from exc
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{printable(path)}: {exc}") from exc
        return Document(path=path, values=values, lines={})
    return _Reader(text, path).document()


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twin = next(key for key in values if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"{quoted(twin)} is given twice")
    return values


class _Reader:
    """Goes down the lines once."""

    def __init__(self, text: str, path: str) -> None:
        self._path = path
        self._lines = text.split("\n")
        self._at = 0
        self._found: dict[tuple[str, ...], int] = {}

    def document(self) -> Document:
        for line in self._lines:
            if (match := _NOT_ALLOWED.search(line)) is not None:
                raise self._error(
                    f"{quoted(match[0])} is not read in YAML here",
                    hint="in double quotes, \\x or \\u",
                )
            self._at += 1
        self._at = 0
        if self._next() is not None and self._lines[self._at].rstrip(_BLANK) == "---":
            self._at += 1
        indent = self._next()
        values = {} if indent is None else self._mapping(indent, ())
        if self._next() is not None and (
            not values or self._lines[self._at].rstrip(_BLANK) != "..."
        ):
            raise self._error(
                "less indented than what it follows" if values else "expected 'name: value'"
            )
        self._at += 1
        if self._next() is not None:
            raise self._error("something stands behind the end of the document")
        return Document(path=self._path, values=values, lines=self._found)

    def _next(self) -> int | None:
        """Go on to the next line that says something, and give its indentation; None at the end."""
        while self._at < len(self._lines):
            line = self._lines[self._at]
            content = line.lstrip(" ")
            if content.strip(_BLANK) and not content.startswith("#"):
                if content.startswith("\t"):
                    raise self._error("indented by a tab, YAML takes spaces")
                return len(line) - len(content)
            self._at += 1
        return None

    def _mapping(self, indent: int, above: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if len(above) > _MOST_LEVELS:
            raise self._error("nested too deeply")
        while self._next() == indent:
            line = self._lines[self._at]
            match = _KEY.match(line, indent)
            if match is None:
                if line.rstrip(_BLANK) in ("...", "---"):
                    break
                raise self._error("expected 'name: value'")
            key = self._key(match["key"], above, values)
            values[key] = self._value(match.end(), indent, (*above, key))
        indent_now = self._next()
        if indent_now is not None and indent_now > indent:
            raise self._error("more indented than what it follows")
        return values

    def _key(self, written: str, above: tuple[str, ...], there: Mapping[str, Any]) -> str:
        """Give a key as text, and keep where it stands."""
        key = written.strip("'\"")
        if key == written and key in _WORDS:
            raise self._error(
                f"{key} is no text in YAML, but a value", hint=f'"{key}": if that is its name'
            )
        keys = (*above, key)
        if key in there:
            raise self._error(f"{quoted(key)} is given twice, first on line {self._found[keys]}")
        self._found[keys] = self._at + 1
        return key

    def _value(self, start: int, indent: int, keys: tuple[str, ...]) -> Any:
        rest = self._lines[self._at][start:]
        if rest.strip(_BLANK) and not rest.startswith("#"):
            return self._scalar(start, indent, keys)
        self._at += 1
        below = self._next()
        if (
            below is not None
            and below >= indent
            and re.match(r"-(\s|$)", self._lines[self._at][below:])
        ):
            return self._sequence(below, keys)
        return self._mapping(below, keys) if below is not None and below > indent else None

    def _sequence(self, indent: int, above: tuple[str, ...]) -> list[Any]:
        values: list[Any] = []
        while self._next() == indent and re.match(r"- +(?=\S)", self._lines[self._at][indent:]):
            start = len(self._lines[self._at]) - len(
                self._lines[self._at][indent + 1 :].lstrip(" ")
            )
            if _KEY.match(self._lines[self._at], start):
                raise self._error("a list of mappings is not read here")
            if self._lines[self._at][start] == "#":
                raise self._error(
                    "nothing stands in this line of the list", hint="- null, if that is meant"
                )
            values.append(self._scalar(start, indent, (*above, str(len(values)))))
        return values

    def _scalar(self, start: int, indent: int, keys: tuple[str, ...]) -> Any:
        """Read a value that begins here, and go on behind it: it may be folded over several
        lines."""
        rest = self._lines[self._at][start:]
        first = rest[0]
        if first in _CLOSING:
            return self._quoted(start, first)
        if first in "[{":
            return self._flow(start, keys)
        words = self._uncommented(rest)
        self._check_start(words)
        if _has_colon(words):
            raise self._error("a second ':' in one line", hint="quote the value")
        is_open = words == rest.strip(_BLANK)  # a comment ends it
        begun = last = self._at
        self._at += 1
        while is_open and (below := self._next()) is not None and below > indent:
            if any(between.strip(_BLANK) for between in self._lines[last + 1 : self._at]):
                raise self._error("a comment stands within a value")
            line = self._lines[self._at].strip(_BLANK)
            more = self._uncommented(line)
            if _has_colon(more):
                raise self._error("more indented than what it follows")
            words += "\n" * (self._at - last) + more
            is_open, last = more == line, self._at
            self._at += 1
        end, self._at = self._at, begun
        value = self._resolved(_folded(words))
        self._at = end
        return value

    def _quoted(self, start: int, quote: str) -> str:
        begun = self._at
        line, at = self._lines[self._at], start + 1
        parts: list[str] = []
        while (end := _CLOSING[quote].match(line, at)) is None:  # each line is looked at once
            parts.append(line[at:])
            self._at += 1
            if self._at == len(self._lines) or self._at - begun > _MOST_LINES:
                self._at = begun
                raise self._error(f"the quote {quote} is not closed")
            line, at = self._lines[self._at], 0
        text = "\n".join((*parts, end[1]))
        self._check_behind(line, end.end())
        self._at += 1
        return self._unquoted(text, quote)

    def _unquoted(self, text: str, quote: str) -> str:
        if quote == "'":
            return _folded(text).replace("''", "'")
        joined = re.sub(
            r"\\(\n[ \t]*|.)", lambda found: "" if found[1][0] == "\n" else found[0], text
        )
        return _ESCAPE.sub(self._unescaped, _folded(joined))

    def _unescaped(self, match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code not in _ESCAPES:
            raise self._error(f"{match[0]} is no escape of YAML")
        return _ESCAPES[code]

    def _flow(self, start: int, above: tuple[str, ...]) -> Any:
        """Read a list or a mapping that begins here and ends on this line, of single values."""
        line = self._lines[self._at]
        at, end, closing = start + 1, ",", "]" if line[start] == "[" else "}"
        values: dict[Any, Any] = {}
        while end == ",":
            match = _ITEM.match(line, at)
            if match is None:
                raise self._error(
                    "only {A: B} and [A, B] of single values are read in one line", hint=_EACH
                )
            at, end, key, word = (
                match.end(),
                match["end"],
                match["key"],
                match["word"].strip(_BLANK),
            )
            if end == closing and key is None and not word:
                break  # nothing at all, or a comma before it
            if end not in (",", closing) or (key is None) is (closing == "}"):
                raise self._error(
                    f"a list is [A, B], a mapping {{A: B}}, not {quoted(line[start:at])}",
                    hint=_EACH,
                )
            if key is None and not word:
                raise self._error(
                    "nothing stands between two commas", hint="null, if that is meant"
                )
            place = len(values) if key is None else self._key(key, above, values)
            values[place] = self._within(word)
        self._check_behind(line, at)
        self._at += 1
        return list(values.values()) if closing == "]" else values

    def _within(self, word: str) -> Any:
        if word[:1] in _CLOSING:
            return self._unquoted(word[1:-1], word[0])
        if word:
            self._check_start(word)
        return self._resolved(word)

    def _resolved(self, text: str) -> Any:
        """Give a plain scalar its type, as YAML 1.1 has it."""
        if text in _WORDS:
            return _WORDS[text]
        if _TIME.fullmatch(text) or text in ("<<", "="):
            raise self._error(
                f"{quoted(text)} is no text in YAML, and not read here",
                hint=f'"{text}" if it is text',
            )
        try:
            return _number(text)
        except ValueError as exc:  # 0x_, or thousands of digits
            raise self._error(f"{quoted(text)} is no number", hint="quote the value") from exc

    def _check_behind(self, line: str, end: int) -> None:
        behind = line[end:].strip(_BLANK)
        if behind and not (behind.startswith("#") and line[end] == " "):
            raise self._error(f"{quoted(behind)} stands behind a value that has ended")

    def _check_start(self, words: str) -> None:
        if words[0] in "|>&*!%@`,]}" or words in ("-", "?") or words.startswith(("? ", "- ")):
            raise self._error(
                f"{quoted(words[0])} begins what is not read of YAML here", hint="quote the value"
            )

    def _uncommented(self, text: str) -> str:
        words = text.partition(" #")[0].strip(_BLANK)
        if "\t" in words:
            raise self._error("a tab outside quotes, YAML takes spaces")
        return words

    def _error(self, why: str, *, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{printable(self._path)}:{self._at + 1}: {why}", hint=hint)


def _has_colon(text: str) -> bool:
    return ": " in text or text.endswith(":")


def _folded(text: str) -> str:
    """Join lines as YAML folds them: by a space, or by a newline for each empty line between."""
    first, *others = text.split("\n")
    if not others:
        return text
    *between, last = others
    lines = (first.rstrip(" \t"), *(line.strip(" \t") for line in between), last.lstrip(" \t"))
    joined = "\n".join(lines)
    return re.sub(r"\n+", lambda found: "\n" * (len(found[0]) - 1) or " ", joined)


def _number(text: str) -> int | float | str:
    """Give the number that a plain scalar is, else the text."""
    number = text.replace("_", "").lower()
    if _INTEGER.fullmatch(text):
        digits = number.lstrip("+-")
        value = int(digits, 8 if digits.isdigit() and digits[0] == "0" else 0)
        return -value if number[0] == "-" else value
    if _FLOAT.fullmatch(text):
        return float(number.replace(".inf", "inf").replace(".nan", "nan"))
    return text
