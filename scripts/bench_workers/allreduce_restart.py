"""Every attempt adds up a tensor over a gloo group; in the first one rank 1 then exits with 3,
later ones end well."""

import os
import signal
import time

import common
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(common.RANK)])
dist.all_reduce(total)
common.stamp("start", common.STARTED_NS)
common.stamp("reduced", time.monotonic_ns())
if common.ATTEMPT == 0:
    if common.RANK != 1:
        signal.pause()
    common.wait_for_all()
    time.sleep(0.5)  # let the launcher come to rest: what is measured is its reaction
    common.stamp("fail", time.monotonic_ns())
    os._exit(3)
with open("/proc/self/smaps_rollup", encoding="ascii") as file:
    pss_kib = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
common.stamp("pss", pss_kib)
dist.barrier()
dist.destroy_process_group()
