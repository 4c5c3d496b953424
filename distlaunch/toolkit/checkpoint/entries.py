"""Classify the entries of a checkpoint by their paths in torch's metadata.

The classes are: model, optimizer state of one parameter, setting of a parameter group, part, other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A parameter, a buffer or an extra state of the model."""

    name: str
    is_whole: bool
    """Whether the entry is the whole value, and not a part of a structure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStateEntry:
    """State of an optimizer for one parameter, such as a moment."""

    parameter: str
    key: str | int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """A setting of a parameter group, or the names of its parameters."""

    group: int
    key: str
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """A sharded tensor in the state of a part."""

    part: str
    place: str
    """``Elsewhere.place`` in the state of the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEntry:
    """An entry with a name of its own, such as ``tied``, or one that no save writes."""

    name: str | int
    is_whole: bool


Entry = ModelEntry | ParameterStateEntry | GroupEntry | PartEntry | OtherEntry
CLASSES = OtherEntry(name="classes", is_whole=True)
"""The class of each parameter group's optimizer."""
TIED = OtherEntry(name="tied", is_whole=True)
"""The names of each parameter that has several names."""


def entry_at(path: tuple[Any, ...]) -> Entry:
    """Return the class of the entry at a path, with the names that the path contains."""
    match path:
        case ("model", str(name), *more):
            return ModelEntry(name=name, is_whole=not more)
        case ("optimizer", "state", str(parameter), str() | int() as key, *more):
            return ParameterStateEntry(parameter=parameter, key=key, is_whole=not more)
        case ("optimizer", "param_groups", int(group), str(key), *more):
            return GroupEntry(group=group, key=key, is_whole=not more)
        case ("parts", str(part), str(place)):
            return PartEntry(part=part, place=place)
    return OtherEntry(name=path[0], is_whole=len(path) == 1)


def entries_of(metadata: Metadata) -> Mapping[str, Entry]:
    """Return all entries of a checkpoint by their flat names."""
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data
    return {key: entry_at(path) for key, path in paths.items()}


def is_written(entry: Entry) -> bool:
    """Return whether a save may write the entry. Resumes read no others."""
    return not isinstance(entry, OtherEntry) or entry.name not in {"model", "optimizer", "parts"}


def worker_key(rank: int, world_size: int) -> str:
    """Return the entry that a worker reads: its own, or rank 0's if fewer workers saved."""
    return f"worker-{rank if rank < world_size else 0}"
