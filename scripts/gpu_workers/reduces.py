"""Form the group as ``init`` does and reduce a tensor on each device; with --wait, stay until a
file says to go on."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from observations import report

from distlaunch.toolkit import init

LONGEST_S = 45.0

parser = argparse.ArgumentParser()
parser.add_argument("--wait", metavar="FILE", help="stay in the group until this file is there")
args = parser.parse_args()
context = init()
reduced, backends = {}, {}
for kind in dict.fromkeys(("cpu", context.device.type)):
    place = context.device if kind == context.device.type else torch.device(kind)
    value = torch.arange(4.0, device=place) + context.rank
    dist.all_reduce(value)
    reduced[kind] = value.tolist()
    backends[kind] = dist.group.WORLD._get_backend(torch.device(kind)).name()  # type: ignore[union-attr] # noqa: SLF001 - no public way
report(
    device=context.device,
    backend=context.backend,
    backends=backends,
    reduced=reduced,
    world=context.world_size,
    nccl=".".join(map(str, torch.cuda.nccl.version())) if context.device.type == "cuda" else None,
)
deadline = time.monotonic() + LONGEST_S
while args.wait and not os.path.exists(args.wait) and time.monotonic() < deadline:
    time.sleep(0.05)
