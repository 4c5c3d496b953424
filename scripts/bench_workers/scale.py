"""Train for so many steps with a batch that does not depend on the number of workers, then wait to
be looked at."""

import os
import sys
import time

import common
import torch
from torch import nn

from distlaunch.toolkit import heartbeat, init, wrap

steps = int(sys.argv[1])
context = init()
images, labels = torch.randn(128, 64), torch.randint(10, (128,))
network = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
model, optimizer = wrap(network, torch.optim.AdamW(network.parameters()))
common.stamp("pid", os.getpid())
for step in range(-20, steps):
    if step == 0:
        common.stamp("cpu_before", time.process_time_ns())
        common.stamp("began", time.monotonic_ns())
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    heartbeat(step=step, loss=loss)
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")
common.stamp("cpu_after", time.process_time_ns())
common.stamp("done", time.monotonic_ns())
while not os.path.exists(f"{common.BENCH_DIR}/looked"):
    time.sleep(0.02)
