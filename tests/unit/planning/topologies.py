"""Topologies of hosts in the syntax of ``--hosts``, or granted by a source written by hand."""

from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Gpu, GpuInventory, Topology
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.build_topology import build_topology
from distlaunch.planning.hosts.hostfile import parse_hosts
from distlaunch.planning.train_options import TrainOptions


def gpus(count: int) -> GpuInventory:
    return GpuInventory(
        gpus=tuple(Gpu(index=i, uuid=f"GPU-{i}") for i in range(count)), source="nvml"
    )


def hosts(text: str) -> tuple[Host, ...]:
    return parse_hosts(text)


def plan(
    make_facts, text, *, source="flags", here=None, seen=0, environ=None, allocation=None, **options
) -> Topology:
    """Return the plan over hosts in the syntax of --hosts. ``here`` has ``seen`` GPUs."""
    given_ = {
        "source": source,
        "by_user": source == "flags",
        "hosts": hosts(text),
        **(allocation or {}),
    }
    facts = make_facts(gpus=gpus(seen), environ=environ or {})
    return build_topology(
        Allocation(**given_), TrainOptions(script="train.py", **options), facts, here=here
    )


def refused(make_facts, text, **changed) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(make_facts, text, **changed)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


def sizes(topology: Topology) -> dict[str, int | None]:
    return {node.host: node.slots for node in topology.nodes}
