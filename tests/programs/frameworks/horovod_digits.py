"""Train on scikit-learn's digits as a script of Horovod's users does, without a word of ours in it.

Arguments: the batch of a worker, a file for checkpoints (or -), the epoch before which the last rank fails in the first
attempt (or -1). Prints the mean loss of all workers of each step, and the accuracy.
"""

import os
import sys

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from digits import load_digits

EPOCHS = 8
batch, checkpoint, failing = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
pixels, digits = load_digits()
images = torch.tensor(pixels, dtype=torch.float32) / 16
labels = torch.tensor(digits)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
held_out, rest = order[:360], order[360:]
train_set = TensorDataset(images[rest], labels[rest])
sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_set, batch_size=batch, sampler=sampler, drop_last=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
# Before its state is loaded, which it would not take along.
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
begin = 0
if hvd.rank() == 0 and os.path.exists(checkpoint):
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["epoch"] + 1
begin = hvd.broadcast_object(begin, root_rank=0)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
if begin:
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(begin, EPOCHS):
    if epoch == failing and hvd.rank() == hvd.size() - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("as it was told to")
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"loss {epoch}.{step} {float(mean):.6f}", flush=True)
    if hvd.rank() == 0 and checkpoint != "-":
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, checkpoint + ".part"
        )
        os.replace(checkpoint + ".part", checkpoint)

with torch.no_grad():
    right = (model(images[held_out]).argmax(dim=1) == labels[held_out]).float().mean()
if hvd.rank() == 0:
    print(f"accuracy {float(right):.4f}", flush=True)
hvd.barrier()
hvd.shutdown()
