"""Train within `with init()`, and leave the block while the last checkpoint is still being written."""

import sys

import torch
from torch import nn

from distlaunch.toolkit import Checkpoint, init, wrap

with init() as context:
    model = nn.Linear(2000, 2000)
    model, optimizer = wrap(model, torch.optim.AdamW(model.parameters()))
    checkpoint = Checkpoint(sys.argv[1], model=model, optimizer=optimizer, every=2)
    for step in range(checkpoint.resume(), 4):
        optimizer.zero_grad()
        model(torch.randn(4, 2000)).sum().backward()
        optimizer.step()
        checkpoint.step(step)
