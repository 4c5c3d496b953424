# workers: 3
# expect-rank: 2
# expect-exit: 134
# expect-cause: std::bad_alloc
# expect-hint: memory
# misleads: same collectives
"""A C++ reader of records gets no host memory for an index and throws through Python's frames."""
import ctypes
import os
import sys
import time

RANK = int(os.environ["RANK"])


class NativeReader:
    """Bindings of a record reader."""

    def __init__(self):
        self.libc = ctypes.CDLL(None)

    def build_index(self, size):
        if size > 1 << 40:
            os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
            self.libc.abort()
        return size


def open_shards(reader):
    for shard in range(5):
        size = (7 << 40) if RANK == 2 and shard == 4 else 1 << 20
        reader.build_index(size)
        print(f"[{RANK}] shard {shard} indexed", flush=True)
        time.sleep(0.1)


def main():
    sys.stderr.write("I1102 12:00:01.100 reader.cc:120] Opened record file with 83112 records\n")
    open_shards(NativeReader())
    time.sleep(20)


main()
