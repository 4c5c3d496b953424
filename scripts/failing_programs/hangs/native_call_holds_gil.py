# workers: 3
# hang-timeout: 8
# expect-rank: 2
# expect-cause: solve_assignment
# misleads: same collectives
"""Rank 2 is in a C function that holds the interpreter's lock and does not come back."""
import ctypes

import torch
import torch.distributed as dist


def solve_assignment(costs):
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # as a solver that is entered twice
    return costs


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    costs = torch.ones(16, 16)
    for step in range(8):
        if rank == 2 and step == 5:
            solve_assignment(costs)
        dist.all_reduce(costs)
        print(f"[{rank}] match step {step}", flush=True)


main()
