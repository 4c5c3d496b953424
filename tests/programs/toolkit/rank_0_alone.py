"""Rank 0 saves alone, until it has been warned of it; then the others save, too. argv: the directory."""

import logging
import sys

import torch.distributed as dist
from torch import nn

from distlaunch.toolkit import Checkpoint, init
from distlaunch.toolkit.checkpoint.write import Group


class Told(logging.Handler):
    def emit(self, record):
        if "has waited" in record.getMessage():
            print(f"rank {context.rank}: {record.getMessage()}", flush=True)
            store.set("told", "yes")


context = init(device="cpu")
Group.warn_after_s = 0.5
store = dist.FileStore(f"{sys.argv[1]}.store", 2)
logging.getLogger("distlaunch.checkpoint").addHandler(Told())
checkpoint = Checkpoint(sys.argv[1], model=nn.Linear(2, 1))
if context.rank:
    store.wait(["told"])
checkpoint.save(5)
checkpoint.close()
