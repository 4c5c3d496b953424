"""A module that starts CUDA by being imported, as none should that is to be preloaded."""

import torch

started = torch.zeros(1).cuda()
