# workers: 3
# hang-timeout: 8
# expect-rank: 2
# expect-cause: ended | exited | left | exit code 0
# misleads: firewall
"""Rank 2 had fewer files and ended with 0; ranks 0 and 1 wait for its part of the index in a shared folder."""
import json
import os
import sys
import time

RANK = int(os.environ["RANK"])


def write_index(files):
    with open(f"index-{RANK}.json", "w") as file:
        json.dump(files, file)


def merge_index():
    while not all(os.path.exists(f"index-{rank}.json") for rank in range(3)):
        time.sleep(0.2)


def main():
    files = [["a.tar", "b.tar"], ["c.tar"], []][RANK]
    print(f"rank {RANK}: {len(files)} files", flush=True)
    if not files:
        print("no files for this rank, nothing to do", flush=True)
        sys.exit(0)
    write_index(files)
    merge_index()


main()
