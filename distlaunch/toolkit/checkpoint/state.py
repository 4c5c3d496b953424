"""The content of a checkpoint, and loading it into model, optimizer, parts and random states.

Parameters have canonical names (torch.distributed.checkpoint.state_dict), so DDP, FSDP and a plain
model read each other's checkpoints. The entry ``worker-<rank>`` has what differs between workers,
as bytes of ``torch.save``: random states, states of parts, and buffers that differ from rank 0's,
without those that DDP copies before each use.

The entries to read are those of the checkpoint: an optimizer that has not stepped has no state yet,
and torch would step it to get one.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import _get_fqns, get_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.allowed_types import check_saved
from distlaunch.toolkit.checkpoint.entries import (
    CLASSES,
    TIED,
    Entry,
    GroupEntry,
    ModelEntry,
    ParameterStateEntry,
    PartEntry,
    entries_of,
    worker_key,
)
from distlaunch.toolkit.checkpoint.parts import joined, saveable_form, split, unwrapped
from distlaunch.toolkit.checkpoint.storage import CheckpointError, describe, some
from distlaunch.toolkit.checkpoint.unpickler import MalformedError
from distlaunch.toolkit.optimizer_state import (
    differing_classes,
    differing_sizes,
    load_optimizer_state,
    match_groups,
)
from distlaunch.toolkit.sharded_tensors import is_sharded

Nested = dict[str, Any]
SHOWN = 5
"""How many differences an error lists."""
_NAMES = {"params", "param_names"}
_MT_NUMBERS = 624


class Stateful(Protocol):
    """An object whose state can be saved: a scheduler, a scaler, a sampler, or one of the
    script."""

    def state_dict(self) -> Any:
        """Return the object's state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Set the object's state."""


class TrainingState:
    """The objects that determine the next training step: model, optimizers, parts, random
    generators."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        parts: Mapping[str, Stateful],
        *,
        trust: bool = False,
    ) -> None:
        """Raise ConfigError for objects that could be saved but not loaded again.

        ``trust``: objects of any class are allowed.
        """
        self._trust = trust
        self.model = model
        self.optimizers = list(optimizers)
        self.parts = dict(parts)
        """Each worker saves its own, so they should be small."""
        self._random: Nested | None = None
        self._own_entries: Nested = {}
        self._groups: dict[int, int] = {}
        """The checkpoint's number of each parameter group, by the present number."""
        _check_objects(model, self.optimizers)

    @property
    def kinds(self) -> list[str]:
        """The names of the optimizers' classes."""
        return [type(optimizer).__name__ for optimizer in self.optimizers]

    def snapshot(self, *, alone: bool) -> Snapshot:
        """Return what this worker saves, except random states. Tensors are not copied."""
        model, optimizer = self._canonical_states()
        if not alone:
            _refuse_ignored_parameters(self.model)
        own = {} if alone else unshared(self.model, model)
        for group in optimizer["param_groups"]:
            group.update(
                {
                    key: self._saveable_form(value, f"the optimizer's {key}")
                    for key, value in group.items()
                }
            )
        for name, state in optimizer["state"].items():
            optimizer["state"][name] = {
                key: self._saveable_form(value, f"{name}.{key}") for key, value in state.items()
            }
        return Snapshot(
            model={name: self._saveable_form(value, name) for name, value in model.items()},
            optimizer=optimizer if self.optimizers else None,
            classes=self._group_classes(),
            tied=tied(self.model),
            parts={
                name: split(self._check_value(part.state_dict(), name))
                for name, part in self.parts.items()
            },
            own=own,
            digests=digests(own),
            for_all=isinstance(self.model, DistributedDataParallel),
        )

    def check_parts(self) -> None:
        """Raise ConfigError if a resume would refuse the present state of a part."""
        if not self._trust:
            for name, part in self.parts.items():
                check_saved(part.state_dict(), name)

    def _check_value(self, value: Any, name: str) -> Any:
        if not self._trust:
            check_saved(value, name)
        return value

    def _saveable_form(self, value: Any, name: str) -> Any:
        return saveable_form(self._check_value(value, name), name)

    def _canonical_states(self) -> tuple[Nested, Nested]:
        """Return the states of model and optimizers by canonical names."""
        with _prevent_steps(self.optimizers):
            model, found = get_state_dict(self.model, self.optimizers)
        optimizer: Nested = {"state": {}, "param_groups": [], **found}
        optimizer["state"] = {name: state for name, state in optimizer["state"].items() if state}
        return dict(model), optimizer

    # --- reading ---------------------------------------------------------------------------------------------------

    def own_template(self, metadata: Metadata, rank: int, world_size: int) -> Nested:
        """Return the entries of this worker to read: ``worker-<rank>``, or rank 0's, and sharded
        tensors of parts.

        A sharded tensor is sharded as in the part's present state, or else like a parameter of the
        same shape. Raises CheckpointError if there is no such entry.
        """
        own = worker_key(rank, world_size)
        there: Mapping[str, Any] = metadata.state_dict_metadata
        if own not in there:
            raise CheckpointError(f".metadata has no entry {own}")
        found: Nested = {own: torch.empty(getattr(there[own], "size", ()), dtype=torch.uint8)}
        sharded = {
            key: entry
            for key, entry in entries_of(metadata).items()
            if isinstance(entry, PartEntry)
        }
        names = {entry.part for entry in sharded.values()} & self.parts.keys()
        here, shapes = (
            {name: split(self.parts[name].state_dict())[1] for name in names},
            self._sharded_parameters(),
        )
        for key, entry in sharded.items():
            if entry.part in names:
                found[key] = _empty_tensor(
                    there[key], here[entry.part].get(entry.place, shapes.get(there[key].size))
                )
        return found

    def _sharded_parameters(self) -> dict[torch.Size, nn.Parameter]:
        return {
            parameter.shape: parameter
            for parameter in self.model.parameters()
            if is_sharded(parameter)
        }

    def groups_template(self, metadata: Metadata) -> Nested:
        """Return the entries that describe the parameter groups, which are read first.

        Raises ConfigError if the checkpoint is of another model.
        """
        if differing := differing_parameters(self._canonical_states()[0], metadata):
            raise ConfigError(f"is of another model: {listing(differing, 'parameter')}")
        found: Nested = {
            key: None
            for key, entry in entries_of(metadata).items()
            if entry in (CLASSES, TIED) or (isinstance(entry, GroupEntry) and entry.key == "params")
        }
        for each, buffer in self.model.named_buffers(remove_duplicate=False):
            for key in (f"model.{name}" for name in canonical(self.model, [each])):
                saved = metadata.state_dict_metadata.get(key)
                if (
                    isinstance(saved, TensorStorageMetadata)
                    and saved.properties.dtype != buffer.dtype
                ):
                    found[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
        return found

    def check_model(self, read: Nested, metadata: Metadata) -> list[str]:
        """Compare the entries of ``groups_template`` with the model. Return warnings about what
        cannot be compared.

        Raises ConfigError if a value does not fit the type of its buffer, or if parameters are tied
        here that were separate in the checkpoint.
        """
        for each, buffer in self.model.named_buffers(remove_duplicate=False):
            for name in canonical(self.model, [each]):
                value = read.get(f"model.{name}")
                if isinstance(value, torch.Tensor) and not _fits_type(value, buffer.dtype):
                    here, was = (
                        str(dtype).removeprefix("torch.") for dtype in (buffer.dtype, value.dtype)
                    )
                    raise ConfigError(
                        f"has values in the buffer {name} ({was}) that do not fit its type here, "
                        f"{here}"
                    )
        here_tied = tied(self.model)
        tied_key = next((key for key, entry in entries_of(metadata).items() if entry == TIED), None)
        if tied_key is None:
            known = {
                name
                for names in here_tied
                for name in names
                if f"model.{name}" in metadata.state_dict_metadata
            }
            few = ", ".join(sorted(known)[:SHOWN])
            return (
                [f"does not say whether these were one parameter, as they are here: {few}"]
                if known
                else []
            )
        there = [set(names) for names in read[tied_key]]
        if new := [names for names in here_tied if not any(set(names) <= those for those in there)]:
            differing = [
                f"{' and '.join(names)} are one here, and were not in the checkpoint"
                for names in new
            ]
            raise ConfigError(f"is of another model: {listing(differing, 'parameter')}")
        return []

    def match_groups(
        self, read: Nested, metadata: Metadata, kinds: Sequence[str] | None
    ) -> list[str]:
        """Match the parameter groups of the checkpoint with the present ones by parameter names,
        and keep the result for ``template``.

        ``kinds``: the classes of the checkpoint's optimizers. Return warnings about what cannot be
        compared. Raises ConfigError if groups or classes differ.
        """
        entries = entries_of(metadata)
        there = {
            entry.group: names
            for key, names in read.items()
            if isinstance(entry := entries[key], GroupEntry)
        }
        self._groups = {}
        if not there:  # the checkpoint is of a training without an optimizer
            if any(isinstance(e, ParameterStateEntry | GroupEntry) for e in entries.values()):
                raise CheckpointError(".metadata has an optimizer without parameter groups")
            return []
        here = [group["params"] for group in self._canonical_states()[1]["param_groups"]]
        numbers = sorted(there)
        found, differing = match_groups(here, [there[number] for number in numbers])
        classes = read["classes"] if "classes" in read else _classes_of_groups(kinds, len(numbers))
        if classes is not None and len(classes) != len(numbers):
            raise CheckpointError(".metadata has not one class for each parameter group")
        unknown = classes is None and kinds is not None
        if not differing and classes is not None:
            differing = differing_classes(self._group_classes(), classes, here, found)
        elif not differing and kinds is not None and sorted(kinds) != sorted(self.kinds):
            differing = [f"it was {', '.join(kinds)}, and is {', '.join(self.kinds)} here"]
        if differing:
            raise ConfigError(f"is of another optimizer: {listing(differing, 'entry')}")
        self._groups = {number: numbers[other] for number, other in found.items()}
        return (
            ["does not say which optimizer had which parameter group: not compared"]
            if unknown
            else []
        )

    def _group_classes(self) -> list[str]:
        return [type(each).__name__ for each in self.optimizers for _ in each.param_groups]

    def template(self, metadata: Metadata) -> Nested:
        """Return the entries of model and optimizer to read, by flat name. The model's tensors are
        filled in place.

        State with the shape and number type of its parameter is read in the parameter's present
        type, but not a count of steps: bf16 cannot represent 301. ``match_groups`` must have been
        called. Raises ConfigError if the checkpoint is of another optimizer.
        """
        model, optimizer = self._canonical_states()
        there = metadata.state_dict_metadata
        entries = entries_of(metadata)
        parameters = self._parameters_by_name(optimizer)
        if differing := [
            f"{entry.parameter}.{entry.key} is only in the checkpoint"
            for entry in entries.values()
            if isinstance(entry, ParameterStateEntry) and entry.parameter not in parameters
        ]:
            raise ConfigError(f"is of another optimizer: {listing(differing, 'entry')}")
        here = {
            other: optimizer["param_groups"][number].keys() - _NAMES
            for number, other in self._groups.items()
        }
        flat: Nested = {}
        for key, entry in entries.items():
            saved = there[key]
            match entry:
                case ModelEntry(name=name):
                    live = model[name]
                    in_place = entry.is_whole and isinstance(live, torch.Tensor)
                    flat[key] = live if in_place else _empty_tensor(saved, None)
                case ParameterStateEntry(parameter=name):
                    parameter, was = parameters[name], _type_of(there.get(f"model.{name}"))
                    converted = (
                        entry.key != "step"
                        and _size_of(saved) == parameter.size()
                        and _type_of(saved) == was
                    )
                    flat[key] = _empty_tensor(
                        saved, parameter, parameter.dtype if converted else None
                    )
                case GroupEntry() if entry.key in here.get(entry.group, ()):
                    flat[key] = _empty_tensor(saved, None)
        return flat

    def check_sizes(self, values: Nested, metadata: Metadata) -> None:
        """Raise ConfigError if a fused optimizer would read beyond the end of a state.

        ``values`` are the entries of ``template`` that are no tensors.
        """
        names = self._parameters_by_name(self._canonical_states()[1])
        fused: dict[int, object] = {}
        sizes: dict[int, dict[str, torch.Size]] = {}
        for key, entry in entries_of(metadata).items():
            saved = metadata.state_dict_metadata[key]
            if isinstance(entry, GroupEntry) and entry.key == "fused":
                fused[entry.group] = values.get(key, True) if entry.is_whole else True
            elif (
                isinstance(entry, ParameterStateEntry)
                and isinstance(entry.key, str)
                and entry.is_whole
                and isinstance(saved, TensorStorageMetadata)
            ):
                sizes.setdefault(id(names[entry.parameter]), {})[entry.key] = saved.size
        number, differing = 0, []
        for each in self.optimizers:
            settings = []
            for group in each.param_groups:
                settings.append(fused.get(self._groups.get(number, -1), group.get("fused")))
                number += 1
            differing += differing_sizes(each, settings, sizes)
        if differing:
            by_id = {id(parameter): name for name, parameter in names.items()}
            shown = [f"{by_id[id(parameter)]}.{text}" for parameter, text in differing]
            raise ConfigError(f"is of another optimizer: {listing(shown, 'entry')}")

    def converted(self, metadata: Metadata) -> str | None:
        """Return a text about the first entry that is converted to another number type; None if
        none is."""
        model, _ = self._canonical_states()
        for name, value in model.items():
            entry = metadata.state_dict_metadata.get(f"model.{name}")
            if isinstance(entry, TensorStorageMetadata) and isinstance(value, torch.Tensor):
                here, was = (
                    str(dtype).removeprefix("torch.")
                    for dtype in (value.dtype, entry.properties.dtype)
                )
                if here != was:
                    return f"{name} is {here} here and was {was}: it is converted"
        return None

    def _parameters_by_name(self, optimizer: Nested) -> dict[str, nn.Parameter]:
        groups = [group for each in self.optimizers for group in each.param_groups]
        return {
            name: parameter
            for group, named in zip(groups, optimizer["param_groups"], strict=True)
            for name, parameter in zip(named["params"], group["params"], strict=True)
        }

    @staticmethod
    def unpickle_own(
        read: Nested, key: str, unpickled: Callable[[str, memoryview, Callable[[Any], None]], Any]
    ) -> None:
        """Replace the bytes of the entry ``key`` by the object in them.

        Raises CheckpointError if the object is refused.
        """
        read[key] = unpickled(key, read[key].numpy().data, check_own)

    def load_own(self, read: Nested, rank: int, was: int, world_size: int) -> list[str]:
        """Load the states of parts. Keep this worker's buffers for ``load``, and its random states
        for ``restore_random``.

        Return texts about parts that are only in the checkpoint or only here. If ``was``, the
        number of workers that saved, has changed, all get rank 0's buffers. Raises ConfigError if a
        part refuses its state. The sampler is loaded first, because it checks its state.
        """
        own = read[worker_key(rank, was)]
        self._random = own["random"] if rank < was else None
        self._own_entries = own.get("model", {}) if was == world_size else {}
        if self._own_entries and (
            different := _differing_own_entries(
                self._own_entries, self._canonical_states()[0], rank
            )
        ):
            raise ConfigError(f"is of another model: {listing(different, 'parameter')}")
        said, states, shapes = [], own["parts"], set(self._sharded_parameters())
        for name in sorted(self.parts, key=lambda name: name != "sampler"):
            part = self.parts[name]
            # The state of a disabled GradScaler is empty.
            if name not in states or (_is_empty(states[name]) and not _is_empty(part.state_dict())):
                said.append(f"has nothing for {name}, which stays as it is")
                continue
            try:
                self._load_part(name, states[name], read, shapes)
            except ConfigError:
                raise
            except Exception as error:
                kind = type(part).__name__
                raise ConfigError(
                    f"has a {name} that {kind} does not take: {type(error).__name__}: {error}"
                ) from error
        return said + [
            f"has a {name}, which Checkpoint was not given here"
            for name in sorted(states.keys() - self.parts)
        ]

    def _load_part(self, name: str, state: Any, read: Nested, shapes: set[torch.Size]) -> None:
        part = self.parts[name]
        here = cache(lambda: split(part.state_dict())[1])

        def entry(place: str) -> torch.Tensor:
            if (found := read.get(f"parts.{name}.{place}")) is None:
                raise ConfigError(f"has no entry for {place} of {name}, which is sharded")
            return cast("torch.Tensor", found)

        part.load_state_dict(joined(state, entry, here, shapes))

    def load(self, read: Nested, metadata: Metadata) -> None:
        """Load the entries of ``template``, and the buffers that ``load_own`` has kept, into model
        and optimizers."""
        try:
            nested = unwrapped(
                unflatten_state_dict(read, {key: metadata.planner_data[key] for key in read})
            )
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise CheckpointError(".metadata has entries in the places of others") from error
        model, optimizer = self._canonical_states()
        found = nested.get("optimizer", {})
        states = self._optimizer_states(found, optimizer) if found else []
        entries, self._own_entries = self._own_entries, {}
        own = {
            name: value.to(model[name].device)
            if isinstance(value, torch.Tensor) and isinstance(model[name], torch.Tensor)
            else value
            for name, value in entries.items()
        }
        with _name_class_in_errors(self.model):
            set_model_state_dict(self.model, {**model, **nested.get("model", {}), **own})
        for each, state in states:
            with _name_class_in_errors(each):
                load_optimizer_state(each, state)

    def _optimizer_states(
        self, found: Nested, optimizer: Nested
    ) -> list[tuple[torch.optim.Optimizer, Nested]]:
        names = {
            id(parameter): name for name, parameter in self._parameters_by_name(optimizer).items()
        }
        settings_there = found.get("param_groups", [])
        groups = (
            dict(enumerate(settings_there)).get(self._groups[number]) or {}
            for number in sorted(self._groups)
        )
        loads = []
        for each in self.optimizers:
            whole = each.state_dict()
            numbers = [number for group in whole["param_groups"] for number in group["params"]]
            of_each = [
                names[id(parameter)] for group in each.param_groups for parameter in group["params"]
            ]
            states = {
                n: found["state"][name]
                for n, name in zip(numbers, of_each, strict=True)
                if name in found.get("state", {})
            }
            settings = [{**group, **next(groups)} for group in whole["param_groups"]]
            loads.append((each, {**whole, "state": states, "param_groups": settings}))
        return loads

    def restore_random(self) -> None:
        """Set the random states of the checkpoint. A worker that it lacks keeps the seeds of the
        script."""
        if self._random is not None:
            set_random_states(self._random)


@contextmanager
def _name_class_in_errors(what: object) -> Iterator[None]:
    """Raise CheckpointError, with the class of the object, if loading its state fails."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{type(what).__name__} does not take its state: {describe(error)}"
        ) from error


@contextmanager
def _prevent_steps(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep torch from stepping optimizers without state: a step would change weights, and under DDP
    only rank 0's."""
    fresh = [
        (optimizer.state, first)
        for optimizer in optimizers
        if not optimizer.state
        and (
            first := next(
                (each for group in optimizer.param_groups for each in group["params"]), None
            )
        )
        is not None
    ]
    for state, parameter in fresh:
        state[parameter] = {}
    try:
        yield
    finally:
        for state, parameter in fresh:
            del state[parameter]


def _check_objects(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"Checkpoint: model is a {type(model).__name__}, and has to be a torch.nn.Module"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"Checkpoint: optimizer is a {type(optimizer).__name__}, and has to be torch's, or "
                "several"
            )
    if not any(True for _ in model.parameters()) and not model.state_dict():
        raise ConfigError(
            f"Checkpoint: the model ({type(model).__name__}) has no parameters: there is nothing "
            "to save"
        )
    for name, buffer in model.named_buffers():
        if (buffer.layout != torch.strided or buffer.is_quantized) and name in model.state_dict():
            kind = "quantized" if buffer.is_quantized else str(buffer.layout).removeprefix("torch.")
            raise ConfigError(
                f"Checkpoint: the buffer {name} is {kind}, and can be neither saved nor loaded: "
                "keep it dense, or "
                "register it with persistent=False"
            )
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if any(
            id(parameter) not in known
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise ConfigError(
                f"Checkpoint: the optimizer ({type(optimizer).__name__}) has parameters that the "
                "model does not have: "
                "make it of model.parameters(), when the model is wrapped"
            )
    overlapping = [
        name
        for name, buffer in model.named_buffers()
        if buffer.layout == torch.strided
        and any(
            stride == 0 and size > 1
            for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
        )
    ]
    if overlapping and (saved := [name for name in overlapping if name in model.state_dict()]):
        raise ConfigError(
            f"Checkpoint: the buffer {saved[0]} is an expanded view, into which nothing can be "
            "loaded: .clone() it"
        )


def _classes_of_groups(kinds: Sequence[str] | None, groups: int) -> Sequence[str] | None:
    """Return the optimizer's class for each parameter group; None if that is ambiguous, or not
    known, as in older checkpoints."""
    if kinds is None:
        return None
    if len(set(kinds)) == 1:
        return [kinds[0]] * groups
    return kinds if len(kinds) == groups else None


def _refuse_ignored_parameters(model: nn.Module) -> None:
    """Raise ConfigError for trained parameters that DDP ignores: only rank 0's would be saved."""
    ignored = (
        getattr(model, "parameters_to_ignore", ())
        if isinstance(model, DistributedDataParallel)
        else ()
    )
    if not ignored:
        return
    parameters = ((name.removeprefix("module."), each) for name, each in model.named_parameters())
    if names := [name for name, each in parameters if name in ignored and each.requires_grad]:
        raise ConfigError(
            "DDP ignores these parameters, so that each worker may train its own, and a "
            "checkpoint has one for all: "
            f"{some(names)}; shard them (FSDP), or take them out of DDP's parameters_to_ignore"
        )


def tied(model: nn.Module) -> list[list[str]]:
    """Return the canonical names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(canonical(model, several)) for several in names.values() if len(several) > 1]


def _fits_type(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values are in the range of a type. Rounding is accepted, except to
    integers."""
    new = value.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return bool((torch.isfinite(new) | ~torch.isfinite(value)).all())
    return torch.equal(new.to(value.dtype), value)


def _empty_tensor(
    entry: object, parameter: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """Return an empty tensor for an entry, sharded like the parameter if it has the same shape.
    Return None if the entry is no tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype if dtype is None else dtype
    if parameter is not None and entry.size == parameter.size() and entry.size:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype)


def _type_of(entry: object) -> torch.dtype | None:
    return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None


def _size_of(entry: object) -> torch.Size | None:
    return entry.size if isinstance(entry, TensorStorageMetadata) else None


def differing_parameters(model: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """Return texts about parameters and buffers whose names or shapes differ between the model and
    the checkpoint."""
    saved = {
        entry.name: metadata.state_dict_metadata[key]
        for key, entry in entries_of(metadata).items()
        if isinstance(entry, ModelEntry)
    }
    differing = []
    for name, value in model.items():
        if name not in saved:
            # No entry is written for an empty mapping.
            if isinstance(value, torch.Tensor) or value != {}:
                differing.append(f"{name} {_shape_text(value)} is only here".replace("  ", " "))
        elif (
            isinstance(entry := saved[name], TensorStorageMetadata)
            and isinstance(value, torch.Tensor)
            and value.size() != entry.size
        ):
            differing.append(
                f"{name} is {_shape_text(value)} here and {list(entry.size)} in the checkpoint"
            )
    for name in saved.keys() - model.keys():
        size = (
            f" {list(entry.size)}"
            if isinstance(entry := saved[name], TensorStorageMetadata)
            else ""
        )
        differing.append(f"{name}{size} is only in the checkpoint")
    return differing


def listing(differing: Sequence[str], noun: str) -> str:
    """Return a text such as ``3 parameters differ: a [2] is only here; …``."""
    plural = {"entry": "entries"}.get(noun, f"{noun}s")
    count = f"1 {noun} differs" if len(differing) == 1 else f"{len(differing):,} {plural} differ"
    more = f"; and {len(differing) - SHOWN:,} more" if len(differing) > SHOWN else ""
    return f"{count}: {'; '.join(differing[:SHOWN])}{more}"


def _shape_text(value: object) -> str:
    return str(list(value.size())) if isinstance(value, torch.Tensor) else ""


def is_part(part: object) -> bool:
    """Return whether ``stateful_part`` accepts ``part``."""
    return _has_state(part) or _has_epoch(part)


def stateful_part(name: str, part: Any) -> Stateful:
    """Return an object with state_dict and load_state_dict for ``part``.

    For torch's DistributedSampler it saves the epoch. Raises ConfigError for other objects.
    """
    if _has_state(part):
        stateful: Stateful = part
        return stateful
    if _has_epoch(part):
        return _EpochState(part)
    raise ConfigError(
        f"Checkpoint: {name} ({type(part).__name__}) has no state_dict() and load_state_dict(): "
        "give an object that has both; distlaunch help checkpoints shows one"
    )


def _has_state(part: object) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


def _has_epoch(part: object) -> bool:
    return callable(getattr(part, "set_epoch", None)) and hasattr(part, "epoch")


class _EpochState:
    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def state_dict(self) -> Nested:
        return {"epoch": self._sampler.epoch}

    def load_state_dict(self, state: Nested) -> None:
        self._sampler.set_epoch(state["epoch"])


Digests = dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one worker at a save."""

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    classes: list[str]
    """The class of each parameter group's optimizer."""
    tied: list[list[str]]
    """The names of each parameter that has several names."""
    parts: dict[str, tuple[Any, dict[str, torch.Tensor]]]
    """The state of each part by name, without its sharded tensors, and these tensors."""
    own: dict[str, Any]
    """Entries of the model that may differ between workers."""
    digests: Digests
    """Digests of ``own``."""
    for_all: bool
    """Whether all workers have the same model, as with DDP."""

    def state(self, rank: int, rank_0s: Digests) -> dict[str, Any]:
        """Return what this worker saves; of ``own``, only what differs from rank 0's."""
        own: dict[str, Any] = {
            "random": random_states(),
            "parts": {name: unsharded for name, (unsharded, _) in self.parts.items()},
            "model": differing(self.own, self.digests, rank_0s) if rank else {},
        }
        stream = io.BytesIO()
        torch.save(own, stream)
        state: dict[str, Any] = {
            f"worker-{rank}": torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
        }
        if sharded := {name: tensors for name, (_, tensors) in self.parts.items() if tensors}:
            state["parts"] = sharded
        if rank == 0:
            state["tied"] = self.tied
        if rank == 0 and self.classes:
            state["classes"] = self.classes
        if rank == 0 or not self.for_all:
            state["model"] = self.model
            if self.optimizer is not None:
                state["optimizer"] = self.optimizer
        return state


def unshared(model: nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries that may differ between workers: extra states, buffers that DDP does not
    broadcast, ignored parameters."""
    ignored = (
        getattr(model, "parameters_to_ignore", ())
        if isinstance(model, DistributedDataParallel)
        else ()
    )
    shared = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or name.removeprefix("module.") not in ignored
    ]
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        buffers = model.module.named_buffers(remove_duplicate=False)
        shared += [
            f"module.{name}" for name, _ in buffers if name not in model.parameters_to_ignore
        ]
    of_all = canonical(model, shared)
    return {name: value for name, value in entries.items() if name not in of_all}


def canonical(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return names without the prefixes of wrappers such as DDP."""
    return {name for each in names for name in _get_fqns(model, each)}


def digests(entries: Mapping[str, Any]) -> Digests:
    """Return digests by which workers compare entries, independent of the device."""
    return {name: _digest(value) for name, value in entries.items()}


def differing(entries: Mapping[str, Any], mine: Digests, theirs: Digests) -> dict[str, Any]:
    """Return copies of the entries whose digests differ. Without a copy, torch would save a view's
    whole storage."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in entries.items()
        if mine[name] != theirs.get(name)
    }


def _digest(value: Any) -> bytes:
    """Return a digest of a value, by which workers compare it.

    For a plain tensor it covers type, shape and values; for a sharded one, those of this rank's
    part. Anything else is pickled, and pickles of equal values may differ.
    """
    value = value.to_local() if is_sharded(value) else value
    hashed = blake2b(digest_size=16)
    if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        hashed.update(f"{value.dtype} {list(value.shape)} ".encode())
        hashed.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    else:
        hashed.update(pickle.dumps(value))
    return hashed.digest()


def random_states() -> dict[str, Any]:
    """Return the states of the random generators that scripts commonly use."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        states["numpy"] = np.random.get_state()  # noqa: NPY002 - the global one
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def check_own(own: Any) -> None:
    """Raise MalformedError if ``own`` is not the content of a ``worker-<rank>`` entry."""
    if not _has_text_keys(own) or not (
        _has_text_keys(own.get("random"))
        and _has_text_keys(own.get("parts"))
        and _has_text_keys(own.get("model", {}))
    ):
        raise MalformedError("it is not what a worker has for itself")
    check_random_states(own["random"])


def _has_text_keys(value: object) -> bool:
    return isinstance(value, dict) and all(type(key) is str for key in value)


def _is_empty(state: object) -> bool:
    return isinstance(state, Mapping) and not state


def _differing_own_entries(own: Nested, model: Nested, rank: int) -> list[str]:
    differing = []
    for name, value in own.items():
        live: Any = model.get(name)
        is_tensor = isinstance(live, torch.Tensor) and not name.endswith("_extra_state")
        if name not in model:
            differing.append(f"{name} of rank {rank} is only in the checkpoint")
        elif is_tensor and getattr(value, "shape", None) != live.shape:
            differing.append(f"{name} of rank {rank} is of another size in the checkpoint")
    return differing


def check_names(entry: Entry, value: Any) -> None:
    """Check the value of an entry. Raises MalformedError if it is no list of names."""
    if isinstance(entry, ModelEntry):
        return
    several = value if entry == TIED else [value]
    if type(several) is not list or not all(map(_are_names, several)):
        raise MalformedError("it holds no names")


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(each) is str for each in value)


def check_random_states(states: dict[str, Any]) -> None:
    """Raise MalformedError if a saved random state is invalid.

    numpy accepts an invalid length or position, and then reads out of bounds.
    """
    name, is_of_numpys = "Python", True
    try:
        random.Random().setstate(states["python"])
        name = "torch"
        torch.Generator().set_state(states["torch"])
        name = "numpy"
        if "numpy" in states:
            import numpy as np

            np.random.RandomState().set_state(states["numpy"])
            _, numbers, position, *_ = states["numpy"]
            is_of_numpys = len(numbers) == _MT_NUMBERS and 0 <= position <= _MT_NUMBERS
    except Exception as error:
        raise MalformedError(f"it has a random state of {name}'s that is none") from error
    if not is_of_numpys:
        raise MalformedError("it has a random state of numpy's that is none")


def set_random_states(states: dict[str, Any]) -> None:
    """Set the random generators to the result of ``random_states``."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])  # noqa: NPY002 - the global one
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
