"""Structures in a state come back unchanged; a model that cannot be saved or loaded is refused."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque

import pytest

from tests.facts import mentions

torch = pytest.importorskip("torch")

from torch import nn

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint
from distlaunch.toolkit.checkpoint.state import TrainingState
from distlaunch.toolkit.checkpoint.storage import CheckpointError
from tests.unit.toolkit.test_checkpoint_optimizers import (
    resumed,
    saved,
    torch_has_set_its_variables,  # noqa: F401
)


class Extra(nn.Linear):
    """A module with an extra state."""

    def __init__(self, state):
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": {}},
        {1: "x", (2, 3): {None: [{}, {4.0: ()}]}},
        {"a": 1, "b": {}, "c": [1, {2: 3}]},
        [{1: 2}, {}],
        OrderedDict([(2, "b"), (1, "a")]),
        OrderedDict(b=torch.ones(1), a=[torch.tensor(2.0)]),
        [torch.ones(1), {"a": defaultdict(list, b=[torch.ones(1)])}],
        deque([torch.ones(1)]),
        {"n": torch.tensor(3), "more": {"list": [torch.tensor([1.0]), None, (1, 2)]}},
    ],
)
def test_an_extra_state_comes_back_as_it_was(tmp_path, state):
    saved(tmp_path, nn.Sequential(Extra(state)), None)
    other = nn.Sequential(Extra({"other": 1} if state == {} else state))
    other[0].set_extra_state({} if state == {} else other[0].get_extra_state())
    assert resumed(tmp_path, other, None) == 1
    assert type(other[0].state) is type(state)
    assert repr(other[0].state) == repr(state)


def test_a_change_after_the_save_is_not_in_the_checkpoint(tmp_path):
    model = Extra({1: [1]})
    checkpoint = Checkpoint(tmp_path, model=model)
    checkpoint.save(0, background=True)
    model.state[1].append(2)
    checkpoint.close()
    other = Extra(None)
    resumed(tmp_path, other, None)
    assert other.state == {1: [1]}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {1: torch.ones(2)},
            r"_extra_state has the key 1 \(int\) among tensors: it would be a str: make it one",
        ),
        (
            {"a": torch.ones(2), "b": {}},
            r"_extra_state.b is an empty dictionary among tensors: it would be lost",
        ),
        ({"a": [torch.ones(2), {2: 3}]}, r"_extra_state.a.1 has the key 2 \(int\)"),
    ],
)
def test_a_structure_with_tensors_that_would_change_is_refused_at_the_save(tmp_path, state, text):
    checkpoint = Checkpoint(tmp_path, model=Extra(state))
    with pytest.raises(CheckpointError, match=text):
        checkpoint.save(0)
    checkpoint.close()


class Nested(torch.optim.SGD):
    """Keeps nested structures of each parameter, and one in its group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["plan"] = {1: {}, "betas": {0.5: [1]}}
            for parameter in group["params"]:
                self.state[parameter] = {"seen": {3: "x", "none": {}}, "step": torch.tensor(1.0)}


def test_an_optimizers_nested_state_and_settings_come_back_as_they_were(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = Nested(model.parameters(), lr=0.1)
    optimizer.step()
    saved(tmp_path, model, optimizer)
    other = nn.Linear(2, 2)
    again = Nested(other.parameters(), lr=0.5)
    again.param_groups[0]["plan"] = None
    resumed(tmp_path, other, again)
    assert again.param_groups[0]["plan"] == {1: {}, "betas": {0.5: [1]}}
    assert [state["seen"] for state in again.state.values()] == [{3: "x", "none": {}}] * 2


def with_buffer(buffer):
    model = nn.Linear(2, 2)
    model.register_buffer("seen", buffer)
    return model


def test_a_buffer_that_is_not_dense_is_refused_when_the_checkpoint_is_made(tmp_path):
    for buffer in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse().coalesce()):
        with pytest.raises(ConfigError, match=r"buffer seen .* sparse_coo"):
            Checkpoint(tmp_path, model=with_buffer(buffer))
    with pytest.raises(ConfigError, match=r"\(ReLU\) .* no parameters"):
        Checkpoint(tmp_path, model=nn.ReLU())


@pytest.mark.parametrize("type_", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_buffer_of_float8_is_saved_as_it_is(tmp_path, type_):
    saved(tmp_path, with_buffer(torch.tensor([0.5, -2.0]).to(type_)), None)
    other = with_buffer(torch.zeros(2).to(type_))
    assert TrainingState(other, (), {}).snapshot(alone=False).own["seen"] is not None
    resumed(tmp_path, other, None)
    assert other.seen.float().tolist() == [0.5, -2.0]


@pytest.mark.parametrize(
    ("was", "here", "text"),
    [
        (torch.tensor([300, 1]), torch.uint8, "seen .int64. that do not fit its type here, uint8"),
        (
            torch.tensor([0.5, 1.0]),
            torch.int64,
            "seen .float32. that do not fit its type here, int64",
        ),
        (
            torch.tensor([1e6, 1.0]),
            torch.float16,
            "seen .float32. that do not fit its type here, float16",
        ),
    ],
)
def test_a_value_that_does_not_fit_its_buffers_type_is_refused_and_nothing_is_changed(
    tmp_path, was, here, text
):
    saved(tmp_path, with_buffer(was), None)
    other = with_buffer(torch.zeros(2, dtype=here))
    weight = other.weight.detach().clone()
    with pytest.raises(ConfigError, match=text):
        resumed(tmp_path, other, None)
    assert torch.equal(other.weight, weight)
    saved(tmp_path / "fits", with_buffer(torch.ones_like(was)), None)
    assert resumed(tmp_path / "fits", other, None) == 1
    assert other.seen.tolist() == [1, 1]


def pair(*, tied):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    if tied:
        model[1].weight = model[0].weight
    return model


def test_weights_that_are_tied_only_now_are_refused(tmp_path, caplog):
    saved(tmp_path, pair(tied=False), None)
    text = r"another model: 1 parameter .* 0\.weight and 1\.weight .* here"
    with pytest.raises(ConfigError, match=text):
        resumed(tmp_path, pair(tied=True), None)
    saved(tmp_path / "tied", pair(tied=True), None)
    for now in (True, False):
        assert resumed(tmp_path / "tied", pair(tied=now), None) == 1


def test_an_older_checkpoint_has_no_record_of_tied_weights_and_that_is_reported(
    tmp_path, caplog, monkeypatch
):
    saved(tmp_path, pair(tied=False), None)
    monkeypatch.setattr(TrainingState, "groups_template", lambda self, metadata: {})
    from distlaunch.toolkit.checkpoint import state as checkpoint_state

    kept = checkpoint_state.TrainingState.check_model

    def older(self, read, metadata):
        metadata.planner_data = {
            key: path for key, path in metadata.planner_data.items() if path != ("tied",)
        }
        return kept(self, read, metadata)

    monkeypatch.setattr(TrainingState, "check_model", older)
    assert resumed(tmp_path, pair(tied=True), None) == 1
    assert mentions(caplog.text, "one parameter", "0.weight, 1.weight")
