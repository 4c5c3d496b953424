"""Train with dropout on the device and checkpoints; with --fail-at, fail once and go on from the
last one.

Whatever decides the next step has to come back for both ways to end with the same bits: weights,
optimizer, and the device's own random numbers.
"""

import argparse
import hashlib
import os

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before CUDA starts: cuBLAS is deterministic with it

import torch
from learning import CLASSES, PIXELS, samples
from observations import report
from torch import nn

from distlaunch.toolkit import Checkpoint, init, wrap

STEPS, EVERY = 12, 5

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument(
    "--fail-at", type=int, default=-1, metavar="STEP", help="raise before it, in the first attempt"
)
args = parser.parse_args()
context = init(seed=3)
torch.use_deterministic_algorithms(mode=True)
bare = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, CLASSES))
model, optimizer = wrap(bare, torch.optim.AdamW(bare.parameters(), lr=3e-3))
checkpoint = Checkpoint(args.folder, model=model, optimizer=optimizer, every=EVERY)
first = checkpoint.resume()
for step in range(first, STEPS):
    if step == args.fail_at and context.attempt == 0:
        raise RuntimeError("asked to fail")
    images, labels = (tensor.to(context.device) for tensor in samples(seed=step, count=64))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    checkpoint.step(step)
checkpoint.close()
digest = hashlib.sha256()
for tensor in (*model.state_dict().values(), torch.rand(8, device=context.device)):
    digest.update(bytes(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist()))
report(device=context.device, attempt=context.attempt, first=first, digest=digest.hexdigest())
