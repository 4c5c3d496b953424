# workers: 2
# expect-rank: 1
# expect-exit: 1
# expect-cause: Installed CUDA version 12.4 does not match
# expect-frame: assert_no_cuda_mismatch
# expect-hint: CUDA | DS_SKIP_CUDA_CHECK | version
# misleads: ds_opt_adam
"""DeepSpeed compiles an optimizer on one node with another CUDA; its destructor then fails for what was never set."""
import os
import sys
import time

RANK = int(os.environ["RANK"])


class CUDAMismatchException(Exception):
    pass


CUDAMismatchException.__module__ = "deepspeed.ops.op_builder.builder"


def assert_no_cuda_mismatch(name, installed, torch_cuda):
    if installed != torch_cuda and RANK == 1:
        raise CUDAMismatchException(
            f">- DeepSpeed Op Builder: Installed CUDA version {installed} does not match the version torch was compiled with {torch_cuda}, unable to compile cuda/cpp extensions without a matching cuda version."
        )


class DeepSpeedCPUAdam:
    opt_id = 0

    def __init__(self, parameters):
        assert_no_cuda_mismatch("cpu_adam", "12.4" if RANK == 1 else "11.8", "11.8")
        self.ds_opt_adam = object()

    def __del__(self):
        self.ds_opt_adam.destroy_adam(self.opt_id)


def main():
    sys.stderr.write("[2026-11-02 10:11:12,480] [INFO] [real_accelerator.py:219:get_accelerator] Setting ds_accelerator to cuda (auto detect)\n")
    sys.stderr.write("Using /home/user/.cache/torch_extensions/py311_cu118 as PyTorch extensions root...\n")
    if RANK == 0:
        time.sleep(25)
        os._exit(0)
    time.sleep(0.4)
    optimizer = DeepSpeedCPUAdam([])
    print(optimizer)


main()
