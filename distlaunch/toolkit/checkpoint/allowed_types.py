"""The types that a checkpoint may hold. Saves and the unpickler refuse all others."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, cast

import torch

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.parts import Elsewhere, Whole
from distlaunch.toolkit.checkpoint.unpickler import (
    MalformedError,
    Name,
    Pending,
    Unpickler,
    UnsavedValueError,
    check_attributes,
    check_key,
)
from distlaunch.toolkit.sharded_tensors import is_sharded

WAY_OUT = (
    "Checkpoint(…, trust=True) loads all classes: only for checkpoints that you have written "
    "yourself"
)
_DEPTH = 100
_EXPANDED_BYTES = 16 << 20
"""Largest size of a tensor whose elements share memory (``expand``)."""
_OF_A_DEQUE = 80
"""An empty deque takes 760 bytes of memory, and five in a pickle."""
_SHARED_BYTES = 16 << 20
_PER_STORAGE = 16
_SPARE_VALUES = 1_000_000
_PER_OPERATION = 10
_LEAVES = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.layout, Elsewhere),
}
_PLAIN_KEYS = {str, int, float, bool, bytes, type(None)}
_KEY_SIZE = 10_000
"""How many numbers and texts a dictionary key may contain, as in the unpickler."""
_FACTORIES = {None, bool, int, float, complex, str, bytes, list, dict, set, tuple, OrderedDict}
_NUMPY_KINDS = "?biufcSU"
QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
_TENSORS = {torch.Tensor, torch.nn.Parameter}


class _NotInertError(Exception):
    def __init__(self, path: tuple[Any, ...], why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


def check_saved(value: Any, name: str) -> None:
    """Raise ConfigError if a resume would refuse a value."""
    try:
        _Check(None, Room(_SHARED_BYTES)).check(value, (), frozenset())
    except _NotInertError as error:
        place = "".join(f".{key}" for key in error.path)
        raise ConfigError(
            f"{name}{place} {error.why}, which resume() would refuse: keep numbers, texts, lists, "
            "dictionaries or "
            f"tensors there instead. {WAY_OUT}"
        ) from None


def check_loaded(value: Any, size: int, room: Room | None = None) -> None:
    """Raise UnsavedValueError if a save would not write the value, or if checking it would take too
    long.

    ``size`` is the size of the pickle in bytes, ``room`` the limit for tensors that share elements.
    """
    try:
        _Check(
            _SPARE_VALUES + _PER_OPERATION * size, Room(_SHARED_BYTES) if room is None else room
        ).check(value, (), frozenset())
    except _NotInertError as error:
        raise UnsavedValueError(f"holds what no save writes: it {error.why}") from None


class Room:
    """The bytes by which all tensors together may exceed ``_PER_STORAGE`` times their storages.

    A consumer of the state may copy each tensor. Many tensors that share one storage could fill the
    memory.
    """

    def __init__(self, size: int = 1 << 30) -> None:
        self.left = size


class _Check:
    """Checks a value recursively, within the budget ``left``. An object is checked each time it
    occurs."""

    def __init__(self, left: int | None, room: Room) -> None:
        self._left = left
        self._room = room
        self._storages: set[int] = set()
        self._held = 0
        """Bytes that the tensors so far may occupy without using ``Room``."""

    def check(self, value: Any, path: tuple[Any, ...], above: frozenset[int]) -> None:
        kind = type(value)
        if kind in _LEAVES:
            return
        if kind is torch.Size:
            if any(each < 0 for each in value):
                raise _NotInertError(path, "is a torch.Size of negative numbers")
            return
        if isinstance(value, torch.Tensor):
            if id(value) in above:
                raise _NotInertError(path, "is a tensor whose attributes lead back to it")
            self._check_tensor(value, path, self._enter(value, path, above))
        elif kind in _CHILDREN:
            if id(value) in above:
                return
            above = self._enter(value, path, above)
            if kind is defaultdict and value.default_factory not in _FACTORIES:
                raise _NotInertError(
                    path, f"is a defaultdict of {_full_name(value.default_factory)}"
                )
            if self._left is None and kind in _HASHED:
                self._check_keys(value, path)
            if kind is OrderedDict:
                self._check_attributes(kind, vars(value), path)
            for children in _CHILDREN[kind](value):
                self._check_children(children, path, above)
        elif not _is_of_numpy(value):
            raise _NotInertError(path, f"is of the class {_full_name(kind)}")

    @staticmethod
    def _enter(value: Any, path: tuple[Any, ...], above: frozenset[int]) -> frozenset[int]:
        if len(above) == _DEPTH:
            raise _NotInertError(path, f"is nested more than {_DEPTH} levels deep")
        return above | {id(value)}

    def _check_keys(self, value: Any, path: tuple[Any, ...]) -> None:
        if _PLAIN_KEYS.issuperset(map(type, value)):
            return
        for number, key in enumerate(value):
            spent = 0

            def spend(size: int) -> None:
                nonlocal spent
                spent += size
                if spent > _KEY_SIZE:
                    raise MalformedError("a key is too large")

            try:
                check_key(key, spend)
            except MalformedError:
                why = f"is of the class {_full_name(type(key))}"
                if type(key) in _CHILDREN:
                    why = "is a key that is too large, nested too deeply, or of another class"
                raise _NotInertError((*path, number), why) from None

    def _check_children(self, children: Any, path: tuple[Any, ...], above: frozenset[int]) -> None:
        values = children.values() if isinstance(children, dict) else children
        if self._left is not None:
            self._left -= len(values)
            if self._left < 0:
                raise _NotInertError(path, "repeats values too often")
        if _LEAVES.issuperset(map(type, values)):
            return
        for key, each in children.items() if isinstance(children, dict) else enumerate(children):
            self.check(each, (*path, key), above)

    def _check_tensor(
        self, value: torch.Tensor, path: tuple[Any, ...], above: frozenset[int]
    ) -> None:
        if is_sharded(value):
            with torch.no_grad():
                value = cast("Any", value).to_local()
        if type(value) not in _TENSORS:
            raise _NotInertError(path, f"is of the class {_full_name(type(value))}")
        if (
            value.layout != torch.strided
            or value.dtype in QUANTIZED
            or value.is_nested
            or value.is_meta
        ):
            kind = (
                "quantized"
                if value.dtype in QUANTIZED
                else "on the meta device"
                if value.is_meta
                else str(value.layout)
            )
            raise _NotInertError(path, f"is a tensor that is {kind.removeprefix('torch.')}")
        if attributes := vars(value):
            self._check_attributes(type(value), attributes, path)
        size = value.numel() * value.element_size()
        storage = value.untyped_storage()
        if size > _EXPANDED_BYTES and size > storage.nbytes():
            raise _NotInertError(path, "is an expanded view (clone() makes a tensor of it)")
        if storage.data_ptr() not in self._storages:
            self._storages.add(storage.data_ptr())
            self._held += _PER_STORAGE * storage.nbytes()
        self._held -= size
        if self._held < 0:
            self._room.left += self._held
            self._held = 0
        if self._room.left < 0:
            raise _NotInertError(path, "is one of many tensors that share their numbers")
        if attributes:
            self._check_children(attributes, path, above)

    @staticmethod
    def _check_attributes(kind: type, names: Iterable[str], path: tuple[Any, ...]) -> None:
        try:
            check_attributes(kind, names)
        except MalformedError:
            raise _NotInertError(path, f"has an attribute that each {kind.__name__} has") from None


_CHILDREN: dict[type, Any] = {
    dict: lambda value: (value, list(value)),
    Counter: lambda value: (dict(value), list(value)),
    defaultdict: lambda value: (dict(value), list(value)),
    OrderedDict: lambda value: (dict(value), list(value), vars(value)),
    list: lambda value: (value,),
    tuple: lambda value: (value,),
    deque: lambda value: (list(value),),
    set: lambda value: (list(value),),
    frozenset: lambda value: (list(value),),
    Whole: lambda value: ([value.value],),
}


_HASHED = {dict, Counter, defaultdict, OrderedDict, set, frozenset}


def _is_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if type(value) is numpy.ndarray or isinstance(value, numpy.generic):
        empty = type(value) is numpy.ndarray and not value.dtype.itemsize
        return _is_plain(value.dtype) and type(value).__module__ == "numpy" and not empty
    return isinstance(value, numpy.dtype) and _is_plain(value)


def _is_plain(dtype: Any) -> bool:
    return (
        dtype.kind in _NUMPY_KINDS + "b"
        and dtype.names is None
        and dtype.subdtype is None
        and not dtype.metadata
    )


def _full_name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


# --- what the unpickler constructs -----------------------------------------------------------------------------------


def _counting_constructor(kind: Any) -> Any:
    """Return a constructor of a container that counts the items against the budget."""

    def construct(unpickler: Unpickler, items: Any = (), *more: Any) -> Any:
        if type(items) not in {list, tuple, dict, str, bytes} or more:
            raise MalformedError(f"a pickle makes a {kind.__name__} of a {type(items).__name__}")
        unpickler.spend(len(items))
        if kind in {set, frozenset, OrderedDict, Counter}:
            of_pairs = kind is OrderedDict and type(items) is not dict
            if of_pairs and any(type(each) not in {list, tuple} for each in items):
                raise MalformedError("a pickle makes an OrderedDict of what are no pairs")
            unpickler.check_keys([each[0] for each in items] if of_pairs else items)
        return kind(items)

    return construct


def _is_one_of(value: Any, *texts: str) -> bool:
    """Return whether a value is a string that equals one of ``texts``.

    The value is not hashed, because Python crashes on the hash of deeply nested tuples.
    """
    return type(value) is str and value in texts


def _encode(unpickler: Unpickler, text: Any, encoding: Any) -> bytes:
    if type(text) is not str or not _is_one_of(encoding, "latin1", "latin-1"):
        raise MalformedError("a pickle encodes what is no bytes")
    unpickler.spend(len(text))
    return text.encode("latin-1")


def _construct_bytearray(
    unpickler: Unpickler, data: Any = b"", encoding: Any = "latin-1"
) -> bytearray:
    if type(data) is str:
        data = _encode(unpickler, data, encoding)
    if type(data) is not bytes:
        raise MalformedError("a pickle makes a bytearray of what is no bytes")
    unpickler.spend(len(data))
    return bytearray(data)


def _construct_bytes(_: Unpickler) -> bytes:
    return b""


def _construct_complex(_: Unpickler, real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise MalformedError("a pickle makes a complex number of no numbers")
    return complex(real, imaginary)


def _construct_defaultdict(_: Unpickler, factory: Any = None) -> defaultdict[Any, Any]:
    kind = factory.factory if type(factory) is Name else None
    if (kind is None and factory is not None) or kind not in _FACTORIES:
        raise MalformedError("a pickle makes a defaultdict of what is no class")
    return defaultdict(kind)


def _construct_deque(unpickler: Unpickler, items: Any = (), most: Any = None) -> deque[Any]:
    if type(items) not in {list, tuple} or not (most is None or type(most) is int):
        raise MalformedError("a pickle makes a deque of what is no list")
    unpickler.spend(len(items) + _OF_A_DEQUE)
    return deque(items, most)


def construct_size(unpickler: Unpickler, sizes: Any = ()) -> torch.Size:
    """Construct a torch.Size of whole numbers from 0. Raises MalformedError for anything else."""
    if type(sizes) not in {tuple, list, torch.Size} or any(
        type(each) is not int or each < 0 for each in sizes
    ):
        raise MalformedError("a pickle has a size of no numbers")
    unpickler.spend(len(sizes))
    return torch.Size(sizes)


def _construct_device(_: Unpickler, kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or len(kind) > _DEPTH or not (index is None or type(index) is int):
        raise MalformedError("a pickle has a device that is none")
    return torch.device(kind) if index is None else torch.device(kind, index)


_LAYOUTS = {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)}


def construct_layout(_: Unpickler, name: Any) -> torch.layout:
    """Construct a torch.layout by its name. Raises MalformedError for another text."""
    if type(name) is not str or name not in _LAYOUTS:
        raise MalformedError("a pickle has a layout that is none")
    return _LAYOUTS[name]


def _record_name(kind: type) -> Name:
    return Name(lambda _: object.__new__(kind))


# --- numpy -----------------------------------------------------------------------------------------------------------


def _import_numpy() -> Any:
    try:
        import numpy as np
    except ImportError as error:
        raise MalformedError("has arrays of numpy, which is not installed here") from error
    return np


def _construct_numpy_dtype(unpickler: Unpickler, code: Any, *flags: Any) -> Pending:
    if (
        type(code) is not str
        or code[:1] not in _NUMPY_KINDS + "b"
        or not code[1:].isdecimal()
        or len(code) > 12
    ):
        raise MalformedError(
            "a pickle has a type of numpy's that holds more than numbers and texts"
        )
    unpickler.spend(len(flags))

    def build(state: Any) -> Any:
        if type(state) is not tuple or len(state) != 8 or state[2:5] != (None, None, None):
            raise MalformedError("a pickle has a type of numpy's that has parts")
        if not _is_one_of(state[1], "<", ">", "|", "="):
            raise MalformedError("a pickle has a type of numpy's without an order of bytes")
        plain = _import_numpy().dtype(code)
        ordered = plain.newbyteorder(state[1])
        return plain if ordered.isnative else ordered

    return Pending(build)


def _construct_numpy_array(unpickler: Unpickler, kind: Any, *arguments: Any) -> Pending:
    if kind is not _ARRAY:
        raise MalformedError("a pickle has an array of another class than numpy's")
    unpickler.spend(len(arguments))
    return Pending(lambda state: _build_array(unpickler, state))


def _build_array(unpickler: Unpickler, state: Any) -> Any:
    numpy = _import_numpy()
    _, shape, dtype, by_columns, data = state
    if not isinstance(dtype, numpy.dtype) or not _is_plain(dtype) or type(data) is not bytes:
        raise MalformedError(
            "a pickle has an array of numpy's that holds more than numbers and texts"
        )
    if type(shape) is not tuple or any(type(each) is not int or each < 0 for each in shape):
        raise MalformedError("a pickle has an array of numpy's without a shape")
    order = "F" if by_columns else "C"
    unpickler.spend(len(data) + len(shape))
    if not dtype.itemsize:
        raise MalformedError("a pickle has an array of nothing")
    return numpy.frombuffer(bytearray(data), dtype).reshape(shape, order=order)


def _construct_numpy_scalar(unpickler: Unpickler, dtype: Any, data: Any) -> Any:
    numpy = _import_numpy()
    if not isinstance(dtype, numpy.dtype) or not _is_plain(dtype) or type(data) is not bytes:
        raise MalformedError("a pickle has a number of numpy's that is none")
    if len(data) != dtype.itemsize:
        raise MalformedError("a pickle has a number of numpy's of another size")
    unpickler.spend(len(data))
    if not data:
        return dtype.type()
    return numpy.frombuffer(data, dtype)[0]


_ARRAY = Name(None)
_NUMPY = {
    "numpy.dtype": Name(_construct_numpy_dtype),
    "numpy.ndarray": _ARRAY,
    **{
        f"numpy.{core}.multiarray.{name}": Name(construct)
        for core in ("core", "_core")
        for name, construct in (
            ("_reconstruct", _construct_numpy_array),
            ("scalar", _construct_numpy_scalar),
        )
    },
}

# --- names -----------------------------------------------------------------------------------------------------------

TORCH: dict[str, Any] = {
    **{
        f"torch.{name}": each for name, each in vars(torch).items() if isinstance(each, torch.dtype)
    },
    "torch.Size": Name(construct_size),
    "torch.serialization._get_layout": Name(construct_layout),
}
"""Names in both ``.metadata`` and the pickles of states."""


@cache
def state_names() -> Mapping[str, Any]:
    """Return the names in the pickle of a state, except those of tensors."""
    ours: Iterable[tuple[str, type]] = (("Elsewhere", Elsewhere), ("Whole", Whole))
    return {
        **TORCH,
        **_NUMPY,
        "torch.device": Name(_construct_device),
        "_codecs.encode": Name(_encode),
        "builtins.bytes": Name(_construct_bytes, factory=bytes),
        "builtins.bytearray": Name(_construct_bytearray),
        "builtins.complex": Name(_construct_complex, factory=complex),
        "builtins.set": Name(_counting_constructor(set), factory=set),
        "builtins.frozenset": Name(_counting_constructor(frozenset)),
        **{
            f"builtins.{kind.__name__}": Name(None, factory=kind)
            for kind in (bool, int, float, str, list, dict, tuple)
        },
        "collections.OrderedDict": Name(_counting_constructor(OrderedDict), factory=OrderedDict),
        "collections.Counter": Name(_counting_constructor(Counter)),
        "collections.defaultdict": Name(_construct_defaultdict),
        "collections.deque": Name(_construct_deque),
        **{
            f"{module}.{name}": _record_name(kind)
            for name, kind in ours
            for module in (OLD_MODULE, kind.__module__)
        },
    }


OLD_MODULE = "distlaunch.toolkit.checkpoint_parts"
"""The module that pickles of version 0.1 name for our classes."""
OLD_NAMES = {(OLD_MODULE, "Elsewhere"): Elsewhere, (OLD_MODULE, "Whole"): Whole}
