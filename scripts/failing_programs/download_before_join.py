# workers: 3
# expect-rank: 2
# expect-cause: clients joined | wait timeout
# expect-frame: fetch_vocabulary
# expect-hint: rank 2 | did not | join
# misleads: firewall
# misleads: MASTER_ADDR
"""Rank 2 reads from a mirror that accepts and never answers, before it joins; the store gives up on it."""
import datetime
import os
import socket
import urllib.request

import torch.distributed as dist

RANK = int(os.environ["RANK"])


def fetch_vocabulary(port):
    print(f"[{RANK}] downloading vocab.bpe from http://mirror.internal:{port}/gpt2/vocab.bpe", flush=True)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/gpt2/vocab.bpe", timeout=50) as answer:
        return answer.read()


def main():
    if RANK == 2:
        silent = socket.create_server(("127.0.0.1", 0))
        fetch_vocabulary(silent.getsockname()[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=7))
    dist.barrier()


main()
