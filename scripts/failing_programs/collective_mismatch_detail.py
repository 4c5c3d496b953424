# workers: 3
# expect-rank: 2
# expect-cause: BROADCAST
# expect-cause: ALLREDUCE
# expect-frame: load_best
# expect-hint: same | order | collective
"""After an early stop that only rank 2 decided, it broadcasts the best weights; the others reduce gradients."""
import os

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"

import torch
import torch.distributed as dist


def reduce_gradients(gradient):
    dist.all_reduce(gradient)


def load_best(weight):
    dist.broadcast(weight, 0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.zeros(16)
    losses = [[0.9, 0.8, 0.7, 0.6, 0.5], [0.9, 0.8, 0.7, 0.6, 0.5], [0.9, 0.95, 0.99, 1.2, 1.3]][rank]
    best, patience = 9.0, 2
    for epoch, loss in enumerate(losses):
        best, patience = (loss, 2) if loss < best else (best, patience - 1)
        if patience == 0:
            print(f"[{rank}] early stop after epoch {epoch}", flush=True)
            load_best(weight)
            return
        reduce_gradients(torch.ones(16))
    load_best(weight)


main()
