# workers: 3
# hang-timeout: 10
# expect-rank: 1
# expect-cause: wait_for_leader
# misleads: same collectives
"""Rank 1 waits for a key of the store that rank 0 wrote under another name; the others are at the barrier."""
import torch.distributed as dist


def announce(store, epoch):
    store.set(f"epoch{epoch}_done", "1")


def wait_for_leader(store, epoch):
    store.wait([f"epoch_{epoch}_done"])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    for epoch in range(2):
        print(f"[{rank}] epoch {epoch}", flush=True)
        if rank == 0:
            announce(store, epoch)
        if rank == 1:
            wait_for_leader(store, epoch)
        dist.barrier()


main()
