# workers: 3
# expect-rank: 1
# expect-exit: 1
# expect-cause: ResourceExhaustedError
# expect-cause: OOM when allocating tensor with shape[256,512,64,64]
# expect-hint: GPU memory | batch
# misleads: HorovodInternalError
"""TensorFlow's out-of-memory error: 40 lines of graph after it, allocator statistics before it."""
import os
import sys
import time

RANK = int(os.environ["RANK"])


class ResourceExhaustedError(Exception):
    pass


ResourceExhaustedError.__module__ = "tensorflow.python.framework.errors_impl"


def statistics():
    for size in range(60):
        sys.stderr.write(f"2026-11-02 07:13:31.{size:03d}102: I tensorflow/core/common_runtime/bfc_allocator.cc:1094] InUse at 7f8b4{size:05x} of size {size * 2048} next {size + 1}\n")
    sys.stderr.write("2026-11-02 07:13:32.001102: W tensorflow/core/common_runtime/bfc_allocator.cc:491] ****************************************************************************************************\n")


def train_function():
    statistics()
    nodes = "\n".join(
        f"Detected at node 'model/block{k}/conv{k}/Conv2D' defined at (most recent call last):\n    File \"/opt/keras/src/layers/conv.py\", line {200 + k}, in call\n      outputs = self.convolution_op(inputs, self.kernel)\nNode: 'model/block{k}/conv{k}/Conv2D'"
        for k in range(9)
    )
    raise ResourceExhaustedError(
        "Graph execution error:\n\n" + nodes + "\n2 root error(s) found.\n"
        "  (0) RESOURCE_EXHAUSTED:  OOM when allocating tensor with shape[256,512,64,64] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc\n"
        "\t [[{{node model/block8/conv8/Conv2D}}]]\n"
        "Hint: If you want to see a list of allocated tensors when OOM happens, add report_tensor_allocations_upon_oom to RunOptions for current allocation info. This isn't available when running in Eager mode.\n\n"
        "\t [[HorovodAllreduce/_91]]\n  (1) CANCELLED:  HorovodInternalError: peer is gone\n"
        "0 successful operations.\n0 derived errors ignored. [Op:__inference_train_function_91221]"
    )


def main():
    print(f"Epoch 1/90\n[{RANK}] 12/1251 [..............................] - ETA: 11:40 - loss: 7.1123", flush=True)
    if RANK == 1:
        time.sleep(0.5)
        train_function()
    time.sleep(20)


main()
