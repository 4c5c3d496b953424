"""Read the nodes of platforms that start one launcher on each node of a job. No I/O.

Each function of a platform returns None if no job of the platform runs here. It raises
IncompleteError if something is missing, and ConfigError for an invalid or contradicting value.

Sources: each platform's documentation of its variables. Vertex and Determined use JSON.
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.clusters.environment_reader import (
    MOST_HOSTS,
    Environ,
    IncompleteError,
    Origins,
    Texts,
    contradiction_error,
    host_and_port,
    host_name,
    ignore_hint,
    job_id,
    json_list,
    json_object,
    number,
    shown,
    text,
)
from distlaunch.planning.clusters.table import NodeSystem, find_node

DETERMINED_FILE = "/run/determined/info/rendezvous.json"

SYSTEMS = {
    system.name: system
    for system in (
        NodeSystem(
            name="sagemaker",
            needs=("SM_HOSTS", "SM_CURRENT_HOST"),
            hosts="SM_HOSTS",
            me="SM_CURRENT_HOST",
            slots="SM_NUM_GPUS",
            unit="gpus",
            mixed="SM_IS_HETERO",
            job="TRAINING_JOB_NAME",
        ),
        NodeSystem(
            name="azureml",
            needs=("AZUREML_NODE_COUNT", "NODE_RANK"),
            count="AZUREML_NODE_COUNT",
            rank="NODE_RANK",
            master="MASTER_ADDR",
            port="MASTER_PORT",
            job="AZUREML_RUN_ID",
        ),
        NodeSystem(
            name="skypilot",
            needs=("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"),
            count="SKYPILOT_NUM_NODES",
            rank="SKYPILOT_NODE_RANK",
            hosts="SKYPILOT_NODE_IPS",
            slots="SKYPILOT_NUM_GPUS_PER_NODE",
            unit="gpus",
            job="SKYPILOT_TASK_ID",
        ),
        NodeSystem(
            name="dstack",
            needs=("DSTACK_NODE_RANK", "DSTACK_NODES_IPS"),
            count="DSTACK_NODES_NUM",
            rank="DSTACK_NODE_RANK",
            hosts="DSTACK_NODES_IPS",
            master="DSTACK_MASTER_NODE_IP",
            slots="DSTACK_GPUS_PER_NODE",
            unit="gpus",
            job="DSTACK_RUN_NAME",
        ),
        # WORLD_SIZE counts nodes, and RANK is the node's. The platforms' own examples pass them to
        # torchrun so.
        NodeSystem(
            name="pai-dlc",
            needs=("WORLD_SIZE", "RANK", "MASTER_ADDR", "NPROC_PER_NODE"),
            starts=("MASTER_ADDR", "dlc"),
            without=("LOCAL_RANK",),
            count="WORLD_SIZE",
            rank="RANK",
            master="MASTER_ADDR",
            port="MASTER_PORT",
            slots="NPROC_PER_NODE",
        ),
        NodeSystem(
            name="baidu-aihc",
            needs=("AIHC_JOB_NAME", "WORLD_SIZE", "RANK", "MASTER_ADDR"),
            without=("LOCAL_RANK",),
            count="WORLD_SIZE",
            rank="RANK",
            master="MASTER_ADDR",
            port="MASTER_PORT",
            slots="NPROC_PER_NODE",
            job="AIHC_JOB_NAME",
        ),
    )
}


def files(environ: Environ, system: str) -> tuple[str, ...]:  # noqa: ARG001 - all sources share the signature
    """Return the paths of the files that the system ``system`` needs."""
    return (DETERMINED_FILE,) if system == "determined" else ()


def find(environ: Environ, texts: Texts, system: str) -> Allocation | None:
    """Return the platform's nodes and the rank of this node; None if the variables of ``system``
    are not set.

    Raises ConfigError if the variables are invalid or contradict each other.
    """
    if system == "vertex":
        return _find_vertex(environ)
    if system == "determined":
        return _find_determined(environ, texts)
    found = find_node(SYSTEMS[system], environ)
    return (
        _with_azure_workers(found, environ) if system == "azureml" and found is not None else found
    )


def _with_azure_workers(found: Allocation, environ: Environ) -> Allocation:
    """Return the allocation with one launcher per worker if Azure ML started several processes per
    node.

    In this case Azure ML also sets WORLD_SIZE, RANK and LOCAL_RANK for each process. Raises
    ConfigError if they contradict the numbers of nodes.
    """
    world, rank, local = (number(environ, each) for each in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if world is None or rank is None:
        return found
    nodes, node_rank = len(found.hosts), found.node_rank or 0
    each, rest = divmod(world, nodes)
    if rest or not each:
        raise contradiction_error(
            environ,
            "WORLD_SIZE",
            "AZUREML_NODE_COUNT",
            "every node has as many processes as the others",
        )
    if rank != node_rank * each + (local or 0) or (local or 0) >= each:
        raise contradiction_error(
            environ, "RANK", "NODE_RANK", f"with {counted(each, 'worker')} on each node"
        )
    if each == 1:
        return found
    hosts = tuple(replace(host, slots=each) for host in found.hosts)
    return replace(found, part="worker", local_rank=local or 0, hosts=hosts)


def _find_vertex(environ: Environ) -> Allocation | None:
    """Return the replicas in CLUSTER_SPEC. Pool 0 has the primary replica, pool 1 the other
    workers.

    Pools 2 and 3 (servers, evaluators) do not train.
    """
    value = text(environ, "CLUSTER_SPEC")
    if value is None:
        return None
    if "workerpool0" not in value and text(environ, "CLOUD_ML_JOB_ID") is None:
        raise IncompleteError("CLUSTER_SPEC names no workerpool0: it is not Vertex AI's")
    spec = json_object(value, "CLUSTER_SPEC")
    cluster, task = spec.get("cluster"), spec.get("task")
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise IncompleteError("CLUSTER_SPEC has no cluster and task, as Vertex AI's has")
    pools = [_read_replicas(cluster.get(pool)) for pool in ("workerpool0", "workerpool1")]
    kind, index = task.get("type"), task.get("index")
    if kind not in ("workerpool0", "workerpool1"):
        raise ConfigError(
            f"{shown(environ, 'CLUSTER_SPEC')}: this replica's task.type is neither workerpool0 "
            "nor workerpool1",
            hint="start distlaunch only in the first two worker pools",
        )
    pool = 0 if kind == "workerpool0" else 1
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(pools[pool]):
        raise ConfigError(
            f"{shown(environ, 'CLUSTER_SPEC')}: task.index is not one of the {len(pools[pool])} "
            f"of {kind}",
            hint=ignore_hint(),
        )
    addresses = [*pools[0], *pools[1]]
    found = Origins(environ)
    found.add(
        "nodes",
        len(addresses),
        "CLUSTER_SPEC",
        *found.lost("TF_CONFIG", "says the same for TensorFlow"),
    )
    rank = index + pool * len(pools[0])
    found.add("node rank", rank, "CLUSTER_SPEC")
    host, port = addresses[0]
    return Allocation(
        source="vertex",
        hosts=tuple(Host(name=each) for each, _ in addresses),
        part="node",
        node_rank=rank,
        master_addr=host,
        master_port=port,
        job_id=job_id(text(environ, "CLOUD_ML_JOB_ID")),
        origins=found.all(),
    )


def _read_replicas(pool: object) -> list[tuple[str, int | None]]:
    """Return a pool's entries as (host, port); none for a missing pool. Raises ConfigError."""
    if pool is None:
        return []
    if (
        not isinstance(pool, list)
        or not all(isinstance(entry, str) for entry in pool)
        or len(pool) > MOST_HOSTS
    ):
        raise ConfigError(
            "CLUSTER_SPEC: a worker pool is not a list of HOST:PORT", hint=ignore_hint()
        )
    replicas: list[tuple[str, int | None]] = []
    for entry in pool:
        host, port = host_and_port({"CLUSTER_SPEC": entry}, "CLUSTER_SPEC")
        if host is None:
            raise ConfigError("CLUSTER_SPEC: a replica has no address", hint=ignore_hint())
        replicas.append((host, port))
    return replicas


def _find_determined(environ: Environ, texts: Texts) -> Allocation | None:
    """Return the nodes of the rendezvous file that Determined puts into each container."""
    if text(environ, "DET_ALLOCATION_ID") is None:
        return None
    content = texts.get(DETERMINED_FILE)
    if content is None:
        raise IncompleteError(
            f"{shown(environ, 'DET_ALLOCATION_ID')}, but {DETERMINED_FILE} is not there"
        )
    info = json_object(content, DETERMINED_FILE)
    addresses, rank = info.get("container_addrs"), info.get("container_rank")
    if (
        not isinstance(addresses, list)
        or not addresses
        or not all(isinstance(each, str) for each in addresses)
    ):
        raise ConfigError(
            f"{DETERMINED_FILE}: expected container_addrs, a list of addresses", hint=ignore_hint()
        )
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < len(addresses):
        raise ConfigError(
            f"{DETERMINED_FILE}: container_rank is not one of the {len(addresses)} of "
            "container_addrs",
            hint=ignore_hint(),
        )
    names = [host_name(each, DETERMINED_FILE) for each in addresses]
    slots = _determined_slots(info.get("container_slot_counts"), len(names), rank, environ)
    found = Origins(environ)
    found.add("hosts", ",".join(names), DETERMINED_FILE)
    found.add("node rank", rank, DETERMINED_FILE)
    return Allocation(
        source="determined",
        hosts=tuple(
            Host(name=each, slots=count or None) for each, count in zip(names, slots, strict=True)
        ),
        part="node",
        node_rank=rank,
        master_addr=names[0],
        job_id=job_id(text(environ, "DET_ALLOCATION_ID")),
        origins=found.all(),
    )


def _determined_slots(counts: object, nodes: int, rank: int, environ: Environ) -> list[int | None]:
    if (
        isinstance(counts, list)
        and len(counts) == nodes
        and all(type(each) is int and each >= 0 for each in counts)
    ):
        return list(counts)
    value = text(environ, "DET_SLOT_IDS")
    own = len(json_list(value, shown(environ, "DET_SLOT_IDS"))) if value is not None else None
    return [own if index == rank else None for index in range(nodes)]
