"""Facts built by hand: machines, directories and environments."""

from __future__ import annotations

from collections import defaultdict

import pytest

from distlaunch.backends.registry import find_backend
from distlaunch.core.model.topology import CpuInventory, Gpu, GpuInventory
from distlaunch.core.protocol.agent_messages import Interface, Surveyed
from distlaunch.planning.build_topology import build_topology
from distlaunch.planning.facts import Facts, Surroundings
from distlaunch.planning.hosts.this_host import Identity
from distlaunch.planning.node_source import locate
from distlaunch.planning.surveyed_nodes import SurveyedPlanner
from distlaunch.planning.train_options import TrainOptions
from tests.unit.planning.joined_planners import by_hand, from_source  # noqa: F401 - fixtures


def facts(*, environ=None, gpus=None, paths=None, texts=None, programs=None, **changed) -> Facts:
    """Return a machine of 16 CPUs with ``/w/train.py``, and further ``paths``."""
    known = defaultdict(
        lambda: "missing", {"/w": "directory", "/w/train.py": "file", **(paths or {})}
    )
    values = {
        "environ": environ or {},
        "cwd": "/w",
        "hostname": "nodeA",
        "python": "/usr/bin/python3",
        "cpus": CpuInventory(allowed=tuple(range(16)), online=16),
        "gpus": gpus or GpuInventory(),
        "paths": known,
        "texts": texts or {},
        "programs": programs or {},
    }
    return Facts(**{**values, **changed})


@pytest.fixture(scope="session")
def make_facts():
    return facts


# --- jobs of several nodes


def gpus(count: int, *, node: object = "", **changed) -> GpuInventory:
    """Return ``count`` GPUs with the UUIDs of their node."""
    each = (
        Gpu(index=index, uuid=f"GPU-{node}-{index}", name="H100", numa_node=index // 4)
        for index in range(count)
    )
    return GpuInventory(gpus=tuple(each), source="nvml", **changed)


def surveyed(host: str, **changed) -> Surveyed:
    """Return the survey of a node of 16 CPUs without GPUs, whose one address stands for its name.

    ``address`` is short for one on eth0; ``seen`` for so many GPUs.
    """
    address, seen = changed.pop("address", "10.0.0.7"), changed.pop("seen", 0)
    values = {
        "serial": 0,
        "hostname": host,
        "environ": {},
        "interfaces": (Interface(name="eth0", address=address, prefix=24),),
        "named": (address,),
        "gpus": gpus(seen, node=host) if seen else GpuInventory(),
        "cpus": CpuInventory(allowed=tuple(range(16)), online=16),
        "granted_cpus": None,
        "python": "/usr/bin/python3",
        "script_sha256": "ab" * 32,
        "problem": None,
        "hint": None,
        "shares_run_dir": False,
    }
    return Surveyed(**{**values, **changed})


def planner(
    *, environ=None, identity="laptop", facts_=None, discovered=None, texts=None, **options
) -> SurveyedPlanner:
    """Return the planner of a job whose launcher is on ``identity``: a host of this name is this
    machine."""
    chosen = TrainOptions(**{"script": "train.py", **options})
    own = Identity(hostname=identity, fqdn=None, addresses=(), aliases=())
    around = Surroundings(texts=texts or {}, discovered=discovered, identity=own)
    known = facts(environ=environ or {}, surroundings=around, hostname=identity, **(facts_ or {}))
    location, _ = locate(chosen, known)
    topology = build_topology(location.allocation, chosen, known, here=location.here)
    backend = find_backend("pytorch-ddp")({}, {})
    return SurveyedPlanner(
        chosen, known, topology, location, backend, job_id="job-1", run_dir="/r/job-1"
    )


def survey_all(made: SurveyedPlanner, **changed) -> dict[int, Surveyed]:
    """Return surveys that differ in names and addresses alone."""
    return {
        number: surveyed(node.host, **{"address": f"10.0.0.{number + 1}", **changed})
        for number, node in enumerate(made.hosts)
    }


@pytest.fixture(scope="session")
def make_planner():
    return planner


@pytest.fixture(scope="session")
def make_surveyed():
    return surveyed


@pytest.fixture(scope="session")
def make_surveys():
    return survey_all


@pytest.fixture(scope="session")
def make_gpus():
    return gpus
