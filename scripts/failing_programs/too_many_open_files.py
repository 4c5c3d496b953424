# workers: 2
# expect-rank: 0
# expect-exit: 1
# expect-cause: Too many open files
# expect-hint: ulimit -n | open files | file_system
"""A dataset keeps a memory map per shard open until the limit of open files is reached."""
import os
import resource
import time

import numpy

RANK = int(os.environ["RANK"])


class MappedShards:
    def __init__(self):
        self.open = []

    def add(self, path):
        numpy.zeros(16, dtype=numpy.uint16).tofile(path)
        self.open.append(open(path, "rb"))
        return numpy.memmap(self.open[-1], dtype=numpy.uint16, mode="r")


def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    shards = MappedShards()
    count = 400 if RANK == 0 else 20
    maps = [shards.add(f"shard-{RANK}-{index % 7}.bin") for index in range(count)]
    print(f"[{RANK}] {len(maps)} shards", flush=True)
    time.sleep(20)


main()
