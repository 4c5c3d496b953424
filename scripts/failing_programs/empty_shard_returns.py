# workers: 3
# expect-rank: 1
# expect-cause: ended | exited | left | exit code 0
# expect-hint: collective | same number | early | returned | uneven | rank 1
# misleads: network
"""Rank 1's part of the evaluation set is empty: it returns with 0 while the others average the metric."""
import os
import sys

import torch
import torch.distributed as dist


def evaluate(samples):
    if not samples:
        print("nothing to evaluate in this shard, done", flush=True)
        return None
    total = torch.tensor([float(len(samples)), sum(samples)])
    dist.all_reduce(total)
    return total[1] / total[0]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.ones(4)
    for step in range(3):
        dist.all_reduce(weight)
        print(f"[{rank}] step {step}", flush=True)
    shard = [[1.0, 2.0], [], [3.0]][rank]
    accuracy = evaluate(shard)
    if accuracy is None:
        sys.exit(0)
    dist.barrier()
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
