"""Train models of many shapes with wrap() on the halves of a batch, beside the same unwrapped ones on the whole of it.

Each case prints what was sharded for itself, and how far the losses are apart at most.
"""

import copy
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distlaunch.toolkit import init, wrap

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.register_buffer("seen", torch.tensor([True, False]))

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


class Listed(nn.Module):
    """Blocks in a list, and an output that shares its weights with the input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.extra = nn.ModuleList([nn.ReLU()])
        self.last = nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.extra[0](x))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        x = x.view(-1, 2, 8)
        return self.inner(self.attention(x, x, x, need_weights=False)[0].flatten(1))


class Language(nn.Module):
    """A Transformers model, as it is, with its loss."""

    def __init__(self):
        super().__init__()
        size = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.inner = GPT2LMHeadModel(GPT2Config(**size, **dropout, bos_token_id=0, eos_token_id=0))
        self._no_split_modules = self.inner._no_split_modules

    def forward(self, x):
        return self.inner(x.abs().mul(40).long().clamp(max=31)).logits


def conv():
    model = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 16))
    return model.to(memory_format=torch.channels_last)


def train(case, make, *, tolerance=2e-5, before=0, **options):
    torch.manual_seed(0)
    alone = make()
    tried = copy.deepcopy(alone)
    if context.rank:  # the others start with rank 0's
        with torch.no_grad():
            for parameter in tried.parameters():
                parameter.zero_()
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    half = batch.chunk(context.world_size)[context.rank]
    plain, own = (torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (alone, tried))
    scheduler = torch.optim.lr_scheduler.StepLR(own, 2, gamma=0.5)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.5)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    for _ in range(before):  # an optimizer that has learnt something
        step(alone, plain, batch)
    if before:
        tried.load_state_dict(alone.state_dict())
        own.load_state_dict(copy.deepcopy(plain.state_dict()))
    model, optimizer = wrap(tried, own, **options)
    assert optimizer is own
    worst = 0.0
    for _ in range(4):
        loss, wanted = step(model, optimizer, half), step(alone, plain, batch)
        scheduler.step()
        plain_scheduler.step()
        dist.all_reduce(loss)
        worst = max(worst, abs(loss.item() / context.world_size - wanted.item()))
    assert worst < tolerance, (case, worst)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) == (context.strategy == "fsdp")
        assert parameter in own.state, "the optimizer trains the model's parameters"
    for name, value in alone.state_dict().items():
        found = model.state_dict()[name if context.strategy == "fsdp" else f"module.{name}"]
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.allclose(found.float(), value.float(), atol=max(1e-4, tolerance)), (case, name)
    parts = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    print(f"{case}:", " ".join(name or "whole" for name in parts), flush=True)


warnings.simplefilter("ignore", FutureWarning)
context = init()
train("listed", Listed)
train("grad", Listed, sharding="grad")
train("hybrid", Listed, sharding="hybrid")
train("classes", Listed, wrap_classes="Block")
train("by size", Listed, wrap_min_params=256)
train("attending", Attending, wrap_min_params=200)
train("again", Listed, activation_checkpointing=True)
train("offloaded", Listed, cpu_offload=True)
train("language", Language)
train("learnt", Listed, before=3)
train("conv", conv)
if context.strategy == "fsdp":
    train("bf16", Listed, precision="bf16", tolerance=0.05)
else:
    train("unused", Listed, find_unused_parameters=True, bucket_mb=1)
    train("static", Listed, static_graph=True)
