"""What a script gives a Checkpoint, and what of it is refused in words."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from torch.optim import Optimizer

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.storage import MOST_STEPS


def above_0(name: str, number: Any, *, whole: bool) -> None:
    """Raise ConfigError for anything but a number above 0; True is none, though Python has it be 1."""
    is_one = isinstance(number, Integral if whole else Real) and not isinstance(number, bool)
    if not (is_one and 0 < float(number) < math.inf):
        expected = "a whole number above 0" if whole else "a number of seconds above 0"
        raise ConfigError(f"Checkpoint: {name} is {number!r}, and has to be {expected}")


def several(optimizer: Any) -> Sequence[Optimizer]:
    """Give the optimizers: one, several or none. Raises ConfigError for what has no order, and for one given twice."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return () if optimizer is None else (optimizer,)
    if isinstance(optimizer, str) or not isinstance(optimizer, Sequence):
        kind = type(optimizer).__name__
        raise ConfigError(f"Checkpoint: optimizer is a {kind}, and has to be torch's, or a list of several")
    if len({id(each) for each in optimizer}) < len(optimizer):
        raise ConfigError("Checkpoint: optimizer has one of them twice: give each once")
    return optimizer


def steps_after(step: Any, reached: int) -> int:
    """Give how many steps are done then; numpy's and torch's whole numbers are taken as well.

    Raises ConfigError for no number, and where they go back: the newest checkpoint is the one after the most steps.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < MOST_STEPS:
        raise ConfigError(f"Checkpoint: the step is {step!r}; a whole number is expected, from 0 to 10**18 - 2")
    if number + 1 < reached:
        raise ConfigError(
            f"Checkpoint: step {number} after step {reached - 1}: only steps that follow can be saved: count them over "
            "all epochs, from what resume() gives; resume(steps=...) goes back"
        )
    return number + 1


def not_shared(places: Sequence[tuple[str, str, bool | str]]) -> str:
    """Say which workers do not see what rank 0 has written.

    ``places``: of each worker by rank its host, its place, and whether it sees that; a text says why it cannot tell.
    """
    host, root, _ = places[0]
    blind = [(rank, *place) for rank, place in enumerate(places) if place[2] is not True]
    if unread := [(rank, why) for rank, _, other, why in blind if other == root and isinstance(why, str)]:
        rank, why = unread[0]
        return f"checkpoints in {root}: rank {rank}: {why}"
    if others := [(rank, other) for rank, _, other, _ in blind if other != root]:
        rank, other = others[0]
        return f"checkpoints in {root}: rank {rank} was given another place, {other}: all workers have to give the same"
    hosts = ", ".join(sorted({each for _, each, _, _ in blind}))
    seen = f"{hosts} and {host} do not see the same directory"
    return f"checkpoints in {root}: {seen}: it has to be one that all nodes share"
