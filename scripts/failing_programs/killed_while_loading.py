# workers: 3
# expect-rank: 2
# expect-exit: 137
# expect-cause: SIGKILL | signal 9 | Killed
# expect-hint: memory
# misleads: rank 0 failed
"""The kernel kills the rank with the largest memory while it loads a checkpoint; its last words are shards."""
import os
import signal
import time

RANK = int(os.environ["RANK"])


def load_shard(index):
    if RANK == 2 and index == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.12)
    return index


def main():
    for index in range(8):
        load_shard(index)
        rss = 3.1 * (index + 1) * (2 if RANK == 2 else 1)
        print(f"Loading checkpoint shards:  {100 * (index + 1) // 8:3d}%|{'█' * index:8}| {index + 1}/8 [rank {RANK}, rss {rss:.1f} GB]", flush=True)
    time.sleep(20)


main()
