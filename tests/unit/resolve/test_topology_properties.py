from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.gpus import Gpu, GpuInventory
from distlaunch.resolve.allocation import Allocation, Host
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.topology import build_topology


def gpus(count: int) -> GpuInventory:
    return GpuInventory(gpus=tuple(Gpu(index=i) for i in range(count)), source="nvml")


@given(
    slots=st.lists(st.none() | st.integers(1, 5), min_size=1, max_size=6),
    size=st.dictionaries(
        st.sampled_from(["num_procs", "procs_per_node", "num_gpus", "gpus_per_node", "num_nodes"]),
        st.integers(1, 12),
        max_size=2,
    ),
    options=st.fixed_dictionaries(
        {},
        optional={
            "spread": st.booleans(),
            "device": st.sampled_from(["auto", "cpu", "cuda"]),
            "include": st.sampled_from(["h0", "h*", "h1:0", "h0:1-2@h1"]),
            "exclude": st.sampled_from(["h0", "h*", "h1:0", "h2:9"]),
            "gpus": st.sampled_from(["0", "1,0", "7"]),
        },
    ),
    here=st.none() | st.integers(0, 5),
    seen=st.integers(0, 4),
    source=st.sampled_from(["flags", "slurm"]),
    part=st.sampled_from(["all", "node", "worker"]),
)
@settings(deadline=None)
def test_what_is_planned_is_what_was_asked_for(make_facts, slots, size, options, here, seen, source, part):
    named = tuple(Host(name=f"h{place}", slots=count) for place, count in enumerate(slots))
    allocation = Allocation(source=source, hosts=named, part=part)
    asked = TrainOptions(script="train.py", **size, **options)
    here = here if here is not None and here < len(named) else None
    try:
        topology = build_topology(allocation, asked, make_facts(gpus=gpus(seen)), here=here)
    except ConfigError:
        return
    assert topology == build_topology(allocation, asked, make_facts(gpus=gpus(seen)), here=here)
    names = [host.name for host in named]
    planned = [node.host for node in topology.nodes]
    assert planned == sorted(planned, key=names.index), "the source's order"
    assert all(node.slots is None or node.slots > 0 for node in topology.nodes)
    total = size.get("num_procs", size.get("num_gpus"))
    if total is not None:
        assert topology.world_size == total
    if "num_nodes" in size:
        assert len(planned) == size["num_nodes"] or total is not None
    if topology.here is not None:
        node = topology.nodes[topology.here]
        assert len(node.masks) == node.slots
