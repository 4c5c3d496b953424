"""Pods of a Volcano job; pure.

Its plugin ``env`` numbers a task's pods, ``svc`` lists each task's hosts (VC_<TASK>_HOSTS, VC_<TASK>_NUM), and
``pytorch`` sets RANK and WORLD_SIZE, which count pods, over its tasks master and worker.
"""

from __future__ import annotations

from distlaunch.core.model.text import counted
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.clusters.environment_reader import (
    Environ,
    IncompleteError,
    Origins,
    contradiction,
    host_and_port,
    host_list,
    number,
    numbered_hosts,
    same_slots,
    shown,
    text,
)

_LEADING = ("MASTER", "CHIEF")
_TRAINING = (*_LEADING, "WORKER")
_HINT = "list the hosts with --hosts, or use the plugin pytorch"


def find(environ: Environ) -> Allocation:
    """Say which pod this is. Raises IncompleteError and ConfigError."""
    found = Origins(environ)
    tasks = _tasks(environ)
    if text(environ, "RANK") is not None and text(environ, "WORLD_SIZE") is not None:
        return _by_rank(environ, tasks, found)
    if not tasks:
        source = "VC_TASK_INDEX" if "VC_TASK_INDEX" in environ else "VK_TASK_INDEX"
        why = f"{shown(environ, source)}, but no VC_<TASK>_HOSTS: the job lacks the plugin svc"
        raise IncompleteError(why, hint=_HINT, of_several=text(environ, source) not in {None, "0"})
    if len(tasks) > 1 and not all(task in _TRAINING for task in tasks):
        which = ", ".join(f"VC_{task}_HOSTS" for task in tasks)
        raise IncompleteError(f"{which}: which of these tasks train is not known", hint=_HINT, of_several=True)
    hosts = _in_order(tasks)
    rank = _own_place(environ, tasks, hosts, found)
    found.add("hosts", ",".join(hosts), ", ".join(f"VC_{task}_HOSTS" for task in tasks))
    return _allocation(same_slots(hosts), rank, hosts[0], None, found)


def _tasks(environ: Environ) -> dict[str, tuple[str, ...]]:
    """Collect the hosts of each task. Raises ConfigError if a list and its length do not agree."""
    tasks: dict[str, tuple[str, ...]] = {}
    for variable in sorted(environ):
        task = variable.removeprefix("VC_").removesuffix("_HOSTS")
        if variable != f"VC_{task}_HOSTS" or not task:
            continue
        hosts = host_list(environ, variable)
        declared = number(environ, f"VC_{task}_NUM")
        if declared is not None and declared != len(hosts):
            raise contradiction(environ, variable, f"VC_{task}_NUM", f"the list has {counted(len(hosts), 'host')}")
        if hosts:
            tasks[task] = hosts
    return tasks


def _in_order(tasks: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    ordered = sorted(tasks, key=lambda task: task not in _LEADING)
    return tuple(host for task in ordered for host in tasks[task])


def _by_rank(environ: Environ, tasks: dict[str, tuple[str, ...]], found: Origins) -> Allocation:
    """Follow the plugin pytorch: RANK and WORLD_SIZE count pods."""
    size = number(environ, "WORLD_SIZE", least=1) or 1
    rank = number(environ, "RANK") or 0
    if rank >= size:
        raise contradiction(environ, "RANK", "WORLD_SIZE", f"ranks of {counted(size, 'pod')} go to {size - 1}")
    found.add("nodes", size, "WORLD_SIZE")
    found.add("node rank", rank, "RANK")
    address, port = host_and_port(environ, "MASTER_ADDR")
    port = number(environ, "MASTER_PORT", least=1, most=65535) or port
    found.add_port(port, "MASTER_PORT", "MASTER_ADDR")
    listed = _in_order({task: hosts for task, hosts in tasks.items() if task in _TRAINING})
    hosts = same_slots(listed) if len(listed) == size else numbered_hosts(address, size)
    if address is not None:
        if len(listed) == size and address in listed[1:]:
            lists = next(f"VC_{task}_HOSTS" for task, names in tasks.items() if address in names)
            raise contradiction(environ, "MASTER_ADDR", lists, f"rank 0 runs on {listed[0]}")
        found.add("master address", address, "MASTER_ADDR")
    return _allocation(hosts, rank, address or (listed[0] if len(listed) == size else None), port, found)


def _own_place(environ: Environ, tasks: dict[str, tuple[str, ...]], hosts: tuple[str, ...], found: Origins) -> int:
    """Find this pod by its name; in a job of one task its index will do."""
    pod = text(environ, "HOSTNAME")
    places = [place for place, host in enumerate(hosts) if pod is not None and host.partition(".")[0] == pod]
    if len(places) == 1:
        found.add("node rank", places[0], "HOSTNAME")
        return places[0]
    source = "VC_TASK_INDEX" if "VC_TASK_INDEX" in environ else "VK_TASK_INDEX"
    index = number(environ, source)
    if index is None or len(tasks) > 1:
        why = f"HOSTNAME is none of the hosts of {', '.join(f'VC_{task}_HOSTS' for task in tasks)}"
        raise IncompleteError(why, hint=_HINT, of_several=len(hosts) > 1)
    if index >= len(hosts):
        listed = f"VC_{next(iter(tasks))}_HOSTS"
        raise contradiction(environ, source, listed, f"the list has {counted(len(hosts), 'host')}")
    found.add("node rank", index, source)
    return index


def _allocation(
    hosts: tuple[Host, ...], rank: int, address: str | None, port: int | None, found: Origins
) -> Allocation:
    return Allocation(
        source="kubernetes",
        hosts=hosts,
        part="node",
        node_rank=rank,
        master_addr=address,
        master_port=port,
        origins=found.all(),
    )
