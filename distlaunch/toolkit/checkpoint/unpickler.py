"""An unpickler that executes no code that the pickle names.

It supports the operations that torch.save and pickle.dump write, and a fixed table of names. A name
is never imported: it selects a constructor of ours, which checks its arguments. No class or
function is ever on the stack, so a pickle can neither call nor change one. Memory and time are
bounded by the size of the pickle; for keys with equal hashes, each comparison counts.
"""

# ruff: noqa: SLF001 - a table at the end has the methods of the class above

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from distlaunch.toolkit.checkpoint.parts import Elsewhere, Whole

Construct = Callable[..., Any]
_SPARE = 1 << 20
_PER_BYTE = 16
"""Bytes that a pickle may construct for each of its own. Copies of a long string could fill the
memory."""
_OF_A_SET = 2 * _PER_BYTE
"""An empty set takes 216 bytes of memory, and two in a pickle."""
_KEY_DEPTH = 20
_LARGEST = (1 << 63) - 1


class RefusedClassError(Exception):
    """A pickle names a class or function that is not in the table."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class MalformedError(ValueError):
    """The data is no pickle, or has something that no checkpoint needs."""


class OverBudgetError(MalformedError):
    """A pickle would construct far more than its size suggests."""


class UnsavedValueError(MalformedError):
    """A valid pickle has a value that a save would refuse. ``trust=True`` loads it."""


class Name:
    """What a name selects: a constructor for REDUCE and NEWOBJ, or a default factory."""

    def __init__(self, construct: Construct | None, *, factory: Any = None) -> None:
        self.construct = construct
        self.factory = factory


class Unpickler:
    """Reads one pickle.

    ``names`` has a ``Name``, or a value, for each allowed name. ``persistent`` returns the value
    for a persistent id.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        names: Mapping[str, Any],
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._names = names
        self._persistent = persistent
        self._budget = _SPARE + _PER_BYTE * len(self._data)
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._hashes: dict[int, tuple[Any, dict[int, int]]] = {}
        """The number of a container's keys by hash, by id of the container."""

    def load(self) -> Any:
        """Return the object. Raises RefusedClassError, MalformedError, or an error of a
        constructor."""
        operations, data = _OPERATIONS, self._data
        try:
            while True:
                code = data[self._at]
                self._at += 1
                if code == _STOP:
                    return self._stack.pop()
                operation = operations.get(code)
                if operation is None:
                    raise MalformedError(
                        f"the operation {bytes([code])!r} of a pickle is none that a checkpoint "
                        "needs"
                    )
                operation(self)
        except (IndexError, struct.error, KeyError, UnicodeDecodeError) as error:
            raise MalformedError(
                f"a pickle is damaged at byte {self._at:,} ({type(error).__name__})"
            ) from error

    def spend(self, size: int) -> None:
        """Charge the budget. Raises MalformedError if it is used up."""
        self._budget -= size
        if self._budget < 0:
            raise OverBudgetError("a pickle constructs far more than it holds")

    # --- what is read of the pickle --------------------------------------------------------------------------------

    def _take(self, size: int) -> memoryview:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise MalformedError("a pickle ends early")
        self._at += size
        return taken

    def _read_number(self, form: str, size: int) -> Any:
        return struct.unpack(form, self._take(size))[0]

    def _read_line(self) -> str:
        for end in range(self._at, min(self._at + 1000, len(self._data))):
            if self._data[end] == 0x0A:
                line = str(self._data[self._at : end], "utf-8")
                self._at = end + 1
                return line
        raise MalformedError("a pickle has a name without an end")

    def _push_text(self, size: int) -> None:
        self._stack.append(str(self._take(size), "utf-8", "surrogatepass"))

    def _push_bytes(self, size: int) -> None:
        self._stack.append(bytes(self._take(size)))

    def _push_long(self, size: int) -> None:
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _push_bytearray(self, size: int) -> None:
        self._stack.append(bytearray(self._take(size)))

    def _skip(self, size: int) -> None:
        self._take(size)

    def _pop_above_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    # --- names and what they construct -----------------------------------------------------------------------------

    def _push_global(self) -> None:
        self._push_name(self._read_line(), self._read_line())

    def _push_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise MalformedError("a pickle has a name that is no text")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if full not in self._names:
            raise RefusedClassError(full)
        self._stack.append(self._names[full])

    def _construct(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if type(name) is not Name or name.construct is None or type(arguments) is not tuple:
            raise MalformedError("a pickle calls what cannot be called")
        try:
            self._stack.append(name.construct(self, *arguments))
        except TypeError as error:
            raise MalformedError("a pickle calls something with other arguments") from error

    def _build(self) -> None:
        state, value = self._stack.pop(), self._stack[-1]
        build = _BUILDERS.get(type(value))
        if build is None:
            raise MalformedError(f"a pickle changes a {type(value).__name__}")
        built = build(self, value, state)
        if built is not value:
            self._replace(value, built)

    def _replace(self, value: Any, built: Any) -> None:
        """Put the finished value on the stack and in the memo."""
        self._stack[-1] = built
        for place in value.places:
            self._memo[place] = built

    def _push_persistent(self) -> None:
        if self._persistent is None:
            raise MalformedError("a pickle has a storage where there is none")
        self._stack.append(self._persistent(self._stack.pop()))

    # --- containers ------------------------------------------------------------------------------------------------

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _extend(self, items: list[Any]) -> None:
        value = self._stack[-1]
        if type(value) is not list and type(value) is not deque:
            raise MalformedError(f"a pickle appends to a {type(value).__name__}")
        value.extend(items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in _DICTS or len(items) % 2:
            raise MalformedError(f"a pickle sets items of a {type(target).__name__}")
        for place in range(0, len(items), 2):
            key = items[place]
            if type(key) is not str:
                self._check_key_of(target, key)
            target[key] = items[place + 1]

    def _add_items(self) -> None:
        items, target = self._pop_above_mark(), self._stack[-1]
        if type(target) is not set:
            raise MalformedError(f"a pickle adds items to a {type(target).__name__}")
        for item in items:
            self._check_key_of(target, item)
        target.update(items)

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Raise MalformedError for a key that ``check_key`` refuses."""
        hashes: dict[int, int] = {}
        for key in keys:
            self._check_key(key, hashes)

    def _check_key_of(self, target: Any, key: Any) -> None:
        found = self._hashes.get(id(target))
        if found is None:
            # Holds a reference, so that the id is not reused.
            found = self._hashes[id(target)] = (target, {})
        self._check_key(key, found[1])

    def _check_key(self, key: Any, hashes: dict[int, int]) -> None:
        """Charge the cost, multiplied by the number of earlier keys with the same hash, to which it
        is compared."""
        before = self._budget
        check_key(key, self.spend)
        if type(key) in _SPREAD or (type(key) is int and abs(key) < _SMALL):
            return
        hashed = hash(key)
        others = hashes[hashed] = hashes.get(hashed, -1) + 1
        self.spend(others * (1 + before - self._budget))

    def _push_empty_set(self) -> None:
        self.spend(_OF_A_SET)
        self._stack.append(set())

    def _push_frozenset(self) -> None:
        items = self._pop_above_mark()
        self.check_keys(items)
        self._stack.append(frozenset(items))

    def _set_mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _pop(self) -> None:
        self._stack.pop()

    def _drop_above_mark(self) -> None:
        self._pop_above_mark()

    def _push_tuple(self, size: int) -> None:
        if len(self._stack) < size:
            raise MalformedError("a pickle ends early")
        self._stack[-size:] = [tuple(self._stack[-size:])]

    # --- memo ------------------------------------------------------------------------------------------------------

    def _store_in_memo(self, place: int) -> None:
        value = self._stack[-1]
        if type(value) is Pending:
            value.places.append(place)
        self._memo[place] = value

    def _push_from_memo(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def _push(self, value: Any) -> None:
        self._stack.append(value)


Build = Callable[[Unpickler, Any, Any], Any]


def check_key(key: Any, spend: Callable[[int], None], depth: int = _KEY_DEPTH) -> None:
    """Raise MalformedError for a key that checkpoints do not contain.

    The hash of deeply nested tuples could crash Python. ``spend`` gets the cost of hashing.
    """
    kind = type(key)
    if kind is int:
        spend(key.bit_length() >> 6)
    elif kind in {tuple, frozenset} and depth:
        spend(len(key))
        for each in key:
            check_key(each, spend, depth - 1)
    elif kind is torch.Size:
        spend(len(key))
    elif kind in _RECORD_KEYS:
        spend(len(getattr(key, "offset", None) or ()))
    elif getattr(kind, "__module__", "").startswith("numpy"):
        spend(len(key) if isinstance(key, str | bytes) else 1)
    elif kind not in _KEYS:
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        raise UnsavedValueError(f"a pickle has a key of the class {name}")


class Pending:
    """A value until its BUILD operation: numpy's arrays and types cannot be changed afterwards."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build = build
        self.is_built = False
        self.places: list[int] = []


def _build_pending(_: Unpickler, value: Pending, state: Any) -> Any:
    if value.is_built:  # each build visits all places of the value
        raise MalformedError("a pickle builds a value of numpy's twice")
    value.is_built = True
    return value.build(state)


def check_attributes(kind: type, names: Iterable[str]) -> None:
    """Raise MalformedError for an attribute that would hide one of the class."""
    for name in names:
        if hasattr(kind, name):
            raise MalformedError(f"a pickle gives a {kind.__name__} another {name[:100]}")


def _build_ordered(unpickler: Unpickler, value: OrderedDict[Any, Any], state: Any) -> Any:
    if type(state) is not dict or any(type(key) is not str for key in state):
        raise MalformedError("a pickle gives an OrderedDict what are no attributes")
    unpickler.spend(len(state))
    check_attributes(OrderedDict, state)
    vars(value).update(state)
    return value


def _set_fields(**kinds: type) -> Build:
    """Return a function that sets the fields of a frozen record, checked, from a list or a
    dictionary."""
    names = tuple(kinds)

    def build(_: Unpickler, value: Any, state: Any) -> Any:
        fields = dict(zip(names, state, strict=True)) if type(state) is list else state
        if type(fields) is not dict or set(fields) != set(names):
            raise MalformedError(f"a pickle gives a {type(value).__name__} other fields")
        for name, each in fields.items():
            if not isinstance(each, kinds[name]):
                raise MalformedError(f"{name} of a {type(value).__name__} is another type")
            object.__setattr__(value, name, each)
        return value

    return build


_BUILDERS: dict[type, Build] = {
    Pending: _build_pending,
    OrderedDict: _build_ordered,
    Elsewhere: _set_fields(place=str),
    Whole: _set_fields(value=object),
}
_DICTS = {dict, OrderedDict, defaultdict, Counter}
_KEYS = {
    *(str, int, float, bool, bytes, complex, type(None)),
    *(torch.Size, torch.dtype, torch.device, torch.layout),
}
_SPREAD = {str, bytes, bool, type(None), torch.dtype, torch.layout}
"""Values of these types cannot collide in a hash: they are few, or Python's secret seed is part of
it."""
_SMALL = 1 << 60
"""Integers below this have distinct hashes."""
_RECORD_KEYS: set[type] = set()


def register(kind: type, build: Callable[[Any, Any], Any], *, key: bool = False) -> None:
    """Let the unpickler build objects of class ``kind``. ``key``: they may be dictionary keys."""
    _BUILDERS[kind] = lambda _, value, state: build(value, state)
    if key:
        _RECORD_KEYS.add(kind)


# --- the operations --------------------------------------------------------------------------------------------------

_STOP = ord(".")
_Operation = Callable[[Unpickler], None]
_OPERATIONS: dict[int, _Operation] = {
    0x80: lambda self: self._skip(1),  # PROTO
    0x95: lambda self: self._skip(8),  # FRAME
    ord("("): Unpickler._set_mark,
    ord("0"): Unpickler._pop,
    ord("1"): Unpickler._drop_above_mark,
    ord("N"): lambda self: self._push(None),
    0x88: lambda self: self._push(True),  # noqa: FBT003 - it is a value
    0x89: lambda self: self._push(False),  # noqa: FBT003 - same
    ord("J"): lambda self: self._push(self._read_number("<i", 4)),
    ord("K"): lambda self: self._push(self._read_number("B", 1)),
    ord("M"): lambda self: self._push(self._read_number("<H", 2)),
    ord("G"): lambda self: self._push(self._read_number(">d", 8)),
    0x8A: lambda self: self._push_long(self._read_number("B", 1)),
    0x8B: lambda self: self._push_long(self._read_number("<I", 4)),
    ord("X"): lambda self: self._push_text(self._read_number("<I", 4)),
    0x8C: lambda self: self._push_text(self._read_number("B", 1)),
    0x8D: lambda self: self._push_text(self._read_number("<Q", 8)),
    ord("B"): lambda self: self._push_bytes(self._read_number("<I", 4)),
    ord("C"): lambda self: self._push_bytes(self._read_number("B", 1)),
    0x8E: lambda self: self._push_bytes(self._read_number("<Q", 8)),
    0x96: lambda self: self._push_bytearray(self._read_number("<Q", 8)),
    ord(")"): lambda self: self._push(()),
    0x85: lambda self: self._push_tuple(1),
    0x86: lambda self: self._push_tuple(2),
    0x87: lambda self: self._push_tuple(3),
    ord("t"): lambda self: self._push(tuple(self._pop_above_mark())),
    ord("]"): lambda self: self._push([]),
    ord("}"): lambda self: self._push({}),
    0x8F: Unpickler._push_empty_set,
    ord("a"): Unpickler._append,
    ord("e"): lambda self: self._extend(self._pop_above_mark()),
    ord("s"): Unpickler._set_item,
    ord("u"): lambda self: self._set_items(self._pop_above_mark()),
    0x90: Unpickler._add_items,
    0x91: Unpickler._push_frozenset,
    ord("q"): lambda self: self._store_in_memo(self._read_number("B", 1)),
    ord("r"): lambda self: self._store_in_memo(self._read_number("<I", 4)),
    0x94: lambda self: self._store_in_memo(len(self._memo)),
    ord("h"): lambda self: self._push_from_memo(self._read_number("B", 1)),
    ord("j"): lambda self: self._push_from_memo(self._read_number("<I", 4)),
    ord("c"): Unpickler._push_global,
    0x93: Unpickler._push_stack_global,
    ord("R"): Unpickler._construct,
    0x81: Unpickler._construct,  # NEWOBJ
    ord("b"): Unpickler._build,
    ord("Q"): Unpickler._push_persistent,
}
"""Operations of the protocols 2 to 5."""
