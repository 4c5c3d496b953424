"""Train one network with DDP written by hand and one with the toolkit, step by step in turns: what
does one cost more?

The medians of both kinds of step are compared, as whatever else the machine does falls on single
ones; so does what a heartbeat sends twice a second, which is why its mean counts.
"""

import statistics
import sys
import time

import common
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlaunch.toolkit import heartbeat, init, wrap

steps = int(sys.argv[1])
init()
images, labels = torch.randn(32, 64), torch.randint(10, (32,))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, torch.Tensor]:
    """Return how long a step took, and its loss."""
    began = time.perf_counter_ns()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return time.perf_counter_ns() - began, loss


by_hand = DistributedDataParallel(network())
of_hand = torch.optim.AdamW(by_hand.parameters())
bare = network()
wrapped, of_toolkit = wrap(bare, torch.optim.AdamW(bare.parameters()))
hand, toolkit, beats = [], [], []
for step in range(steps):
    for toolkits in (False, True) if step % 2 else (True, False):
        if toolkits:
            taken, loss = train(wrapped, of_toolkit)
            began = time.perf_counter_ns()
            heartbeat(step=step, loss=loss)
            beats.append(time.perf_counter_ns() - began)
            toolkit.append(taken)
        else:
            hand.append(train(by_hand, of_hand)[0])
usual = statistics.median(hand)
more = statistics.median(toolkit) - usual + statistics.mean(beats)
common.stamp("step_ns", int(usual))
common.stamp("beat_ns", int(statistics.mean(beats)))
common.stamp("overhead_ppm", int(more / usual * 1e6))
