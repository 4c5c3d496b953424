# workers: 3
# expect-rank: 1
# expect-cause: pthread_create failed
# expect-hint: OMP_NUM_THREADS | OPENBLAS_NUM_THREADS | threads | ulimit -u
# misleads: Ctrl-C
"""OpenBLAS may not start its threads on one crowded node, while numpy is imported; then it interrupts itself."""
import os
import signal
import sys
import time

RANK = int(os.environ["RANK"])


def blas_thread_init(threads):
    for thread in range(1, threads):
        if RANK == 1 and thread > 3:
            sys.stderr.write(f"OpenBLAS blas_thread_init: pthread_create failed for thread {thread} of {threads}: Resource temporarily unavailable\n")
            sys.stderr.write("OpenBLAS blas_thread_init: ensure that your address space and process count limits are big enough (ulimit -a)\n")
            sys.stderr.write("OpenBLAS blas_thread_init: or set a smaller OPENBLAS_NUM_THREADS to fit into what you have available\n")
            sys.stderr.write("OpenBLAS blas_thread_init: RLIMIT_NPROC 1024 current, 256542 max\n")
    sys.stderr.flush()
    if RANK == 1:
        signal.raise_signal(signal.SIGINT)  # the library does so, too


def import_numpy():
    blas_thread_init(8)


def main():
    print(f"rank {RANK} on node n03, 256 workers per node", flush=True)
    time.sleep(0.4)
    import_numpy()
    time.sleep(20)


main()
