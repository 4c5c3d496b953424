"""Properties of every plan from surveys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.errors import NodesError
from distlaunch.planning.build_plan import bind

SLOTS = st.lists(st.integers(1, 5), min_size=1, max_size=7)


@given(slots=SLOTS, data=st.data())
def test_ranks_are_contiguous_every_worker_is_there_once_and_sizes_agree(
    make_planner, make_surveys, slots, data
):
    spares = data.draw(st.integers(0, len(slots) - 1), label="spares")
    training = len(slots) - spares
    elastic = data.draw(st.booleans(), label="elastic")
    fewest = data.draw(st.integers(1, training), label="fewest") if elastic else training
    hosts = ",".join(f"h{place}:{count}" for place, count in enumerate(slots))
    bounds = (fewest, training) if fewest < training else training
    made = make_planner(hosts=hosts, num_nodes=bounds, spares=spares)
    there = data.draw(st.sets(st.sampled_from(range(len(slots)))), label="there")
    surveys = {
        number: reported for number, reported in make_surveys(made).items() if number in there
    }
    if len(there) < fewest:
        with pytest.raises(NodesError):
            made.plan_attempt(surveys)
        return
    node_numbers, plan = made.plan_attempt(surveys)
    assert list(node_numbers) == sorted(there)[: min(training, len(there))]
    assert [node.host for node in plan.nodes] == [f"h{number}" for number in node_numbers]
    assert [node.slots for node in plan.nodes] == [slots[number] for number in node_numbers]
    world = sum(slots[number] for number in node_numbers)
    assert [worker.rank for worker in plan.workers] == list(range(world))
    assert plan.env["WORLD_SIZE"] == str(world) == str(plan.world_size)
    assert plan.env["GROUP_WORLD_SIZE"] == str(len(node_numbers))
    for rank, node in enumerate(plan.nodes):
        own = [worker for worker in plan.workers if worker.node_rank == rank]
        assert [worker.local_rank for worker in own] == list(range(node.slots))
        assert own[0].rank == plan.first_ranks[rank]
        assert {worker.env["LOCAL_WORLD_SIZE"] for worker in own} == {str(node.slots)}
        assert {worker.env["NODE_RANK"] for worker in own} == {str(rank)}
    assert {node.host for node in plan.spares} == {
        f"h{number}" for number in there - set(node_numbers)
    }
    bound = bind(plan, attempt=3, master_port=4711)
    assert [worker.env["TORCHELASTIC_ERROR_FILE"] for worker in bound.workers] == [
        f"/r/job-1/attempt-3/rank-{rank}.error.json" for rank in range(world)
    ]
    assert bind(bound, attempt=3, master_port=4711) == bound


@given(slots=SLOTS, seen=st.lists(st.integers(0, 4), min_size=7, max_size=7), whole=st.booleans())
def test_composing_the_same_again_gives_the_same(make_planner, make_surveys, slots, seen, whole):
    made = make_planner(
        hosts=",".join(f"h{place}{'' if whole else f':{n}'}" for place, n in enumerate(slots))
    )
    gpus = max(slots) if any(seen) else 0
    surveys = make_surveys(made, seen=gpus)
    assert made.plan_attempt(surveys) == made.plan_attempt(dict(reversed(surveys.items())))
