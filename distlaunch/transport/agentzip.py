"""The agent's code as a zip, made from whatever distlaunch itself was imported from."""

from __future__ import annotations

import importlib.util
import marshal
import os
import pkgutil
import struct
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_LEVEL = 1
"""Of deflate. Level 6 makes the zip 6 % smaller and takes half as long again, which only 50 nodes would pay back."""
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_NEEDS = 20
"""The version of PKZIP that knows deflate and folders."""
_DEFLATED = 8
_DATE = 1 << 5 | 1
"""The first of January 1980: zips have no time of zero."""
_UNCHECKED = struct.pack("<I8x", 1)
"""Behind the magic number of a .pyc: valid by its hash (PEP 552), which nobody is to compare."""
_PYC_HEADER = 16


def agent_zip() -> bytes:
    """Pack ``distlaunch/__init__`` and all of ``distlaunch.core``, each module as source and as this Python's code.

    A Python of another version ignores the code and compiles the source. Modules that have not been compiled yet are,
    and kept in the import cache if that can be written. Raises ImportError or OSError if the package is damaged.
    """
    import distlaunch
    from distlaunch import core

    return _zipped(member for package in (distlaunch, core) for member in _members(package, deep=package is core))


def _members(package: ModuleType, *, deep: bool) -> Iterator[tuple[str, bytes]]:
    spec = package.__spec__
    yield from _of_module(package.__name__, spec, is_package=True)
    if deep:
        yield from _below(package.__name__ + ".", package.__path__)


def _below(prefix: str, folders: Any) -> Iterator[tuple[str, bytes]]:
    for info in pkgutil.iter_modules(folders, prefix):
        spec: Any = info.module_finder.find_spec(info.name, None)
        yield from _of_module(info.name, spec, is_package=info.ispkg)
        if info.ispkg:
            yield from _below(info.name + ".", spec.submodule_search_locations)


def _of_module(name: str, spec: Any, *, is_package: bool) -> Iterator[tuple[str, bytes]]:
    stem = name.replace(".", "/") + ("/__init__" if is_package else "")
    source = spec.loader.get_data(spec.origin)
    code = _cached(spec, len(source)) or marshal.dumps(spec.loader.get_code(name))
    yield stem + ".py", source
    yield stem + ".pyc", importlib.util.MAGIC_NUMBER + _UNCHECKED + code


def _cached(spec: Any, size: int) -> bytes | None:
    """Give the code that the import cache has, if it is of this very source: half the cost of loading it."""
    if not spec.cached:
        return None
    try:
        with open(spec.cached, "rb") as file:
            held = file.read()
        changed = int(os.stat(spec.origin).st_mtime)
    except OSError:
        return None
    header = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, changed & 0xFFFFFFFF, size & 0xFFFFFFFF)
    return held[_PYC_HEADER:] if held[:_PYC_HEADER] == header else None


def _zipped(members: Iterator[tuple[str, bytes]]) -> bytes:
    """Write a zip: ``zipfile`` takes five times as long for it."""
    parts: list[bytes] = []
    directory: list[bytes] = []
    at = 0
    for name, data in members:
        path = name.encode()
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = packer.compress(data) + packer.flush()
        facts = (0, _DEFLATED, 0, _DATE, zlib.crc32(data), len(packed), len(data), len(path), 0)
        local = _LOCAL.pack(b"PK\3\4", _NEEDS, *facts) + path + packed
        directory.append(_CENTRAL.pack(b"PK\1\2", _NEEDS, _NEEDS, *facts, 0, 0, 0, 0, at) + path)
        parts.append(local)
        at += len(local)
    listed = b"".join(directory)
    end = _END.pack(b"PK\5\6", 0, 0, len(directory), len(directory), len(listed), at, 0)
    return b"".join((*parts, listed, end))
