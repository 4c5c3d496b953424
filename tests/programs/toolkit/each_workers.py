"""Train with checkpoints what each worker has for itself: statistics, a running mean, an extra state; other data each.

argv: the directory, the steps, the step to save after, and "apart" for a DDP that broadcasts no buffers. Each step's
loss and a digest of the state are printed.
"""

import hashlib
import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distlaunch.toolkit import Checkpoint, init, wrap


class Watching(nn.Module):
    """Subtract the mean of all that it has seen, and count, the one as a buffer, the other not even as a tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.seen = [0.0] * 3

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen.append(x.detach().sum().item())
        return x - self.mean + 1e-3 * self.seen[-1]

    def get_extra_state(self):
        return torch.tensor(self.seen[-3:])

    def set_extra_state(self, state):
        self.seen = state.tolist()


where, steps, save = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
context = init(seed=3)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Watching(), nn.Linear(8, 4))
own = model[2]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
if sys.argv[4:] == ["apart"]:
    model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
else:
    model, optimizer = wrap(model, optimizer)
checkpoint = Checkpoint(where, model=model, optimizer=optimizer)


def digest():
    """Hash what this worker has."""
    hashed = hashlib.sha256()
    for value in (*model.state_dict().values(), torch.tensor(own.seen[-3:])):
        hashed.update((value.to_local() if isinstance(value, DTensor) else value).numpy().tobytes())
    return hashed.hexdigest()[:16]


start = checkpoint.resume()
print(f"rank {context.rank} begins {start} with {digest()}", flush=True)
for step in range(start, steps):
    optimizer.zero_grad()
    loss = model(torch.rand(5, 8) + context.rank).square().sum()
    loss.backward()
    optimizer.step()
    if step + 1 == save:
        checkpoint.save(step)
    print(f"rank {context.rank} step {step} loss {loss.item().hex()} state {digest()}", flush=True)
checkpoint.close()
