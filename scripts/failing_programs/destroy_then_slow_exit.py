# workers: 3
# expect-rank: 2
# expect-exit: 1
# expect-cause: KeyError
# expect-cause: 'bleu'
# expect-frame: report
# misleads: Connection closed by peer
"""Rank 2 fails, destroys its group in finally, and flushes a tracker for 2 s; the others die at once."""
import atexit
import time

import torch
import torch.distributed as dist


def flush_tracker():
    time.sleep(2)
    print("mlflow: run 8c21 marked as FAILED", flush=True)


def report(metrics):
    return {"score": metrics["bleu"], "loss": metrics["loss"]}


def train(rank):
    gradient = torch.ones(1024)
    for step in range(400):
        dist.all_reduce(gradient)
        if step == 20:
            report({"loss": 1.2} if rank == 2 else {"loss": 1.2, "bleu": 27.1})
        time.sleep(0.01)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    atexit.register(flush_tracker if rank == 2 else lambda: None)
    try:
        train(rank)
    finally:
        dist.destroy_process_group()


main()
