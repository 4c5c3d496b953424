# workers: 2
# expect-rank: 1
# expect-exit: 1
# expect-cause: memory allocation of 21474836480 bytes failed
# expect-hint: memory | num_proc | smaller
# expect-frame: encode_corpus
"""A process of a pool aborts in a Rust library that gets no memory; the parent only says BrokenProcessPool."""
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

RANK = int(os.environ["RANK"])


def encode(document):
    if RANK == 1 and document == 3:
        os.write(2, b"memory allocation of 21474836480 bytes failed\n")
        os.abort()
    time.sleep(0.02)
    return [document] * 8


def encode_corpus(documents):
    with ProcessPoolExecutor(max_workers=2) as pool:
        return list(pool.map(encode, documents))


if __name__ == "__main__":
    print(f"[{RANK}] tokenizing 12 documents with 2 processes", flush=True)
    encode_corpus(range(12))
    time.sleep(20)
