# workers: 3
# hang-timeout: 8
# expect-rank: 2
# expect-cause: 'caption'
# expect-cause: KeyError
# misleads: same collectives
"""The thread that fills rank 2's queue died of a KeyError; the main thread waits for the next item for ever."""
import queue
import threading

import torch
import torch.distributed as dist


def produce(out, rank):
    for index in range(200):
        row = {"image": index, "caption": "a cat"}
        if rank == 2 and index == 9:
            del row["caption"]
        out.put((row["image"], row["caption"]))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    items = queue.Queue(4)
    threading.Thread(target=produce, args=(items, rank), name="producer", daemon=True).start()
    for step in range(40):
        image, _caption = items.get()
        dist.all_reduce(torch.tensor([float(image)]))
        print(f"[{rank}] step {step}", flush=True)


main()
