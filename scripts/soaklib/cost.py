"""Cost of a background save for rank 0: the time until it returns, and the memory until it is
done."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint

WORKERS = 2
_TENSOR_BYTES = 16 << 20
_STATUS = Path("/proc/self/status")


def measure(scratch: str, gib: float, saves: int) -> int:
    """Save a model of so many GiB under DDP with two workers; print the medians and the load."""
    pids = []
    for rank in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            try:
                _work(rank, scratch, gib, saves)
            finally:
                os._exit(0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return int(any(codes))


def _work(rank: int, scratch: str, gib: float, saves: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{scratch}/meet", WORKERS), rank=rank, world_size=WORKERS
    )
    width = _TENSOR_BYTES // 4
    layers = [nn.Linear(1, width, bias=False) for _ in range(int(gib * (1 << 30)) // _TENSOR_BYTES)]
    model = DistributedDataParallel(nn.ModuleList(layers))
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    checkpoint = Checkpoint(f"{scratch}/checkpoints", model=model, keep=1)
    returned, computed, written, peaks = [], [], [], []
    for step in range(saves):
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        before, begun, begun_cpu = _memory("VmRSS"), time.perf_counter(), time.thread_time()
        checkpoint.save(step, background=True)
        returned.append(time.perf_counter() - begun)
        computed.append(time.thread_time() - begun_cpu)
        checkpoint.wait()
        written.append(time.perf_counter() - begun)
        peaks.append((_memory("VmHWM") - before) / size)
    checkpoint.close()
    if rank == 0:
        rows = {
            "returns after s": returned,
            "CPU s of that": computed,
            "is written after s": written,
        }
        for name, found in {**rows, "peak / model": peaks}.items():
            print(
                f"{name}: median {statistics.median(found):.2f} of "
                f"{[round(each, 2) for each in found]}"
            )
        print(
            f"model {size / (1 << 30):.2f} GiB, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} "
            "CPUs",
            flush=True,
        )
        shutil.rmtree(f"{scratch}/checkpoints")
    dist.barrier()


def _memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
