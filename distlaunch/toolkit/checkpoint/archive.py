"""Read files written by torch.save without executing anything in them.

Such a file is a zip archive with a pickle (``data.pkl``) and a file for each storage. Sizes in the
pickle are checked against the archive before memory is allocated. torch.load(weights_only=True) is
not used: its table of allowed classes is global to the process, and before torch 2.6 it could be
made to execute code.
"""

from __future__ import annotations

import ctypes
import io
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import torch

from distlaunch.toolkit.checkpoint.allowed_types import Room, check_loaded, state_names
from distlaunch.toolkit.checkpoint.unpickler import (
    MalformedError,
    Name,
    Unpickler,
    check_attributes,
)

_LOCAL_HEADER_BYTES = 30
_STORAGES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


class Part(io.RawIOBase):
    """A section of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file, self._offset, self.size, self._at = file, offset, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, and return it. Raises ValueError for a position before the
        beginning."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return at most ``size`` bytes; by default all remaining bytes."""
        left = max(0, self.size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._offset + self._at)
        data = self._file.read(wanted)
        self._at += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer as far as there are bytes. Return their number."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer with the bytes from position ``at``. Raises MalformedError if there are
        fewer."""
        if at < 0 or at + len(buffer) > self.size:
            raise MalformedError("a storage ends outside of its file")
        self._file.seek(self._offset + at)
        filled = 0
        while filled < len(buffer):
            count = cast("io.BufferedIOBase", self._file).readinto(buffer[filled:])
            if not count:
                raise MalformedError("a storage ends early")
            filled += count


def loaded(part: Part, room: Room | None = None) -> Any:
    """Return the object that torch.save has written to ``part``, with tensors on the CPU.

    All parts of a checkpoint share the ``room`` for tensors that share elements. Raises
    RefusedClassError for a class that is not allowed, and MalformedError for damaged data.
    """
    archive = _Archive(part)
    data = archive.pickle()
    value = Unpickler(data, _allowed_names(), archive.storage).load()
    check_loaded(value, len(data), room)
    return value


class _Archive:
    def __init__(self, part: Part) -> None:
        self._part = part
        try:
            with zipfile.ZipFile(cast("Any", part)) as archive:
                self._files = {each.filename: each for each in archive.infolist()}
        except (
            zipfile.BadZipFile,
            ValueError,
            NotImplementedError,
            EOFError,
            struct.error,
        ) as error:
            raise MalformedError(f"is no archive of torch.save ({error})") from error
        pickles = [
            name for name in self._files if name.endswith("/data.pkl") and name.count("/") == 1
        ]
        if len(pickles) != 1:
            raise MalformedError("is no archive of torch.save with one data.pkl")
        self._prefix = pickles[0].removesuffix("data.pkl")
        self._left = part.size
        order = f"{self._prefix}byteorder"
        if order in self._files and bytes(self._read_content(order)) != sys.byteorder.encode():
            raise MalformedError("was written on a machine with another order of bytes")
        self._storages: dict[str, torch.Tensor] = {}

    def pickle(self) -> memoryview:
        return self._read_content(f"{self._prefix}data.pkl")

    def storage(self, pid: Any) -> _Storage:
        """Return the storage for a persistent id: ``("storage", type, key, device, count)``.

        Raises MalformedError for another id, or a storage that is larger than its file.
        """
        if (
            type(pid) is not tuple
            or len(pid) != 5
            or pid[0] != "storage"
            or type(pid[1]) is not _StorageType
        ):
            raise MalformedError("a pickle has a storage that is none")
        _, kind, key, _, count = pid
        if type(key) is not str or type(count) is not int or count < 0:
            raise MalformedError("a pickle has a storage that is none")
        if key not in self._storages:
            self._storages[key] = self._read_tensor(f"{self._prefix}data/{key}")
        data = self._storages[key]
        if count * (1 if kind.dtype is None else kind.dtype.itemsize) > data.numel():
            raise MalformedError("a storage is larger than its file")
        return _Storage(data, kind.dtype)

    def _read_tensor(self, name: str) -> torch.Tensor:
        at, size = self._find_file(name)
        data = torch.empty(size, dtype=torch.uint8)
        if size:
            self._part.read_into(
                memoryview((ctypes.c_char * size).from_address(data.data_ptr())).cast("B"), at
            )
        return data

    def _read_content(self, name: str) -> memoryview:
        at, size = self._find_file(name)
        data = memoryview(bytearray(size))
        self._part.read_into(data, at)
        return data

    def _find_file(self, name: str) -> tuple[int, int]:
        """Return offset and size of a file. Raises MalformedError if all files together are larger
        than the archive."""
        found = self._files.get(name)
        if found is None:
            raise MalformedError(f"has no {name[:100]}")
        if found.compress_type != zipfile.ZIP_STORED or found.file_size != found.compress_size:
            raise MalformedError(f"has {name[:100]} compressed")
        header = memoryview(bytearray(_LOCAL_HEADER_BYTES))
        self._part.read_into(header, found.header_offset)
        at = found.header_offset + _LOCAL_HEADER_BYTES
        at += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        self._left -= found.file_size
        if (
            bytes(header[:4]) != b"PK\x03\x04"
            or at + found.file_size > self._part.size
            or self._left < 0
        ):
            raise MalformedError(f"has {name[:100]} where it cannot be")
        return at, found.file_size


class _StorageType:
    """``dtype`` is None for a storage of bytes."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype


class _Storage:
    def __init__(self, data: torch.Tensor, dtype: torch.dtype | None) -> None:
        self.data, self.dtype = data, dtype


def _construct_tensor(
    unpickler: Unpickler,
    dtype: Any,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    metadata: Any,
) -> torch.Tensor:
    """Construct a tensor on a storage. Raises MalformedError if it does not fit."""
    if type(storage) is not _Storage or not isinstance(dtype, torch.dtype):
        raise MalformedError("a pickle has a tensor without a storage")
    if not {type(size), type(stride)} <= {tuple, torch.Size}:
        raise MalformedError("a pickle has a tensor without a size")
    unpickler.spend(len(size) + len(stride))
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or any(type(each) is not int or each < 0 for each in numbers):
        raise MalformedError("a pickle has a tensor without a size")
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if all(size) and (last + 1) * dtype.itemsize > storage.data.numel():
        raise MalformedError("a pickle has a tensor that is larger than its storage")
    if all(size):
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(cast("Any", storage.data.untyped_storage()), offset, size, stride)
    else:
        tensor = torch.empty(size, dtype=dtype)
    for name, isset in (metadata or {}).items():
        if name not in {"conj", "neg"}:
            raise MalformedError("a pickle has a tensor of an unknown kind")
        if isset:
            tensor = tensor.conj() if name == "conj" else torch._neg_view(tensor)  # noqa: SLF001 - as torch.load does
    return tensor.requires_grad_(requires_grad is True)


def _construct_tensor_v2(
    unpickler: Unpickler,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> torch.Tensor:
    _refuse_hooks(hooks)
    return _construct_tensor(
        unpickler,
        getattr(storage, "dtype", None),
        storage,
        offset,
        size,
        stride,
        requires_grad,
        _check_flags(metadata),
    )


def _construct_tensor_v3(
    unpickler: Unpickler,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> torch.Tensor:
    _refuse_hooks(hooks)
    return _construct_tensor(
        unpickler, dtype, storage, offset, size, stride, requires_grad, _check_flags(metadata)
    )


def _construct_parameter(
    _: Unpickler, data: Any, requires_grad: Any, hooks: Any
) -> torch.nn.Parameter:
    _refuse_hooks(hooks)
    if type(data) is not torch.Tensor:
        raise MalformedError("a pickle has a parameter that is no tensor")
    return torch.nn.Parameter(data.detach(), requires_grad is True)


def _construct_parameter_with_state(
    unpickler: Unpickler, data: Any, requires_grad: Any, hooks: Any, state: Any
) -> torch.nn.Parameter:
    parameter = _construct_parameter(unpickler, data, requires_grad, hooks)
    _set_attributes(unpickler, parameter, state)
    return parameter


def _construct_from_type(
    unpickler: Unpickler, construct: Any, kind: Any, arguments: Any, state: Any
) -> Any:
    """Return a tensor with attributes. Replaces torch's ``_rebuild_from_type_v2``.

    ``construct`` makes the tensor from ``arguments``. Raises MalformedError for any other function
    or class than those of plain tensors and parameters.
    """
    makes = {_TENSOR_V2: _TENSOR, _TENSOR_V3: _TENSOR, _PARAMETER: _PARAMETER_CLASS}
    if (
        type(construct) is not Name
        or makes.get(construct) is not kind
        or type(arguments) is not tuple
    ):
        raise MalformedError("a pickle has a tensor of another class")
    tensor = cast("Any", construct.construct)(unpickler, *arguments)
    _set_attributes(unpickler, tensor, state)
    return tensor


def _set_attributes(unpickler: Unpickler, tensor: torch.Tensor, state: Any) -> None:
    if type(state) is tuple and len(state) == 2 and state[1] is None:
        state = state[0]
    if type(state) is not dict or any(type(key) is not str for key in state):
        raise MalformedError("a pickle has a tensor whose attributes are none")
    unpickler.spend(len(state))
    check_attributes(type(tensor), state)
    vars(tensor).update(state)


def _refuse_hooks(hooks: Any) -> None:
    if type(hooks) is not OrderedDict or hooks:
        raise MalformedError("a pickle has a tensor with hooks")


def _check_flags(metadata: Any) -> dict[Any, Any]:
    if not (metadata is None or type(metadata) is dict):
        raise MalformedError("a pickle has a tensor of an unknown kind")
    return metadata or {}


_TENSOR, _PARAMETER_CLASS = Name(None), Name(None)
_TENSOR_V2, _TENSOR_V3, _PARAMETER = (
    Name(_construct_tensor_v2),
    Name(_construct_tensor_v3),
    Name(_construct_parameter),
)
_TENSOR_NAMES = {
    "torch.Tensor": _TENSOR,
    "torch.nn.parameter.Parameter": _PARAMETER_CLASS,
    "torch._utils._rebuild_tensor_v2": _TENSOR_V2,
    "torch._utils._rebuild_tensor_v3": _TENSOR_V3,
    "torch._utils._rebuild_parameter": _PARAMETER,
    "torch._utils._rebuild_parameter_with_state": Name(_construct_parameter_with_state),
    "torch._tensor._rebuild_from_type_v2": Name(_construct_from_type),
    "torch.storage.UntypedStorage": _StorageType(None),
    **{f"torch.{name}": _StorageType(dtype) for name, dtype in _STORAGES.items()},
}


def _allowed_names() -> Mapping[str, Any]:
    if not _all_names:
        _all_names.update({**state_names(), **_TENSOR_NAMES})
    return _all_names


_all_names: dict[str, Any] = {}
