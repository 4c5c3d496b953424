"""Who this worker is, and what it needs before it trains: a device, a process group, random seeds.

Under a launcher that sets ``RANK`` and the other variables of torchrun the group is formed with the
other workers; in a plain ``python train.py`` it is a group of one, so that the same script works.

Which device a worker trains on.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from hashlib import blake2b
from itertools import count
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from distlaunch.core.model.record import Record
from distlaunch.core.model.text import quoted
from distlaunch.core.model.variables import DEVICE_MASKS
from distlaunch.toolkit.toolkit_error import ToolkitError
from distlaunch.toolkit.wait_at_end import end_process_group
from distlaunch.toolkit.wrap_options import (
    Strategy,
    collective_timeout_s,
    launched_strategy,
    near_name,
)

_NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
    "HOROVOD_SIZE": "horovodrun",
}
"""Variables of launchers that start several workers without torchrun's variables: each would train
for itself."""

_LOCAL = {
    "LOCAL_RANK": (
        "SLURM_LOCALID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "PALS_LOCAL_RANKID",
    ),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""What those launchers set that say a worker's place on its node, for scripts that make RANK of
their variables."""

_SETTLE_S = 0.1
"""So long a group that is left as it is has to let go of its last tensor: its threads abort a
Python that has ended."""


class _Default(int):
    """A number that nobody gave: it is told by its identity from the same one that somebody
    gives."""


_SEED = _Default(0)
_current: Context | None = None
_asked: Mapping[str, object] = {}
"""What ``init`` was called with."""
_stores: dict[tuple[object, ...], tuple[Any, Iterator[int]]] = {}
"""By process and environment: the store by which the workers find each other, and the numbers of
its groups.

One that has failed counts, too, as for torch, which numbers those itself: it is tried again by all
workers or by none.
"""
_store: Any = None
"""That of the group."""
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
    """What communicates: ``gloo``, or ``cpu:gloo,cuda:nccl``, each with the tensors of its
    device."""
    strategy: Strategy
    """What ``wrap`` does."""
    attempt: int
    """How often the job has been restarted."""
    seed: int | None
    """Of this rank; None if nothing was seeded."""

    def close(self) -> None:
        """Wait for the other workers, at most 10 s, and end the group if they come. Python's end
        does so by itself."""
        _end(clean=True)

    def __enter__(self) -> Context:  # noqa: PYI034 - Self is Python 3.11's
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        _end(clean=error is None or (isinstance(error, SystemExit) and not error.code))


def init(
    *,
    seed: int | None = _SEED,
    device: str | torch.device | None = None,
    backend: str | None = None,
    collective_timeout: float | None = None,
    **unknown: NoReturn,
) -> Context:
    """Choose and set the device, form the process group and seed the random generators. Again: the
    same context.

    What is given again has to be what it was; all may be left out, or be None (``seed`` not: that
    is a choice).

    ``device``: ``cpu``, ``cuda``, …; by default what is there, an accelerator before the CPU.
    ``backend``: by default the device's own (nccl, gloo), with gloo for tensors on the CPU.
    ``collective_timeout``: seconds after which a collective is given up; the launcher's ``-o
    collective-timeout`` wins. ``seed`` (0): ``random``, numpy and torch get it on rank 0, and on
    every other rank one made of it and the rank; None leaves them alone.

    At Python's end the group is ended when all workers have come so far, which each waits for at
    most 10 s, and after an exception not at all. Raises ToolkitError for an environment that is not
    whole, a device that is not there, and arguments that are unknown or others than before.
    """
    global _current, _owner, _asked  # noqa: PLW0603 - one group a process, as in torch
    asked: dict[str, object] = {
        "seed": seed,
        "device": None if device is None else str(device),
        "backend": backend,
        "collective_timeout": collective_timeout,
    }
    for name in unknown:
        raise ToolkitError(f"init() takes no {quoted(name)}", hint=near_name(name, list(asked)))
    if _current is not None and _owner == os.getpid():
        _check_again(asked)
        return _current
    if _current is not None:
        raise ToolkitError(
            "init() in a forked process: the process group is its parent's",
            hint="call it in workers of the launcher",
        )
    if dist.is_initialized():
        raise ToolkitError(
            "init() comes too late: there is a process group",
            hint="init() makes it: drop the other one",
        )
    _check(seed, backend)
    place = _place(os.environ)
    chosen = choose_device(
        device, place["LOCAL_RANK"], shared=backend == "gloo", environ=os.environ
    )
    if backend is None:
        backend = (
            "gloo"
            if chosen.type == "cpu"
            else f"cpu:gloo,{chosen.type}:{_own_backend(chosen.type)}"
        )
    elif chosen.type == "cpu" and "nccl" in backend:
        raise ToolkitError(
            f"init(backend={backend!r}): this worker has no GPU", hint="leave backend out"
        )
    set_device = getattr(
        getattr(torch, chosen.type), "set_device", None
    )  # of a Mac there is only one
    if chosen.type != "cpu" and set_device is not None:
        set_device(chosen)
    seconds = collective_timeout_s(collective_timeout)
    strategy = launched_strategy()
    _form(place, backend, None if seconds is None else timedelta(seconds=seconds), strategy)
    seed = None if seed is None else _of_rank(int(seed), place["RANK"])
    if seed is not None:
        _sow(seed)
    if _owner != os.getpid():
        atexit.register(_at_exit)
    _owner, _asked = os.getpid(), asked
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
    """Return what ``init`` gave. Raises ToolkitError if it was not called."""
    if _current is None or _owner != os.getpid():
        raise ToolkitError(
            f"{caller}() needs a process group", hint="call distlaunch.toolkit.init() before it"
        )
    return _current


def group_store() -> Any:
    """Return the store by which the workers of the group have found each other."""
    return _store


def _check_again(asked: Mapping[str, object]) -> None:
    for name, value in asked.items():
        is_given = value is not (_SEED if name == "seed" else None)
        if is_given and value != _asked[name]:
            raise ToolkitError(
                f"init({name}={value!r}): it was called before, with {name}={_asked[name]!r}",
                hint="end that one first: close(), or a with block",
            )


def _check(seed: object, backend: str | None) -> None:
    if seed is not None and (not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 64):
        raise ToolkitError(
            f"init(seed=...) is {quoted(str(seed))}",
            hint="it takes a whole number of 64 bits, or None",
        )
    known = {*dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
    if (
        backend is not None
        and not {part.rpartition(":")[2] for part in str(backend).lower().split(",")} <= known
    ):
        raise ToolkitError(
            f"init(backend=...) is {quoted(str(backend))}",
            hint=f"torch knows {', '.join(sorted(known))}",
        )


def _place(environ: Mapping[str, str]) -> dict[str, int]:
    """Read the worker's place among the others; a world of one where no launcher tells."""
    if "RANK" not in environ:
        for name, launcher in _OTHER_LAUNCHERS.items():
            if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
                raise ToolkitError(
                    f"{launcher} has started {environ[name]} workers ({name}), and none has a RANK",
                    hint="distlaunch train in its place, or have RANK, WORLD_SIZE, LOCAL_RANK, "
                    "LOCAL_WORLD_SIZE, "
                    "MASTER_ADDR and MASTER_PORT set",
                )
        environ = {}
    elif not environ["RANK"]:
        raise ToolkitError(
            "RANK is empty", hint="a launcher sets it to a number; without one, unset RANK"
        )
    elif missing := [name for name in _NEEDED if not environ.get(name)]:
        raise ToolkitError(
            f"RANK is set, but not {' and '.join(missing)}",
            hint="a launcher sets all of them; without it, unset RANK",
        )
    environ = {**environ, **_on_its_node(environ)}
    place = {
        name: _number(environ, name, default)
        for name, default in (
            ("RANK", 0),
            ("WORLD_SIZE", 1),
            ("LOCAL_RANK", 0),
            ("TORCHELASTIC_RESTART_COUNT", 0),
        )
    }
    if not place["RANK"] < place["WORLD_SIZE"]:
        raise ToolkitError(
            f"RANK is {place['RANK']}, but WORLD_SIZE {place['WORLD_SIZE']}",
            hint="ranks count from 0",
        )
    if not environ.get("LOCAL_RANK") and place["WORLD_SIZE"] > 1:
        raise ToolkitError(
            "RANK is set, but not LOCAL_RANK",
            hint="a launcher sets it and LOCAL_WORLD_SIZE: the place on this node",
        )
    place["LOCAL_WORLD_SIZE"] = _number(environ, "LOCAL_WORLD_SIZE", 1)
    if (
        environ.get("LOCAL_WORLD_SIZE")
        and not place["LOCAL_RANK"] < place["LOCAL_WORLD_SIZE"] <= place["WORLD_SIZE"]
    ):
        raise ToolkitError(
            f"LOCAL_RANK is {place['LOCAL_RANK']}, LOCAL_WORLD_SIZE {place['LOCAL_WORLD_SIZE']} "
            "and WORLD_SIZE "
            f"{place['WORLD_SIZE']}",
            hint="local ranks count the workers of a node, from 0",
        )
    if environ and _number(environ, "MASTER_PORT", 0) >= 1 << 16:
        raise ToolkitError(f"MASTER_PORT is {environ['MASTER_PORT']}", hint="ports end at 65535")
    return place


def _on_its_node(environ: Mapping[str, str]) -> dict[str, str]:
    """Take from other launchers' variables what is not set of a worker's place on its node."""
    found = {
        name: [environ[other] for other in others if environ.get(other)]
        for name, others in _LOCAL.items()
        if environ and not environ.get(name)
    }
    alike = re.fullmatch(
        r"(\d+)(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    )  # as 4(x2)
    if alike and "LOCAL_WORLD_SIZE" in found:
        found["LOCAL_WORLD_SIZE"].append(alike[1])
    return {name: values[0] for name, values in found.items() if values}


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


def _form(
    place: Mapping[str, int], backend: str, timeout: timedelta | None, strategy: Strategy
) -> None:
    """Form the group of all workers."""
    global _store  # noqa: PLW0603 - as in init
    rank, world = place["RANK"], place["WORLD_SIZE"]
    store: Any
    if strategy == "horovod":
        from distlaunch.toolkit.horovod import rendezvous

        store = rendezvous(rank, world)
    elif "RANK" in os.environ:
        store = _meet(rank, world, timeout or default_pg_timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined] # it is documented there
    _store = store
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _meet(rank: int, world: int, timeout: timedelta) -> Any:
    """Have the workers find each other as torch does; give what is then kept of it, with keys of
    each group's own.

    torch numbers its groups anew when all have ended, and takes what earlier ones have written for
    the new ones' where the store is still there: it is torchrun's, somebody keeps a group, or rank
    0 has not ended it yet.
    """
    where = (os.getpid(), *(os.environ[name] for name in ("RANK", *_NEEDED)))
    if where not in _stores:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
        _stores[where] = store, count(1)
    store, turns = _stores[where]
    own = dist.PrefixStore(f"distlaunch/{next(turns)}", store)  # type: ignore[attr-defined] # it is documented there
    own.set_timeout(timeout)
    return own


def _of_rank(seed: int, rank: int) -> int:
    """Make a rank's seed: ``seed + rank`` would give rank 1 what rank 0 has in the run with the
    next seed."""
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
    """End the group. After an exception the others are somewhere else: neither waiting nor ending
    it would return."""
    global _current, _store  # noqa: PLW0603 - as in init
    if _current is None or _owner != os.getpid():
        return
    _current = _store = None
    if clean or (dist.is_initialized() and dist.get_world_size() == 1):
        end_process_group()
    else:
        time.sleep(_SETTLE_S)


_NONE_VISIBLE = {"", "-1"}


def choose_device(
    asked: str | torch.device | None, local_rank: int, *, shared: bool, environ: Mapping[str, str]
) -> torch.device:
    """Choose the device of this local rank. Raises ToolkitError where it is not there.

    ``shared``: more workers than devices take them in turn.
    """
    there = _accelerator()
    if asked is None:
        if there is None and "DISTLAUNCH_JOB_ID" in environ:
            _refuse_idle_devices(environ)
        kind = there or "cpu"
    else:
        kind = _kind(asked, there)
    if kind == "cpu":
        return torch.device("cpu")
    count = getattr(torch, kind).device_count()
    if count == 1 and local_rank and not shared:
        raise ToolkitError(
            f"local rank {local_rank} has no device: torch sees one of {kind} here",
            hint="where each worker is given a device of its own (srun --gpus-per-task), have "
            "LOCAL_RANK=0 set for "
            "all; else start no more workers than devices, or have them share: "
            'init(backend="gloo")',
        )
    if local_rank >= count and not shared:
        raise ToolkitError(
            f"local rank {local_rank} has no device: torch sees {count} of {kind} here",
            hint='start no more workers than devices, or have them share: init(backend="gloo")',
        )
    return torch.device(kind, local_rank % count)


def _kind(asked: str | torch.device, there: str | None) -> str:
    """Read which kind of device was asked for; the local rank chooses among those of a kind."""
    written = f"init(device={str(asked)!r})"
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as exc:
        raise ToolkitError(
            f"{written}: torch knows no such device", hint="'cpu', 'cuda', or leave it out"
        ) from exc
    if device.type not in {"cpu", there}:
        seen = f"only {there}" if there else "no accelerator"
        raise ToolkitError(
            f"{written}: torch {torch.__version__} sees {seen} here",
            hint="leave device out to take what is there",
        )
    if device.type != "cpu" and device.index is not None:
        raise ToolkitError(
            f"{written}: the local rank chooses which one",
            hint=f"init(device={device.type!r}), or distlaunch --gpus",
        )
    return device.type


def _accelerator() -> str | None:
    if torch.cuda.is_available():
        return "cuda"
    found = (
        torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    )  # from torch 2.6 on
    return found.type if found is not None and getattr(torch, found.type).is_available() else None


def _refuse_idle_devices(environ: Mapping[str, str]) -> None:
    """Raise ToolkitError where the launcher gave devices to this worker: it is not meant to train
    on the CPU."""
    for name in sorted(DEVICE_MASKS):
        if environ.get(name, "") not in _NONE_VISIBLE:
            raise ToolkitError(
                f"{name}={environ[name]}, but torch {torch.__version__} sees no accelerator",
                hint="is that torch built for it, and is the driver new enough? init(device='cpu') "
                "trains without",
            )
