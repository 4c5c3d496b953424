"""Train with Horovod through the toolkit, with checkpoints: argv is the directory, the steps, and when to save."""

import sys

import torch
from torch import nn

from distlaunch.toolkit import Checkpoint, init, wrap

context = init(seed=3)
torch.set_num_threads(1)
model = nn.Linear(8, 4)
model, optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=0.1))
checkpoint = Checkpoint(sys.argv[1], model=model, optimizer=optimizer)
start = checkpoint.resume()
if sys.argv[3] == "fresh":
    checkpoint.save(0)  # which must not step the optimizer
for step in range(start, int(sys.argv[2])):
    optimizer.zero_grad()
    loss = model(torch.rand(5, 8)).square().sum()
    loss.backward()
    optimizer.step()
    if str(step + 1) == sys.argv[3]:
        checkpoint.save(step)
    print(f"rank {context.rank} step {step} loss {loss.item().hex()}", flush=True)
checkpoint.close()
