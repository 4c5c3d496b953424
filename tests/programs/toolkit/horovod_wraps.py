"""Wrap under Horovod what was wrapped before, copies of it, and optimizers of many kinds; go on after a failed backward.

Each case tells the norm of the parameters after some clipped steps, as far as that is exact: all workers' is the same.
"""

import contextlib
import copy
import gc
import io
import weakref

import torch
from torch import nn

from distlaunch.toolkit import init, wrap


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        raise ArithmeticError


def layers():
    return nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 8))


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(8, 32)).square().mean() * 20).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def tell(case, model):
    print(f"{case}: {' '.join(each.double().norm().item().hex() for each in model.parameters())}")


def again():
    """Wrapped twice, and as a part of a model that is wrapped: what was last averages, and nothing twice at a time."""
    part = layers()
    wrap(part, sgd(part))
    wrap(part)
    whole = nn.Sequential(part, nn.Linear(8, 8))
    wrap(whole)
    train(whole, sgd(whole))
    train(part, sgd(part))
    tell("again", whole)
    stream = io.BytesIO()
    torch.save(part, stream)
    stream.seek(0)
    for free in (copy.deepcopy(part), torch.load(stream, weights_only=False)):
        if context.rank == 0:  # alone
            train(free, sgd(free))
    kept = [weakref.ref(part), weakref.ref(part[0].weight)]
    del part, whole, free
    gc.collect()
    assert [each() for each in kept] == [None, None]


def failed():
    model, optimizer = wrap(model := layers(), sgd(model))
    for _ in range(2):
        try:
            model[2](model[1](Fails.apply(model[0](torch.randn(8, 32))))).sum().backward()
        except ArithmeticError:
            optimizer.zero_grad()
        train(model, optimizer)
    tell("failed", model)
    rows = torch.ones(8, 32, dtype=torch.bfloat16)
    alike = []
    for fails in (False, True):  # with gradients in place, of which nothing may come from the pass that has failed
        torch.manual_seed(context.rank)
        model = wrap(layers().bfloat16())
        model(rows).sum().backward()
        model.zero_grad(set_to_none=False)
        if fails:
            with contextlib.suppress(ArithmeticError):
                model[2](model[1](Fails.apply(model[0](rows)))).sum().backward()
            model.zero_grad(set_to_none=False)
        model(rows).square().mean().backward()
        alike.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(*alike, rtol=0, atol=0)


def of_16_bits():
    model = layers().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 + context.rank)
    for _ in range(2 + context.rank):
        model(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    model, optimizer = wrap(model, optimizer)
    [learnt, *_] = optimizer.state_dict()["state"].values()
    average = learnt["exp_avg"]
    print(
        "state:", learnt["step"].item(), average.dtype, average.double().sum().item(), optimizer.param_groups[0]["lr"]
    )
    tell("of 16 bits", model)


def of_one_vector():
    model = layers()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(8, 32)).square().mean()
        loss.backward()
        return loss

    if context.rank == 0:
        optimizer.step(closure)
    model, optimizer = wrap(model, optimizer)
    optimizer.step(closure)
    tell("of one vector", model)


torch.set_num_threads(1)
with init() as context:
    again()
    failed()
    of_16_bits()
    of_one_vector()
