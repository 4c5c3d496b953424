"""Pods that are numbered only by their names: Indexed Job, JobSet, StatefulSet; pure.

None of them tells its pods how many there are: --num-nodes does. The pod's full name stands in /etc/hosts, which
kubelet writes: address, name with subdomain, name. JobSet's pods are an Indexed Job's, named
JOBSET-REPLICATEDJOB-JOB-POD.
"""

from __future__ import annotations

from collections.abc import Callable

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted
from distlaunch.planning.allocation import Allocation
from distlaunch.planning.clusters.environment_reader import (
    NODE_RANK,
    NUM_NODES,
    Environ,
    IncompleteError,
    Origins,
    Texts,
    contradiction,
    host_and_port,
    host_name,
    number,
    numbered_hosts,
    says_several,
    shown,
    text,
)

HOSTS_FILE = "/etc/hosts"
_OF_WORKERS = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "PMIX_RANK", "PMI_RANK")
"""With one of these, RANK is a process's, and not the pod's."""
Naming = Callable[[int], str]
_COUNT_HINT = "give --num-nodes N (or DISTLAUNCH_NUM_NODES in the pod's env); --num-nodes 1 if each pod trains alone"


def numbered_by_name(environ: Environ) -> bool:
    """Tell whether this pod has a number: an index of its own, or one at the end of its name."""
    if text(environ, "JOB_COMPLETION_INDEX") is not None:
        return True
    return "KUBERNETES_SERVICE_HOST" in environ and _ordinal(text(environ, "HOSTNAME")) is not None


def find(environ: Environ, texts: Texts) -> Allocation | None:
    """Say which pod this is; None if it has no number, or if each is to train alone. Raises ConfigError."""
    size = _size(environ)
    if not numbered_by_name(environ):
        _check_alone(environ, size)
        return None
    indexed = text(environ, "JOB_COMPLETION_INDEX") is not None
    if size == 1 or (size is None and not indexed):
        _check_alone(environ, size)
        return None
    if size is None:
        which = shown(environ, "JOB_COMPLETION_INDEX")
        raise ConfigError(
            f"{which}: this is one pod of an Indexed Job, which does not say of how many", hint=_COUNT_HINT
        )
    found = Origins(environ)
    pod = text(environ, "HOSTNAME")
    full = _full_name(pod, texts.get(HOSTS_FILE))
    rank = _rank(environ, pod, full, indexed=indexed)
    if rank is None:
        return None
    source = NODE_RANK if NODE_RANK in environ else "JOB_COMPLETION_INDEX" if indexed else "HOSTNAME"
    if rank >= size:
        raise contradiction(environ, source, NUM_NODES, f"ranks of {counted(size, 'node')} go to {size - 1}")
    found.add("nodes", size, "--num-nodes")
    found.add("node rank", rank, source)
    naming = _naming(pod, full, rank)
    hosts = numbered_hosts(naming(0) if naming else None, size, name=naming)
    if full is None:  # without a subdomain a pod's name leads nowhere
        hosts = tuple(replace(host, known=False) for host in hosts)
    address, port = host_and_port(environ, "MASTER_ADDR")
    port = number(environ, "MASTER_PORT", least=1, most=65535) or port
    found.add_port(port, "MASTER_PORT", "MASTER_ADDR")
    notes: tuple[str, ...] = ()
    if address is not None:
        if address in (host.name for host in hosts[1:]):
            raise contradiction(environ, "MASTER_ADDR", source, f"rank 0 is {hosts[0].name}")
        found.add("master address", address, "MASTER_ADDR")
    elif naming is not None and full is not None:
        address = hosts[0].name
        found.add("master address", address, f"HOSTNAME and {HOSTS_FILE}")
    else:
        notes = (
            "the pod template has no subdomain (a headless Service), so pods cannot find each other by their names",
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


def _check_alone(environ: Environ, size: int | None) -> None:
    """Hear what a controller sets that numbers pods by RANK alone (PyTorchJob before 1.6). Raises IncompleteError.

    WORLD_SIZE may count pods or processes there, so it is not built upon.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or any(each in environ for each in _OF_WORKERS):
        return
    if size is None and text(environ, "RANK") is not None and says_several(environ, "WORLD_SIZE"):
        raise IncompleteError(
            f"{shown(environ, 'RANK')} and {shown(environ, 'WORLD_SIZE')} in a pod, but PET_NNODES is not set",
            hint="give --num-nodes N --node-rank K --master-addr HOST; --num-nodes 1 if each pod trains alone",
            of_several=True,
        )


def _size(environ: Environ) -> int | None:
    """Read --num-nodes; of an elastic MIN:MAX the larger number."""
    value = text(environ, NUM_NODES)
    if value is None:
        return None
    return number({NUM_NODES: value.rpartition(":")[2]}, NUM_NODES, least=1)


def _ordinal(pod: str | None) -> int | None:
    digits = (pod or "").rpartition("-")[2]
    return int(digits) if pod and "-" in pod and digits.isascii() and digits.isdecimal() and len(digits) < 7 else None


def _full_name(pod: str | None, hosts_file: str | None) -> str | None:
    """Find the pod's name with its subdomain in /etc/hosts; None without a subdomain."""
    if pod is None or hosts_file is None:
        return None
    for line in hosts_file.split("\n"):
        words = line.partition("#")[0].split()
        for word in words[1:]:
            if word.startswith(f"{pod}.") and pod in words[2:]:
                return host_name(word, HOSTS_FILE)
    return None


def _rank(environ: Environ, pod: str | None, full: str | None, *, indexed: bool) -> int | None:
    told = number(environ, NODE_RANK)
    if told is not None:
        index = number(environ, "JOB_COMPLETION_INDEX")
        if index is not None and index > told:
            raise contradiction(environ, NODE_RANK, "JOB_COMPLETION_INDEX", "two pods would have the same rank")
        return told
    if not indexed:
        # A Deployment's pod may end in digits by chance; a StatefulSet's has a Service behind it.
        return _ordinal(pod) if full is not None else None
    index = number(environ, "JOB_COMPLETION_INDEX")
    ordinal = _ordinal(pod)
    if pod is not None and full is not None and ordinal is not None and ordinal == index:
        jobset = full.removeprefix(f"{pod}.").partition(".")[0]
        job = _ordinal(pod.rpartition("-")[0])
        if pod.startswith(f"{jobset}-") and job:
            raise ConfigError(
                f"{shown(environ, 'HOSTNAME')}: replica {job} of a JobSet's job; JOB_COMPLETION_INDEX counts within it",
                hint="use one replica with all pods, or give --node-rank and --master-addr",
            )
    return index


def _naming(pod: str | None, full: str | None, rank: int) -> Naming | None:
    """Make the rule for the pods' names from this one's, which ends in its number; None if it does not."""
    if pod is None or _ordinal(pod) != rank:
        return None
    stem, domain = pod.rpartition("-")[0], (full or pod).removeprefix(pod)
    host_name(f"{stem}{domain}", "HOSTNAME")
    return lambda index: f"{stem}-{index}{domain}"
