"""GPUs that Slurm granted: to this node (what is there), to the others (what was asked for); pure."""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record, replace
from distlaunch.planning.allocation import Host
from distlaunch.planning.clusters.environment_reader import IGNORE_HINT, Environ, Origins, number, shown, text
from distlaunch.planning.gpu_masks import HIDES_ALL

_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_MOST_GPUS = 4096
_REQUESTS = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET"),
    "SLURM_NTASKS_PER_GPU",
)


class Granted(Record):
    """This node's GPUs; None where nothing tells."""

    count: int | None = None
    devices: tuple[str, ...] | None = None
    """The mask, where Slurm's own word has as many GPUs; None for one that somebody else has set."""

    def on(self, host: Host) -> Host:
        """Say of the host what is granted there; it stays as it is if no GPU of it is known."""
        if not self.count:
            return replace(host, devices=self.devices)
        return replace(host, slots=self.count, unit="gpus", devices=self.devices)


def granted_here(environ: Environ, found: Origins, *, in_step: bool) -> Granted:
    """Read what this node has: the mask (narrowed for this task, or by the user), else the list, else the number.

    ``SLURM_JOB_GPUS`` counts only outside of a step: in one it is the job's, of another node even.
    """
    own_list = "SLURM_STEP_GPUS" if in_step else "SLURM_JOB_GPUS"
    told = any(name in environ for name in (own_list, "SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"))
    mask = next((name for name in _MASKS if name in environ), None) if told else None
    ids = _ids(environ[own_list]) if text(environ, own_list) is not None else ()
    count = number(environ, "SLURM_GPUS_ON_NODE", most=_MOST_GPUS)
    if mask is not None:
        value = environ[mask].strip()
        devices = () if value in HIDES_ALL else _ids(value)
        lost = tuple(_other(environ, own_list, len(ids), len(devices)))
        if count is not None and count != len(devices):
            lost += found.lost("SLURM_GPUS_ON_NODE", "the mask decides")
        found.add("slots of this node", len(devices), mask, *lost)
        own_word = len(ids) or count
        return Granted(count=len(devices), devices=devices if own_word in {None, len(devices)} else None)
    if ids:
        # Physical numbers: behind device cgroups these are not what a mask would hold.
        found.add("slots of this node", len(ids), own_list)
        return Granted(count=len(ids))
    if count is not None:
        found.add("slots of this node", count, "SLURM_GPUS_ON_NODE")
        return Granted(count=count)
    return Granted()


def _ids(value: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in value.split(",") if entry.strip())


def _other(environ: Environ, name: str, number_of_ids: int, number_in_mask: int) -> list[str]:
    return [f"{shown(environ, name)}: the mask decides"] if number_of_ids not in {0, number_in_mask} else []


def asked_for_gpus(environ: Environ, suffix: str) -> bool:
    """Tell whether a job or component has GPUs, even if not how many a node: its tasks then say nothing of workers."""
    of_node = suffix in {"", "_HET_GROUP_0"} and ("SLURM_GPUS_ON_NODE" in environ or "SLURM_JOB_GPUS" in environ)
    return of_node or any(f"{request}{suffix}" in environ for request in _REQUESTS)


def gpus_of_hosts(
    environ: Environ, suffix: str, tasks: list[int] | None, nodes: int, found: Origins
) -> list[int | None]:
    """Say how many GPUs each host of a job or component was given, as far as the request tells. Raises ConfigError."""
    name = f"SLURM_GPUS_PER_NODE{suffix}"
    if (per_node := _typed_count(environ, name)) is not None:
        return _noted(found, name, [per_node] * nodes)
    name = f"SLURM_GPUS_PER_TASK{suffix}"
    per_task = _typed_count(environ, name)
    if per_task is None:
        name = f"SLURM_TRES_PER_TASK{suffix}"
        per_task = _of_tres(environ, name)
    if per_task is not None and tasks is not None:
        return _noted(found, name, [per_task * count for count in tasks])
    name = f"SLURM_NTASKS_PER_GPU{suffix}"
    tasks_per_gpu = number(environ, name, least=1, most=_MOST_GPUS)
    if tasks_per_gpu is not None and tasks is not None and not any(count % tasks_per_gpu for count in tasks):
        return _noted(found, name, [count // tasks_per_gpu for count in tasks])
    name = f"SLURM_GPUS{suffix}"
    total = _typed_count(environ, name)
    if total is not None and nodes == 1:
        return _noted(found, name, [total])
    return [None] * nodes


def _noted(found: Origins, name: str, counts: list[int]) -> list[int | None]:
    found.add("slots", ",".join(str(count) for count in dict.fromkeys(counts)), name)
    return [count or None for count in counts]


def _typed_count(environ: Environ, name: str) -> int | None:
    """Read ``4``, ``a100:4``, ``volta:3,kepler:1`` (4); None if unset. Raises ConfigError."""
    value = text(environ, name)
    if value is None:
        return None
    total = 0
    for entry in value.split(","):
        count = entry.rpartition(":")[2].strip()
        if not (count.isascii() and count.isdecimal() and len(count) < 9):
            raise ConfigError(
                f"{shown(environ, name)}: expected a number of GPUs, as in 4, a100:4 or volta:3,kepler:1",
                hint=IGNORE_HINT,
            )
        total += int(count)
    if total > _MOST_GPUS:
        raise ConfigError(f"{shown(environ, name)}: no node has more than {_MOST_GPUS} GPUs", hint=IGNORE_HINT)
    return total


def _of_tres(environ: Environ, name: str) -> int | None:
    """Read the GPUs in ``cpu=4,gres/gpu:a100=2`` or ``gres/gpu:2``; None if there are none."""
    total = None
    for entry in (text(environ, name) or "").split(","):
        kind = entry.strip().replace("gres:", "gres/").removeprefix("gres/")
        if entry.strip().startswith("gres") and kind.startswith("gpu"):
            count = kind.replace("=", ":").rpartition(":")[2]
            if kind == "gpu":
                count = "1"
            if not (count.isascii() and count.isdecimal() and len(count) < 5):
                raise ConfigError(f"{shown(environ, name)}: expected GPUs as in gres/gpu=2", hint=IGNORE_HINT)
            total = (total or 0) + int(count)
    return total
