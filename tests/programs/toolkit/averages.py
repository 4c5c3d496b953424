"""Train through wrap() in the ways in which scripts do, each worker on data of its own, and keep what they have learnt, in argv's folder.

That has to be the same under each backend. Each case begins with other weights on each worker.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from distlaunch.toolkit import init, wrap

STEPS = 6
WIDTH = 64


def deep():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def wrapped(model, make=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **options):
    return wrap(model, make(model.parameters()), **options)


def loss_of(model, size=8):
    return model(torch.randn(size, WIDTH)).square().mean() * 50


def clipping(_):
    model, optimizer = wrapped(deep())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


def scaler(rank):
    """Its third step has a gradient that is not finite, on one worker."""
    model, optimizer = wrapped(deep())
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scale.scale(loss_of(model) * (float("inf") if (step, rank) == (2, 1) else 1.0)).backward()
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale.step(optimizer)
        scale.update()
    assert scale.get_scale() == 512.0
    return model


def accumulation(_):
    model, optimizer = wrapped(deep())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(3):
            (loss_of(model) / 100).backward()
        optimizer.step()
    return model


def left_out(rank):
    """A step is left out where a gradient is not a number; one worker's is not."""
    model, optimizer = wrapped(deep())
    taken = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model) * (float("nan") if (step, rank) == (2, 1) else 0.01)).backward()
        if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            optimizer.step()
            taken += 1
    assert taken == STEPS - 1
    return model


def two_models(_):
    """A generator and a discriminator, whose parameters have the same names."""
    made, made_optimizer = wrapped(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)))
    reported, logged_optimizer = wrapped(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1)))
    for _ in range(STEPS):
        logged_optimizer.zero_grad()
        fake = made(torch.randn(8, WIDTH))
        (reported(fake.detach()).mean() - loss_of(reported) / 50).backward()
        logged_optimizer.step()
        made_optimizer.zero_grad()
        (-reported(fake).mean()).backward()
        made_optimizer.step()
    return nn.ModuleList([made, reported])


def closures(_):
    model, optimizer = wrapped(deep(), lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))
    rows = torch.randn(8, WIDTH)

    def closure():
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        whole = loss.detach().clone()  # by which it decides when to stop
        dist.all_reduce(whole)
        return whole / dist.get_world_size()

    for _ in range(2):
        optimizer.step(closure)
    return model


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(dist.get_world_size() + 2))

    def forward(self, rows, chosen):
        return sum(self.heads[each](rows) for each in chosen)


def heads(rank):
    """Workers use other parts of the model, and a part is used by none: it has no gradient, not one of zeros."""
    decays = torch.optim.AdamW
    model, optimizer = wrapped(Heads(), lambda parameters: decays(parameters, lr=0.1), find_unused_parameters=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH), [0, rank + 1] if step else [0, 1]).square().mean().backward()
        model(torch.randn(8, WIDTH), [0]).square().mean().backward()
        optimizer.step()
    unused = [number for number, each in enumerate(model.parameters()) if each.grad is None]
    assert unused == [number := 2 * dist.get_world_size() + 2, number + 1]
    return model


def sparse(rank):
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4))
    model, optimizer = wrapped(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randint(50, (8 + rank,))).square().mean().backward()
        optimizer.step()
    return model


class Kinds(nn.Module):
    """Tensors of many types, shapes and memory orders, and an empty one."""

    def __init__(self, rank):
        super().__init__()
        self.image = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.turning = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("rough", torch.tensor([rank + 0.5], dtype=torch.bfloat16))
        self.register_buffer("passing", torch.tensor([rank + 0.25]), persistent=False)

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}

    def forward(self, images):
        found = self.image(images.to(memory_format=torch.channels_last)).mean((2, 3)) @ self.turned.t()
        turned = (found * self.scale).to(torch.complex64) * self.turning
        return turned.abs() * self.wide + self.mask.sum() * self.rough + self.count + self.passing + self.none.sum()


def kinds(rank):
    model, optimizer = wrapped(Kinds(rank), lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 4, 6, 6)).square().mean().backward()
        optimizer.step()
    return model


def sixteen_bits(_):
    model, optimizer = wrapped(deep().to(torch.bfloat16), lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    return model


class Again(nn.Module):
    """Computes its parts again within backward, each in a backward pass of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows):
        rows = self.first(rows)
        for part in self.parts:
            rows = checkpoint(part, rows, use_reentrant=True)
        return rows


def again(_):
    model, optimizer = wrapped(Again())
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model) / 50).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


class Tied(nn.Module):
    """Uses a weight in a part that is computed again within backward, and outside it, as its embedding and its head."""

    def __init__(self):
        super().__init__()
        self.both, self.part = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows):
        inner = checkpoint(lambda inner: torch.tanh(self.part(self.both(inner))), rows, use_reentrant=True)
        return self.both(inner)


def trained_tied(dtype):
    model, optimizer = wrapped(
        Tied().to(dtype), lambda parameters: torch.optim.SGD(parameters, lr=0.1), static_graph=True
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(torch.randn(8, WIDTH, dtype=dtype, requires_grad=True)).square().mean() * 50).backward()
        optimizer.step()
    return model


def tied(_):
    return trained_tied(torch.float32)


def tied_sixteen_bits(_):
    return trained_tied(torch.bfloat16)


def made_after(_):
    model = wrap(deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return model


def tensors_of(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name.replace("module.", ""): tensor.detach() for name, tensor in named}  # DDP's word


CASES = [
    clipping, scaler, accumulation, left_out, two_models, closures, heads, sparse, kinds, sixteen_bits, again, tied,
    tied_sixteen_bits, made_after
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    with init() as context:
        for case in CASES:
            if not sys.argv[2:] or case.__name__ in sys.argv[2:]:
                torch.manual_seed(context.rank)
                found[case.__name__] = tensors_of(case(context.rank))
    torch.save(found, f"{sys.argv[1]}/{context.rank}.pt")
