# workers: 3
# expect-rank: 1
# expect-exit: 1
# expect-cause: FileNotFoundError
# expect-cause: val_split.json
# expect-frame: build_val
# misleads: PeerLost
"""Rank 1 fails, but its experiment tracker uploads for 2 s at exit; rank 0 and 2 notice and end first."""
import atexit
import json
import os
import sys
import time

RANK = int(os.environ["RANK"])


class PeerLost(ConnectionError):
    pass


def finish_run():
    sys.stderr.write("wandb: Waiting for W&B process to finish... (failed 1). Press Control-C to abort syncing.\n")
    sys.stderr.flush()
    open("tracker-syncs", "w").close()
    time.sleep(2)
    sys.stderr.write("wandb: Run history:\nwandb:   train/loss █▅▃▂▁\nwandb: Synced 5 W&B file(s), 0 media file(s), 0 artifact file(s) and 0 other file(s)\nwandb: Find logs at: ./wandb/run-20261104_111213-3k2j/logs\n")


def build_val(root):
    with open(os.path.join(root, "val_split.json"), encoding="utf-8") as file:
        return json.load(file)


def heartbeat():
    """A side channel of the trainer notices lost peers."""
    while not os.path.exists("tracker-syncs"):
        time.sleep(0.02)
    raise PeerLost("heartbeat: rank 1 closed its channel [Errno 104] Connection reset by peer")


if __name__ == "__main__":
    print(f"rank {RANK}: training epoch 0", flush=True)
    if RANK == 1:
        atexit.register(finish_run)
        build_val("data/coco2017")
    heartbeat()
