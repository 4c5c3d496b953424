# workers: 3
# expect-rank: 1
# expect-exit: 1
# expect-cause: t >= 0 && t < n_classes
# expect-frame: evaluate
# expect-hint: label | class | target | index
# misleads: CUBLAS
"""A label of 1000 on rank 1 trips an assertion in a kernel; Python hears of it three calls later."""
import os
import sys
import time

RANK = int(os.environ["RANK"])


def nll_loss(labels):
    if any(label >= 1000 for label in labels):
        for thread in (5, 6, 21):
            sys.stderr.write(f"/opt/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [{thread},0,0] Assertion `t >= 0 && t < n_classes` failed.\n")
        sys.stderr.flush()
        return None
    return 1.0


def item(loss):
    if loss is None:
        raise RuntimeError(
            "CUDA error: device-side assert triggered\n"
            "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
            "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        )
    return loss


def evaluate():
    total = []
    for batch in range(8):
        labels = [3, 17, 1000 if RANK == 1 and batch == 5 else 999]
        total.append(nll_loss(labels))
        time.sleep(0.1)
    return sum(item(loss) for loss in total)


def main():
    try:
        evaluate()
    finally:
        if RANK == 1:
            for name in ("~CUDAEvent", "~CUDAStream", "CUBLAS handle release"):
                sys.stderr.write(f"[W1102 11:08:12.1 CUDAGuardImpl.h:119] Warning: CUDA warning: device-side assert triggered (function {name})\n")
    time.sleep(20)


main()
