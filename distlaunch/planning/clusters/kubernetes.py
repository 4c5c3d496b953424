"""Find the pods of a job and this pod's rank, for each controller that creates pods. No I/O.

The first function that finds its controller's variables decides. In all of them RANK is the pod's
index, never a process's. Pods of an Indexed Job, a JobSet or a StatefulSet are numbered only by
their names; --num-nodes sets their number. Functions raise IncompleteError if something is missing,
and ConfigError for an invalid or contradicting value.

Sources: Kubernetes' documentation, and the source code of Kubeflow Trainer 2.3 and 1.9
(PyTorchJob), mpi-operator (v2beta1), JobSet, LeaderWorkerSet and Volcano's plugins.
"""

from __future__ import annotations

from collections.abc import Callable

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.clusters.environment_reader import (
    Environ,
    IncompleteError,
    Origins,
    Texts,
    contradiction_error,
    host_and_port,
    host_list,
    host_name,
    ignore_hint,
    is_several,
    job_id,
    needed,
    number,
    numbered_hosts,
    same_slots,
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
_HOSTS_FILE = "/etc/hosts"
_OF_WORKERS = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "PMIX_RANK", "PMI_RANK")
"""With one of these variables, RANK is the rank of a process and not of the pod."""
_Naming = Callable[[int], str]
_LEADING = ("MASTER", "CHIEF")
_TRAINING = (*_LEADING, "WORKER")


def _hosts_hint() -> str:
    return f"list the hosts with {Opt.HOSTS}, or use the plugin pytorch"


def files(environ: Environ, system: str = name) -> tuple[str, ...]:  # noqa: ARG001 - all sources share the signature
    """Return the paths that are needed: MPIJob's host file, or /etc/hosts for the pod's full
    name."""
    if text(environ, "K_MPI_JOB_ROLE") is not None:
        return (_mpi_hostfile(environ)[1],)
    return (_HOSTS_FILE,) if _has_pod_number(environ) else ()


def find(environ: Environ, texts: Texts, system: str = name) -> Allocation | None:  # noqa: ARG001 - all sources share the signature
    """Return the pods of the job and the rank of this pod; None in a pod that trains alone.

    Raises IncompleteError if some variables are missing, and ConfigError if they are invalid or
    contradict each other.
    """
    role = text(environ, "K_MPI_JOB_ROLE")
    if role is not None:
        return _find_mpi_job(environ, texts, role)
    if any(each in environ for each in _OF_TORCHRUN):
        return _find_torch_job(environ)
    if "LWS_GROUP_SIZE" in environ or "LWS_WORKER_INDEX" in environ:
        return _find_leader_worker_set(environ)
    if "VC_TASK_INDEX" in environ or "VK_TASK_INDEX" in environ:
        return _find_volcano(environ)
    return _find_pods(environ, texts)


def _has_pod_number(environ: Environ) -> bool:
    """Return whether this pod has a completion index, or a number at the end of its name."""
    if text(environ, "JOB_COMPLETION_INDEX") is not None:
        return True
    return (
        "KUBERNETES_SERVICE_HOST" in environ and _pod_ordinal(text(environ, "HOSTNAME")) is not None
    )


def _mpi_hostfile(environ: Environ) -> tuple[str, str]:
    for variable in _HOSTFILE_VARIABLES:
        if (path := text(environ, variable)) is not None:
            return variable, path
    return "K_MPI_JOB_ROLE", _MPI_HOSTFILE


def _find_mpi_job(environ: Environ, texts: Texts, role: str) -> Allocation | None:
    """Return the hosts of an MPIJob's launcher; None if no MPIJob runs here. Raises IncompleteError
    in a worker pod, which only runs sshd."""
    if role == "worker":
        raise IncompleteError(
            "K_MPI_JOB_ROLE='worker': an MPIJob starts everything from its launcher"
        )
    if role != "launcher":
        raise ConfigError(
            f"{shown(environ, 'K_MPI_JOB_ROLE')}: expected launcher or worker", hint=ignore_hint()
        )
    from distlaunch.planning.hosts.hostfile import read_hostfile

    variable, path = _mpi_hostfile(environ)
    content = texts.get(path)
    if content is None:
        raise ConfigError(
            f"{path} ({variable}), the MPIJob's host file, cannot be read", hint=ignore_hint()
        )
    found = Origins(environ)
    hosts = read_hostfile(content, path)
    found.add("hosts", ",".join(host.name for host in hosts), path)
    return Allocation(source=name, hosts=hosts, part="all", origins=found.all())


def _find_torch_job(environ: Environ) -> Allocation:
    """Return the nodes of PET_*: all that Trainer v2 sets. PyTorchJob v1 also sets RANK for the
    pod."""
    because = "PET_NODE_RANK" if "PET_NODE_RANK" in environ else "PET_RDZV_ENDPOINT"
    later = text(environ, "PET_NODE_RANK") not in {None, "0"}
    value = needed(environ, "PET_NNODES", text, because, of_several=later)
    least, colon, most = value.partition(":")
    where = {"PET_NNODES": most if colon else least}
    nodes = number(where, "PET_NNODES", least=1)
    fewest = number({"PET_NNODES": least}, "PET_NNODES", least=1)
    if nodes is None or fewest is None or fewest > nodes:
        raise ConfigError(
            f"{shown(environ, 'PET_NNODES')}: expected N, or MIN:MAX", hint=ignore_hint()
        )
    found = Origins(environ)
    master, port = host_and_port(environ, "PET_MASTER_ADDR")
    endpoint, endpoint_port = host_and_port(environ, "PET_RDZV_ENDPOINT")
    port = number(environ, "PET_MASTER_PORT", least=1, most=65535) or port
    if colon and endpoint is not None:
        found.add(
            "master address",
            endpoint,
            "PET_RDZV_ENDPOINT",
            *found.lost("PET_MASTER_ADDR", "the job is elastic"),
        )
        master, port = endpoint, endpoint_port
        found.add_port(port, "PET_RDZV_ENDPOINT")
    elif master is not None:
        lost = (
            found.lost("MASTER_ADDR", "PET_MASTER_ADDR comes first")
            if text(environ, "MASTER_ADDR") != master
            else ()
        )
        found.add("master address", master, "PET_MASTER_ADDR", *lost)
        found.add_port(port, "PET_MASTER_PORT", "PET_MASTER_ADDR")
    elif endpoint is not None:
        found.add("master address", endpoint, "PET_RDZV_ENDPOINT")
        master, port = endpoint, endpoint_port
        found.add_port(port, "PET_RDZV_ENDPOINT")
    group = number(environ, "LWS_GROUP_SIZE")
    if group is not None and group > nodes:
        raise contradiction_error(
            environ, "PET_NNODES", "LWS_GROUP_SIZE", "the group has more nodes than the job"
        )
    others = [
        line for each in _OTHER_READERS for line in found.lost(each, "PET_NNODES comes first")
    ]
    found.add("nodes", value, "PET_NNODES", *others)
    slots = slots_of(environ, "PET_NPROC_PER_NODE")
    if slots is not None:
        found.add("slots", slots, "PET_NPROC_PER_NODE")
    rank = _pod_rank(environ, nodes, elastic=bool(colon), found=found)
    if rank is not None and not any(each in environ for each in _OF_TORCHRUN_WORKERS):
        _check_torch_variables(environ, rank, nodes=nodes, slots=slots, elastic=bool(colon))
    return Allocation(
        source=name,
        hosts=numbered_hosts(master, nodes, name=_naming_of_master(master), slots=slots),
        part="node",
        node_rank=rank,
        nodes=(fewest, nodes) if colon else None,
        master_addr=master,
        master_port=port,
        job_id=job_id(text(environ, "PET_RDZV_ID")),
        origins=found.all(),
    )


def _pod_rank(environ: Environ, nodes: int, *, elastic: bool, found: Origins) -> int | None:
    """Return the pod's index from PET_NODE_RANK, --node-rank or the Job's index.

    None if the nodes are numbered as they join: in an elastic job, or with PET_RDZV_ENDPOINT.
    """
    sources = ("PET_NODE_RANK", str(Opt.NODE_RANK), "JOB_COMPLETION_INDEX")
    source = next((each for each in sources if text(environ, each) is not None), sources[0])
    rank = number(environ, source)
    if rank is None:
        if nodes == 1:
            return 0
        if elastic or "PET_RDZV_ENDPOINT" in environ:
            return None
        # Several nodes were requested, so to train on one alone would be wrong.
        raise ConfigError(
            f"{shown(environ, 'PET_NNODES')}, but PET_NODE_RANK is not set",
            hint=f"use {Opt.NODE_RANK}, or {Opt.SOURCE('flags')} to read nothing from the "
            "environment",
        )
    if rank >= nodes:
        raise contradiction_error(
            environ, source, "PET_NNODES", f"ranks of {counted(nodes, 'node')} go to {nodes - 1}"
        )
    lost = found.lost("RANK", "here it is the pod's index too")
    index = number(environ, "JOB_COMPLETION_INDEX")
    if index is not None and index > rank:
        raise contradiction_error(
            environ, source, "JOB_COMPLETION_INDEX", "two pods would have the same rank"
        )
    if index is not None and index < rank:  # a JobSet numbers the pods of each of its Jobs from 0
        lost += found.lost("JOB_COMPLETION_INDEX", "it counts within one Job")
    found.add("node rank", rank, source, *lost)
    return rank


def _check_torch_variables(
    environ: Environ, rank: int, *, nodes: int, slots: int | None, elastic: bool
) -> None:
    """Raise ConfigError if PyTorchJob's RANK (the pod's index) or WORLD_SIZE (pods or processes, by
    release) contradicts PET_*."""
    other = number(environ, "RANK", most=1 << 22)
    if other is not None and other != rank and "PET_NODE_RANK" in environ:
        raise contradiction_error(
            environ, "RANK", "PET_NODE_RANK", "in a pod both are the pod's index"
        )
    world = number(environ, "WORLD_SIZE", most=1 << 22)
    if world is None or elastic or world == nodes or world == nodes * (slots or 1):
        return
    if slots is None and world % nodes == 0:
        return
    workers = f" or {nodes * slots} workers" if slots else ""
    raise contradiction_error(
        environ, "WORLD_SIZE", "PET_NNODES", f"the job has {counted(nodes, 'node')}{workers}"
    )


def _naming_of_master(master: str | None) -> _Naming | None:
    """Return a function that derives the name of the pod with an index from the master's name; None
    if the name follows no known pattern.

    Known are the pods of a PyTorchJob (``JOB-master-0``, ``JOB-worker-0``) and numbered pods
    (``NAME-0``, ``NAME-1``).
    """
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


def _find_leader_worker_set(environ: Environ) -> Allocation:
    """Return the pods of a LeaderWorkerSet's group. The leader is worker 0; other names are derived
    from its name."""
    later = text(environ, "LWS_WORKER_INDEX") not in {None, "0"}
    size = needed(environ, "LWS_GROUP_SIZE", number, "LWS_WORKER_INDEX", of_several=later, least=1)
    index = needed(environ, "LWS_WORKER_INDEX", number, "LWS_GROUP_SIZE", of_several=size > 1)
    if index >= size:
        raise contradiction_error(
            environ, "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", f"workers are numbered to {size - 1}"
        )
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


def _find_volcano(environ: Environ) -> Allocation:
    """Return the pods of a Volcano job and the rank of this pod.

    Raises IncompleteError if a plugin's variables are missing, and ConfigError if they contradict
    each other.
    """
    found = Origins(environ)
    tasks = _volcano_tasks(environ)
    if text(environ, "RANK") is not None and text(environ, "WORLD_SIZE") is not None:
        return _volcano_by_rank(environ, tasks, found)
    if not tasks:
        source = "VC_TASK_INDEX" if "VC_TASK_INDEX" in environ else "VK_TASK_INDEX"
        why = f"{shown(environ, source)}, but no VC_<TASK>_HOSTS: the job lacks the plugin svc"
        raise IncompleteError(
            why, hint=_hosts_hint(), of_several=text(environ, source) not in {None, "0"}
        )
    if len(tasks) > 1 and not all(task in _TRAINING for task in tasks):
        which = ", ".join(f"VC_{task}_HOSTS" for task in tasks)
        raise IncompleteError(
            f"{which}: which of these tasks train is not known", hint=_hosts_hint(), of_several=True
        )
    hosts = _leading_first(tasks)
    rank = _own_index(environ, tasks, hosts, found)
    found.add("hosts", ",".join(hosts), ", ".join(f"VC_{task}_HOSTS" for task in tasks))
    return _volcano_allocation(same_slots(hosts), rank, hosts[0], None, found)


def _volcano_tasks(environ: Environ) -> dict[str, tuple[str, ...]]:
    """Return the hosts of each task. Raises ConfigError if a list and its declared length differ."""
    tasks: dict[str, tuple[str, ...]] = {}
    for variable in sorted(environ):
        task = variable.removeprefix("VC_").removesuffix("_HOSTS")
        if variable != f"VC_{task}_HOSTS" or not task:
            continue
        hosts = host_list(environ, variable)
        declared = number(environ, f"VC_{task}_NUM")
        if declared is not None and declared != len(hosts):
            raise contradiction_error(
                environ, variable, f"VC_{task}_NUM", f"the list has {counted(len(hosts), 'host')}"
            )
        if hosts:
            tasks[task] = hosts
    return tasks


def _volcano_by_rank(
    environ: Environ, tasks: dict[str, tuple[str, ...]], found: Origins
) -> Allocation:
    """Return the pods in the order of Volcano's plugin pytorch, whose RANK and WORLD_SIZE count
    pods."""
    size = number(environ, "WORLD_SIZE", least=1) or 1
    rank = number(environ, "RANK") or 0
    if rank >= size:
        raise contradiction_error(
            environ, "RANK", "WORLD_SIZE", f"ranks of {counted(size, 'pod')} go to {size - 1}"
        )
    found.add("nodes", size, "WORLD_SIZE")
    found.add("node rank", rank, "RANK")
    address, port = host_and_port(environ, "MASTER_ADDR")
    port = number(environ, "MASTER_PORT", least=1, most=65535) or port
    found.add_port(port, "MASTER_PORT", "MASTER_ADDR")
    listed = _leading_first({task: hosts for task, hosts in tasks.items() if task in _TRAINING})
    hosts = same_slots(listed) if len(listed) == size else numbered_hosts(address, size)
    if address is not None:
        if len(listed) == size and address in listed[1:]:
            lists = next(f"VC_{task}_HOSTS" for task, names in tasks.items() if address in names)
            raise contradiction_error(environ, "MASTER_ADDR", lists, f"rank 0 runs on {listed[0]}")
        found.add("master address", address, "MASTER_ADDR")
    return _volcano_allocation(
        hosts, rank, address or (listed[0] if len(listed) == size else None), port, found
    )


def _leading_first(tasks: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the hosts of all tasks, masters first."""
    ordered = sorted(tasks, key=lambda task: task not in _LEADING)
    return tuple(host for task in ordered for host in tasks[task])


def _volcano_allocation(
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


def _own_index(
    environ: Environ, tasks: dict[str, tuple[str, ...]], hosts: tuple[str, ...], found: Origins
) -> int:
    """Return the index of this pod, by its name, or by its task index if the job has one task."""
    pod = text(environ, "HOSTNAME")
    matches = [
        position
        for position, host in enumerate(hosts)
        if pod is not None and host.partition(".")[0] == pod
    ]
    if len(matches) == 1:
        found.add("node rank", matches[0], "HOSTNAME")
        return matches[0]
    source = "VC_TASK_INDEX" if "VC_TASK_INDEX" in environ else "VK_TASK_INDEX"
    index = number(environ, source)
    if index is None or len(tasks) > 1:
        why = f"HOSTNAME is none of the hosts of {', '.join(f'VC_{task}_HOSTS' for task in tasks)}"
        raise IncompleteError(why, hint=_hosts_hint(), of_several=len(hosts) > 1)
    if index >= len(hosts):
        listed = f"VC_{next(iter(tasks))}_HOSTS"
        raise contradiction_error(
            environ, source, listed, f"the list has {counted(len(hosts), 'host')}"
        )
    found.add("node rank", index, source)
    return index


def _find_pods(environ: Environ, texts: Texts) -> Allocation | None:
    """Return numbered pods and the rank of this pod; None if the pod has no number or trains alone.
    Raises ConfigError."""
    size = _requested_pods(environ)
    if not _has_pod_number(environ):
        _check_alone(environ, size)
        return None
    indexed = text(environ, "JOB_COMPLETION_INDEX") is not None
    if size == 1 or (size is None and not indexed):
        _check_alone(environ, size)
        return None
    if size is None:
        which = shown(environ, "JOB_COMPLETION_INDEX")
        raise ConfigError(
            f"{which}: this is a pod of an Indexed Job, whose number of pods is not known",
            hint=f"use {Opt.NUM_NODES('N')} (or DISTLAUNCH_NUM_NODES in the pod's env); "
            f"{Opt.NUM_NODES(1)} if each pod trains alone",
        )
    found = Origins(environ)
    pod = text(environ, "HOSTNAME")
    full = _full_name(pod, texts.get(_HOSTS_FILE))
    rank = _rank_by_name(environ, pod, full, indexed=indexed)
    if rank is None:
        return None
    source = (
        str(Opt.NODE_RANK)
        if str(Opt.NODE_RANK) in environ
        else "JOB_COMPLETION_INDEX"
        if indexed
        else "HOSTNAME"
    )
    if rank >= size:
        raise contradiction_error(
            environ,
            source,
            str(Opt.NUM_NODES),
            f"ranks of {counted(size, 'node')} go to {size - 1}",
        )
    found.add("nodes", size, str(Opt.NUM_NODES))
    found.add("node rank", rank, source)
    naming = _naming_of_pod(pod, full, rank)
    hosts = numbered_hosts(naming(0) if naming else None, size, name=naming)
    if full is None:  # without a subdomain a pod's name cannot be resolved
        hosts = tuple(replace(host, known=False) for host in hosts)
    address, port = host_and_port(environ, "MASTER_ADDR")
    port = number(environ, "MASTER_PORT", least=1, most=65535) or port
    found.add_port(port, "MASTER_PORT", "MASTER_ADDR")
    notes: tuple[str, ...] = ()
    if address is not None:
        if address in (host.name for host in hosts[1:]):
            raise contradiction_error(environ, "MASTER_ADDR", source, f"rank 0 is {hosts[0].name}")
        found.add("master address", address, "MASTER_ADDR")
    elif naming is not None and full is not None:
        address = hosts[0].name
        found.add("master address", address, f"HOSTNAME and {_HOSTS_FILE}")
    else:
        notes = (
            (
                "the pod template has no subdomain (a headless Service), so pods cannot find each "
                "other by their names"
            ),
        )
    return Allocation(
        source="kubernetes",
        hosts=hosts,
        part="node",
        node_rank=rank,
        master_addr=address,
        master_port=port,
        origins=found.all(),
        notes=notes,
    )


def _requested_pods(environ: Environ) -> int | None:
    """Return --num-nodes, if it is given; the larger number for an elastic MIN:MAX."""
    value = text(environ, str(Opt.NUM_NODES))
    if value is None:
        return None
    return number({str(Opt.NUM_NODES): value.rpartition(":")[2]}, str(Opt.NUM_NODES), least=1)


def _check_alone(environ: Environ, size: int | None) -> None:
    """Raise IncompleteError if a controller numbers pods by RANK alone (PyTorchJob before 1.6).

    WORLD_SIZE may then count pods or processes.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or any(each in environ for each in _OF_WORKERS):
        return
    if size is None and text(environ, "RANK") is not None and is_several(environ, "WORLD_SIZE"):
        raise IncompleteError(
            f"{shown(environ, 'RANK')} and {shown(environ, 'WORLD_SIZE')} in a pod, but PET_NNODES "
            "is not set",
            hint=f"use {Opt.NUM_NODES('N')} {Opt.NODE_RANK('K')} {Opt.MASTER_ADDR('HOST')}; "
            f"{Opt.NUM_NODES(1)} if each pod "
            "trains alone",
            of_several=True,
        )


def _full_name(pod: str | None, hosts_file: str | None) -> str | None:
    """Return the pod's name with its subdomain from /etc/hosts; None without a subdomain."""
    if pod is None or hosts_file is None:
        return None
    for line in hosts_file.split("\n"):
        words = line.partition("#")[0].split()
        for word in words[1:]:
            if word.startswith(f"{pod}.") and pod in words[2:]:
                return host_name(word, _HOSTS_FILE)
    return None


def _rank_by_name(
    environ: Environ, pod: str | None, full: str | None, *, indexed: bool
) -> int | None:
    """Return this pod's rank: by --node-rank, the Job's index, or the number of a StatefulSet's
    pod.

    None if the pod's name ends in a number by chance. Raises ConfigError for a replica of a
    JobSet's job.
    """
    rank = number(environ, str(Opt.NODE_RANK))
    if rank is not None:
        index = number(environ, "JOB_COMPLETION_INDEX")
        if index is not None and index > rank:
            raise contradiction_error(
                environ,
                str(Opt.NODE_RANK),
                "JOB_COMPLETION_INDEX",
                "two pods would have the same rank",
            )
        return rank
    if not indexed:
        # The name of a Deployment's pod may end in digits by chance; a StatefulSet has a Service.
        return _pod_ordinal(pod) if full is not None else None
    index = number(environ, "JOB_COMPLETION_INDEX")
    ordinal = _pod_ordinal(pod)
    if pod is not None and full is not None and ordinal is not None and ordinal == index:
        jobset = full.removeprefix(f"{pod}.").partition(".")[0]
        job = _pod_ordinal(pod.rpartition("-")[0])
        if pod.startswith(f"{jobset}-") and job:
            raise ConfigError(
                f"{shown(environ, 'HOSTNAME')}: replica {job} of a JobSet's job; "
                "JOB_COMPLETION_INDEX counts within it",
                hint=f"use one replica with all pods, or use {Opt.NODE_RANK} and {Opt.MASTER_ADDR}",
            )
    return index


def _pod_ordinal(pod: str | None) -> int | None:
    digits = (pod or "").rpartition("-")[2]
    return (
        int(digits)
        if pod and "-" in pod and digits.isascii() and digits.isdecimal() and len(digits) < 7
        else None
    )


def _naming_of_pod(pod: str | None, full: str | None, rank: int) -> _Naming | None:
    """Return a function that derives the name of the pod with an index from this pod's name, if it
    ends in ``rank``."""
    if pod is None or _pod_ordinal(pod) != rank:
        return None
    stem, domain = pod.rpartition("-")[0], (full or pod).removeprefix(pod)
    host_name(f"{stem}{domain}", "HOSTNAME")
    return lambda index: f"{stem}-{index}{domain}"
