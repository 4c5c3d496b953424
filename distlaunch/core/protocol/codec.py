"""Encode messages as frames, and decode and check frames. No I/O.

A frame is one byte with the protocol's version, two big-endian 32-bit lengths, a JSON object, and
raw bytes. The object's ``t`` names the message; its other keys are the fields. A field annotated
``bytes`` is the raw section. Types of fields and sizes of frames are checked. A frame can carry
numbers and text, never code.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.record import Record, fields_of, plain

VERSION = 1
MAX_OBJECT_BYTES = 64 << 20
MAX_RAW_BYTES = 1 << 20
LEAST_BYTES = 4 << 10
"""Objects up to this size are accepted for every type. A larger one must begin with its type."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
"""Range of integers. Others fit neither in a float nor in arguments of the kernel."""

_HEADER = struct.Struct(">BII")
_NAME = re.compile(rb'\{"t":"([A-Za-z]{1,64})"')
"""Beginning of an encoded object."""
_NAME_BYTES = 80
_dumps = json.JSONEncoder(separators=(",", ":")).encode

M = TypeVar("M")


def encode(message: Record) -> bytes:
    """Return the message as one frame."""
    raw = b""
    record: dict[str, object] = {"t": type(message).__name__}
    for field, kind in fields_of(type(message)).items():
        value = getattr(message, field)
        if kind == "bytes":
            raw = value
        else:
            record[field] = plain(value)
    body = _dumps(record).encode("ascii")
    return _HEADER.pack(VERSION, len(body), len(raw)) + body + raw


class FrameSize(Record):
    """Largest sizes of a frame's object and raw bytes."""

    object_bytes: int = MAX_OBJECT_BYTES
    raw_bytes: int = MAX_RAW_BYTES


_LARGEST = FrameSize()


def any_size(_: str) -> FrameSize:
    """Return the largest size, whatever the message. For streams between a process and its own
    child."""
    return _LARGEST


class Decoder(Generic[M]):
    """Reassembles messages of the given types from a byte stream.

    ``size_of`` returns the largest size of a frame of a type at this moment. A larger frame is
    refused before all of it has arrived.
    """

    def __init__(
        self,
        types: tuple[type[M], ...],
        nested_types: tuple[type[Any], ...] = (),
        *,
        size_of: Callable[[str], FrameSize] = any_size,
    ) -> None:
        self._types = {cls.__name__: cls for cls in types}
        self._nested_types = {cls.__name__: cls for cls in nested_types}
        self._size_of = size_of
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield each message that ``data`` completes. Raises ProtocolError; the stream is then
        unusable.
        """
        self.add(data)
        while (message := self.next()) is not None:
            yield message

    def add(self, data: bytes) -> None:
        """Append received bytes; ``next`` returns the messages."""
        self._buffer += data

    def next(self) -> M | None:
        """Return the next complete message; None until all its bytes are there.

        Raises ProtocolError for an invalid or too large frame.
        """
        if len(self._buffer) < _HEADER.size:
            return None
        version, body_size, raw_size = _HEADER.unpack_from(self._buffer)
        if version != VERSION:
            raise ProtocolError(
                f"the other side uses version {version} of the protocol, not {VERSION}"
            )
        if body_size > MAX_OBJECT_BYTES or raw_size > MAX_RAW_BYTES:
            raise ProtocolError(f"a frame of {body_size}+{raw_size} bytes exceeds the allowed size")
        if (body_size > LEAST_BYTES or raw_size) and self._size_of is not any_size:
            if len(self._buffer) < _HEADER.size + min(body_size, _NAME_BYTES):
                return None
            self._check_size(body_size, raw_size)
        end = _HEADER.size + body_size + raw_size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : _HEADER.size + body_size])
        raw = bytes(self._buffer[_HEADER.size + body_size : end])
        del self._buffer[:end]
        return self._decode_message(body, raw)

    def _check_size(self, body_size: int, raw_size: int) -> None:
        found = _NAME.match(self._buffer, _HEADER.size)
        if found is None:
            raise ProtocolError("a large frame does not begin with the type of its message")
        name = found[1].decode()
        most = self._size_of(name)
        if body_size > most.object_bytes or raw_size > most.raw_bytes:
            raise ProtocolError(
                f"{name} of {body_size}+{raw_size} bytes exceeds the allowed size, now"
                f" {most.object_bytes}+{most.raw_bytes}"
            )

    def _decode_message(self, body: bytes, raw: bytes) -> M:
        try:
            record = json.loads(body)
        except (ValueError, RecursionError) as exc:
            raise ProtocolError("a frame does not hold JSON") from exc
        name = record.pop("t", None) if isinstance(record, dict) else None
        cls = self._types.get(name) if isinstance(name, str) else None
        if cls is None:
            raise ProtocolError(f"unknown message {name!r}")
        return cast("M", self._decode_record(cls, record, raw))

    def _decode_record(self, cls: type[Any], record: object, raw: bytes) -> Any:
        if not isinstance(record, dict):
            raise TypeError(cls.__name__)
        values: dict[str, object] = {}
        raw_fields = 0
        for field, kind in fields_of(cls).items():
            if kind == "bytes":
                values[field] = raw
                raw_fields = 1
                continue
            if field not in record:
                raise ProtocolError(f"{cls.__name__} lacks {field}")
            try:
                values[field] = self._decode_value(kind, record[field])
            except (KeyError, TypeError, ValueError) as exc:
                raise ProtocolError(f"{cls.__name__}.{field} is not {kind}") from exc
        if len(record) + raw_fields > len(values) or (raw and not raw_fields):
            raise ProtocolError(f"{cls.__name__} has unknown fields")
        return cls(**values)

    def _decode_value(self, kind: str, value: object) -> object:
        if kind.endswith(" | None"):
            return None if value is None else self._decode_value(kind[:-7], value)
        if kind.startswith("tuple["):
            inner = kind[len("tuple[") : -len(", ...]")]
            if not isinstance(value, list):
                raise TypeError(kind)
            nested_type = self._nested_types.get(inner)
            if nested_type is not None:
                return tuple(self._decode_record(nested_type, item, b"") for item in value)
            return tuple(self._decode_value(inner, item) for item in value)
        nested_type = self._nested_types.get(kind)
        if nested_type is not None:
            return self._decode_record(nested_type, value, b"")
        if kind.startswith("Literal["):
            return _literal_value(kind, value)
        return _CHECKS[kind](value)


def _literal_value(kind: str, value: object) -> object:
    """Return the value if it is one of the words in ``Literal['a', 'b']``. Raises TypeError."""
    if value not in kind[len("Literal[") : -1].replace("'", "").split(", "):
        raise TypeError
    return value


def _check_type(*allowed: type) -> Callable[[object], object]:
    def check(value: object) -> object:
        if type(value) not in allowed:
            raise TypeError
        return value

    return check


def _check_int(value: object) -> object:
    if type(value) is not int or not _LEAST <= value <= _MOST:
        raise TypeError
    return value


def _check_text_map(value: object) -> object:
    if not isinstance(value, dict) or not all(type(item) is str for item in value.values()):
        raise TypeError
    return value


def _check_number_map(value: object) -> object:
    if not isinstance(value, dict):
        raise TypeError
    for item in value.values():
        _check_float(item)
    return value


def _check_int_map(value: object) -> object:
    if not isinstance(value, dict):
        raise TypeError
    return {_check_int(int(key)): _check_int(item) for key, item in value.items()}


def _check_float(value: object) -> float:
    if type(value) not in (int, float):
        raise TypeError
    try:
        number = float(value)  # type: ignore[arg-type]  # it is a number
    except OverflowError as exc:  # an int of hundreds of digits
        raise TypeError from exc
    if number - number != 0:  # NaN and infinity are not valid
        raise TypeError
    return number


_CHECKS: dict[str, Callable[[object], object]] = {
    "int": _check_int,
    "float": _check_float,
    "str": _check_type(str),
    "bool": _check_type(bool),
    "Mapping[str, str]": _check_text_map,
    "Mapping[str, float]": _check_number_map,
    "Mapping[int, int]": _check_int_map,
}
