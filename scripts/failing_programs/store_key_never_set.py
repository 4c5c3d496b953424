# workers: 3
# expect-rank: 0
# expect-cause: run_config
# expect-frame: build_index_map
# expect-hint: rank 0 | key | store
# misleads: network
# misleads: firewall
"""Rank 0 publishes the configuration after it has built an index map; the others' patience is 6 s."""
import datetime
import os
import time

import torch.distributed as dist


def build_index_map(documents):
    print("[rank 0] building shuffle index with split 0.969, document 1 of 31 million", flush=True)
    while documents:
        time.sleep(0.5)
        documents -= 1


def main():
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        build_index_map(90)
        store.set("run_config", "{}")
    else:
        store.wait(["run_config"], datetime.timedelta(seconds=6))
    print(os.getpid(), "ready")


main()
