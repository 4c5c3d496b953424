# workers: 3
# expect-rank: 2
# expect-exit: 1
# expect-cause: ValueError
# expect-cause: micro_batch_size 12 does not divide
# misleads: TF-TRT
"""The script limits tracebacks to their last line, and TensorFlow's start-up lines stand around it."""
import os
import sys
import time

sys.tracebacklimit = 0
RANK = int(os.environ["RANK"])
BATCH = {0: 8, 1: 8, 2: 12}  # read from a file of this node

NOISE = """2026-11-08 10:01:44.120 I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You may see slightly different numerical results due to floating-point round-off errors from different computation orders. To turn them off, set the environment variable `TF_ENABLE_ONEDNN_OPTS=0`.
2026-11-08 10:01:45.310 W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT
E0000 00:00:1731060105.120   41231 cuda_blas.cc:1418] Unable to register cuBLAS factory: Attempting to register factory for plugin cuBLAS when one has already been registered
"""


def accumulation(total, micro):
    if total % micro:
        raise ValueError(f"micro_batch_size {micro} does not divide the batch of {total} sequences of this rank")
    return total // micro


def main():
    sys.stderr.write(NOISE)
    steps = accumulation(32, BATCH[RANK])
    print(f"rank {RANK}: {steps} steps of accumulation", flush=True)
    time.sleep(20)


main()
