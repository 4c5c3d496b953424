"""Read configuration files in YAML or JSON, with the line of each key for messages.

PyYAML parses the YAML (1.1: ``no`` is false). Its constructors never run, so a file can only
contain text, numbers, booleans, None, lists and mappings. Size, depth and number of values are
limited, since a file may be hostile or the wrong one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable, quoted

_MOST_CHARACTERS = 256 << 10
"""PyYAML needs up to 4 s for a file of this size."""
_MOST_VALUES = 100_000
"""A value that aliases repeat counts each time."""
_MOST_LEVELS = 20
_TAG = "tag:yaml.org,2002:"
_SCALARS = ("null", "bool", "int", "float", "str")


class Document(Record):
    """The content of a file, as built-in types."""

    path: str
    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]
    """The line (from 1) by key path. List indexes are text. Empty for JSON."""

    def where(self, *keys: str) -> str:
        """Return the location of a key: ``FILE:LINE``, or ``FILE`` if the line is not known."""
        line = self.lines.get(keys)
        return printable(self.path if line is None else f"{self.path}:{line}")


def read_document(text: str, path: str) -> Document:
    """Parse a file's ``text``, in which bytes that are not UTF-8 are surrogates.

    Text that begins with ``{`` is JSON, other text YAML. An empty text has no keys. Raises
    ConfigError with file and line.
    """
    text = text.removeprefix("\ufeff")
    if (no_text := re.search("[\0\ud800-\udfff]", text)) is not None:
        line = text.count("\n", 0, no_text.start()) + 1
        raise ConfigError(
            f"{printable(path)}:{line}: not UTF-8 text",
            hint="check that it is the right file, and not in UTF-16",
        )
    if text.lstrip().startswith("{"):
        return Document(path=path, values=_read_json(text, path), lines={})
    return _YamlReader(text, path).read()


def _read_json(text: str, path: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{printable(path)}:{exc.lineno}: not JSON: {exc.msg}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{printable(path)}: {exc}") from exc
    return values


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{quoted(key)} is given twice")
        values[key] = value
    return values


class _YamlReader:
    def __init__(self, text: str, path: str) -> None:
        import yaml

        self._yaml = yaml
        self._text = text
        self._path = path
        self._scalars = yaml.constructor.SafeConstructor()
        self._count = 0
        self._lines: dict[tuple[str, ...], int] = {}

    def read(self) -> Document:
        if len(self._text) > _MOST_CHARACTERS:
            raise ConfigError(
                f"{printable(self._path)}: larger than {_MOST_CHARACTERS >> 10} KiB",
                hint="is it the right file?",
            )
        root = self._compose()
        is_empty = root is None or (root.tag == f"{_TAG}null" and not root.value)
        if not is_empty and root.tag != f"{_TAG}map":
            raise self._error(root, "expected 'name: value'")
        values = {} if is_empty else self._convert_mapping(root, ())
        return Document(path=self._path, values=values, lines=self._lines)

    def _compose(self) -> Any:
        yaml = self._yaml
        try:
            loader = yaml.SafeLoader(self._text)
        except yaml.reader.ReaderError as exc:
            line = self._text.count("\n", 0, exc.position) + 1
            raise self._error_at(
                line,
                f"{quoted(self._text[exc.position])} is not allowed in YAML",
                hint="escape it with \\x or \\u in double quotes",
            ) from exc
        try:
            return loader.get_single_node()
        except yaml.MarkedYAMLError as exc:
            raise self._syntax_error(exc) from exc
        except RecursionError as exc:
            raise self._error_at(loader.line + 1, "nested too deeply") from exc
        except (ValueError, OverflowError) as exc:  # "\UFFFFFFFF", or digits without end
            raise self._error_at(loader.line + 1, f"not YAML: {printable(str(exc))}") from exc

    def _syntax_error(self, exc: Any) -> ConfigError:
        is_token = isinstance(exc, self._yaml.scanner.ScannerError) and exc.context_mark
        mark = exc.context_mark if is_token else exc.problem_mark or exc.context_mark
        line = 1 if mark is None else mark.line + 1
        why = f"not YAML: {exc.problem or exc.context}"
        if exc.problem and exc.context:
            is_elsewhere = exc.context_mark is not None and exc.context_mark.line + 1 != line
            began = f" from line {exc.context_mark.line + 1} on" if is_elsewhere else ""
            why += f" ({exc.context}{began})"
        lines = self._text.split("\n")
        has_tab = line <= len(lines) and "\t" in lines[line - 1]
        hint = "indent YAML with spaces, not tabs" if has_tab else None
        return self._error_at(line, printable(why), hint=hint)

    def _convert_value(self, node: Any, keys: tuple[str, ...]) -> Any:
        self._count += 1
        if self._count > _MOST_VALUES:
            raise self._error(node, f"more than {_MOST_VALUES:,} values")
        if len(keys) > _MOST_LEVELS:
            raise self._error(node, "nested too deeply")
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, self._yaml.MappingNode) and kind == "map":
            return self._convert_mapping(node, keys)
        if isinstance(node, self._yaml.SequenceNode) and kind == "seq":
            return [
                self._convert_value(each, (*keys, str(at))) for at, each in enumerate(node.value)
            ]
        if isinstance(node, self._yaml.ScalarNode):
            return self._convert_scalar(node, kind)
        raise self._error(node, f"the tag {quoted(node.tag)} is not supported here")

    def _convert_mapping(self, node: Any, above: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._read_key(key_node)
            keys = (*above, key)
            if key in values:
                raise self._error(
                    key_node, f"{quoted(key)} is given twice, first on line {self._lines[keys]}"
                )
            self._lines[keys] = key_node.start_mark.line + 1
            values[key] = self._convert_value(value_node, keys)
        return values

    def _read_key(self, node: Any) -> str:
        if not isinstance(node, self._yaml.ScalarNode):
            raise self._error(node, "a list or a mapping cannot be a name", hint="name: value")
        if node.tag == f"{_TAG}merge":
            raise self._error(node, "merge keys (<<) are not supported", hint="write the keys out")
        if node.tag != f"{_TAG}str":
            written = printable(node.value)
            raise self._error(
                node,
                f"{written or 'nothing'} is a value in YAML, not text",
                hint=f'"{written}": if that is its name',
            )
        return str(node.value)

    def _convert_scalar(self, node: Any, kind: str) -> Any:
        text: str = node.value
        is_time = kind == "timestamp" or (kind in ("int", "float") and ":" in text)
        if is_time or kind in ("merge", "value"):
            raise self._error(
                node,
                f"{quoted(text)} is not text in YAML, and not supported here",
                hint=f'"{printable(text)}" if it is text',
            )
        if kind not in _SCALARS:
            raise self._error(node, f"the tag {quoted(node.tag)} is not supported here")
        try:
            return self._scalars.construct_object(node)
        except (LookupError, ValueError) as exc:  # 0x_, thousands of digits, !!bool maybe
            what = "a number" if kind in ("int", "float") else f"of the type {kind}"
            raise self._error(
                node, f"{quoted(text)} is not {what}", hint="quote the value"
            ) from exc

    def _error(self, node: Any, why: str, *, hint: str | None = None) -> ConfigError:
        return self._error_at(node.start_mark.line + 1, why, hint=hint)

    def _error_at(self, line: int, why: str, *, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{printable(self._path)}:{line}: {why}", hint=hint)
