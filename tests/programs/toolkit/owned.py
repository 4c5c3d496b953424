"""Save a model of which DDP ignores a parameter: trained by each rank for itself, or frozen and other on each rank.

argv: the directory, and ``trained`` or ``frozen``. Each rank prints the error, or what it gets back.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlaunch.toolkit import Checkpoint, CheckpointError, init

context = init(device="cpu")
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
expert = model[1].weight
with torch.no_grad():
    expert.fill_(context.rank + 5)
expert.requires_grad_(sys.argv[2] == "trained")
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
model = DistributedDataParallel(model)
checkpoint = Checkpoint(sys.argv[1], model=model)
try:
    checkpoint.save(0)
except CheckpointError as error:
    print(f"rank {context.rank}: {error}", flush=True)
else:
    with torch.no_grad():
        expert.fill_(0)
    checkpoint.resume()
    print(f"rank {context.rank}: {expert.tolist()}", flush=True)
checkpoint.close()
