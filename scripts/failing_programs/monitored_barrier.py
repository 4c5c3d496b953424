# workers: 4
# expect-rank: 3
# expect-cause: monitoredBarrier
# expect-frame: compile_kernels
# expect-hint: rank 3 | wait | slow | barrier
# misleads: Connection closed by peer
"""A monitored barrier before the first step: rank 3 still compiles its kernels, on a node without the cache."""
import datetime
import time

import torch.distributed as dist


def compile_kernels(cache):
    for name in ("layer_norm", "rotary", "cross_entropy", "swiglu"):
        if name not in cache:
            print(f"[rank {dist.get_rank()}] ninja: building fused_{name}.so", flush=True)
            time.sleep(10)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    compile_kernels({} if rank == 3 else {"layer_norm", "rotary", "cross_entropy", "swiglu"})
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=5))
    print("all kernels are there")


main()
