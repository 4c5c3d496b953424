"""Train a small network on scikit-learn's digits with DeepSpeed, or alone with torch; print the loss of each step.

The configuration comes from the arguments, as ``deepspeed.add_config_arguments`` has them; without one, one process
takes the whole batch.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from digits import load_digits

BATCH, STEPS = 64, 24

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed_config")
args = parser.parse_args()

pixels, digits = load_digits()
images = torch.tensor(pixels, dtype=torch.float32) / 16.0
labels = torch.tensor(digits)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
rank, size, engine = 0, 1, None
if args.deepspeed_config:
    import deepspeed

    assert args.local_rank in (None, int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(args=args, model=network, optimizer=optimizer)
    rank, size = dist.get_rank(), dist.get_world_size()

losses = []
for step in range(STEPS):
    batch = slice(step * BATCH + rank, (step + 1) * BATCH, size)
    loss = nn.functional.cross_entropy((engine or network)(images[batch]), labels[batch])
    mean = loss.detach().clone()
    if engine is None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        engine.backward(loss)
        engine.step()
        dist.all_reduce(mean)
    losses.append(mean.item() / size)
if rank == 0:
    print("losses", json.dumps(losses), flush=True)
if engine is not None:
    print("stage", engine.zero_optimization_stage(), "of", size, flush=True)
    dist.monitored_barrier()
    dist.destroy_process_group()
