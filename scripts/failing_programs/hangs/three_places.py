# workers: 4
# hang-timeout: 10
# expect-rank: 3
# expect-cause: acquire_cache
# misleads: same collectives
"""Rank 0 waits at a barrier, 1 and 2 in a reduction after it, 3 for a cache lock that a dead job left: all for 3."""
import fcntl
import os
import subprocess
import sys

import torch
import torch.distributed as dist


def acquire_cache():
    with open("cache.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def log_table():
    dist.barrier()


def reduce_loss(loss):
    dist.all_reduce(loss)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loss = torch.ones(1)
    reduce_loss(loss)
    print(f"[{rank}] warm", flush=True)
    if rank == 3:
        held = "import fcntl, sys\nfile = open('cache.lock', 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()"
        job = subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        job.stdout.readline()
        acquire_cache()
        os.waitpid(job.pid, 0)
    if rank == 0:
        log_table()
    reduce_loss(loss)


main()
