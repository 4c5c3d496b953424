"""Call different methods of Checkpoint on two ranks, and print the error of each: argv is the directory.

At the end rank 1 is gone without a word.
"""

import os
import sys

import torch
from torch import nn

from distlaunch.toolkit import Checkpoint, CheckpointError, init, wrap
from distlaunch.toolkit.toolkit_error import ConfigError

context = init(device="cpu")
torch.set_num_threads(1)
model, optimizer = wrap(linear := nn.Linear(8, 8), torch.optim.Adam(linear.parameters()))
model(torch.ones(2, 8)).sum().backward()
optimizer.step()


def made():
    return Checkpoint(sys.argv[1], model=model, optimizer=optimizer, every=1)


def attempt(what, *calls):
    try:
        calls[context.rank]()
    except (ConfigError, CheckpointError) as error:
        print(f"rank {context.rank} {what}: {type(error).__name__}: {error}", flush=True)
    else:
        print(f"rank {context.rank} {what}: no error", flush=True)


checkpoint = made()
checkpoint.resume()
checkpoint.save(2)
attempt("steps", lambda: checkpoint.save(5), lambda: checkpoint.save(9))
attempt("methods", lambda: checkpoint.save(20), lambda: checkpoint.step(20))
attempt("resumes", lambda: checkpoint.resume(steps=3), lambda: checkpoint.resume())
attempt("left", lambda: checkpoint.save(30), lambda: checkpoint.close())
checkpoint.close()
checkpoint = made()
checkpoint.resume()
attempt("gone", lambda: checkpoint.save(40), lambda: os._exit(0))
