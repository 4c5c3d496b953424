"""Launchers of one job, started by a user or a system, and their messages."""

from __future__ import annotations

import pytest

from distlaunch.backends.base import Backend
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import CpuInventory, GpuInventory
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.agent_messages import Interface, Surveyed
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.build_topology import build_topology
from distlaunch.planning.facts import Surroundings
from distlaunch.planning.hosts.this_host import Identity
from distlaunch.planning.joined_plan import JoinedPlanner
from distlaunch.planning.node_source import Location, locate
from distlaunch.planning.train_options import TrainOptions


class Plain(Backend):
    """A backend that adds nothing."""

    name = "plain"


@pytest.fixture
def by_hand(make_facts):
    """Return the plan of a launcher that a user has started with these options."""

    def make(hostname: str = "n0", **options) -> JoinedPlanner:
        identity = Identity(hostname=hostname, addresses=("10.0.0.7",))
        facts = replace(
            make_facts(surroundings=Surroundings(texts={}, discovered=None, identity=identity)),
            hostname=hostname,
        )
        wanted = TrainOptions(
            **{"module": True, "script": "t", "procs_per_node": 2, "num_nodes": 3, **options}
        )
        location, _ = locate(wanted, facts)
        assert location is not None
        topology = build_topology(location.allocation, wanted, facts, here=location.here)
        planner = JoinedPlanner(wanted, facts, topology, location, Plain({}, {}))
        planner.set_job("j", "/jobs/j")
        return planner

    return make


@pytest.fixture
def from_source(make_facts):
    """Return the plan of a launcher that a cluster has started as one of several."""

    def make(allocation: Allocation, **options) -> JoinedPlanner:
        facts = make_facts()
        wanted = TrainOptions(**{"module": True, "script": "t", "device": "cpu", **options})
        location = Location(
            allocation=allocation, who=allocation.source, here=allocation.node_rank, by="", name="x"
        )
        topology = build_topology(allocation, wanted, facts, here=location.here)
        planner = JoinedPlanner(wanted, facts, topology, location, Plain({}, {}))
        planner.set_job("j", "/jobs/j")
        return planner

    return make


def slurm(**more) -> Allocation:
    hosts = tuple(Host(name=name, slots=more.pop("slots", None)) for name in ("a", "b"))
    values = {
        "source": "slurm",
        "hosts": hosts,
        "part": "node",
        "node_rank": 0,
        "job_id": "1234",
        "number": 1234,
    }
    return Allocation(**{**values, **more})


def tasks(node_rank: int, local_rank: int) -> Allocation:
    hosts = (Host(name="a", slots=2), Host(name="b", slots=3))
    return Allocation(
        source="slurm", hosts=hosts, part="worker", node_rank=node_rank, local_rank=local_rank
    )


def surveyed(name: str, **more) -> Surveyed:
    values = {
        "serial": 1,
        "hostname": name,
        "environ": {},
        "named": (),
        "gpus": GpuInventory(),
        "granted_cpus": None,
        "cpus": CpuInventory(allowed=(0,), online=1),
        "python": "/python",
        "script_sha256": None,
        "problem": None,
        "hint": None,
        "shares_run_dir": False,
        "interfaces": (Interface(name="eth0", address="10.0.0.1", prefix=24),),
    }
    return Surveyed(**{**values, **more})


def reported(planner: JoinedPlanner, **more) -> p.LauncherInfo:
    return replace(planner.launcher_info(clock=0.0, wall=0.0, attempt=-1, restarts=0), **more)
