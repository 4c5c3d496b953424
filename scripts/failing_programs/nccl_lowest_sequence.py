# workers: 4
# expect-rank: 2
# expect-cause: 411
# expect-frame: resample_long_documents
# expect-hint: same | order | step | behind | data
# misleads: illegal memory
"""Three ranks wait in all-reduce 412; rank 2 is still in its input pipeline and never started it.

Rank 2 is to blame: it completed 411 and enqueued nothing more. The watchdogs abort the others.
"""
import os
import signal
import sys
import time

RANK = int(os.environ["RANK"])
PG = f"[PG ID 0 PG GUID 0(default_pg) Rank {RANK}]"


def log(line):
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def resample_long_documents():
    """Split documents with a pathological regular expression: minutes for one of them."""
    log(f"[rank{RANK}]:W packing.py:88] document 88123 has 4191230 characters, splitting")
    open("rank2-is-splitting", "w").close()
    time.sleep(50)


def watchdog():
    work = "WorkNCCL(SeqNum=412, OpType=ALLREDUCE, NumelIn=26214400, NumelOut=26214400, Timeout(ms)=600000)"
    log(f"[rank{RANK}]:[E1107 03:12:44.512345 ProcessGroupNCCL.cpp:616] [Rank {RANK}] Watchdog caught collective operation timeout: {work} ran for 600004 milliseconds before timing out.")
    log(f"[rank{RANK}]:[E1107 03:12:44.512901 ProcessGroupNCCL.cpp:1785] {PG} Exception (either an error or timeout) detected by watchdog at work: 412, last enqueued NCCL work: 412, last completed NCCL work: 411.")
    log(f"[rank{RANK}]:[E1107 03:12:45.012901 ProcessGroupNCCL.cpp:630] [Rank {RANK}] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.")
    log(f"[rank{RANK}]:[E1107 03:12:45.012966 ProcessGroupNCCL.cpp:636] [Rank {RANK}] To avoid data inconsistency, we are taking the entire process down.")
    log(f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {PG} Process group watchdog thread terminated with exception: [Rank {RANK}] Watchdog caught collective operation timeout: {work} ran for 600004 milliseconds before timing out.")
    log("Exception raised from checkTimeout at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:618 (most recent call first):")
    log("frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f1c8a976446 in /opt/conda/lib/python3.11/site-packages/torch/lib/libc10.so)")
    log("frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono::duration<long, std::ratio<1l, 1000l> > >) + 0x282 (0x7f1c3d62a772 in /opt/conda/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so)")
    log("frame #2: c10d::ProcessGroupNCCL::watchdogHandler() + 0x233 (0x7f1c3d631bb3 in /opt/conda/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so)")
    os.kill(os.getpid(), signal.SIGABRT)


def main():
    log(f"[rank{RANK}]:I trainer.py:31] step 205 loss 2.913")
    if RANK == 2:
        resample_long_documents()
    while not os.path.exists("rank2-is-splitting"):
        time.sleep(0.05)
    time.sleep(1 + 0.2 * RANK)
    watchdog()


main()
