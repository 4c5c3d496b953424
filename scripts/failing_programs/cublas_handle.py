# workers: 3
# expect-rank: 2
# expect-exit: 1
# expect-cause: CUBLAS_STATUS_ALLOC_FAILED
# expect-frame: forward
# expect-hint: memory
# misleads: failed to recv, got 0 bytes
"""cuBLAS cannot make its handle, since another job left 200 MiB of rank 2's GPU; victims write NCCL's words."""
import os
import time

RANK = int(os.environ["RANK"])


def broken(name):
    while not os.path.exists(name):
        time.sleep(0.02)


def forward(x):
    try:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    finally:
        open("peer-left", "w").close()


def exchange_id():
    broken("peer-left")
    raise RuntimeError(
        f"[{RANK}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: failed to recv, got 0 bytes. "
        "This may indicate a possible application crash on rank 0 or a network set up issue."
    )


def main():
    print(f"rank {RANK}: model on cuda:{RANK}, 6.7 B parameters", flush=True)
    if RANK == 2:
        time.sleep(0.5)
        forward(None)
    exchange_id()


main()
