"""Workers that are told where all listen: what is the same for all is put together, kept and sent once."""

from __future__ import annotations

import json

from distlaunch.backends.tensorflow import TensorFlow
from distlaunch.core.model.plan import LaunchPlan, WorkerPlan
from distlaunch.core.model.topology import Node
from distlaunch.core.wire.codec import encode
from distlaunch.job.starting import Streams, starts
from distlaunch.resolve.backend import PlannedBackend
from distlaunch.resolve.cluster import cluster_names, with_cluster

NODES, PER_NODE = 5, 8
WORKERS = NODES * PER_NODE
CLUSTER = tuple(f"host-{rank // PER_NODE}.example:{4000 + rank}" for rank in range(WORKERS))


def plan_of(backend: PlannedBackend) -> LaunchPlan:
    workers = tuple(
        WorkerPlan(
            rank=rank, local_rank=rank % PER_NODE, node_rank=rank // PER_NODE, cpus=None,
            env={"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": f"/r/{rank}"},
        )
        for rank in range(WORKERS)
    )  # fmt: skip
    return LaunchPlan(
        job_id="j", backend=backend.name, nodes=(Node(host="a", slots=PER_NODE),) * NODES, workers=workers,
        argv=("python", "train.py"), workdir="/w", env={}, base_env={}, given_env={}, run_dir="/r",
        master_addr="10.0.0.1", wanted_port=0, worker_ports=backend.worker_ports,
    )  # fmt: skip


class Counting(TensorFlow):
    """Counts how often the cluster is put into words."""

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
    assert not any(place in value for worker in plan.workers for value in worker.env.values() for place in CLUSTER)


def test_a_node_is_sent_the_cluster_once_and_gives_each_worker_all_of_it():
    backend = TensorFlow({}, {})
    plan = with_cluster(plan_of(backend), CLUSTER, backend)
    sent = dict(starts(plan, Streams(terminal=None, stdin=False, travelled=True)))
    assert len(sent) == NODES
    told = []
    for start in sent.values():
        assert encode(start).count(CLUSTER[3].encode()) == 1
        told += [json.loads(start.env_of(spec)["TF_CONFIG"]) for spec in start.workers]
        assert [start.env_of(spec)["RANK"] for spec in start.workers] == [spec.env["RANK"] for spec in start.workers]
    assert told == [
        {"cluster": {"worker": list(CLUSTER)}, "task": {"type": "worker", "index": rank}} for rank in range(WORKERS)
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
    """Tells all workers the same."""

    name = "shared"
    worker_ports = 2

    def cluster_variables(self, cluster):
        return {"PEERS": ",".join(cluster)}


def test_what_does_not_go_on_is_the_same_for_all():
    plan = with_cluster(plan_of(Shared()), CLUSTER * 2, Shared())
    start = next(start for _, start in starts(plan, Streams(terminal=None, stdin=False, travelled=True)))
    assert {start.env_of(spec)["PEERS"] for spec in start.workers} == {",".join(CLUSTER * 2)}


def test_the_names_are_known_before_the_ports_are():
    assert cluster_names(TensorFlow({}, {}), 3) == {"TF_CONFIG"}
    assert cluster_names(Shared(), 3) == {"PEERS"}
