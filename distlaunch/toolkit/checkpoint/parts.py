"""Separate sharded tensors from the states of parts, and join them again.

A part is an object that is saved with model and optimizer: a scheduler, a sampler, or an average of
the weights. Its state is saved per worker, but tensors that are sharded over the workers become
entries of the checkpoint, so that any number of workers can load them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.sharded_tensors import is_sharded, sharded_like

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Replaces a tensor in the state of a part. The tensor is an entry of the checkpoint.

    Renaming this module, class or field makes existing checkpoints unreadable.
    """

    place: str


@dataclass(frozen=True, slots=True)
class Whole:
    """Wraps a structure, so that torch writes it unchanged, as one entry.

    Otherwise torch would write an entry for each value of a dictionary, none for an empty one, and
    read an OrderedDict as a dict. Renaming this module, class or field makes existing checkpoints
    unreadable.
    """

    value: Any


def saveable_form(value: Any, name: str) -> Any:
    """Return a form that torch writes and reads unchanged.

    Raises ConfigError for a structure that has tensors and that torch would change.
    """
    if isinstance(value, torch.Tensor) or not _has_mapping(value):
        return value
    tensors: list[torch.Tensor] = []

    def detached(_: Path, each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        tensors.append(each)
        return each.detach()

    plain = changed(value, detached)  # torch can only copy detached tensors
    if not tensors or (_has_subclass(value) and not any(map(is_sharded, tensors))):
        return Whole(copy.deepcopy(plain))
    _refuse_changed(value, name)
    return value


def _has_mapping(value: Any) -> bool:
    return isinstance(value, Mapping | deque) or (
        isinstance(value, list) and any(map(_has_mapping, value))
    )


def _has_subclass(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value) is not dict or any(map(_has_subclass, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_subclass, value))


def _refuse_changed(value: Any, name: str) -> None:
    if isinstance(value, Mapping):
        if type(value) is not dict:
            raise ConfigError(
                f"{name} is a {type(value).__name__} with sharded tensors: it would be a dict: "
                "make it one"
            )
        if not value:
            raise ConfigError(
                f"{name} is an empty dictionary among tensors: it would be lost: leave it out"
            )
        for key, each in value.items():
            if not isinstance(key, str):
                kind = type(key).__name__
                raise ConfigError(
                    f"{name} has the key {key!r} ({kind}) among tensors: it would be a str: make "
                    "it one"
                )
            _refuse_changed(each, f"{name}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _refuse_changed(each, f"{name}.{number}")


def unwrapped(state: Any) -> Any:
    """Replace each ``Whole`` by its content."""
    return changed(state, lambda _, value: value.value if isinstance(value, Whole) else value)


def split(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the state with an ``Elsewhere`` for each sharded tensor, and these tensors by path."""
    sharded: dict[str, torch.Tensor] = {}

    def separate(path: Path, value: Any) -> Any:
        if not is_sharded(value):
            return value
        place = str(path)
        sharded[place] = value
        return Elsewhere(place=place)

    return changed(state, separate), sharded


def joined(
    state: Any,
    read: Callable[[str], torch.Tensor],
    here: Callable[[], dict[str, torch.Tensor]],
    shapes: Container[torch.Size],
) -> Any:
    """Put tensors into the state of a part, and return the state.

    ``read`` returns the tensor for a path. A tensor that was saved whole is sharded if the current
    state (``here``) has a sharded tensor at the same path; it is only read for one of the
    ``shapes`` of the model's sharded tensors.
    """

    def put(path: Path, value: Any) -> Any:
        if isinstance(value, Elsewhere):
            return read(value.place)
        if not isinstance(value, torch.Tensor) or value.shape not in shapes:
            return value
        like = here().get(str(path))
        return value if like is None else sharded_like(value, like)

    return changed(state, put)


def changed(
    value: Any,
    change: Callable[[Path, Any], Any],
    path: Path = (),
    above: frozenset[int] = frozenset(),
) -> Any:
    """Return a state with ``change`` applied to each value in its dictionaries, lists and tuples.

    Containers without changes are not copied. ``path`` and ``above`` are for the recursion: the
    keys to this value, and the ids of the containers around it. A container that contains itself is
    left unchanged there.
    """
    if id(value) in above:
        return value
    if isinstance(value, dict):
        old: dict[Any, Any] = value
    elif isinstance(value, list | tuple):
        old = dict(enumerate(value))
    else:
        return change(path, value)
    above |= {id(value)}
    new = {key: changed(each, change, (*path, key), above) for key, each in old.items()}
    if all(new[key] is each for key, each in old.items()):
        return value
    if isinstance(value, tuple):
        return (
            type(value)(*new.values()) if hasattr(value, "_fields") else type(value)(new.values())
        )
    copied = copy.copy(value)  # the state of a module is a dictionary with attributes
    for key, each in new.items():
        copied[key] = each
    return copied
