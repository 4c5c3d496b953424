"""Read what this node and its workers use: processors, memory, GPUs, network, disks.

Times, bytes of disks and bytes of interfaces are counters since the start of the process or
machine, so two readings give a rate. Memory and the figures of the NVIDIA driver are present
values. A thread reads them when the coordinator asks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from distlaunch.core.agent.workers import process_tree
from distlaunch.core.model.record import Record, replace
from distlaunch.core.probe.files import read_int, read_text, under
from distlaunch.core.protocol import agent_messages as m

if TYPE_CHECKING:
    from distlaunch.core.probe.gpu_usage import GpuMeter, GpuUse

GPUS_S = 1.5
"""How long the NVIDIA driver may take to answer."""
_TREES_S = 10.0
"""How long the descendants that were found of each worker are used."""
_SECTOR_BYTES = 512
_INFINIBAND_BYTES = 4
"""InfiniBand counts in words of four bytes."""
_INTERFACES = 16
"""Largest number of interfaces in an answer. The busiest ones are kept."""
_NAME_CHARS = 32
_VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "tunl", "sit")
"""Beginnings of names of interfaces that carry traffic within a machine, or the traffic of
another interface."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class UsageReader:
    """Reads the usage in a thread, one request at a time.

    ``post`` is called in this thread with the answer. A request that comes while the previous one
    is still being answered is dropped.
    """

    def __init__(
        self, post: Callable[[m.Usage], None], *, environ: Mapping[str, str], root: str = "/"
    ) -> None:
        self._post = post
        self._environ = environ
        self._root = root
        self._thread: threading.Thread | None = None
        self._gpus: GpuMeter | None = None
        self._trees: dict[int, ProcessTree] = {}
        self._trees_until = 0.0

    def read(self, request: m.ReadUsage, pids: Mapping[int, int], start: m.Start) -> None:
        """Start to read the usage of these workers (rank -> pid). ``start`` started them."""
        if self._thread is not None and self._thread.is_alive():
            return

        def work() -> None:
            self._post(self._read_usage(request, pids, start))

        self._thread = threading.Thread(target=work, name="usage", daemon=True)
        with suppress(RuntimeError):  # no thread can be started: the coordinator gets no answer
            self._thread.start()

    def _read_usage(self, request: m.ReadUsage, pids: Mapping[int, int], start: m.Start) -> m.Usage:
        trees = self._find_trees(pids)
        gpus = self._read_gpus() if start.uses_gpus else None
        received = node_usage(self._root)
        return m.Usage(
            attempt=request.attempt,
            serial=request.serial,
            clock_s=time.monotonic(),
            agent_cpu_s=time.process_time(),
            cpus=os.cpu_count() or 1,
            memory_bytes=received.memory_bytes,
            available_bytes=received.available_bytes,
            interfaces=received.interfaces,
            read_bytes=received.read_bytes,
            written_bytes=received.written_bytes,
            workers=_with_gpus([tree.usage() for tree in trees.values()], trees, gpus, start),
        )

    def _find_trees(self, pids: Mapping[int, int]) -> dict[int, ProcessTree]:
        """Return the processes of each worker (rank -> pid).

        To find descendants means to look at each thread of each worker, so they are kept for a
        while.
        """
        now = time.monotonic()
        if now >= self._trees_until:
            self._trees, self._trees_until = {}, now + _TREES_S
        for rank, pid in pids.items():
            if rank not in self._trees or self._trees[rank].pid != pid:
                self._trees[rank] = ProcessTree(rank, pid)
        return {rank: self._trees[rank] for rank in pids}

    def _read_gpus(self) -> list[GpuUse] | None:
        from distlaunch.core.probe.gpu_usage import GpuMeter

        if self._gpus is None:
            self._gpus = GpuMeter(self._root, self._environ)
        return self._gpus.read(until_s=time.monotonic() + GPUS_S)

    def close(self) -> None:
        """End the process that asks the driver, if there is one."""
        if self._gpus is not None:
            self._gpus.close()


class ProcessTree:
    """A worker and its descendants, as ``/proc`` shows them now."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pids = [pid, *process_tree.descendants_of(pid)]

    def usage(self) -> m.WorkerUsage:
        """Return what the processes use. Figures of processes that have ended are 0."""
        cpu_s, rss_bytes, processes, age_s = 0.0, 0, 0, 0.0
        for pid in self.pids:
            fields = _stat(pid)
            if fields is None:
                continue
            processes += 1
            cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S
            rss_bytes += int(fields[21]) * _PAGE_BYTES
            if pid == self.pid:
                age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS_PER_S
        return m.WorkerUsage(
            rank=self.rank,
            pid=self.pid,
            age_s=round(max(0.0, age_s), 3),
            processes=processes,
            cpu_s=round(cpu_s, 3),
            rss_bytes=rss_bytes,
        )


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on; None if the process is gone."""
    text = read_text(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split() if text else []
    return fields if len(fields) > 21 else None


def _with_gpus(
    workers: list[m.WorkerUsage],
    trees: Mapping[int, ProcessTree],
    gpus: list[GpuUse] | None,
    start: m.Start,
) -> tuple[m.WorkerUsage, ...]:
    """Return the workers with the GPUs that they use.

    The driver names the processes on each GPU. In a container it may name pids of the host, or
    none. Each worker then counts as the user of the GPU that its rank on the node selects.
    """
    if not gpus:
        return tuple(workers)
    found = {rank: [gpu for gpu in gpus if gpu.has_any(tree.pids)] for rank, tree in trees.items()}
    if any(found.values()):
        return tuple(_add_gpus(each, found[each.rank], trees[each.rank].pids) for each in workers)
    if not any(gpu.processes for gpu in gpus):  # nothing uses a GPU
        return tuple(workers)
    chosen = {
        spec.rank: _chosen_gpu(gpus, spec.local_rank, {**start.env, **start.env_of(spec)})
        for spec in start.workers
    }
    return tuple(_add_gpus(each, chosen.get(each.rank, ()), ()) for each in workers)


def _add_gpus(
    worker: m.WorkerUsage, gpus: Sequence[GpuUse], pids: Collection[int]
) -> m.WorkerUsage:
    """Return the worker with these GPUs. Memory of the processes ``pids`` counts, if it is known,
    else all memory in use."""
    if not gpus:
        return worker
    percents = [gpu.percent for gpu in gpus if gpu.percent is not None]
    held = [size for gpu in gpus for pid, size in gpu.processes.items() if pid in pids]
    known = [size for size in held if size is not None]
    used = [gpu.used_bytes for gpu in gpus if gpu.used_bytes is not None]
    memory = sum(known) if held and len(known) == len(held) else sum(used) if used else None
    return replace(
        worker,
        gpus=tuple(gpu.index for gpu in gpus),
        gpu_percent=round(sum(percents) / len(percents), 1) if percents else None,
        gpu_bytes=memory,
    )


def _chosen_gpu(
    gpus: Sequence[GpuUse], local_rank: int, environ: Mapping[str, str]
) -> list[GpuUse]:
    """Return the GPU that a worker uses by convention: the one of its mask, or of a mask of
    several the one at ``local_rank``. Return an empty list if there is none."""
    mask = environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    names = [name.strip() for name in mask.split(",") if name.strip()]
    names = names or [str(gpu.index) for gpu in gpus]
    place = 0 if len(names) == 1 else local_rank
    if place >= len(names):
        return []
    name = names[place]
    return [
        gpu
        for gpu in gpus
        if str(gpu.index) == name or any(uuid.startswith(name) for uuid in gpu.uuids)
    ][:1]


class NodeUsage(Record):
    """What the whole machine uses."""

    memory_bytes: int
    available_bytes: int
    interfaces: tuple[m.InterfaceUsage, ...]
    read_bytes: int
    written_bytes: int


def node_usage(root: str = "/") -> NodeUsage:
    """Return what the machine uses. A figure that cannot be read is 0."""
    memory = _meminfo(read_text(under(root, "/proc/meminfo")) or "")
    disks = _disks(root)
    return NodeUsage(
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", memory.get("MemFree", 0)),
        interfaces=_interfaces(root),
        read_bytes=sum(read for read, _ in disks),
        written_bytes=sum(written for _, written in disks),
    )


def _meminfo(text: str) -> dict[str, int]:
    """Return the fields of ``/proc/meminfo`` in bytes."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdigit():
            found[name] = int(words[0]) << 10
    return found


def _interfaces(root: str) -> tuple[m.InterfaceUsage, ...]:
    """Return the interfaces to other machines.

    Those are the ones with a device of their own; in a container or a network namespace, where
    none has one, all but those that are known to be virtual. A bond or a bridge would count the
    traffic of its devices a second time.
    """
    counters = _network_counters(read_text(under(root, "/proc/net/dev")) or "")
    chosen = [
        name
        for name in counters
        if os.path.exists(under(root, f"/sys/class/net/{name}/device"))
        and not name.startswith(_VIRTUAL)
    ]
    chosen = chosen or [name for name in counters if not name.startswith(_VIRTUAL)]
    rows = [(name, *counters[name]) for name in chosen] + _infiniband_counters(root)
    rows.sort(key=lambda row: -(row[1] + row[2]))
    return tuple(
        m.InterfaceUsage(name=name[:_NAME_CHARS], received_bytes=received, sent_bytes=sent)
        for name, received, sent in rows[:_INTERFACES]
    )


def _network_counters(text: str) -> dict[str, tuple[int, int]]:
    """Return interface -> (bytes received, bytes sent) from ``/proc/net/dev``."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.rpartition(":")
        fields = rest.split()
        if len(fields) >= 9 and fields[0].isdigit() and fields[8].isdigit():
            found[name.strip()] = int(fields[0]), int(fields[8])
    return found


def _infiniband_counters(root: str) -> list[tuple[str, int, int]]:
    """Return (port, bytes received, bytes sent) of InfiniBand and RoCE ports in use.

    RDMA traffic, as that of NCCL, passes by the counters of the network interfaces.
    """
    found: list[tuple[str, int, int]] = []
    base = under(root, "/sys/class/infiniband")
    with suppress(OSError):
        for device in sorted(os.listdir(base)):
            for port in sorted(os.listdir(f"{base}/{device}/ports")):
                counters = f"{base}/{device}/ports/{port}/counters"
                received = read_int(f"{counters}/port_rcv_data") or 0
                sent = read_int(f"{counters}/port_xmit_data") or 0
                if received or sent:
                    found.append(
                        (f"{device}:{port}", received * _INFINIBAND_BYTES, sent * _INFINIBAND_BYTES)
                    )
    return found


def _disks(root: str) -> list[tuple[int, int]]:
    """Return (bytes read, bytes written) of each disk.

    Partitions and devices made of others (device mapper, RAID, loop) have no device of their own
    in ``/sys/block``, and would count twice.
    """
    found: list[tuple[int, int]] = []
    for line in (read_text(under(root, "/proc/diskstats")) or "").splitlines():
        fields = line.split()
        if len(fields) < 10 or not (fields[5].isdigit() and fields[9].isdigit()):
            continue
        if os.path.exists(under(root, f"/sys/block/{fields[2].replace('/', '!')}/device")):
            found.append((int(fields[5]) * _SECTOR_BYTES, int(fields[9]) * _SECTOR_BYTES))
    return found
