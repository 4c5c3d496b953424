"""A small training with checkpoints."""

# ruff: noqa: NPY002 - numpy's global generator is what is saved

from __future__ import annotations

import os
import random
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint


class Training:
    """A model of few parameters that trains on random numbers."""

    def __init__(
        self, *, hidden: int = 4, optimizer=torch.optim.AdamW, unused: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2)
        )
        if unused:
            self.model.register_module("unused", nn.Linear(2, 2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def step(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(5, 3) + random.random() + float(np.random.rand())
        self.model[2](self.model[1](self.model[0](inputs))).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def values(self) -> list[float]:
        states = [
            entry.tolist() for state in self.optimizer.state.values() for entry in state.values()
        ]
        return [
            *(value.tolist() for value in self.model.state_dict().values()),
            *states,
            self.scheduler.last_epoch,
        ]


@contextmanager
def checkpoints(where, training, **options):
    checkpoint = Checkpoint(
        where,
        model=training.model,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        **options,
    )
    try:
        yield checkpoint
    finally:
        checkpoint.close()


def train(where, steps, *, training=None, **options):
    """Train up to a step with a checkpoint after each. Return the training and its first step."""
    training = Training() if training is None else training
    with checkpoints(where, training, **{"every": 1, **options}) as checkpoint:
        start = checkpoint.resume()
        for step in range(start, steps):
            training.step()
            checkpoint.step(step)
    return training, start


def names(where):
    return sorted(name for name in os.listdir(where) if name.startswith("step-"))
