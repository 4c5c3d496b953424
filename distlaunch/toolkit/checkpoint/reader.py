"""Read a checkpoint without executing code from it, and without trusting its metadata.

``.metadata`` has size, file and offset of each entry. It is checked against the manifest before
memory is allocated or a file opened. With ``trust``, Python and torch load pickles with any class,
and ``.metadata`` is not checked.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint import filesystem as torch_filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from distlaunch.toolkit.checkpoint.allowed_types import (
    OLD_NAMES,
    QUANTIZED,
    TORCH,
    WAY_OUT,
    Room,
)
from distlaunch.toolkit.checkpoint.archive import Part, loaded
from distlaunch.toolkit.checkpoint.entries import PartEntry, entry_at, is_written
from distlaunch.toolkit.checkpoint.storage import OUR_FILE, CheckpointError, Store, retried
from distlaunch.toolkit.checkpoint.unpickler import (
    MalformedError,
    Name,
    RefusedClassError,
    Unpickler,
    UnsavedValueError,
    register,
)

METADATA = ".metadata"
_SHOWN = 200
_LIST_GAPS = 10
_LONGEST_PATH = 110
_MOST_DIMENSIONS = 64
_CORNERS_PER_BYTE = 4
_LONG_LISTS = "it has entries in lists that are longer than there are entries"
_FROM_ELSEWHERE = (
    "Checkpoint does not write such a file. Move the directory away to resume from the checkpoint "
    "before it"
)
_OF_HOSTILE_ARGUMENTS = (
    *(
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        MemoryError,
        AssertionError,
    ),
)
"""Constructors raise them for invalid arguments. Errors of reading files are OSErrors, but none of
these."""


class RefusedError(CheckpointError):
    """The checkpoint could execute code, or has content that no save writes."""


def shown(text: object) -> str:
    """Return a text from a checkpoint shortened, without control characters."""
    return "".join(each if each.isprintable() else "?" for each in str(text)[:_SHOWN])


class Reader(StorageReader):
    """Reads one checkpoint, for torch's ``load``."""

    def __init__(self, store: Store, name: str, files: Mapping[str, Any], *, trust: bool) -> None:
        """Read and check ``.metadata``.

        Raises RefusedError if it is not allowed or does not match ``files``, the sizes and
        checksums of the manifest.
        """
        self._store, self._name, self._trust = store, name, trust
        self._room = Room()
        self._chunks: dict[str, dict[torch.Size, ChunkStorageMetadata]] = {}
        """The chunks of each tensor by offset. Filled on first use."""
        data = store.read(f"{name}/{METADATA}")
        self.metadata: Metadata
        if trust:
            self.metadata = _TrustingUnpickler(io.BytesIO(data)).load()
        else:
            self.metadata = self._load_or_refuse(METADATA, lambda: _read_metadata(data, files))

    def unpickled(
        self, key: str, data: bytes | memoryview, check: Callable[[Any], None] | None = None
    ) -> Any:
        """Return the object that torch.save has written into an entry.

        Raises RefusedError if it is not allowed, or if ``check`` raises an error for it.
        """
        part = Part(io.BytesIO(data), 0, memoryview(data).nbytes)

        def load() -> Any:
            value = self._load(part)
            if check is not None:
                check(value)
            return value

        return self._load_or_refuse(self._describe_entry(key), load)

    def check(self, values: Mapping[str, Any], check: Callable[[str, Any], None]) -> None:
        """Call ``check`` for values. Raises RefusedError instead of its error."""
        for key, value in values.items():
            what = self._describe_entry(key)
            self._load_or_refuse(what, lambda key=key, value=value: check(key, value))  # type: ignore[misc]

    def _describe_entry(self, key: str) -> str:
        found = (
            info.relative_path
            for index, info in self.metadata.storage_data.items()
            if index.fqn == key
        )
        return f"{next(found, '')}: {shown(key)}"

    def _load(self, part: Part) -> Any:
        if not self._trust:
            return loaded(part, self._room)
        return torch.load(
            cast("Any", part), map_location="cpu", weights_only=False, pickle_module=_TRUSTING
        )

    def _load_or_refuse(self, what: str, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except RefusedClassError as error:
            raise RefusedError(
                f"{what} needs {shown(error.name)}, which is not loaded, as it could execute code. "
                f"{WAY_OUT}"
            ) from None
        except _OF_HOSTILE_ARGUMENTS as error:
            why = error if isinstance(error, MalformedError) else f"{type(error).__name__}: {error}"
            hint = WAY_OUT if isinstance(error, UnsavedValueError) else _FROM_ELSEWHERE
            raise RefusedError(f"{what} is not loaded: {shown(why)}. {hint}") from error

    # --- what torch calls ------------------------------------------------------------------------------------------

    def read_metadata(self) -> Metadata:
        """Return the metadata that the constructor has read."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # noqa: FBT001 - torch calls it so
        """Do nothing."""
        del metadata, is_coordinator

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing. torch's StorageReader has this method for readers of several checkpoints."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return True."""
        del checkpoint_id
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan, file by file."""
        of_files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            of_files.setdefault(
                self.metadata.storage_data[item.storage_index].relative_path, []
            ).append(item)
        for file, items in of_files.items():
            with self._open_file(f"{self._name}/{file}") as stream:
                for item in items:
                    self._read_item(item, stream, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, item: ReadItem, stream: BinaryIO, planner: LoadPlanner) -> None:
        info = self.metadata.storage_data[item.storage_index]
        what = f"{info.relative_path}: {shown(item.storage_index.fqn)}"
        value = self._load_or_refuse(
            what, lambda: self._load(Part(stream, info.offset, info.length))
        )
        if item.type != LoadItemType.BYTE_IO:
            self._copy_chunk(item, value, planner, what)
        elif isinstance(value, torch.Tensor):
            raise RefusedError(f"{what} is not loaded: it is a tensor, and has to be bytes")
        else:
            planner.load_bytes(item, value)

    def _open_file(self, path: str) -> BinaryIO:
        return retried(lambda: self._store.open(path), self._store.where(path))

    def _copy_chunk(self, item: ReadItem, value: Any, planner: LoadPlanner, what: str) -> None:
        """Copy a chunk to its place in the target. Raises RefusedError if it does not match the
        metadata."""
        entry: Any = self.metadata.state_dict_metadata[item.storage_index.fqn]
        if not self._trust:
            key = item.storage_index.fqn
            if key not in self._chunks:
                self._chunks[key] = {each.offsets: each for each in entry.chunks}
            chunk = self._chunks[key][cast("torch.Size", item.storage_index.offset)]
            is_as_said = (
                type(value) is torch.Tensor
                and value.size() == chunk.sizes
                and value.dtype == entry.properties.dtype
            )
            if not is_as_said:
                raise RefusedError(
                    f"{what} is not loaded: it is not the tensor that {METADATA} describes"
                )
        for place, (start, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            value = value.narrow(place, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(value.detach())
        planner.commit_tensor(item, target)


class CheckpointLoadPlanner(DefaultLoadPlanner):
    """Loads into a flat dictionary of tensors and other values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> LoadPlan:
        """Return the plan. Raises RefusedError if the checkpoint has bytes instead of a tensor, or
        the reverse."""
        entries: Any = self.metadata.state_dict_metadata if self.metadata is not None else {}
        for key, value in self.state_dict.items():
            if key in entries and isinstance(entries[key], BytesStorageMetadata) == isinstance(
                value, torch.Tensor
            ):
                is_bytes = isinstance(entries[key], BytesStorageMetadata)
                found, expected = ("bytes", "a tensor") if is_bytes else ("a tensor", "bytes")
                raise RefusedError(
                    f"{METADATA}: {shown(key)} is {found} there, and has to be {expected}"
                )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Store a value that the reader has already unpickled."""
        key = read_item.dest_index.fqn
        self.state_dict[key] = self.original_state_dict[key] = value


# --- with trust ------------------------------------------------------------------------------------------------------


class _TrustingUnpickler(pickle.Unpickler):
    """Finds our classes under their former names too."""

    def find_class(self, module: str, name: str, /) -> Any:
        return OLD_NAMES.get((module, name)) or super().find_class(module, name)


_TRUSTING: Any = SimpleNamespace(
    __name__="pickle",
    Unpickler=_TrustingUnpickler,
    load=lambda file, **_: _TrustingUnpickler(file).load(),
)

# --- the metadata ----------------------------------------------------------------------------------------------------


def _read_metadata(data: bytes, files: Mapping[str, Any]) -> Metadata:
    """Return the metadata. Raises MalformedError if it does not match the files of the manifest."""
    found = Unpickler(data, _allowed_names()).load()
    if type(found) is not Metadata:
        raise MalformedError("it is not the record that torch writes")
    _check_metadata(found, files, len(data))
    return found


def _check_metadata(metadata: Metadata, files: Mapping[str, Any], size_of_all: int) -> None:
    places, entries = metadata.storage_data, metadata.state_dict_metadata
    for index, info in places.items():
        if type(index) is not MetadataIndex or type(info) is not torch_filesystem._StorageInfo:  # noqa: SLF001 - torch's
            raise MalformedError("it has a place that is none")
        size = files.get(info.relative_path, [0])[0]
        if info.relative_path not in files or not OUR_FILE.fullmatch(info.relative_path):
            raise MalformedError(
                f"it names the file {info.relative_path!r}, which is none of this checkpoint"
            )
        if info.offset + info.length > size:
            raise MalformedError(f"it has {index.fqn} behind the end of {info.relative_path}")
    if sum(info.length for info in places.values()) > sum(each[0] for each in files.values()):
        raise MalformedError("it has more entries than fit into the files")
    chunks_left = size_of_all  # if entries share a list of chunks, it counts for each entry
    for key, entry in entries.items():
        if type(key) is not str:
            raise MalformedError("it has an entry without a name")
        if type(entry) is TensorStorageMetadata:
            chunks_left -= len(entry.chunks)
            if chunks_left < 0:
                raise MalformedError("it repeats parts of tensors")
            _check_tensor(key, entry, places, size_of_all)
        elif type(entry) is not BytesStorageMetadata or MetadataIndex(key) not in places:
            raise MalformedError(f"it does not tell where {key} is")
    lists: dict[Any, int] = {}
    taken: set[str] = set()
    for key, path in metadata.planner_data.items():
        if key not in entries or type(path) is not tuple or not 0 < len(path) <= _LONGEST_PATH:
            what = repr(key) if type(key) is str else f"a {type(key).__name__}"
            raise MalformedError(f"it has {what} in no place")
        for place, part in enumerate(path):
            if type(part) is int and part >= 0:
                if part > _LIST_GAPS * len(entries):
                    raise MalformedError(_LONG_LISTS)
                lists[path[:place]] = max(part, lists.get(path[:place], 0))
            elif type(part) is not str:
                raise MalformedError(f"it has {key} in no place")
        held = entry_at(path)
        if not is_written(held) or (
            isinstance(held, PartEntry) and type(entries[key]) is not TensorStorageMetadata
        ):
            raise MalformedError(f"it has {key} in a place that no training has")
        if (place_of := str(path)) in taken:
            raise MalformedError(f"it has two entries in the place of {key}")
        taken.add(place_of)
    if sum(lists.values()) > _LIST_GAPS * len(entries):  # a list gets all indexes below the highest
        raise MalformedError(_LONG_LISTS)


def _check_tensor(
    key: str,
    entry: TensorStorageMetadata,
    places: Mapping[MetadataIndex, Any],
    size_of_all: int,
) -> None:
    """Raise MalformedError unless the chunks of a tensor are in the files and cover it exactly
    once.

    This bounds the tensor by the size of the files. ``size_of_all`` is that of the metadata.
    """
    held, seen = 0, set()
    parts: list[tuple[Sequence[int], Sequence[int]]] = []
    if entry.properties.dtype in QUANTIZED:
        raise MalformedError(f"it has {key} of the type {entry.properties.dtype}")
    if len(entry.size) > _MOST_DIMENSIONS:
        raise MalformedError(f"it has {key} with more than {_MOST_DIMENSIONS} dimensions")
    for chunk in entry.chunks:
        if type(chunk) is not ChunkStorageMetadata or not (
            len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
        ):
            raise MalformedError(f"it has a part of {key} outside of it")
        ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        count, info = math.prod(chunk.sizes), places.get(MetadataIndex(key, chunk.offsets))
        if any(end > most for end, most in zip(ends, entry.size, strict=True)):
            raise MalformedError(f"it has a part of {key} outside of it")
        if info is None or count * entry.properties.dtype.itemsize > info.length:
            raise MalformedError(f"it has a part of {key} that is in no file")
        if count and chunk.offsets in seen:
            raise MalformedError(f"it has the same part of {key} twice")
        if count:  # empty chunks may share an offset
            seen.add(chunk.offsets)
            parts.append((chunk.offsets, chunk.sizes))
        held += count
    if math.prod(entry.size) > held:
        raise MalformedError(f"it has {key} larger than its parts")
    if math.prod(entry.size) < held:
        raise MalformedError(f"it has parts of {key} that overlap")
    if len(parts) > 1 and not covers_once(entry.size, parts, _CORNERS_PER_BYTE * size_of_all):
        raise MalformedError(f"it has parts of {key} that overlap")


def covers_once(
    size: Sequence[int], parts: Sequence[tuple[Sequence[int], Sequence[int]]], most: int
) -> bool:
    """Return whether chunks, none of them empty, cover a tensor exactly once.

    ``parts`` are their offsets and sizes. False if the test would need more than ``most`` corners,
    which no saved tensor does.

    Method: give each corner of a chunk the sign +1 or -1, by the parity of the number of upper
    ends. The chunks cover the tensor exactly once if the signs at each point add up to 0, except at
    the tensor's corners. Corners are sorted, not hashed, because hashes of numbers can be made to
    collide.
    """
    divided = [
        place for place, whole in enumerate(size) if any(each[place] != whole for _, each in parts)
    ]
    if len(parts) << len(divided) > most:
        return False
    corners = []
    for offsets, sizes, sign in (
        *((offsets, sizes, 1) for offsets, sizes in parts),
        ([0] * len(size), size, -1),
    ):
        ends = [((offsets[at], 1), (offsets[at] + sizes[at], -1)) for at in divided]
        for corner in itertools.product(*ends):
            signs = math.prod(end for _, end in corner)
            corners.append(([place for place, _ in corner], sign * signs))
    corners.sort()
    return not any(
        sum(sign for _, sign in same)
        for _, same in itertools.groupby(corners, key=lambda corner: corner[0])
    )


def _checked_fields(
    kind: type, **checks: Callable[[Any], bool]
) -> tuple[type, Callable[[Any, Any], Any]]:
    """Return a class, and a function that builds its objects from checked fields."""

    def build(value: Any, state: Any) -> Any:
        if type(state) is not dict or not state.keys() <= checks.keys():
            raise MalformedError(f"a {kind.__name__} has other fields")
        for name, each in state.items():
            if not checks[name](each):
                raise MalformedError(f"{name} of a {kind.__name__} is a {type(each).__name__}")
            object.__setattr__(value, name, each)
        return value

    return kind, build


def _build_properties(value: Any, state: Any) -> Any:
    if type(state) is not tuple or len(state) != 5 or not isinstance(state[0], torch.dtype):
        raise MalformedError("a tensor has no type of numbers")
    value.dtype, value.layout, value.requires_grad = state[0], torch.strided, False
    value.memory_format, value.pin_memory = torch.contiguous_format, False
    return value


def _has_type(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _construct_path(unpickler: Unpickler, *parts: Any) -> str:
    """Replace a path of pathlib in the pickle by an empty text."""
    unpickler.spend(len(parts))
    return ""


def _construct_memory_format(_: Unpickler, number: Any) -> Any:
    return number


_NOW = "torch.distributed.checkpoint.metadata"
_TORCH_2_2 = "torch.distributed._shard.sharded_tensor.metadata"
_NONE = type(None)
_RECORDS = (
    _checked_fields(
        Metadata,
        state_dict_metadata=_has_type(dict),
        planner_data=_has_type(dict),
        storage_data=_has_type(dict),
        storage_meta=_has_type(StorageMeta, _NONE),
        version=_has_type(str, _NONE),
    ),
    _checked_fields(
        TensorStorageMetadata,
        properties=_has_type(TensorProperties),
        size=_has_type(torch.Size),
        chunks=_has_type(list),
    ),
    _checked_fields(BytesStorageMetadata),
    _checked_fields(
        ChunkStorageMetadata, offsets=_has_type(torch.Size), sizes=_has_type(torch.Size)
    ),
    _checked_fields(
        MetadataIndex,
        fqn=_has_type(str),
        offset=_has_type(torch.Size, _NONE),
        index=_has_type(int, _NONE),
    ),
    _checked_fields(
        StorageMeta,
        **dict.fromkeys(("checkpoint_id", "save_id", "load_id", "modules"), lambda _: True),
    ),
    _checked_fields(
        torch_filesystem._StorageInfo,  # noqa: SLF001 - torch pickles it
        relative_path=_has_type(str),
        offset=_is_count,
        length=_is_count,
        transform_descriptors=lambda value: value is None or (type(value) is tuple and not value),
    ),
    (TensorProperties, _build_properties),
)
for _kind, _build in _RECORDS:
    register(_kind, _build, key=_kind is MetadataIndex)


def _record_name(kind: type) -> Name:
    return Name(lambda _: object.__new__(kind))


def _allowed_names() -> Mapping[str, Any]:
    if not _all_names:
        _all_names.update(TORCH)
        _all_names.update(
            {f"{kind.__module__}.{kind.__qualname__}": _record_name(kind) for kind, _ in _RECORDS}
        )
        for module, encoding in (
            (_NOW, "_MEM_FORMAT_ENCODING"),
            (_TORCH_2_2, "MEM_FORMAT_ENCODING"),
        ):
            _all_names[f"{module}.{encoding}"] = Name(_construct_memory_format)
            _all_names[f"{module}.TensorProperties"] = _record_name(TensorProperties)
        for module in ("pathlib", "pathlib._local"):
            _all_names[f"{module}.PosixPath"] = Name(_construct_path)
    return _all_names


_all_names: dict[str, Any] = {}
