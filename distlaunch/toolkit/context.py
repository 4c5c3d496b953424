"""Layer toolkit: who this worker is, and what it needs before it trains: a device, a process group, random seeds.

Under a launcher that sets ``RANK`` and the other variables of torchrun the group is formed with the other workers; in a
plain ``python train.py`` it is a group of one, so that the same script works.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
from collections.abc import Mapping
from datetime import timedelta
from hashlib import blake2b
from types import TracebackType

import torch
import torch.distributed as dist

from distlaunch.core.model.record import Record
from distlaunch.toolkit.devices import choose_device
from distlaunch.toolkit.errors import ToolkitError
from distlaunch.toolkit.meeting import end_process_group
from distlaunch.toolkit.options import Strategy, launched_options, launched_strategy

_NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
    "HOROVOD_SIZE": "horovodrun",
}
"""Variables of launchers that start several workers without torchrun's variables: each would train for itself."""

_current: Context | None = None
_owner = 0
"""The process that called ``init``; a forked one does not end its group."""


class Context(Record):
    """What ``init`` found. As a context manager it ends the group where its block ends."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str
    """What communicates: ``gloo``, or ``cpu:gloo,cuda:nccl``, each with the tensors of its device."""
    strategy: Strategy
    """What ``wrap`` does."""
    attempt: int
    """How often the job has been restarted."""
    seed: int | None
    """Of this rank; None if nothing was seeded."""

    def close(self) -> None:
        """Wait for the other workers, at most 10 s, and end the group if they come. Python's end does so by itself."""
        _end(clean=True)

    def __enter__(self) -> Context:  # noqa: PYI034 - Self is Python 3.11's
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        _end(clean=error is None or (isinstance(error, SystemExit) and not error.code))


def init(
    *,
    seed: int | None = 0,
    device: str | None = None,
    backend: str | None = None,
    collective_timeout: float | None = None,
) -> Context:
    """Choose and set the device, form the process group and seed the random generators. Again: the same context.

    ``device``: ``cpu``, ``cuda``, …; by default what is there, an accelerator before the CPU. ``backend``: by default
    the device's own (nccl, gloo), with gloo for tensors on the CPU. ``collective_timeout``: seconds after which a
    collective is given up; the launcher's ``-o collective-timeout`` wins. ``seed``: ``random``, numpy and torch get it
    on rank 0, and on every other rank one made of it and the rank; None leaves them alone.

    At Python's end the group is ended when all workers have come so far, which each waits for at most 10 s, and after
    an exception not at all. Raises ToolkitError for an environment that is not whole, and a device that is not there.
    """
    global _current, _owner  # noqa: PLW0603 - one group a process, as in torch
    if _current is not None and _owner == os.getpid():
        return _current
    if dist.is_initialized():
        raise ToolkitError(
            "init() comes too late: there is a process group", hint="init() makes it: drop the other one"
        )
    place = _place(os.environ)
    chosen = choose_device(device, place["LOCAL_RANK"], shared=backend == "gloo", environ=os.environ)
    if backend is None:
        backend = "gloo" if chosen.type == "cpu" else f"cpu:gloo,{chosen.type}:{_own_backend(chosen.type)}"
    if chosen.type != "cpu":
        getattr(torch, chosen.type).set_device(chosen)
    seconds = launched_options().get("collective-timeout", collective_timeout)
    strategy = launched_strategy()
    _form(place, backend, None if seconds is None else timedelta(seconds=float(seconds)), strategy)  # type: ignore[arg-type]
    seed = None if seed is None else _of_rank(seed, place["RANK"])
    if seed is not None:
        _sow(seed)
    if _owner != os.getpid():
        atexit.register(_at_exit)
    _owner = os.getpid()
    _current = Context(
        rank=place["RANK"],
        local_rank=place["LOCAL_RANK"],
        world_size=place["WORLD_SIZE"],
        local_world_size=place["LOCAL_WORLD_SIZE"],
        device=chosen,
        backend=backend,
        strategy=strategy,
        attempt=place["TORCHELASTIC_RESTART_COUNT"],
        seed=seed,
    )
    return _current


def current(caller: str) -> Context:
    """Give what ``init`` gave. Raises ToolkitError if it was not called."""
    if _current is None or _owner != os.getpid():
        raise ToolkitError(f"{caller}() needs a process group", hint="call distlaunch.toolkit.init() before it")
    return _current


def _place(environ: Mapping[str, str]) -> dict[str, int]:
    """Read the worker's place among the others; a world of one where no launcher tells."""
    if "RANK" not in environ:
        for name, launcher in _OTHER_LAUNCHERS.items():
            if environ.get(name, "1") not in {"", "0", "1"}:
                raise ToolkitError(
                    f"{launcher} has started {environ[name]} workers ({name}), and none has a RANK",
                    hint="distlaunch train in its place, or have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set",
                )
        environ = {}
    elif missing := [name for name in _NEEDED if not environ.get(name)]:
        raise ToolkitError(
            f"RANK is set, but not {' and '.join(missing)}", hint="a launcher sets all of them; without it, unset RANK"
        )
    place = {
        name: _number(environ, name, default)
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("TORCHELASTIC_RESTART_COUNT", 0))
    }
    place["LOCAL_WORLD_SIZE"] = _number(environ, "LOCAL_WORLD_SIZE", 1)
    if not place["RANK"] < place["WORLD_SIZE"]:
        raise ToolkitError(f"RANK is {place['RANK']}, but WORLD_SIZE {place['WORLD_SIZE']}")
    return place


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise ToolkitError(f"{name} is {text!r}", hint="a whole number is expected")
    return int(text)


def _own_backend(kind: str) -> str:
    if kind == "cuda":  # also ROCm, whose RCCL goes by the same name
        return "nccl"
    if not hasattr(dist, "get_default_backend_for_device"):  # before torch 2.5
        raise ToolkitError(f"which backend {kind} has is not known", hint="init(backend=...)")
    return str(dist.get_default_backend_for_device(kind))


def _form(place: Mapping[str, int], backend: str, timeout: timedelta | None, strategy: Strategy) -> None:
    """Form the group of all workers."""
    rank, world = place["RANK"], place["WORLD_SIZE"]
    if strategy == "horovod":
        from distlaunch.toolkit.horovod import rendezvous

        store = rendezvous(rank, world)
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    else:
        store = dist.HashStore()  # type: ignore[attr-defined] # it is documented there
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _of_rank(seed: int, rank: int) -> int:
    """Make a rank's seed: ``seed + rank`` would give rank 1 what rank 0 has in the run with the next seed."""
    if rank == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed} {rank}".encode(), digest_size=4).digest(), "big")


def _sow(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)  # of all devices
    if "numpy" in sys.modules:  # torch has loaded it if it is there
        import numpy as np

        np.random.seed(seed % (1 << 32))  # noqa: NPY002 - the generator that scripts share


def _at_exit() -> None:
    _end(clean=getattr(sys, "last_type", None) is None)


def _end(*, clean: bool) -> None:
    """End the group. After an exception the others are somewhere else: neither waiting nor ending it would return."""
    global _current  # noqa: PLW0603 - as in init
    if _current is None or _owner != os.getpid():
        return
    _current = None
    if clean:
        end_process_group()
