"""Wrap a model before there is a process group."""

import torch

from distlaunch.toolkit import wrap

wrap(torch.nn.Linear(2, 2))
