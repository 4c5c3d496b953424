# workers: 3
# hang-timeout: 8
# expect-rank: 0
# expect-cause: flush_metrics
# misleads: same collectives
"""Rank 0's metric thread and its main thread take two locks in opposite order."""
import threading
import time

import torch
import torch.distributed as dist

buffer_lock, file_lock = threading.Lock(), threading.Lock()
both = threading.Barrier(2)


def flush_metrics():
    with buffer_lock:
        both.wait()
        with file_lock:
            pass


def rotate_file():
    with file_lock:
        both.wait()
        with buffer_lock:
            pass


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(10):
        dist.all_reduce(torch.ones(8))
        print(f"[{rank}] step {step}", flush=True)
        if rank == 0 and step == 4:
            threading.Thread(target=rotate_file, daemon=True).start()
            flush_metrics()
        time.sleep(0.05)


main()
