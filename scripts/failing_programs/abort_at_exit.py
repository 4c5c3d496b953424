# workers: 3
# expect-rank: 2
# expect-cause: tokenizer hash 11c0 differs from 7f3a
# misleads: terminate called without an active exception
"""sys.exit(3) with a clear last word; then a thread of a native library makes the exit an abort."""
import atexit
import os
import sys
import time

RANK = int(os.environ["RANK"])


def native_threads_end():
    os.write(2, b"terminate called without an active exception\n")
    os.abort()


def resume(path):
    print(f"rank {RANK}: resuming {path}", flush=True)
    if RANK == 2:
        atexit.register(native_threads_end)
        sys.stderr.write("FATAL: cannot resume run7/step-9000: tokenizer hash 11c0 differs from 7f3a in the checkpoint\n")
        sys.exit(3)


def main():
    resume("run7/step-9000")
    time.sleep(20)


main()
