"""Environments of shells and tasks in the test bed's Slurm (tests/data/slurm; tests/cluster
captures and checks them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlaunch.planning.clusters import slurm

DATA = Path(__file__).parents[3] / "data" / "slurm"

EXPECTED = {
    "gpus-per-node-one-task-0": ("node", "0", "n1:2"),
    "gpus-per-node-single-0": ("worker", "0.0", "n1:2 n2:2"),
    "gpus-per-node-single-3": ("worker", "1.1", "n1:2 n2:2"),
    "gpus-per-node-step-0": ("worker", "0.0", "n1:2 n2:2"),
    "gpus-per-node-step-3": ("worker", "1.1", "n1:2 n2:2"),
    "gpus-per-node-task-per-node-0": ("node", "0", "n1:2 n2"),
    "gpus-per-node-task-per-node-1": ("node", "1", "n1 n2:2"),
    "gpus-per-node": ("all", "0", "n1:2 n2:2"),
    "gpus-per-task-one-task-0": ("node", "0", "n2:1"),
    "gpus-per-task-step-0": ("worker", "0.0", "n2:2 n3:2"),
    "gpus-per-task-step-3": ("worker", "1.1", "n2:2 n3:2"),
    "gpus-per-task": ("all", "0", "n2:2 n3:2"),
    "gres-second-node-0": ("node", "0", "n2:2"),
    "gres-step-0": ("node", "0", "n2:2 n3"),
    "gres-step-1": ("node", "1", "n2 n3:2"),
    "gres": ("all", "0", "n2:2 n3"),
    "heterogeneous-first-group-0": ("node", "0", "n4:2"),
    "heterogeneous-second-group-0": ("worker", "0.0", "n1:3 n2:1"),
    "heterogeneous-second-group-3": ("worker", "1.0", "n1:3 n2:1"),
    "heterogeneous-step-0": ("worker", "0.0", "n4:1 n1:3 n2:1"),
    "heterogeneous-step-4": ("worker", "2.0", "n4:1 n1:3 n2:1"),
    "heterogeneous": ("all", "0", "n4:2 n1:1 n2:1"),
    "node-list-step-0": ("node", "0", "n1 n4"),
    "node-list-step-1": ("node", "1", "n1 n4"),
    "node-list": ("all", "0", "n1 n4"),
    "nodes-only-step-0": ("node", "0", "n1 n2"),
    "nodes-only-step-1": ("node", "1", "n1 n2"),
    "nodes-only": ("all", "0", "n1 n2"),
    "salloc-interactive": ("all", "0", "n1:2 n2"),
    "salloc-one-task-0": ("node", "0", "n1"),
    "salloc-per-node": ("all", "-", "n1:2 n2:2"),
    "salloc-step-0": ("worker", "0.0", "n1:2 n2:1"),
    "salloc-step-2": ("worker", "1.0", "n1:2 n2:1"),
    "salloc": ("all", "-", "n1 n2"),
    "srun-gpus-per-task-step-0": ("worker", "0.0", "n1:2 n2:1"),
    "srun-gpus-per-task-step-2": ("worker", "1.0", "n1:2 n2:1"),
    "srun-task-per-node-step-0": ("node", "0", "n1:4 n2"),
    "srun-task-per-node-step-1": ("node", "1", "n1 n2:4"),
    "srun-uneven-gpus-step-0": ("worker", "0.0", "n1:4 n2:1"),
    "srun-uneven-gpus-step-4": ("worker", "1.0", "n1:4 n2:1"),
    "tasks-per-gpu-step-0": ("worker", "0.0", "n1:2 n4:2"),
    "tasks-per-gpu-step-3": ("worker", "1.1", "n1:2 n4:2"),
    "tasks-per-gpu": ("all", "0", "n1:2 n4:2"),
    "tasks-per-node-cyclic-0": ("worker", "0.0", "n1:3 n2:3"),
    "tasks-per-node-cyclic-5": ("worker", "1.2", "n1:3 n2:3"),
    "tasks-per-node-one-task-0": ("node", "0", "n1"),
    "tasks-per-node-step-0": ("worker", "0.0", "n1:3 n2:3"),
    "tasks-per-node-step-5": ("worker", "1.2", "n1:3 n2:3"),
    "tasks-per-node": ("all", "0", "n1:3 n2:3"),
    "terminal-step-0": ("node", "0", "n1 n2"),
    "terminal-step-1": ("node", "1", "n1 n2"),
    "three-components-last-two-0": ("worker", "0.0", "n3:2 n1:1"),
    "three-components-last-two-2": ("worker", "1.0", "n3:2 n1:1"),
    "three-components-outer-two-0": ("node", "0", "n4 n1"),
    "three-components-outer-two-1": ("node", "1", "n4 n1"),
    "three-components-step-0": ("worker", "0.0", "n4:1 n3:2 n1:1"),
    "three-components-step-3": ("worker", "2.0", "n4:1 n3:2 n1:1"),
    "three-components": ("all", "0", "n4 n3:2 n1"),
    "types-step-0": ("node", "0", "n3:4"),
    "types": ("all", "0", "n3:4"),
    "uneven-gpus": ("all", "0", "n1:3 n2"),
    "uneven-tasks-step-0": ("worker", "0.0", "n1:2 n2:1 n3:1"),
    "uneven-tasks-step-3": ("worker", "2.0", "n1:2 n2:1 n3:1"),
    "uneven-tasks": ("all", "0", "n1:2 n2:1 n3:1"),
}
"""Part; node rank, and local rank after a dot; hosts with the slots that are known. Read against
each file's command."""


def environ_of(name):
    lines = (DATA / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_captured_environment_gives_the_place_that_slurm_gave(name):
    part, place, hosts = EXPECTED[name]
    found = slurm.find(environ_of(name), {})
    ranks = [found.node_rank] if found.local_rank is None else [found.node_rank, found.local_rank]
    shown = [
        host.name if host.slots is None else f"{host.name}:{host.slots}" for host in found.hosts
    ]
    assert (found.part, " ".join(shown)) == (part, hosts)
    assert ".".join("-" if rank is None else str(rank) for rank in ranks) == place


def test_no_capture_is_left_out():
    assert {path.stem for path in DATA.glob("*.env")} == set(EXPECTED)
