"""Workers that hang in different ways, for ``record_stacks.py``: ``python hanging.py KIND``, with
RANK.

``main`` is the main part, as in a training script. Kinds without torch run under Python 3.8 or
newer.
"""

import faulthandler
import os
import signal
import sys
import threading
import time

RANK = int(os.environ.get("RANK", "0"))
FOREVER = 1000.0


def load_batch():
    time.sleep(FOREVER)


def lock():
    guard = threading.Lock()
    guard.acquire()

    def holder():
        time.sleep(FOREVER)

    threading.Thread(target=holder, name="holder", daemon=True).start()
    with guard:
        pass


def event():
    threading.Event().wait()


def sleep():
    load_batch()


def loop():
    number = 0
    while True:
        number += 1


def c_loop():
    sum(iter(int, 1))


def queue():
    import queue

    queue.Queue().get()


def join():
    def work():
        time.sleep(FOREVER)

    thread = threading.Thread(target=work, name="reader", daemon=True)
    thread.start()
    thread.join()


def child():
    import subprocess

    subprocess.run(["sleep", "6"])


def download():
    import socket
    import urllib.request

    server = socket.create_server(("127.0.0.1", 0))
    urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/weights.bin")


def recursion():
    def deep(number):
        if number:
            deep(number - 1)
        time.sleep(FOREVER)

    deep(300)


def many_threads():
    for _ in range(120):
        threading.Thread(target=time.sleep, args=(FOREVER,), daemon=True).start()
    load_batch()


def slow_import():
    import slow_module  # noqa: F401


def import_lock():
    def other():
        __import__("slow_module")

    threading.Thread(target=other, daemon=True).start()
    time.sleep(0.2)
    __import__("slow_module")


def coroutine():
    import asyncio

    async def step():
        await asyncio.sleep(FOREVER)

    asyncio.run(step())


def debugger():
    breakpoint()  # noqa: T100 - the program is about it


def blocked_signal():
    """Block the signal in the main thread. Another thread gets it, and is the current one of the
    dump."""
    threading.Thread(target=time.sleep, args=(FOREVER,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMAX - 3])
    load_batch()


def group():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist


def dataloader():
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            time.sleep(8)
            return index

    for _batch in DataLoader(Data(), num_workers=1):
        pass


def late_in_all_reduce():
    import torch

    dist = group()
    for _step in range(3):
        if _step == 2 and RANK == 2:
            load_batch()
        dist.all_reduce(torch.ones(4))


def late_in_backward():
    import torch

    group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        if step == 2 and RANK == 1:
            load_batch()
        model(torch.ones(2, 4)).sum().backward()


def other_collective():
    import torch

    dist = group()
    if RANK == 0:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(4))


def late_in_barrier():
    dist = group()
    if RANK == 3:
        load_batch()
    dist.barrier()


def rendezvous():
    if RANK == 1:
        load_batch()
    group()


def stopped():
    import torch

    dist = group()
    dist.all_reduce(torch.ones(4))
    if RANK == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))


def main():
    print("ready", flush=True)
    globals()[sys.argv[1]]()


if __name__ == "__main__":
    faulthandler.register(signal.SIGRTMAX - 3, file=int(os.environ["DUMP_FD"]), all_threads=True)
    main()
