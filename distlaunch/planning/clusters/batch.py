"""Read the hosts of a job from the variables of PBS, LSF, SGE, Flux or AWS Batch. No I/O.

A launcher in a script of PBS, LSF or SGE starts the whole job. Flux starts one launcher per task
and numbers the tasks. AWS Batch starts one launcher per node of a multi-node job and numbers the
nodes. A slot is the unit in which the site grants resources: usually a core, or a GPU if the system
lists GPUs.

Each function of a system returns None if no job of the system runs here. It raises IncompleteError
if something is missing, and ConfigError for an invalid or contradicting value.

Sources: the manuals of OpenPBS and Torque (PBS_NODEFILE, PBS_GPUFILE), IBM's of LSF (LSB_*), Grid
Engine's of qsub (PE_HOSTFILE), flux-environment(7), the user guide of AWS Batch.
"""

from __future__ import annotations

from collections.abc import Collection

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.clusters.environment_reader import (
    MOST_HOSTS,
    Environ,
    IncompleteError,
    Origins,
    Texts,
    contradiction_error,
    host_list,
    host_name,
    ignore_hint,
    is_several,
    job_id,
    lines_of,
    needed,
    number,
    shown,
    text,
)
from distlaunch.planning.clusters.table import TaskSystem, find_task

_MOST_SLOTS = 1 << 16
_FLUX = TaskSystem(
    name="flux",
    rank="FLUX_TASK_RANK",
    size="FLUX_JOB_SIZE",
    local_rank="FLUX_TASK_LOCAL_ID",
    nodes="FLUX_JOB_NNODES",
    job="FLUX_JOB_ID",
)
_LAUNCH_HOSTS = ("batch", "login", "launch")
"""Beginnings of the names of hosts that run the job script but no workers. LSF lists such a host
first, with one slot."""
_FILES = {
    "pbs": ("PBS_NODEFILE", "PBS_GPUFILE"),
    "lsf": ("LSB_DJOB_HOSTFILE",),
    "sge": ("PE_HOSTFILE",),
}
_AWS_INDEX = "AWS_BATCH_JOB_NODE_INDEX"
_AWS_COUNT = "AWS_BATCH_JOB_NUM_NODES"
_AWS_MAIN = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_AWS_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_JOBS = {"pbs": "PBS_JOBID", "lsf": "LSB_JOBID", "sge": "JOB_ID"}


def files(environ: Environ, system: str) -> tuple[str, ...]:
    """Return the paths in this system's variables."""
    paths = (text(environ, variable) for variable in _FILES.get(system, ()))
    return tuple(path for path in paths if path is not None)


def find(environ: Environ, texts: Texts, system: str) -> Allocation | None:
    """Return the job's hosts; None if the variables of ``system`` are not set.

    Raises IncompleteError if some are missing, and ConfigError if they are invalid or contradict
    each other.
    """
    match system:
        case "flux":
            return find_task(_FLUX, environ)
        case "aws-batch":
            return _find_aws_batch(environ)
        case "pbs":
            return _find_pbs(environ, texts)
        case "lsf":
            return _find_lsf(environ, texts)
        case _:
            return _find_sge(environ, texts)


def _find_pbs(environ: Environ, texts: Texts) -> Allocation | None:
    """Return the hosts of the node file (a line per slot; Torque: ppn, OpenPBS: mpiprocs), with
    GPUs of Torque's GPU file."""
    path = _read_path(environ, "pbs", "PBS_NODEFILE")
    if path is None:
        return None
    slots: dict[str, int] = {}
    for where, line in lines_of(texts, path, "PBS_NODEFILE"):
        node = host_name(line, where)
        slots[node] = slots.get(node, 0) + 1
    gpus = text(environ, "PBS_GPUFILE")
    if gpus is None or texts.get(gpus) is None or not (texts[gpus] or "").strip():
        return _allocation_of_slots(environ, "pbs", "PBS_NODEFILE", slots)
    devices: dict[str, list[str]] = {node: [] for node in slots}
    for where, line in lines_of(texts, gpus, "PBS_GPUFILE"):
        node, dash, index = line.rpartition("-gpu")
        if not dash or not (index.isascii() and index.isdecimal()):
            raise ConfigError(f"{where}: {quoted(line)}: expected HOST-gpuN", hint=ignore_hint())
        if node not in devices:
            raise ConfigError(
                f"{where}: {quoted(line)}: the host is not in {printable(path)} (PBS_NODEFILE)",
                hint=ignore_hint(),
            )
        devices[node].append(index)
    found = Origins(environ)
    found.add("hosts", ",".join(slots), "PBS_NODEFILE")
    found.add(
        "slots",
        ",".join(str(len(ids)) for ids in devices.values()),
        "PBS_GPUFILE",
        "PBS_NODEFILE: counts cores",
    )
    hosts = tuple(
        Host(name=node, slots=len(ids) or None, unit="gpus", devices=tuple(ids))
        for node, ids in devices.items()
    )
    job = job_id(text(environ, "PBS_JOBID"))
    return Allocation(
        source="pbs",
        hosts=hosts,
        cpus=_granted_cpus(environ, "pbs", ()),
        job_id=job,
        origins=found.all(),
    )


def _granted_cpus(environ: Environ, system: str, slots: Collection[int]) -> int | None:
    """Return the CPUs granted on the script's node, if known.

    PBS has a variable for it. Elsewhere it is the number of slots, if all hosts have the same.
    """
    if system == "pbs":
        name = "NCPUS" if text(environ, "NCPUS") is not None else "PBS_NUM_PPN"
        return number(environ, name, least=1, most=_MOST_SLOTS)
    return next(iter(slots)) if len(slots) == 1 else None


def _read_path(environ: Environ, system: str, variable: str) -> str | None:
    """Return the path in a system's variable; None if this is no job of the system."""
    job, path = text(environ, _JOBS[system]), text(environ, variable)
    if job is None and path is None:
        return None
    if job is None:
        raise IncompleteError(
            f"{shown(environ, variable)}, but {_JOBS[system]} is not set: no job of {system} runs "
            "here"
        )
    if path is None:
        several = system == "pbs" and is_several(environ, "PBS_NUM_NODES")
        raise IncompleteError(
            f"{shown(environ, _JOBS[system])}, but {variable} is not set", of_several=several
        )
    return path


def _find_lsf(environ: Environ, texts: Texts) -> Allocation | None:
    """Return the hosts of the file (a line per slot) or of variables with the same content, without
    the launch host."""
    if text(environ, "LSB_JOBID") is None:
        return None
    path = text(environ, "LSB_DJOB_HOSTFILE")
    slots: dict[str, int] = {}
    if path is not None and texts.get(path) is not None:
        source = "LSB_DJOB_HOSTFILE"
        for where, line in lines_of(texts, path, source):
            node = host_name(line, where)
            slots[node] = slots.get(node, 0) + 1
    elif (pairs := text(environ, "LSB_MCPU_HOSTS")) is not None:
        source = "LSB_MCPU_HOSTS"
        words = pairs.split()
        if len(words) % 2:
            raise ConfigError(
                f"{shown(environ, source)}: expected HOST COUNT HOST COUNT ...", hint=ignore_hint()
            )
        for node, count in zip(words[::2], words[1::2], strict=True):
            host_name(node, shown(environ, source))
            slots[node] = slots.get(node, 0) + _parse_slots(count, shown(environ, source))
    elif nodes := host_list(environ, "LSB_HOSTS"):
        source = "LSB_HOSTS"
        for node in nodes:
            slots[node] = slots.get(node, 0) + 1
    else:
        which = "neither LSB_DJOB_HOSTFILE nor LSB_MCPU_HOSTS nor LSB_HOSTS"
        raise IncompleteError(f"{shown(environ, 'LSB_JOBID')}, but {which}")
    first, *others = slots
    notes: tuple[str, ...] = ()
    one_of_a_kind = first.startswith(_LAUNCH_HOSTS) and not any(
        other.startswith(_LAUNCH_HOSTS) for other in others
    )
    if others and one_of_a_kind and slots[first] == 1 and all(slots[other] > 1 for other in others):
        del slots[first]
        notes = (f"{first} runs this script and no workers: it is the launch host of {source}",)
    return _allocation_of_slots(environ, "lsf", source, slots, notes)


def _find_sge(environ: Environ, texts: Texts) -> Allocation | None:
    """Return the allocation in Grid Engine's PE_HOSTFILE, whose lines are ``host slots queue
    processors``."""
    path = _read_path(environ, "sge", "PE_HOSTFILE") if "PE_HOSTFILE" in environ else None
    if path is None:
        return None
    slots: dict[str, int] = {}
    for where, line in lines_of(texts, path, "PE_HOSTFILE"):
        words = line.split()
        if len(words) < 2:
            raise ConfigError(
                f"{where}: {quoted(line)}: expected HOST SLOTS QUEUE PROCESSORS", hint=ignore_hint()
            )
        node = host_name(words[0], where)
        slots[node] = slots.get(node, 0) + _parse_slots(words[1], where)
    hosts = number(environ, "NHOSTS", least=1)
    if hosts is not None and hosts != len(slots):
        raise contradiction_error(
            environ, "NHOSTS", "PE_HOSTFILE", f"the file names {counted(len(slots), 'host')}"
        )
    return _allocation_of_slots(environ, "sge", "PE_HOSTFILE", slots)


def _find_aws_batch(environ: Environ) -> Allocation | None:
    """Return the nodes of a multi-node job, and the rank of this node.

    Batch stops all nodes when the main node exits and uses its exit code for the job. So the main
    node gets rank 0, and the ranks of nodes with lower indexes are higher by one. Only the other
    nodes have the main node's address.
    """
    if text(environ, _AWS_INDEX) is None and text(environ, _AWS_COUNT) is None:
        return None
    several = is_several(environ, _AWS_COUNT)
    index = needed(environ, _AWS_INDEX, number, _AWS_COUNT, of_several=several)
    count = needed(environ, _AWS_COUNT, number, _AWS_INDEX, least=1)
    main = needed(environ, _AWS_MAIN, number, _AWS_INDEX, of_several=several)
    for name, value in ((_AWS_INDEX, index), (_AWS_MAIN, main)):
        if value >= count:
            raise contradiction_error(
                environ, name, _AWS_COUNT, f"indexes of {counted(count, 'node')} go to {count - 1}"
            )
    found = Origins(environ)
    found.add("nodes", count, _AWS_COUNT)
    rank = 0 if index == main else index + (index < main)
    found.add("node rank", rank, f"{_AWS_INDEX} and {_AWS_MAIN}")
    address = text(environ, _AWS_ADDRESS)
    if address is not None:
        host_name(address, shown(environ, _AWS_ADDRESS))
        found.add("master address", address, _AWS_ADDRESS)
    elif index != main:
        raise IncompleteError(
            f"{shown(environ, _AWS_INDEX)}, but {_AWS_ADDRESS} is not set", of_several=True
        )
    job = text(environ, "AWS_BATCH_JOB_ID")
    return Allocation(
        source="aws-batch",
        hosts=_nodes_of_aws_batch(main, count, address or "localhost"),
        part="node",
        node_rank=rank,
        master_addr=address,
        job_id=job_id(job and job.partition("#")[0]),  # "#" and the node's index follow
        origins=found.all(),
    )


def _nodes_of_aws_batch(main: int, count: int, address: str) -> tuple[Host, ...]:
    """Return the hosts by node rank. Of other hosts than the main node, a node knows only the
    index."""
    others = (index for index in range(count) if index != main)
    return (
        Host(name=address),
        *(Host(name=f"index-{index}", known=False) for index in others),
    )


def _parse_slots(word: str, where: str) -> int:
    if not (
        word.isascii() and word.isdecimal() and len(word) < 9 and 1 <= int(word) <= _MOST_SLOTS
    ):
        raise ConfigError(
            f"{where}: {quoted(word)} is not a number of slots from 1 to {_MOST_SLOTS}",
            hint=ignore_hint(),
        )
    return int(word)


def _allocation_of_slots(
    environ: Environ, system: str, source: str, slots: dict[str, int], notes: tuple[str, ...] = ()
) -> Allocation:
    if len(slots) > MOST_HOSTS:
        raise ConfigError(
            f"{source} names {len(slots):,} hosts, more than {MOST_HOSTS:,}", hint=ignore_hint()
        )
    found = Origins(environ)
    found.add("hosts", ",".join(slots), source)
    several = max(slots.values()) > 1
    if several:
        found.add("slots", ",".join(str(count) for count in dict.fromkeys(slots.values())), source)
        note = (
            f"the slots of {source} may be cores: without {Opt.NUM_GPUS} or another size, a node "
            "with GPUs runs a worker for each GPU"
        )
        notes = (*notes, note)
    hosts = tuple(
        Host(name=node, slots=count if several else None, unit="cores")
        for node, count in slots.items()
    )
    job = job_id(text(environ, _JOBS[system]))
    cpus = _granted_cpus(environ, system, slots.values())
    return Allocation(
        source=system, hosts=hosts, cpus=cpus, job_id=job, origins=found.all(), notes=notes
    )
