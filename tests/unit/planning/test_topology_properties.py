"""Plans of random hosts, filters and sizes against a separate model: sets of GPUs, one host after
the other."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Gpu, GpuInventory
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.build_topology import build_topology
from distlaunch.planning.train_options import TrainOptions


def gpus(count: int) -> GpuInventory:
    return GpuInventory(gpus=tuple(Gpu(index=i) for i in range(count)), source="nvml")


HOSTS = st.lists(st.none() | st.integers(1, 5), min_size=1, max_size=6)
SIZES = st.dictionaries(
    st.sampled_from(["num_procs", "procs_per_node", "num_gpus", "gpus_per_node", "num_nodes"]),
    st.integers(1, 12),
    max_size=2,
)
SLOT_SETS = st.none() | st.frozensets(st.integers(0, 5), min_size=1, max_size=3)
FILTERS = st.none() | st.dictionaries(st.integers(0, 5), SLOT_SETS, min_size=1, max_size=3)
"""By host: the slots that are named, None for all."""
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "spread": st.booleans(),
        "device": st.sampled_from(["auto", "cpu", "cuda"]),
        "gpus": st.permutations(range(4)).flatmap(
            lambda ids: st.integers(1, 4).map(lambda n: ",".join(map(str, ids[:n])))
        ),
    },
)


def written(chosen) -> str | None:
    if chosen is None:
        return None
    return "@".join(
        f"h{host}" + ("" if slots is None else f":{','.join(map(str, sorted(slots)))}")
        for host, slots in sorted(chosen.items())
    )


@given(
    slots=HOSTS,
    size=SIZES,
    options=OPTIONS,
    include=FILTERS,
    exclude=FILTERS,
    here=st.none() | st.integers(0, 5),
    seen=st.integers(0, 5),
    by_user=st.booleans(),
    part=st.sampled_from(["all", "node", "worker"]),
    unit=st.sampled_from(["workers", "gpus", "cores"]),
)
@settings(deadline=None)
def test_the_plan_matches_the_request(
    make_facts, slots, size, options, include, exclude, here, seen, by_user, part, unit
):
    named = tuple(
        Host(name=f"h{place}", slots=count, unit=unit) for place, count in enumerate(slots)
    )
    allocation = Allocation(
        source="flags" if by_user else "slurm", by_user=by_user, hosts=named, part=part
    )
    asked = TrainOptions(
        script="train.py", include=written(include), exclude=written(exclude), **size, **options
    )
    here = here if here is not None and here < len(named) else None
    try:
        topology = build_topology(allocation, asked, make_facts(gpus=gpus(seen)), here=here)
    except ConfigError:
        return
    assert topology == build_topology(allocation, asked, make_facts(gpus=gpus(seen)), here=here)
    planned = [int(node.host[1:]) for node in topology.nodes]
    assert planned == sorted(planned), "the source's order"
    assert all(node.slots is None or node.slots > 0 for node in topology.nodes)
    total, each = (
        size.get("num_procs", size.get("num_gpus")),
        size.get("procs_per_node", size.get("gpus_per_node")),
    )
    assert total is None or topology.world_size == total
    assert each is None or all(node.slots == each for node in topology.nodes)
    assert "num_nodes" not in size or len(planned) == size["num_nodes"]
    picked = options["gpus"].split(",") if "gpus" in options else None
    shares = ("num_procs" in size or "procs_per_node" in size) and options.get("device") == "cuda"
    for place, node in zip(planned, topology.nodes, strict=True):
        left, gone = _left(place, include, exclude)
        assert left is None or left, "a host that filters took away"
        if node.devices:
            there = picked or [str(index) for index in range(seen)]
            may = {
                device
                for at, device in enumerate(there)
                if at not in gone and (left is None or at in left)
            }
            assert set(node.devices) <= may
            assert shares or len(node.devices) == node.slots
        elif left is not None and node.slots is not None and not shares:
            assert node.slots <= len(left) or (not by_user and node.devices == ())
        if unit == "gpus" and slots[place] and topology.device == "cuda" and not shares:
            assert (node.slots or 99) <= slots[place], "no more than was granted"
    if topology.here is not None:
        node = topology.nodes[topology.here]
        assert len(node.masks) == node.slots
        left, gone = _left(planned[topology.here], include, exclude)
        there = picked or [str(index) for index in range(seen)]
        may = {
            device
            for at, device in enumerate(there)
            if at not in gone and (left is None or at in left)
        }
        assert all(set(mask) <= may for mask in node.masks)
    if not size and len(planned) < len(named):
        kept = {place for place in range(len(named)) if _left(place, include, exclude)[0] != set()}
        gone_whole = kept - set(planned)
        assert all(_left(place, include, exclude)[1] for place in gone_whole), (
            "a host that nobody took away"
        )


def _left(place, include, exclude):
    """Return the slots that the filters name on a host (None: all but the excluded ones), and the
    excluded ones."""
    picked = None if include is None else include.get(place, frozenset())
    gone = (exclude or {}).get(place, frozenset())
    if gone is None:
        return set(), frozenset()
    return (None if picked is None else set(picked) - gone), gone
