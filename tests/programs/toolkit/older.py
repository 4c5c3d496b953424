"""Save a checkpoint with a sharded average, an extra state and settings, or resume one, and print what is in it.

argv: ``save`` or ``resume``, and the directory. ``tests/data/checkpoints/README.md`` has the command that made one.
"""

import sys

import torch
from torch import nn

from distlaunch.toolkit import Checkpoint, init, wrap


class Counted(nn.Linear):
    """A module with an extra state."""

    counts: dict = {}

    def get_extra_state(self):
        return self.counts

    def set_extra_state(self, state):
        self.counts = state


class Average:
    def __init__(self):
        self.kept = {name: each.detach().clone() for name, each in model.named_parameters()}

    def state_dict(self):
        return {"kept": self.kept, "made": (1, {2: None})}

    def load_state_dict(self, state):
        self.kept, self.made = state["kept"], state["made"]


context = init(device="cpu", seed=3)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 4), Counted(4, 2))
model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5))
average = Average()
checkpoint = Checkpoint(sys.argv[2], model=model, optimizer=optimizer, average=average)
counted = next(each for each in model.modules() if isinstance(each, Counted))
if sys.argv[1] == "save":
    counted.counts = {1: {}, "two": [3]}
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(2)
        for each in average.kept.values():
            each.fill_(7)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(0)
else:
    print(f"rank {context.rank} resumed {checkpoint.resume()}: {counted.counts} {average.made}", flush=True)
    kept = [getattr(each, "full_tensor", lambda each=each: each)().unique().tolist() for each in average.kept.values()]
    print(f"rank {context.rank} averages: {kept}", flush=True)
checkpoint.close()
