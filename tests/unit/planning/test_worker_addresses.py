"""Lists of all workers' addresses: built, kept and sent once for all."""

from __future__ import annotations

import json
import subprocess

import pytest

from distlaunch.backends.tensorflow import TensorFlow
from distlaunch.coordinator.policy.start_messages import Streams, starts
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.plan import LaunchPlan, WorkerPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import Node, Topology
from distlaunch.core.protocol.codec import encode
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.master_address import MasterChoice
from distlaunch.planning.worker_addresses import (
    check_cluster,
    cluster_names,
    cluster_of,
    with_cluster,
)
from tests.facts import mentions
from tests.unit.planning.plans import plan as planned_by
from tests.unit.planning.plans import refused

NODES, PER_NODE = 5, 8
WORKERS = NODES * PER_NODE
CLUSTER = tuple(f"host-{rank // PER_NODE}.example:{4000 + rank}" for rank in range(WORKERS))


def plan_of(backend: PlannedBackend) -> LaunchPlan:
    workers = tuple(
        WorkerPlan(
            rank=rank,
            local_rank=rank % PER_NODE,
            node_rank=rank // PER_NODE,
            cpus=None,
            env={"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": f"/r/{rank}"},
        )
        for rank in range(WORKERS)
    )
    return LaunchPlan(
        job_id="j",
        backend=backend.name,
        nodes=(Node(host="a", slots=PER_NODE),) * NODES,
        workers=workers,
        argv=("python", "train.py"),
        workdir="/w",
        env={},
        base_env={},
        given_env={},
        run_dir="/r",
        master_addr="10.0.0.1",
        wanted_port=0,
        worker_ports=backend.worker_ports,
    )


class Counting(TensorFlow):
    """Counts how often the list is built."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.worded = 0

    def cluster_variables(self, cluster):
        self.worded += 1
        return super().cluster_variables(cluster)


def test_the_cluster_is_put_into_words_once_for_all_workers():
    backend = Counting()
    plan = with_cluster(plan_of(backend), CLUSTER, backend)
    assert backend.worded == 1
    assert not any(
        place in value
        for worker in plan.workers
        for value in worker.env.values()
        for place in CLUSTER
    )


def test_a_node_is_sent_the_cluster_once_and_gives_each_worker_all_of_it():
    backend = TensorFlow({}, {})
    plan = with_cluster(plan_of(backend), CLUSTER, backend)
    sent = dict(starts(plan, Streams(terminal=None, stdin=False, is_remote=True)))
    assert len(sent) == NODES
    reported = []
    for start in sent.values():
        assert encode(start).count(CLUSTER[3].encode()) == 1
        reported += [json.loads(start.env_of(spec)["TF_CONFIG"]) for spec in start.workers]
        assert [start.env_of(spec)["RANK"] for spec in start.workers] == [
            spec.env["RANK"] for spec in start.workers
        ]
    assert reported == [
        {"cluster": {"worker": list(CLUSTER)}, "task": {"type": "worker", "index": rank}}
        for rank in range(WORKERS)
    ]


def test_the_plans_record_has_the_cluster_once_and_each_workers_place_beside_it():
    backend = TensorFlow({}, {})
    plan = with_cluster(plan_of(backend), CLUSTER, backend)
    written = "".join(plan.json_chunks())
    assert written.count(CLUSTER[3]) == 1
    record = json.loads(written)
    last = record["nodes"][-1]["workers"][-1]
    config = json.loads(record["env_starts"]["TF_CONFIG"] + last["env"]["TF_CONFIG"])
    assert config["task"] == {"type": "worker", "index": WORKERS - 1}
    assert "env_starts" not in plan_of(backend).record()


class Shared(PlannedBackend):
    """Gives all workers the same value."""

    name = "shared"
    worker_ports = 2

    def cluster_variables(self, cluster):
        return {"PEERS": ",".join(cluster)}


def test_exit_codes_without_a_restart_are_the_same_for_all_controllers():
    plan = with_cluster(plan_of(Shared()), CLUSTER * 2, Shared())
    start = next(
        start for _, start in starts(plan, Streams(terminal=None, stdin=False, is_remote=True))
    )
    assert {start.env_of(spec)["PEERS"] for spec in start.workers} == {",".join(CLUSTER * 2)}


def test_the_names_are_known_before_the_ports_are():
    assert cluster_names(TensorFlow({}, {}), 3) == {"TF_CONFIG"}
    assert cluster_names(Shared(), 3) == {"PEERS"}


# --- what Linux passes on

MOST = 131_071
"""Bytes of NAME=VALUE."""


class Filling(PlannedBackend):
    """Gives each worker so many bytes; the last worker's ending is the longest."""

    name = "filling"
    worker_ports = 1

    def __init__(self, length: int) -> None:
        self.length = length

    def cluster_variables(self, cluster):
        return {"PEERS": "\u00e9" * ((self.length - len("PEERS=") - WORKERS) // 2)}

    def task_variables(self, workers, rank):
        odd = (self.length - len("PEERS=") - WORKERS) % 2
        return {"PEERS": "x" * (rank + 1 + odd)}


def test_as_much_as_linux_passes_on_reaches_a_process():
    backend = Filling(MOST)
    plan = with_cluster(plan_of(backend), CLUSTER, backend)
    *_, (_, start) = starts(plan, Streams(terminal=None, stdin=False, is_remote=False))
    value = start.env_of(start.workers[-1])["PEERS"]
    assert len(f"PEERS={value}".encode()) == MOST
    found = subprocess.run(["/usr/bin/env"], env={"PEERS": value}, capture_output=True, check=True)
    assert found.stdout.decode() == f"PEERS={value}\n"


def test_one_byte_more_for_one_of_the_workers_is_refused():
    backend = Filling(MOST + 1)
    with pytest.raises(ConfigError) as caught:
        with_cluster(plan_of(backend), CLUSTER, backend)
    assert mentions(
        caught.value.message,
        "PEERS",
        "40 workers",
        "131,072 bytes",
        "Linux",
        "NAME=VALUE",
        "131,071",
    )
    assert mentions(caught.value.hint, "fewer workers")


def test_values_of_each_worker_are_measured_too():
    class Apart(Filling):
        def cluster_variables(self, cluster):
            return {"A": "b"}

        def task_variables(self, workers, rank):
            return {"Z": "z" * (MOST - len("Z=") + rank // (WORKERS - 1))}

    with pytest.raises(ConfigError, match="Z of 40 workers: it has 131,072 bytes"):
        with_cluster(plan_of(Apart(0)), CLUSTER, Apart(0))


def test_values_of_one_worker_are_measured_too():
    class Lone(Filling):
        def task_variables(self, workers, rank):
            return {"Z": "z" * MOST} if rank == 5 else {}

    with pytest.raises(ConfigError, match="Z of 40 workers: it has 131,073 bytes"):
        with_cluster(plan_of(Lone(100)), CLUSTER, Lone(100))


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({}, "-o per=node starts one worker per node"),
        ({"per": "gpu"}, "-o per=node"),
        ({"per": "node"}, "fewer nodes"),
    ],
)
def test_tensorflows_workers_are_fewer_with_one_a_node(options, hint):
    assert hint in TensorFlow(options, {}).fewer_workers()


def over(workers: int) -> Topology:
    return Topology(
        nodes=tuple(Node(host=f"n{number}", slots=8) for number in range(workers // 8)),
        device="cpu",
    )


def test_so_many_workers_that_no_address_is_short_enough_are_refused_when_planned(make_facts):
    error = refused(make_facts, backend="tensorflow", topology=over(12_000), num_procs=None)
    text = "TF_CONFIG of 12,000 workers, even with the shortest addresses: it has 156,0"
    assert error.message.startswith(text)
    assert "-o per=node" in str(error.hint)


def test_a_cluster_that_may_fit_with_short_addresses_is_refused_once_they_are_long(make_facts):
    plan = planned_by(make_facts, backend="tensorflow", topology=over(8_000), num_procs=None)
    assert len(plan.workers) == 8_000
    backend, shortest = TensorFlow({}, {}), tuple("[::1]:1024" for _ in plan.workers)
    with_cluster(plan, shortest, backend)
    with pytest.raises(ConfigError, match="TF_CONFIG of 8,000 workers: it has 136,072 bytes"):
        with_cluster(plan, tuple("10.0.0.1:40000" for _ in plan.workers), backend)


@pytest.mark.parametrize("address", [None, "h", "abcd", "abcde", "127.0.0.1", "fd00::1:2"])
def test_a_refused_plan_would_have_been_refused_at_the_start(address):
    class Keeping(Shared):
        def cluster_variables(self, cluster):
            kept.append(cluster)
            return super().cluster_variables(cluster)

    kept: list[tuple[str, ...]] = []
    plan = replace(
        plan_of(Keeping()),
        master_addr=address,
        nodes=(Node(host="a", slots=2), Node(host="b", slots=1)),
    )
    check_cluster(plan, Keeping())
    master = MasterChoice(address="", env={}, addresses=(address or "::1", "::1"))
    places = cluster_of(plan, range(1024, 1030), master)
    assert all(len(short) <= len(place) for short, place in zip(kept[0], places, strict=True))
