"""A Ray cluster on this machine, several nodes, run by an interpreter that has Ray; ends with its
stdin.

Arguments: the port of Ray's client server, how many nodes beside the head (which has no CPU), and
the resources of each. Prints the cluster's address, then answers each line of stdin (``kill ID``: a
node by the beginning of its id; ``add``).
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

PATIENCE_S = 200


def add(count: int) -> None:
    """Add so many nodes, and wait for them longer than Ray's 30 s: a busy machine may take more."""
    new = [cluster.add_node(wait=False, num_cpus=cpus, num_gpus=gpus) for _ in range(count)]
    for node in new:
        cluster._wait_for_node(node, PATIENCE_S)
    nodes.extend(new)


port, count, cpus, gpus = map(int, sys.argv[1:])
looks = {
    "health_check_period_ms": 500
}  # not 3 s: a node that is killed is lost when five looks have found it gone
head = {
    "num_cpus": 0,
    "num_gpus": 0,
    "include_dashboard": False,
    "ray_client_server_port": port,
    "_system_config": looks,
}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = []
add(count)
print("cluster", cluster.address, flush=True)
for line in sys.stdin:
    word, _, start = line.strip().partition(" ")
    if word == "add":
        add(1)
    else:
        gone = next(node for node in nodes if node.node_id.startswith(start))
        nodes.remove(gone)
        cluster.remove_node(gone, allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
