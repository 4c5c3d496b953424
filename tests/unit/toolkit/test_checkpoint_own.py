from __future__ import annotations

import io
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from distlaunch.toolkit.checkpoint.allowed_types import state_names
from distlaunch.toolkit.checkpoint.parts import Elsewhere, changed, split
from distlaunch.toolkit.checkpoint.state import TrainingState
from distlaunch.toolkit.checkpoint.unpickler import Unpickler
from tests.unit.toolkit.hostile import loaded_bytes


def statistics(value: float) -> nn.Module:
    """Return a model of a frozen parameter and of statistics."""
    model = nn.BatchNorm1d(2)
    model.requires_grad_(False)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


@pytest.mark.parametrize(("workers", "expected"), [(2, 5.0), (3, 1.0), (1, 1.0)])
def test_a_worker_gets_its_own_buffers_where_there_are_as_many_workers_and_else_rank_0s(
    workers, expected
):
    """Rank 0's are the model's. Parameters belong to no worker."""
    own = TrainingState(statistics(5.0), (), {}).snapshot(alone=False).state(1, {})["worker-1"]
    here = TrainingState(statistics(1.0), (), {})
    assert here.load_own({"worker-1": loaded_bytes(own.numpy().data)}, 1, 2, workers) == []
    here.load({}, Metadata({}, planner_data={}))
    assert here.model.running_mean.tolist() == [expected] * 2
    assert here.model.num_batches_tracked.item() == expected
    assert here.model.weight.tolist() == [1.0, 1.0]


class Masked(nn.Module):
    """It has a large mask, a small count, and values that are no tensors; each may be this
    worker's."""

    def __init__(self, count, *, extra=0, mask=True):
        super().__init__()
        self.register_buffer("mask", torch.full((1 << 20,), mask))
        self.register_buffer("count", torch.tensor([float(count), float("nan")]))
        self.extra = extra

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Masked(1), []),
        (Masked(2), ["count"]),
        (Masked(-0.0), ["count"]),
        (Masked(1, extra=3), ["_extra_state"]),
        (Masked(2, mask=False), ["count", "mask"]),
        (Masked(1).double(), ["count"]),
    ],
)
def test_a_worker_writes_of_its_buffers_and_extra_states_only_what_is_not_rank_0s(model, expected):
    rank_0s = TrainingState(Masked(1), (), {}).snapshot(alone=False).digests
    written = TrainingState(model, (), {}).snapshot(alone=False).state(1, rank_0s)["worker-1"]
    own = torch.load(io.BytesIO(written.numpy().tobytes()), weights_only=False)
    assert sorted(own["model"]) == expected
    assert ("mask" in expected) == (len(written) > 1 << 20)


def test_a_worker_without_state_of_its_own_gets_rank_0s_and_keeps_none():
    rank_0s = TrainingState(statistics(5.0), (), {}).snapshot(alone=False)
    model = statistics(5.0)
    model.running_mean.fill_(7.0)
    own = TrainingState(model, (), {}).snapshot(alone=False).state(1, rank_0s.digests)["worker-1"]
    here = TrainingState(statistics(1.0), (), {})
    here.load_own({"worker-1": loaded_bytes(own.numpy().data)}, 1, 2, 2)
    for entry in (
        "running_var",
        "num_batches_tracked",
    ):  # as they are when rank 0's model has been read
        getattr(here.model, entry).fill_(5)
    here.load({}, Metadata({}, planner_data={}))
    assert here.model.running_mean.tolist() == [7.0] * 2
    assert here.model.running_var.tolist() == [5.0] * 2
    here.model.running_mean.fill_(9.0)
    here.load({}, Metadata({}, planner_data={}))
    assert here.model.running_mean.tolist() == [9.0] * 2, "what has been taken is gone"


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


def test_a_state_that_holds_itself_is_gone_through_once():
    state = {"kept": [torch.ones(2)], "number": 1}
    state["kept"].append(state)
    state["self"] = state
    same, sharded = split(state)
    assert same is state
    assert sharded == {}
    del state["kept"]
    new = changed(state, lambda _path, value: 2 if value == 1 else value)
    assert new["number"] == 2
    assert new["self"] is state


def test_a_sharded_tensors_mark_in_checkpoints_that_there_are_is_read():
    written = b"\x80\x02cdistlaunch.toolkit.checkpoint_parts\nElsewhere\nq\x00)\x81q\x01]q\x02X\x06\x00\x00\x00('a',)q\x03ab."
    assert Unpickler(written, state_names()).load() == Elsewhere(place="('a',)")
