"""Train with ``wrap`` and, beside it, by a plain loop over the whole batch: the losses are to be
the same."""

import argparse

import torch
import torch.distributed as dist
from learning import network, samples
from observations import report
from torch import nn

from distlaunch.toolkit import init, wrap

STEPS = 20

parser = argparse.ArgumentParser()
parser.add_argument("--group", metavar="BACKEND", help="what init() is to form the group with")
args = parser.parse_args()
context = init(backend=args.group)
device, rank, world = context.device, context.rank, context.world_size
images, labels = (tensor.to(device) for tensor in samples())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, share: slice) -> list[torch.Tensor]:
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[share]), labels[share])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


model = network().to(device)
plain = train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), slice(None))
bare = network()
wrapped, optimizer = wrap(bare, torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9))
mean = torch.stack(train(wrapped, optimizer, slice(rank, None, world)))
dist.all_reduce(mean)
report(
    device=device,
    backend=context.backend,
    wrapper=type(wrapped).__name__,
    world=world,
    plain=torch.stack(plain).tolist(),
    wrapped=(mean / world).tolist(),
)
