"""Layer toolkit: what is in a checkpoint, and how it gets back into model, optimizer, scheduler and random states.

Names are canonical (torch.distributed.checkpoint.state_dict), so that DDP, FSDP and a plain model read each other's.
What a worker has for itself is its own entry, ``worker-<rank>``: the bytes of ``torch.save``.
"""

from __future__ import annotations

import io
import random
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from distlaunch.core.errors import ConfigError

Nested = dict[str, Any]
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
"""What DDP, torch.compile and activation checkpointing put into names."""
SHOWN = 5
"""How many differences an error shows."""


class Stateful(Protocol):
    """What a scheduler, a scaler and a sampler have."""

    def state_dict(self) -> Any:
        """Give its state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take its state."""


class Trained:
    """All that decides the next step."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], parts: Mapping[str, Stateful]
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.parts = dict(parts)
        """Scheduler, scaler, sampler and whatever else the script has; small, and each worker's own."""

    def state(self, rank: int) -> Nested:
        """Give what this worker adds to a checkpoint; tensors are the live ones."""
        own: Nested = {
            "random": random_states(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }
        stream = io.BytesIO()
        torch.save(own, stream)
        state: Nested = {f"worker-{rank}": torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)}
        if rank == 0 or not isinstance(self.model, DistributedDataParallel):  # DDP: all have what rank 0 has
            state["model"], state["optimizer"] = self._canonical()
        return state

    def _canonical(self) -> tuple[Nested, Nested]:
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return dict(model), {"state": {}, "param_groups": [], **optimizer}

    def template(self, metadata: Metadata, rank: int, world_size: int) -> Nested:
        """Give the entries to be read, as they are here. Raises ConfigError if the checkpoint is of something else."""
        model, optimizer = self._canonical()
        there = metadata.state_dict_metadata
        if differing := differing_parameters(model, there):
            raise ConfigError(f"is of another model: {listing(differing, 'parameter')}")
        if differing := self._differing_states(optimizer, there):
            raise ConfigError(f"is of another optimizer: {listing(differing, 'entry')}")
        own = f"worker-{rank if rank < world_size else 0}"
        size = there[own].size  # type: ignore[union-attr]
        return {"model": model, "optimizer": optimizer, own: torch.empty(size, dtype=torch.uint8)}

    @staticmethod
    def _differing_states(optimizer: Nested, there: Mapping[str, Any]) -> list[str]:
        """List entries that only one side has; of the template drop what the checkpoint need not have.

        A parameter that has had no gradient yet has no state; what a newer torch adds to groups keeps its value.
        """
        differing: list[str] = []
        states = optimizer["state"]
        known = {name for name in there if name.startswith("optimizer.state.")}
        read: set[str] = set()
        for parameter in list(states):
            keys = {f"optimizer.state.{parameter}.{entry}" for entry in states[parameter]}
            if known and not keys & known:
                del states[parameter]
                continue
            differing += [f"{_short(key)} is only here" for key in sorted(keys - known)]
            read |= keys & known
        whole = {key.rpartition(".")[0] for key in read}
        for key in sorted(known - read):
            if key.rpartition(".")[0] in whole or not whole:
                differing.append(f"{_short(key)} is only in the checkpoint")
        groups = {found[1] for name in there if (found := re.match(r"optimizer\.param_groups\.(\d+)\.", name))}
        if groups and len(groups) != len(optimizer["param_groups"]):
            here = len(optimizer["param_groups"])
            differing.append(f"there are {here} parameter groups here and {len(groups)} in the checkpoint")
        for number, group in enumerate(optimizer["param_groups"] if groups else ()):
            for name in [name for name in group if f"optimizer.param_groups.{number}.{name}" not in there]:
                del group[name]
        return differing

    def take(self, state: Nested, rank: int, world_size: int) -> list[str]:
        """Put what was read where it belongs, but for random states; tensors of the model are there already.

        Return what of this worker's own the checkpoint had nothing for.
        """
        stepped = set(state["optimizer"]["state"])
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=self._filled(state["optimizer"]),
        )
        self._forget_states(stepped)
        (data,) = (value for name, value in state.items() if name.startswith("worker-"))
        own = torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=False)
        self._random = own["random"] if rank < world_size else None
        for name in own["parts"].keys() & self.parts.keys():
            self.parts[name].load_state_dict(own["parts"][name])
        return sorted(self.parts.keys() - own["parts"].keys())

    def _filled(self, optimizer: Nested) -> Nested:
        """Give back to the parameter groups and states what ``template`` has left out: set_state_dict wants all."""
        _, whole = self._canonical()
        for group, read in zip(whole["param_groups"], optimizer["param_groups"], strict=True):
            group.update(read)
        return {"state": {**whole["state"], **optimizer["state"]}, "param_groups": whole["param_groups"]}

    def _forget_states(self, stepped: set[str]) -> None:
        """Leave parameters without a state that had none: set_state_dict has made one by a step of its own."""
        _, now = self._canonical()
        if not (made := set(now["state"]) - stepped):
            return
        for name, parameter in self.model.named_parameters():
            if name in made or ".".join(part for part in name.split(".") if part not in _WRAPPERS) in made:
                for optimizer in self.optimizers:
                    optimizer.state.pop(parameter, None)

    def restore_random(self) -> None:
        """Set the random states as they were; a worker that was not there keeps the seeds that the script has set."""
        if self._random is not None:
            set_random_states(self._random)

    _random: Nested | None = None


def random_states() -> Nested:
    """Read all random generators that a script is likely to use."""
    states: Nested = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        states["numpy"] = np.random.get_state()  # noqa: NPY002 - the global one
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Nested) -> None:
    """Set what ``random_states`` has read."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])  # noqa: NPY002 - the global one
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def differing_parameters(model: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """List parameters and buffers whose names or shapes differ."""
    prefix = "model."
    saved = {name.removeprefix(prefix): entry for name, entry in there.items() if name.startswith(prefix)}
    differing = []
    for name, value in model.items():
        if name not in saved:
            differing.append(f"{name} {_shape(value)} is only here".replace("  ", " "))
        elif isinstance(entry := saved[name], TensorStorageMetadata) and _shape(value) != str(list(entry.size)):
            differing.append(f"{name} is {_shape(value)} here and {list(entry.size)} in the checkpoint")
    for name in saved.keys() - model.keys():
        size = f" {list(entry.size)}" if isinstance(entry := saved[name], TensorStorageMetadata) else ""
        differing.append(f"{name}{size} is only in the checkpoint")
    return differing


def listing(differing: Sequence[str], noun: str) -> str:
    """Name the first differences and how many there are: ``3 parameters differ: a [2] is only here; …``."""
    plural = {"entry": "entries"}.get(noun, f"{noun}s")
    count = f"1 {noun} differs" if len(differing) == 1 else f"{len(differing):,} {plural} differ"
    more = f"; and {len(differing) - SHOWN:,} more" if len(differing) > SHOWN else ""
    return f"{count}: {'; '.join(differing[:SHOWN])}{more}"


def _shape(value: object) -> str:
    return str(list(value.size())) if isinstance(value, torch.Tensor) else ""


def _short(key: str) -> str:
    return key.removeprefix("optimizer.state.")
