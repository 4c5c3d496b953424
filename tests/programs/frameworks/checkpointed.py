"""Train on the digits with checkpoints: stop, be killed or get signals at given steps; print digests of all state."""

import argparse
import hashlib
import os
import random
import signal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from distlaunch.toolkit.batches import StatefulBatchSampler
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint, Stopped
from digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("where")
parser.add_argument("--wrap", choices=["ddp", "fsdp"], default="ddp")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--every", type=int)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--signal", default="KILL")
parser.add_argument("--at", type=int, help="rank 1 sends itself the signal in this step of the first attempt")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pixels, digits = load_digits()
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16.0, torch.tensor(digits))
torch.manual_seed(0)
network = nn.Sequential(
    nn.Linear(64, args.hidden), nn.BatchNorm1d(args.hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(args.hidden, 10)
)
if args.wrap == "ddp":
    model = DistributedDataParallel(network)
else:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(network[0], mesh=mesh)
    fully_shard(network[4], mesh=mesh)
    model = fully_shard(network, mesh=mesh)
torch.manual_seed(1000 + rank)
random.seed(rank)
np.random.seed(rank)

optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
batches = StatefulBatchSampler(data, 64 // dist.get_world_size())
checkpoint = Checkpoint(
    args.where, model=model, optimizer=optimizer, scheduler=scheduler, sampler=batches, every=args.every
)


def digest(step):
    """Hash the whole model and optimizer, whatever has been sharded how."""
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank:
        return
    hashed = hashlib.sha256()
    for values in (states[0], *states[1]["state"].values()):
        for name in sorted(values):
            hashed.update(values[name].numpy().tobytes())
    print(f"state after {step} steps: {hashed.hexdigest()[:16]}", flush=True)


step = checkpoint.resume()
if rank == 0:
    print(f"starts at {step}, attempt {attempt}, epoch {batches.epoch}", flush=True)
digest(step)
try:
    while step < args.steps:
        for images, labels in DataLoader(data, batch_sampler=batches):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images + 0.01 * random.random() * np.random.rand()), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step == args.at and rank == 1 and attempt == 0:
                os.kill(os.getpid(), getattr(signal, f"SIG{args.signal}"))
            checkpoint.step(step)
            step += 1
            if step >= args.steps:
                break
except Stopped as stopped:
    print(f"rank {rank} stopped in step {step} with {stopped.code}", flush=True)
    raise
digest(step)
drawn = (torch.rand(1).item(), random.random(), float(np.random.rand()))
print(f"rank {rank}: loss {loss.item().hex()}, {scheduler.get_last_lr()}, draws {drawn}", flush=True)
checkpoint.close()
dist.monitored_barrier()
dist.destroy_process_group()
