"""Save a checkpoint in which one rank's own part, or the extra state of all, executes code when it is unpickled; resume it.

argv: the directory for checkpoints, and whose it is: ``0``, ``1``, or ``model``. Each rank prints the error.
"""

import os
import sys

import torch
from torch import nn

from distlaunch.toolkit import Checkpoint, CheckpointError, init, wrap


class Evil:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return os.mkdir, (f"{sys.argv[1]}/executed-on-{context.rank}",)


class Part:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        print(f"rank {context.rank} has loaded", flush=True)


class Extra(nn.Linear):
    def get_extra_state(self):
        return Evil() if sys.argv[2] == "model" else None

    def set_extra_state(self, state):
        pass


context = init(device="cpu")
torch.set_num_threads(1)
model = wrap(Extra(2, 1))
mine = sys.argv[2] == str(context.rank)
checkpoint = Checkpoint(f"{sys.argv[1]}/c", model=model, part=Part({"it": Evil() if mine else None}), trust=True)
checkpoint.save(0)
checkpoint.close()
checkpoint = Checkpoint(f"{sys.argv[1]}/c", model=model, part=Part({"it": None}))
try:
    checkpoint.resume()
except CheckpointError as error:
    print(f"rank {context.rank}: {error}", flush=True)
checkpoint.close()
checkpoint = Checkpoint(f"{sys.argv[1]}/d", model=model, part=Part({"it": Evil() if mine else None}))
try:
    checkpoint.save(0)
except CheckpointError as error:
    print(f"rank {context.rank}: {error}", flush=True)
checkpoint.close()
