from __future__ import annotations

import copy
import os

import pytest

from tests.facts import mentions

torch = pytest.importorskip("torch")

from torch import nn

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.batches import StatefulBatchSampler
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint
from distlaunch.toolkit.checkpoint.state import TrainingState


@pytest.fixture(autouse=True, scope="module")
def torch_has_set_its_variables():
    """Expect torch to set TORCHINDUCTOR_CACHE_DIR at an optimizer's first step."""
    before = dict(os.environ)
    step(*made())
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


def made(kind=torch.optim.Adam, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, kind(model.parameters(), **{"lr": 0.1, **options})


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(6.0).reshape(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def everything(model, *optimizers):
    return [copy.deepcopy(each.state_dict()) for each in (model, *optimizers)]


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def saved(where, model, optimizer, number=0, **parts):
    checkpoint = Checkpoint(where, model=model, optimizer=optimizer, **parts)
    checkpoint.save(number)
    checkpoint.close()


def resumed(where, model, optimizer, **parts):
    checkpoint = Checkpoint(where, model=model, optimizer=optimizer, **parts)
    try:
        return checkpoint.resume()
    finally:
        checkpoint.close()


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_a_save_before_the_first_step_changes_nothing(tmp_path, kind):
    model, optimizer = made(kind)
    before = everything(model, optimizer)
    saved(tmp_path, model, optimizer)
    assert same(everything(model, optimizer), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_of_two_optimizers_one_may_start_later(tmp_path):
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    both = nn.ModuleList([first, second])
    optimizers = [torch.optim.Adam(part.parameters()) for part in both]
    step(first, optimizers[0])
    before = everything(both, *optimizers)
    saved(tmp_path, both, optimizers)
    assert same(everything(both, *optimizers), before)
    others = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    again = [torch.optim.Adam(part.parameters(), lr=0.5) for part in others]
    step(others[1], again[1])
    resumed(tmp_path, others, again)
    assert same(everything(others, *again), before), (
        "and the one that had not started has not started here either"
    )


def test_gradients_without_a_state_are_those_of_the_same_optimizer(tmp_path):
    """As while gradients are accumulated, or after a step that a GradScaler has skipped."""
    model, optimizer = made()
    model(torch.ones(2, 3)).sum().backward()
    saved(tmp_path, model, optimizer)
    other, again = made()
    step(other, again)
    assert resumed(tmp_path, other, again) == 1
    assert not again.state
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "kind", [torch.optim.LBFGS, torch.optim.Adam, torch.optim.Adagrad, torch.optim.Rprop]
)
def test_a_training_goes_on_as_if_it_had_not_stopped(tmp_path, kind):
    model, optimizer = made(kind)
    for _ in range(3):
        step(model, optimizer)
    saved(tmp_path, model, optimizer)
    other, again = made(kind)
    resumed(tmp_path, other, again)
    assert same(everything(other, again), everything(model, optimizer))
    step(model, optimizer)
    step(other, again)
    assert same(everything(other, again), everything(model, optimizer))


class Master(torch.optim.SGD):
    """Keeps a copy in fp32 of each parameter, and values in types of its own."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float().clone()
                    state["more"] = {"both": [parameter.detach() > 0, state["master"].double() / 3]}
                    state["like"] = parameter.detach().clone()
                state["master"] += 1 / 3
                state["step"] = torch.tensor(7, dtype=torch.int32)


@pytest.mark.parametrize("here", [torch.bfloat16, torch.float64])
def test_state_of_an_optimizer_keeps_its_type(tmp_path, here):
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Master(model.parameters(), lr=0.1)
    optimizer.step()
    saved(tmp_path, model, optimizer)
    other = nn.Linear(3, 2).to(here)
    again = Master(other.parameters(), lr=0.1)
    resumed(tmp_path, other, again)
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        state = optimizer.state[old]
        assert same(again.state[new], {**state, "like": state["like"].to(here)})
        types = [
            value.dtype for value in (again.state[new]["master"], *again.state[new]["more"]["both"])
        ]
        assert types == [torch.float32, torch.bool, torch.float64]
        assert again.state[new]["like"].dtype == here, "it had the parameter's type, and has it"


class Scaled(nn.Module):
    """Its weight has a shape, and its scale that of a count of steps."""

    def __init__(self, dtype):
        super().__init__()
        self.weight, self.scale = (
            nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((2, 3), ())
        )

    def forward(self, x):
        return self.scale * x.to(self.scale.dtype) @ self.weight.T


@pytest.mark.parametrize("here", [torch.bfloat16, torch.float16])
def test_the_count_of_steps_goes_on_where_the_model_is_converted(tmp_path, here):
    """bf16 cannot represent 301, and 256 + 1 stays 256 there."""
    model = Scaled(torch.float32)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(301):
        step(model, optimizer)
    saved(tmp_path, model, optimizer)
    other = Scaled(here)
    again = torch.optim.Adam(other.parameters())
    resumed(tmp_path, other, again)
    step(other, again)
    counts = [state["step"] for state in again.state.values()]
    assert [(count.item(), count.dtype) for count in counts] == [(302, torch.float32)] * 2
    assert {state["exp_avg"].dtype for state in again.state.values()} == {here}


def test_a_fused_optimizer_has_its_counts_of_steps_as_it_needs_them(tmp_path):
    model, optimizer = made(fused=True)
    step(model, optimizer)
    saved(tmp_path, model, optimizer)
    other, again = made(fused=True)
    resumed(tmp_path, other, again)
    assert {state["step"].dtype for state in again.state.values()} == {torch.float32}
    step(other, again)


def groups_of(model, numbers, rates):
    """Return a group for each tuple of numbers of parameters."""
    parameters = list(model.parameters())
    return [
        {"params": [parameters[n] for n in each], "lr": lr}
        for each, lr in zip(numbers, rates, strict=True)
    ]


def rates(model, optimizers):
    """Return the learning rate of each parameter by its name."""
    of = {
        id(each): group["lr"]
        for one in optimizers
        for group in one.param_groups
        for each in group["params"]
    }
    return {name: of[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("older", [False, True])
def test_groups_in_another_order_keep_the_settings_and_states_of_their_parameters(
    tmp_path, older, monkeypatch
):
    if older:  # a checkpoint that does not say the class of each group's optimizer
        monkeypatch.setattr(TrainingState, "_group_classes", lambda self: [])
    model, _ = made()
    optimizer = torch.optim.Adam(groups_of(model, [(0, 2), (1, 3)], [0.1, 0.2]))
    step(model, optimizer)
    saved(tmp_path, model, optimizer)
    monkeypatch.undo()
    other, _ = made()
    again = torch.optim.Adam(groups_of(other, [(3, 1), (2, 0)], [0.5, 0.6]))
    assert resumed(tmp_path, other, again) == 1
    assert (
        rates(other, [again])
        == rates(model, [optimizer])
        == dict(zip(NAMES, (0.1, 0.2, 0.1, 0.2), strict=True))
    )
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        assert same(again.state[new], optimizer.state[old])


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("older", [False, True])
def test_optimizers_in_another_order_keep_the_settings_and_states_of_their_parameters(
    tmp_path, older, monkeypatch
):
    if older:
        monkeypatch.setattr(TrainingState, "_group_classes", lambda self: [])
    model, _ = made()
    optimizers = [
        torch.optim.Adam(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model[1].parameters(), lr=0.2),
    ]
    model(torch.ones(2, 3)).sum().backward()
    for each in optimizers:
        each.step()
    saved(tmp_path, model, optimizers)
    monkeypatch.undo()
    other, _ = made()
    again = [
        torch.optim.SGD(other[1].parameters(), lr=0.5),
        torch.optim.Adam(other[0].parameters(), lr=0.6),
    ]
    assert resumed(tmp_path, other, again) == 1
    assert rates(other, again) == dict(zip(NAMES, (0.1, 0.1, 0.2, 0.2), strict=True))
    assert same(again[1].state_dict(), optimizers[0].state_dict())


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([(0, 1, 2), (3,)], r"1 entry differs: 1\.weight is in another parameter group here"),
        ([(0,), (1, 2, 3)], r"1 entry differs: 0\.bias is in another parameter group here"),
        (
            [(0, 1, 2, 3)],
            r"1\.bias is in another parameter group here; 1\.weight is in another parameter group here",
        ),
        (
            [(0,), (1,), (2, 3)],
            r"0\.bias is in another parameter group here|0\.weight is in another",
        ),
        ([(0, 1), (2,)], r"1\.bias is only in the checkpoint"),
        ([(0, 1), (2, 3), ()], r"there are 3 parameter groups here and 2 in the checkpoint"),
    ],
)
def test_other_sets_of_parameters_are_refused_by_name_and_nothing_is_changed(
    tmp_path, numbers, text
):
    model, _ = made()
    optimizer = torch.optim.Adam(groups_of(model, [(0, 1), (2, 3)], [0.1, 0.2]))
    step(model, optimizer)
    saved(tmp_path, model, optimizer)
    other, _ = made()
    again = torch.optim.Adam(groups_of(other, numbers, [0.5] * len(numbers)))
    before = everything(other, again)
    with pytest.raises(ConfigError, match=f"another optimizer: .*{text}"):
        resumed(tmp_path, other, again)
    assert same(everything(other, again), before)


def test_a_parameter_whose_optimizer_is_of_another_class_is_named(tmp_path):
    model, _ = made()
    kinds = torch.optim.Adam, torch.optim.AdamW
    saved(
        tmp_path, model, [kind(part.parameters()) for kind, part in zip(kinds, model, strict=True)]
    )
    other, _ = made()
    swapped = [kind(part.parameters()) for kind, part in zip(kinds[::-1], other, strict=True)]
    text = r"2 entries differ: 0\.weight, 0\.bias: the optimizer was Adam, and is AdamW here; 1\.weight, 1\.bias"
    with pytest.raises(ConfigError, match=text):
        resumed(tmp_path, other, swapped)


def test_an_optimizer_whose_first_group_is_empty_is_saved_and_resumed(tmp_path):
    model, _ = made()
    optimizer = torch.optim.Adam(groups_of(model, [(), (0, 1, 2, 3)], [0.1, 0.2]))
    saved(tmp_path, model, optimizer)
    assert not optimizer.state
    step(model, optimizer)
    saved(tmp_path / "more", model, optimizer)
    other, _ = made()
    again = torch.optim.Adam(groups_of(other, [(0, 1, 2, 3), ()], [0.5, 0.6]))
    assert resumed(tmp_path, other, again) == 1
    assert resumed(tmp_path / "more", other, again) == 1
    assert [group["lr"] for group in again.param_groups] == [0.2, 0.1]
    assert len(again.state) == 4


class Counting(nn.Linear):
    """A module with a state of its own."""

    seen = 0

    def get_extra_state(self):
        return {"n": self.seen, "more": [torch.tensor(self.seen), None]}

    def set_extra_state(self, state):
        assert state["more"][0] == state["n"]
        self.seen = state["n"]


def test_a_module_with_extra_state_gets_it_back(tmp_path):
    model = Counting(2, 2)
    model.seen = 7
    saved(tmp_path, model, None)
    other = Counting(2, 2)
    assert resumed(tmp_path, other, None) == 1
    assert other.seen == 7


def test_an_expanded_buffer_is_refused_when_it_is_made(tmp_path):
    model = nn.Linear(1, 1)
    model.register_buffer("seen", torch.arange(3).expand(2, 3))
    with pytest.raises(ConfigError, match=r"buffer seen .* expanded .*clone"):
        Checkpoint(tmp_path, model=model)
    model.register_buffer("seen", torch.arange(3).expand(2, 3), persistent=False)
    Checkpoint(tmp_path, model=model).close()


def test_a_scaler_that_was_off_leaves_one_that_is_on_as_it_is(tmp_path, caplog):
    model, optimizer = made()
    saved(tmp_path, model, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert resumed(tmp_path, model, optimizer, scaler=scaler) == 1
    assert scaler.get_scale() == 4.0
    assert mentions(caplog.text, "nothing", "scaler")
    saved(tmp_path / "on", model, optimizer, scaler=scaler)
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert resumed(tmp_path / "on", model, optimizer, scaler=off) == 1


def test_a_sampler_that_refuses_does_so_before_anything_is_loaded(tmp_path):
    model, optimizer = made()
    step(model, optimizer)
    saved(tmp_path, model, optimizer, sampler=StatefulBatchSampler(range(8), 2))
    other, again = made()
    before = everything(other, again)
    with pytest.raises(ConfigError, match=f"{tmp_path}/step-000000001 .* sampler .* 8 samples"):
        resumed(tmp_path, other, again, sampler=StatefulBatchSampler(range(9), 2))
    assert same(everything(other, again), before)


def test_missing_or_changed_parts_of_the_script_are_reported(tmp_path, caplog):
    model, optimizer = made()
    saved(tmp_path, model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    other, again = made()
    resumed(tmp_path, other.double(), again)
    assert mentions(caplog.text, "scheduler", "not given")
    assert mentions(caplog.text, "0.weight", "float64", "float32")
