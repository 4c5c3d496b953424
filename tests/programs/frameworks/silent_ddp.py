"""Train with DDP on gloo and print nothing in a step: ``silent_ddp.py HOW``.

In its third step rank 1 computes for long, in a forward pass and without a heartbeat, until the sign ``enough`` is up
(``long``), or waits for ever for a lock (``stuck``); rank 0 waits for it in the backward pass.
"""

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from signs import sign

how = sys.argv[1]
rank = int(os.environ["RANK"])
torch.set_num_threads(1)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        if rank == 1 and self.steps == 3:
            print("the third step begins", flush=True)
            sign("third-step", str(os.getpid()))
            hold_up(x)
            print("the third step goes on", flush=True)
        return self.layer(x)


def hold_up(x):
    if how == "stuck":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    big = torch.ones(1500, 1500)
    while not os.path.exists("enough"):
        big = big @ big / 1500


dist.init_process_group("gloo")
model = DistributedDataParallel(Layer())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
print(f"done {rank}", flush=True)
os._exit(0)  # the end of the interpreter is silent, too, and slow on a busy machine
