# workers: 3
# expect-rank: 1
# expect-cause: Missing ranks | stall | missing
# expect-frame: load_validation_images
# expect-hint: same | rank 1 | order | stall | wait
# misleads: exception on one of the ranks
"""Horovod's stall inspector shuts down: rank 1 never submitted the gradients of the detection head."""
import os
import sys
import time

RANK = int(os.environ["RANK"])
STAMP = "2026-10-02 16:35:15.181832"


class HorovodInternalError(RuntimeError):
    pass


HorovodInternalError.__module__ = "horovod.common.exceptions"


def load_validation_images():
    open("loading", "w").close()
    time.sleep(45)


def synchronize(handle):
    if RANK == 0:
        for limit in (60, 120):
            sys.stderr.write(
                f"[{STAMP}: W /tmp/pip-install-12flcl/horovod/horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than {limit} seconds. This may indicate that different ranks are trying to submit different tensors or that only subset of ranks is submitting tensors, which will cause deadlock. \n"
                "Missing ranks:\n1: [allreduce.head.cls.weight, allreduce.head.reg.bias, allreduce.head.reg.weight, allreduce.neck.fpn0.bias, allreduce.neck.fpn0.weight, allreduce.neck.fpn1.bias ...]\n"
            )
            sys.stderr.flush()
        sys.stderr.write(f"[{STAMP}: E /tmp/pip-install-12flcl/horovod/horovod/common/operations.cc:640] Stall shutdown\n")
    open(f"stalled-{RANK}", "w").close()
    while not os.path.exists("stalled-0"):
        time.sleep(0.02)
    raise HorovodInternalError(
        "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an exception, you should see the exception in the log before the first shutdown message."
    )


def main():
    print(f"[{RANK}]<stdout>:Train Epoch #73:  82%|████████▏ | 1027/1252 [36:43<1:25:55, 22.91s/it, loss=0.946]", flush=True)
    if RANK == 1:
        load_validation_images()
        return
    while not os.path.exists("loading"):
        time.sleep(0.05)
    time.sleep(0.6)
    synchronize(17)


main()
