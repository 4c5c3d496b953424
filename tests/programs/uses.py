"""Use what programs use: processes of all start methods, threads, subprocesses, faulthandler, pickles of ``__main__`` at exit.

Prints ``exit 2``, ``exit 1`` as it ends. ``--torch``: DataLoaders of all start methods, autograd and an all-reduce instead.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading


class Thing:
    """Pickled by reference to ``__main__``."""

    def __init__(self, value):
        self.value = value


def double(thing):
    return Thing(thing.value * 2)


def with_torch():
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(2)
    torch.ones(500, 500) @ torch.ones(500, 500)  # the library's threads run before the loaders fork
    data = TensorDataset(torch.arange(16.0))
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context=method)
        assert sum(batch.sum().item() for (batch,) in loader) == sum(range(16))
    dist.init_process_group("gloo")
    weights = torch.ones(4, requires_grad=True)
    (weights * 2).sum().backward()
    dist.all_reduce(weights.grad)
    assert weights.grad.tolist() == [2.0 * dist.get_world_size()] * 4
    dist.destroy_process_group()


def without():
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert [thing.value for thing in pool.map(double, [Thing(1), Thing(2)])] == [2, 4]
    done = []
    thread = threading.Thread(target=done.append, args=(1,))
    thread.start()
    thread.join()
    assert done == [1]
    os.environ["SET_HERE"] = "2"
    del os.environ["LANG"]
    shown = subprocess.run(
        ["sh", "-c", "echo $RANK $SET_HERE $LANG $DISTLAUNCH_BOOT"], capture_output=True, text=True
    ).stdout
    assert shown.split() == [os.environ["RANK"], "2"], shown
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        frames = [line for line in file.read().decode().splitlines() if "File" in line]
    assert len(frames) == 2, frames


def at_exit(number):
    print("exit", pickle.loads(pickle.dumps(Thing(number))).value, flush=True)


if __name__ == "__main__":
    with_torch() if "--torch" in sys.argv else without()
    for number in (1, 2):
        atexit.register(at_exit, number)
