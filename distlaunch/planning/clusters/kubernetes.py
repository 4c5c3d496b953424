"""Which pod of a job this is, by the controller that made it; pure.

Each controller is a reader below; the first that knows its own variables decides. RANK means the pod's index for all of
them, never a process. Sources: Kubernetes' documentation of Indexed Jobs and StatefulSets, and the sources of Kubeflow
Trainer 2.3 and 1.9 (PyTorchJob), mpi-operator (v2beta1), JobSet, LeaderWorkerSet and Volcano's plugins.
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import counted
from distlaunch.planning.allocation import Allocation
from distlaunch.planning.clusters import pods, volcano
from distlaunch.planning.clusters.environment_reader import (
    IGNORE_HINT,
    NODE_RANK,
    Environ,
    IncompleteError,
    Origins,
    Texts,
    contradiction,
    host_and_port,
    job_id,
    needed,
    number,
    numbered_hosts,
    shown,
    text,
)
from distlaunch.planning.clusters.table import slots_of

name = "kubernetes"

_MPI_HOSTFILE = "/etc/mpi/hostfile"
_HOSTFILE_VARIABLES = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
_OF_TORCHRUN = ("PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT")
_OTHER_READERS = ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "VC_TASK_INDEX", "VK_TASK_INDEX")
_OF_TORCHRUN_WORKERS = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")


def files(environ: Environ, system: str = name) -> tuple[str, ...]:  # noqa: ARG001 - all sources share the signature
    """Name the files to read: MPIJob's host file, and /etc/hosts where only that has the pod's full name."""
    if text(environ, "K_MPI_JOB_ROLE") is not None:
        return (_hostfile(environ)[1],)
    return (pods.HOSTS_FILE,) if pods.numbered_by_name(environ) else ()


def find(environ: Environ, texts: Texts, system: str = name) -> Allocation | None:  # noqa: ARG001 - all sources share the signature
    """Say which of the job's pods this is; None in a pod that stands alone. Raises IncompleteError and ConfigError."""
    role = text(environ, "K_MPI_JOB_ROLE")
    if role is not None:
        return _mpi_job(environ, texts, role)
    if any(each in environ for each in _OF_TORCHRUN):
        return _torch_job(environ)
    if "LWS_GROUP_SIZE" in environ or "LWS_WORKER_INDEX" in environ:
        return _leader_worker_set(environ)
    if "VC_TASK_INDEX" in environ or "VK_TASK_INDEX" in environ:
        return volcano.find(environ)
    return pods.find(environ, texts)


def _torch_job(environ: Environ) -> Allocation:
    """Read PET_*: all that Trainer v2 sets, and what PyTorchJob v1 sets beside a RANK that is the pod's."""
    because = "PET_NODE_RANK" if "PET_NODE_RANK" in environ else "PET_RDZV_ENDPOINT"
    later = text(environ, "PET_NODE_RANK") not in {None, "0"}
    value = needed(environ, "PET_NNODES", text, because, of_several=later)
    least, colon, most = value.partition(":")
    where = {"PET_NNODES": most if colon else least}
    nodes = number(where, "PET_NNODES", least=1)
    fewest = number({"PET_NNODES": least}, "PET_NNODES", least=1)
    if nodes is None or fewest is None or fewest > nodes:
        raise ConfigError(f"{shown(environ, 'PET_NNODES')}: expected N, or MIN:MAX", hint=IGNORE_HINT)
    found = Origins(environ)
    master, port = host_and_port(environ, "PET_MASTER_ADDR")
    endpoint, endpoint_port = host_and_port(environ, "PET_RDZV_ENDPOINT")
    port = number(environ, "PET_MASTER_PORT", least=1, most=65535) or port
    if colon and endpoint is not None:
        found.add("master address", endpoint, "PET_RDZV_ENDPOINT", *found.lost("PET_MASTER_ADDR", "the job is elastic"))
        master, port = endpoint, endpoint_port
        found.add_port(port, "PET_RDZV_ENDPOINT")
    elif master is not None:
        lost = (
            found.lost("MASTER_ADDR", "PET_MASTER_ADDR comes first") if text(environ, "MASTER_ADDR") != master else ()
        )
        found.add("master address", master, "PET_MASTER_ADDR", *lost)
        found.add_port(port, "PET_MASTER_PORT", "PET_MASTER_ADDR")
    elif endpoint is not None:
        found.add("master address", endpoint, "PET_RDZV_ENDPOINT")
        master, port = endpoint, endpoint_port
        found.add_port(port, "PET_RDZV_ENDPOINT")
    group = number(environ, "LWS_GROUP_SIZE")
    if group is not None and group > nodes:
        raise contradiction(environ, "PET_NNODES", "LWS_GROUP_SIZE", "the group has more nodes than the job")
    others = [line for each in _OTHER_READERS for line in found.lost(each, "PET_NNODES comes first")]
    found.add("nodes", value, "PET_NNODES", *others)
    slots = slots_of(environ, "PET_NPROC_PER_NODE")
    if slots is not None:
        found.add("slots", slots, "PET_NPROC_PER_NODE")
    rank = _pod_rank(environ, nodes, elastic=bool(colon), found=found)
    if rank is not None and not any(each in environ for each in _OF_TORCHRUN_WORKERS):
        _check_torch_variables(environ, rank, nodes=nodes, slots=slots, elastic=bool(colon))
    return Allocation(
        source=name,
        hosts=numbered_hosts(master, nodes, name=_peer_of(master), slots=slots),
        part="node",
        node_rank=rank,
        nodes=(fewest, nodes) if colon else None,
        master_addr=master,
        master_port=port,
        job_id=job_id(text(environ, "PET_RDZV_ID")),
        origins=found.all(),
    )


def _pod_rank(environ: Environ, nodes: int, *, elastic: bool, found: Origins) -> int | None:
    """Take the pod's index from PET_NODE_RANK or --node-rank, else the Job's index; an elastic job can do without."""
    sources = ("PET_NODE_RANK", NODE_RANK, "JOB_COMPLETION_INDEX")
    source = next((each for each in sources if text(environ, each) is not None), sources[0])
    rank = number(environ, source)
    if rank is None:
        if nodes == 1:
            return 0
        if elastic or "PET_RDZV_ENDPOINT" in environ:
            return None
        # Somebody asked for several nodes: to train on one alone would be the worst answer.
        raise ConfigError(
            f"{shown(environ, 'PET_NNODES')}, but PET_NODE_RANK is not set",
            hint="give --node-rank, or --source flags to read nothing from the environment",
        )
    if rank >= nodes:
        raise contradiction(environ, source, "PET_NNODES", f"ranks of {counted(nodes, 'node')} go to {nodes - 1}")
    lost = found.lost("RANK", "here it is the pod's index too")
    index = number(environ, "JOB_COMPLETION_INDEX")
    if index is not None and index > rank:
        raise contradiction(environ, source, "JOB_COMPLETION_INDEX", "two pods would have the same rank")
    if index is not None and index < rank:  # a JobSet numbers the pods of each of its Jobs from 0
        lost += found.lost("JOB_COMPLETION_INDEX", "it counts within one Job")
    found.add("node rank", rank, source, *lost)
    return rank


def _check_torch_variables(environ: Environ, rank: int, *, nodes: int, slots: int | None, elastic: bool) -> None:
    """Hold PyTorchJob's RANK and WORLD_SIZE against PET_*: the pod's index; pods or processes, it varies by release."""
    other = number(environ, "RANK", most=1 << 22)
    if other is not None and other != rank and "PET_NODE_RANK" in environ:
        raise contradiction(environ, "RANK", "PET_NODE_RANK", "in a pod both are the pod's index")
    world = number(environ, "WORLD_SIZE", most=1 << 22)
    if world is None or elastic or world == nodes or world == nodes * (slots or 1):
        return
    if slots is None and world % nodes == 0:
        return
    workers = f" or {nodes * slots} workers" if slots else ""
    raise contradiction(environ, "WORLD_SIZE", "PET_NNODES", f"the job has {counted(nodes, 'node')}{workers}")


def _peer_of(master: str | None) -> pods.Naming | None:
    """Make the rule by which a controller names its pods, from the first one's name; None if it is no such name."""
    if master is None:
        return None
    pod, dot, domain = master.partition(".")
    if pod.endswith("-master-0"):
        job = pod.removesuffix("master-0")
        return lambda index: f"{job}worker-{index - 1}{dot}{domain}"
    if pod.endswith("-0"):
        stem = pod.removesuffix("0")
        return lambda index: f"{stem}{index}{dot}{domain}"
    return None


def _leader_worker_set(environ: Environ) -> Allocation:
    """Read a LeaderWorkerSet's group: the leader is worker 0, the others are named after it."""
    later = text(environ, "LWS_WORKER_INDEX") not in {None, "0"}
    size = needed(environ, "LWS_GROUP_SIZE", number, "LWS_WORKER_INDEX", of_several=later, least=1)
    index = needed(environ, "LWS_WORKER_INDEX", number, "LWS_GROUP_SIZE", of_several=size > 1)
    if index >= size:
        raise contradiction(environ, "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", f"workers are numbered to {size - 1}")
    leader, _ = host_and_port(environ, "LWS_LEADER_ADDRESS")
    if leader is None:
        why = f"{shown(environ, 'LWS_GROUP_SIZE')}, but LWS_LEADER_ADDRESS is not set"
        raise IncompleteError(why, of_several=size > 1)
    found = Origins(environ)
    found.add("nodes", size, "LWS_GROUP_SIZE")
    found.add("node rank", index, "LWS_WORKER_INDEX")
    found.add("master address", leader, "LWS_LEADER_ADDRESS")
    pod, dot, domain = leader.partition(".")
    hosts = numbered_hosts(leader, size, name=lambda worker: f"{pod}-{worker}{dot}{domain}")
    return Allocation(
        source=name,
        hosts=hosts,
        part="node",
        node_rank=index,
        master_addr=leader,
        origins=found.all(),
    )


def _hostfile(environ: Environ) -> tuple[str, str]:
    for variable in _HOSTFILE_VARIABLES:
        if (path := text(environ, variable)) is not None:
            return variable, path
    return "K_MPI_JOB_ROLE", _MPI_HOSTFILE


def _mpi_job(environ: Environ, texts: Texts, role: str) -> Allocation | None:
    """Read the launcher's host file; a worker only runs sshd, and is started from the launcher."""
    if role == "worker":
        raise IncompleteError("K_MPI_JOB_ROLE='worker': an MPIJob starts everything from its launcher")
    if role != "launcher":
        raise ConfigError(f"{shown(environ, 'K_MPI_JOB_ROLE')}: expected launcher or worker", hint=IGNORE_HINT)
    from distlaunch.planning.hosts.hostfile import read_hostfile

    variable, path = _hostfile(environ)
    content = texts.get(path)
    if content is None:
        raise ConfigError(f"{path} ({variable}), the MPIJob's host file, cannot be read", hint=IGNORE_HINT)
    found = Origins(environ)
    hosts = read_hostfile(content, path)
    found.add("hosts", ",".join(host.name for host in hosts), path)
    return Allocation(source=name, hosts=hosts, part="all", origins=found.all())
