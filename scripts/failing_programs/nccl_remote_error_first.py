# workers: 4
# expect-rank: 2
# expect-cause: uncorrectable ECC error | Xid
# expect-hint: hardware | drain | replace | GPU
# misleads: Connection reset by peer
# misleads: same collectives
"""A GPU of rank 2 has an ECC error. The others see the network go first in their logs, by microseconds.

Rank 2 needs 0.6 s to unwind and abort; ranks 0, 1, 3 end 0.2 s earlier with ncclRemoteError.
"""
import os
import signal
import sys
import time

RANK = int(os.environ["RANK"])


def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)


class DistBackendError(RuntimeError):
    """As torch names it."""


DistBackendError.__module__ = "torch.distributed"


def all_reduce(bucket):
    raise DistBackendError(
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.19.3\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
        "Last error:\nsocketProgress: Connection closed by remote peer dgx-14.cluster<41532>"
    )


def backward():
    time.sleep(0.2)
    sys.stderr.write("[rank2]:[W CUDAException.h:98] Warning: uncorrectable ECC error encountered (function ~CUDAGraph)\n")
    error = RuntimeError(
        "CUDA error: uncorrectable ECC error encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    raise error


def main():
    print(f"epoch 12 | rank {RANK} | it/s 3.11 | lr 1.2e-04", flush=True)
    if RANK != 2:
        wait_for("gpu-gone")
        all_reduce(None)
    try:
        backward()
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
        open("gpu-gone", "w").close()
        time.sleep(0.8)  # CUDA's atexit handlers synchronise a context that is lost
        sys.stderr.write("terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: uncorrectable ECC error encountered\n")
        os.kill(os.getpid(), signal.SIGABRT)


main()
