"""Save an average of sharded weights, and go back to it when the average of rank 1 cannot tell any more what it has.

argv: the directory. Each rank prints the error.
"""

import sys

import torch
from torch import nn

from distlaunch.toolkit import Checkpoint, CheckpointError, init, wrap


class Average:
    failing = False

    def __init__(self):
        self.kept = {name: each.detach().clone() for name, each in model.named_parameters()}

    def state_dict(self):
        if self.failing:
            raise ValueError("nothing is left of it")
        return dict(self.kept)

    def load_state_dict(self, state):
        self.kept = state


context = init(device="cpu")
torch.set_num_threads(1)
model = wrap(nn.Linear(8, 8))
average = Average()
checkpoint = Checkpoint(sys.argv[1], model=model, average=average)
checkpoint.save(0)
average.failing = context.rank == 1
try:
    checkpoint.resume()
except CheckpointError as error:
    print(f"rank {context.rank}: {error}", flush=True)
checkpoint.close()
