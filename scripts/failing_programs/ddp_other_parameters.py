# workers: 3
# expect-rank: 2
# expect-cause: 4 params | has 4
# expect-frame: wrap
# expect-hint: same model | parameters | configuration
# misleads: network
"""Rank 2 reads another configuration from its node and builds a model with one layer more."""
import os

import torch
import torch.distributed as dist

CONFIG = {"0": {"depth": 1}, "1": {"depth": 1}, "2": {"depth": 2}}[os.environ["RANK"]]


def build():
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(CONFIG["depth"])))


def wrap(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def main():
    dist.init_process_group("gloo")
    model = build()
    print(f"[{dist.get_rank()}] {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    model = wrap(model)
    model(torch.ones(2, 8)).sum().backward()


main()
