"""Train one network with DDP written by hand and one with the toolkit, in turns: what does a step cost more?"""

import statistics
import sys
import time

import common
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlaunch.toolkit import heartbeat, init, wrap

BLOCK = 50
"""Steps of one kind before the other's turn: two such blocks that follow each other are compared."""

pairs = int(sys.argv[1]) // (2 * BLOCK)
init()
images, labels = torch.randn(32, 64), torch.randint(10, (32,))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def block(model: nn.Module, optimizer: torch.optim.Optimizer, *, toolkit: bool) -> float:
    began = time.perf_counter()
    for step in range(BLOCK):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if toolkit:
            heartbeat(step=step, loss=loss)
    return time.perf_counter() - began


bare = network()
by_hand = DistributedDataParallel(bare)
of_hand = torch.optim.AdamW(by_hand.parameters())
bare = network()
wrapped, of_toolkit = wrap(bare, torch.optim.AdamW(bare.parameters()))
block(by_hand, of_hand, toolkit=False)
block(wrapped, of_toolkit, toolkit=True)
times: list[tuple[float, float]] = []
for number in range(pairs):
    if number % 2:
        second = block(wrapped, of_toolkit, toolkit=True)
        times.append((block(by_hand, of_hand, toolkit=False), second))
    else:
        first = block(by_hand, of_hand, toolkit=False)
        times.append((first, block(wrapped, of_toolkit, toolkit=True)))
common.stamp("step_ns", int(statistics.median(hand for hand, _ in times) / BLOCK * 1e9))
common.stamp("overhead_ppm", int((statistics.median(toolkit / hand for hand, toolkit in times) - 1) * 1e6))
