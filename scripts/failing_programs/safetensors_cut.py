# workers: 3
# expect-rank: 2
# expect-exit: 1
# expect-cause: SafetensorError
# expect-cause: file not fully covered | header | MetadataIncompleteBuffer
# expect-frame: load_shard
# expect-hint: truncated | cut | incomplete | download
# misleads: firewall
"""Rank 2's node has a model file whose download was cut off at one third."""
import os
import time

import numpy
from safetensors.numpy import load_file, save_file

RANK = int(os.environ["RANK"])


def download(path):
    save_file({"wte": numpy.zeros((512, 32), numpy.float32), "ln_f": numpy.ones(32, numpy.float32)}, path)
    if RANK == 2:
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 3)


def load_shard(path):
    return load_file(path)


def main():
    path = f"model-0000{RANK}-of-00003.safetensors"
    download(path)
    print(f"[{RANK}] loading {path}", flush=True)
    time.sleep(0.3)
    load_shard(path)
    time.sleep(20)


main()
