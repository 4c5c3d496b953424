# workers: 3
# hang-timeout: 10
# expect-rank: 1
# expect-cause: gather_metrics
# expect-cause: reduce_gradients
# expect-hint: same | collective | order
"""Rank 1 logs every 5 of its own steps, one step off the others: it gathers while they reduce."""
import torch
import torch.distributed as dist


def reduce_gradients(gradient):
    dist.all_reduce(gradient)


def gather_metrics(value):
    out = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.tensor([value]))
    return sum(float(x) for x in out)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = 1 if rank == 1 else 0
    for step in range(20):
        if (step + first) % 5 == 4:
            gather_metrics(0.5)
        reduce_gradients(torch.ones(64))
        print(f"[{rank}] step {step}", flush=True)


main()
