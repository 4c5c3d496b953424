"""What each worker has for itself, and what of it is another's."""

from __future__ import annotations

from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.checkpoint.metadata import Metadata  # noqa: E402

from distlaunch.toolkit.checkpoint_parts import changed, split  # noqa: E402
from distlaunch.toolkit.checkpoint_state import Trained  # noqa: E402


def statistics(value: float) -> nn.Module:
    """Make a model of a frozen parameter and of statistics."""
    model = nn.BatchNorm1d(2)
    model.requires_grad_(False)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


@pytest.mark.parametrize(("workers", "expected"), [(2, 5.0), (3, 1.0), (1, 1.0)])
def test_a_worker_gets_its_own_buffers_where_there_are_as_many_workers_and_else_rank_0s(workers, expected):
    """Rank 0's are the model's, which are read before; parameters are nobody's own."""
    own = Trained(statistics(5.0), (), {}).state(1)["worker-1"]
    here = Trained(statistics(1.0), (), {})
    assert here.take_own({"worker-1": own}, 1, 2, workers) == []
    here.take({}, Metadata({}, planner_data={}))
    assert here.model.running_mean.tolist() == [expected] * 2
    assert here.model.num_batches_tracked.item() == expected
    assert here.model.weight.tolist() == [1.0, 1.0]


class Pair(NamedTuple):
    one: int
    other: list[int]


def test_of_a_parts_state_only_what_is_changed_is_copied_and_all_keeps_its_kind():
    state = nn.BatchNorm1d(2).state_dict()
    state["more"] = (Pair(1, [2, 3]), {"same": [1]})
    new = changed(state, lambda path, value: "x" if path == ("more", 0, 1, 1) else value)
    assert new["more"] == (Pair(1, [2, "x"]), {"same": [1]})
    assert type(new["more"][0]) is Pair
    assert type(new) is type(state)
    assert new._metadata == state._metadata, "by which modules know of what version it is"
    assert state["more"][0].other == [2, 3]
    assert new["more"][1] is state["more"][1]
    assert split(state) == (state, {})
