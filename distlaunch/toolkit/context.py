"""``init``: set up a worker's device, process group and random seeds.

Under a launcher that sets ``RANK`` and torchrun's other variables, all workers form one process
group. In a plain ``python train.py`` the group has one worker, so that the same script works.
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
    name_hint,
    strategy_of_backend,
)

_REQUIRED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
    "HOROVOD_SIZE": "horovodrun",
}
"""Variables of other launchers, whose workers have no ``RANK``: each would train alone."""

_LOCAL_RANK_VARIABLES = {
    "LOCAL_RANK": (
        "SLURM_LOCALID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "PALS_LOCAL_RANKID",
    ),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""Variables that stand in for LOCAL_RANK and LOCAL_WORLD_SIZE, if a script sets RANK from another
launcher's."""

_EXIT_PAUSE_S = 0.1
"""gloo's threads abort a Python that exits while they hold a tensor."""


class _NotGiven(int):
    """An argument that was not passed, unlike None."""


_DEFAULT_SEED = _NotGiven(0)
_current: Context | None = None
_arguments: Mapping[str, object] = {}
"""The arguments of the first ``init`` call."""
_stores: dict[tuple[object, ...], tuple[Any, Iterator[int]]] = {}
"""The store of each process and environment, and the numbers of its groups.

A group whose creation failed is counted, too: all workers try again or none does.
"""
_store: Any = None
_owner_pid = 0
"""A forked child does not destroy the group of the process that called ``init``."""


class Context(Record):
    """The result of ``init``. As a context manager, it ends the process group on exit."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str
    """The communication backend: ``gloo``, or one per device type, as in ``cpu:gloo,cuda:nccl``."""
    strategy: Strategy
    """How ``wrap`` distributes the model."""
    attempt: int
    """How often the job has been restarted."""
    seed: int | None
    """The seed of this rank; None if ``init`` seeded nothing."""

    def close(self) -> None:
        """Wait up to 10 s for the other workers. Destroy the process group if all of them have
        called this.

        Called automatically when Python exits.
        """
        _end_group(clean=True)

    def __enter__(self) -> Context:  # noqa: PYI034 - Self is Python 3.11's
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        _end_group(clean=error is None or (isinstance(error, SystemExit) and not error.code))


def init(
    *,
    seed: int | None = _DEFAULT_SEED,
    device: str | torch.device | None = None,
    backend: str | None = None,
    collective_timeout: float | None = None,
    **unknown: NoReturn,
) -> Context:
    """Choose the device, form the process group and seed the random generators.

    A second call returns the same context. Its arguments must equal those of the first call; they
    may be omitted or None (except ``seed``, where None means no seeding).

    ``device``: ``cpu``, ``cuda``, …; by default an accelerator if there is one, else the CPU.
    ``backend``: by default that of the device (nccl, gloo), with gloo for CPU tensors.
    ``collective_timeout``: seconds after which a collective fails; the launcher's ``-o
    collective-timeout`` takes precedence. ``seed``: rank 0 seeds ``random``, numpy and torch with
    this number, every other rank with a number derived from the seed and the rank; None seeds
    nothing.

    When Python exits, each worker waits up to 10 s for the others and then destroys the group.
    After an exception it does not wait.

    Raises ToolkitError for incomplete variables, a missing device, unknown arguments, and arguments
    that differ from the first call's.
    """
    global _current, _owner_pid, _arguments  # noqa: PLW0603 - one group a process, as in torch
    arguments: dict[str, object] = {
        "seed": seed,
        "device": None if device is None else str(device),
        "backend": backend,
        "collective_timeout": collective_timeout,
    }
    for name in unknown:
        raise ToolkitError(f"init() takes no {quoted(name)}", hint=name_hint(name, list(arguments)))
    if _current is not None and _owner_pid == os.getpid():
        _check_repeated_call(arguments)
        return _current
    if _current is not None:
        raise ToolkitError(
            "init() was called in a forked process, whose parent has the process group",
            hint="call it only in the processes that the launcher starts",
        )
    if dist.is_initialized():
        raise ToolkitError(
            "init() was called after the process group had been formed",
            hint="remove init_process_group(): init() forms the group",
        )
    _check_arguments(seed, backend)
    ranks = _read_ranks(os.environ)
    chosen = choose_device(
        device, ranks["LOCAL_RANK"], shared=backend == "gloo", environ=os.environ
    )
    if backend is None:
        backend = (
            "gloo"
            if chosen.type == "cpu"
            else f"cpu:gloo,{chosen.type}:{_default_backend(chosen.type)}"
        )
    elif chosen.type == "cpu" and "nccl" in backend:
        raise ToolkitError(
            f"init(backend={backend!r}): this worker has no GPU", hint="leave backend out"
        )
    # torch.mps has no set_device
    set_device = getattr(getattr(torch, chosen.type), "set_device", None)
    if chosen.type != "cpu" and set_device is not None:
        set_device(chosen)
    seconds = collective_timeout_s(collective_timeout)
    strategy = strategy_of_backend()
    _init_process_group(
        ranks, backend, None if seconds is None else timedelta(seconds=seconds), strategy
    )
    seed = None if seed is None else _rank_seed(int(seed), ranks["RANK"])
    if seed is not None:
        _seed_generators(seed)
    if _owner_pid != os.getpid():
        atexit.register(_at_exit)
    _owner_pid, _arguments = os.getpid(), arguments
    _current = Context(
        rank=ranks["RANK"],
        local_rank=ranks["LOCAL_RANK"],
        world_size=ranks["WORLD_SIZE"],
        local_world_size=ranks["LOCAL_WORLD_SIZE"],
        device=chosen,
        backend=backend,
        strategy=strategy,
        attempt=ranks["TORCHELASTIC_RESTART_COUNT"],
        seed=seed,
    )
    return _current


def current(caller: str) -> Context:
    """Return the context of ``init`` for the function ``caller``. Raises ToolkitError without one."""
    if _current is None or _owner_pid != os.getpid():
        raise ToolkitError(
            f"{caller}() needs a process group", hint="call distlaunch.toolkit.init() before it"
        )
    return _current


def group_store() -> Any:
    """Return the rendezvous store of the process group."""
    return _store


def _check_repeated_call(arguments: Mapping[str, object]) -> None:
    for name, value in arguments.items():
        is_given = value is not (_DEFAULT_SEED if name == "seed" else None)
        if is_given and value != _arguments[name]:
            raise ToolkitError(
                f"init({name}={value!r}): init() was called before with {name}={_arguments[name]!r}",
                hint="close the first context before: close(), or a with block",
            )


def _check_arguments(seed: object, backend: str | None) -> None:
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


def _read_ranks(environ: Mapping[str, str]) -> dict[str, int]:
    if "RANK" not in environ:
        for name, launcher in _OTHER_LAUNCHERS.items():
            if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
                raise ToolkitError(
                    f"{launcher} has started {environ[name]} workers ({name}), and none has a RANK",
                    hint=f"use distlaunch train instead of {launcher}, or set RANK, WORLD_SIZE, "
                    "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                )
        environ = {}
    elif not environ["RANK"]:
        raise ToolkitError(
            "RANK is empty", hint="a launcher sets it to a number; without one, unset RANK"
        )
    elif missing := [name for name in _REQUIRED if not environ.get(name)]:
        raise ToolkitError(
            f"RANK is set, but not {' and '.join(missing)}",
            hint="a launcher sets all of them; without it, unset RANK",
        )
    environ = {**environ, **_local_rank_variables(environ)}
    ranks = {
        name: _read_number(environ, name, default)
        for name, default in (
            ("RANK", 0),
            ("WORLD_SIZE", 1),
            ("LOCAL_RANK", 0),
            ("TORCHELASTIC_RESTART_COUNT", 0),
        )
    }
    if not ranks["RANK"] < ranks["WORLD_SIZE"]:
        raise ToolkitError(
            f"RANK is {ranks['RANK']}, but WORLD_SIZE {ranks['WORLD_SIZE']}",
            hint="ranks count from 0",
        )
    if not environ.get("LOCAL_RANK") and ranks["WORLD_SIZE"] > 1:
        raise ToolkitError(
            "RANK is set, but not LOCAL_RANK",
            hint="a launcher sets it and LOCAL_WORLD_SIZE, which count the workers of this node",
        )
    ranks["LOCAL_WORLD_SIZE"] = _read_number(environ, "LOCAL_WORLD_SIZE", 1)
    if (
        environ.get("LOCAL_WORLD_SIZE")
        and not ranks["LOCAL_RANK"] < ranks["LOCAL_WORLD_SIZE"] <= ranks["WORLD_SIZE"]
    ):
        raise ToolkitError(
            f"LOCAL_RANK is {ranks['LOCAL_RANK']}, LOCAL_WORLD_SIZE {ranks['LOCAL_WORLD_SIZE']} "
            f"and WORLD_SIZE {ranks['WORLD_SIZE']}",
            hint="local ranks count the workers of a node, from 0",
        )
    if environ and _read_number(environ, "MASTER_PORT", 0) >= 1 << 16:
        raise ToolkitError(f"MASTER_PORT is {environ['MASTER_PORT']}", hint="ports end at 65535")
    return ranks


def _local_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    found = {
        name: [environ[other] for other in others if environ.get(other)]
        for name, others in _LOCAL_RANK_VARIABLES.items()
        if environ and not environ.get(name)
    }
    # As in 4(x2): the same number of tasks on each node.
    equal = re.fullmatch(r"(\d+)(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if equal and "LOCAL_WORLD_SIZE" in found:
        found["LOCAL_WORLD_SIZE"].append(equal[1])
    return {name: values[0] for name, values in found.items() if values}


def _read_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise ToolkitError(f"{name} is {text!r}", hint="a whole number is expected")
    return int(text)


def _default_backend(kind: str) -> str:
    if kind == "cuda":  # also ROCm, where torch calls RCCL nccl
        return "nccl"
    if not hasattr(dist, "get_default_backend_for_device"):  # before torch 2.5
        raise ToolkitError(
            f"the communication backend for {kind} is not known", hint="init(backend=...)"
        )
    return str(dist.get_default_backend_for_device(kind))


def _init_process_group(
    ranks: Mapping[str, int], backend: str, timeout: timedelta | None, strategy: Strategy
) -> None:
    global _store  # noqa: PLW0603 - as in init
    rank, world = ranks["RANK"], ranks["WORLD_SIZE"]
    store: Any
    if strategy == "horovod":
        from distlaunch.toolkit.horovod import start_horovod

        store = start_horovod(rank, world)
    elif "RANK" in os.environ:
        store = _rendezvous_store(rank, world, timeout or default_pg_timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined] # it is documented there
    _store = store
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _rendezvous_store(rank: int, world: int, timeout: timedelta) -> Any:
    """Rendezvous as torch does, and return a store with a key prefix for this group alone.

    torch numbers groups from 0 again when all have been destroyed. In a store that outlives them
    (torchrun's does), a new group would read the keys of an earlier one.
    """
    where = (os.getpid(), *(os.environ[name] for name in ("RANK", *_REQUIRED)))
    if where not in _stores:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
        _stores[where] = store, count(1)
    store, turns = _stores[where]
    own = dist.PrefixStore(f"distlaunch/{next(turns)}", store)  # type: ignore[attr-defined] # it is documented there
    own.set_timeout(timeout)
    return own


def _rank_seed(seed: int, rank: int) -> int:
    """Derive a rank's seed by hashing: with ``seed + rank``, rank 1 would repeat rank 0 of a run
    with the next seed."""
    if rank == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed} {rank}".encode(), digest_size=4).digest(), "big")


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)  # the generators of all devices
    if "numpy" in sys.modules:  # torch imports numpy if it is installed
        import numpy as np

        np.random.seed(seed % (1 << 32))  # noqa: NPY002 - the generator that scripts share


def _at_exit() -> None:
    _end_group(clean=getattr(sys, "last_type", None) is None)


def _end_group(*, clean: bool) -> None:
    """Destroy the group if ``clean`` or alone. After an exception, the other workers are in
    collectives, and destroying would wait for them."""
    global _current, _store  # noqa: PLW0603 - as in init
    if _current is None or _owner_pid != os.getpid():
        return
    _current = _store = None
    if clean or (dist.is_initialized() and dist.get_world_size() == 1):
        end_process_group()
    else:
        time.sleep(_EXIT_PAUSE_S)


_NONE_VISIBLE = {"", "-1"}


def choose_device(
    requested: str | torch.device | None,
    local_rank: int,
    *,
    shared: bool,
    environ: Mapping[str, str],
) -> torch.device:
    """Return the device for a local rank. Raises ToolkitError if it does not exist.

    ``shared``: several workers may share a device.
    """
    accelerator = _find_accelerator()
    if requested is None:
        if accelerator is None and "DISTLAUNCH_JOB_ID" in environ:
            _refuse_idle_devices(environ)
        kind = accelerator or "cpu"
    else:
        kind = _device_type(requested, accelerator)
    if kind == "cpu":
        return torch.device("cpu")
    count = getattr(torch, kind).device_count()
    if count == 1 and local_rank and not shared:
        raise ToolkitError(
            f"local rank {local_rank} has no device: torch sees one of {kind} here",
            hint="if each worker sees only its own device (srun --gpus-per-task), set LOCAL_RANK=0 "
            "for all; otherwise start no more workers than devices, or share them: "
            'init(backend="gloo")',
        )
    if local_rank >= count and not shared:
        raise ToolkitError(
            f"local rank {local_rank} has no device: torch sees {count} of {kind} here",
            hint='start no more workers than devices, or share them: init(backend="gloo")',
        )
    return torch.device(kind, local_rank % count)


def _device_type(requested: str | torch.device, accelerator: str | None) -> str:
    """Return the type of the requested device. Raises ToolkitError for an index, because LOCAL_RANK
    chooses it."""
    written = f"init(device={str(requested)!r})"
    try:
        device = torch.device(requested)
    except (RuntimeError, TypeError) as exc:
        raise ToolkitError(
            f"{written}: torch knows no such device", hint="'cpu', 'cuda', or leave it out"
        ) from exc
    if device.type not in {"cpu", accelerator}:
        seen = f"only {accelerator}" if accelerator else "no accelerator"
        raise ToolkitError(
            f"{written}: torch {torch.__version__} sees {seen} here",
            hint="leave device out to use what there is",
        )
    if device.type != "cpu" and device.index is not None:
        raise ToolkitError(
            f"{written}: the number of the device comes from LOCAL_RANK",
            hint=f"init(device={device.type!r}); distlaunch --gpus chooses among devices",
        )
    return device.type


def _find_accelerator() -> str | None:
    if torch.cuda.is_available():
        return "cuda"
    # torch.accelerator exists since torch 2.6.
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return found.type if found is not None and getattr(torch, found.type).is_available() else None


def _refuse_idle_devices(environ: Mapping[str, str]) -> None:
    for name in sorted(DEVICE_MASKS):
        if environ.get(name, "") not in _NONE_VISIBLE:
            raise ToolkitError(
                f"{name}={environ[name]}, but torch {torch.__version__} sees no accelerator",
                hint="check that torch is built for it and that the driver is new enough; "
                "init(device='cpu') trains without",
            )
