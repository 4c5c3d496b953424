# workers: 2
# expect-rank: 1
# expect-exit: 1
# expect-cause: ZeroDivisionError
# expect-frame: cosine
# misleads: KeyError
"""rich draws the traceback in a box of 88 columns, with the locals of every frame."""
import math
import os
import time

from rich.console import Console
from rich.traceback import install

install(console=Console(stderr=True, width=88, force_terminal=False), show_locals=True, word_wrap=True)
RANK = int(os.environ["RANK"])
DEFAULTS = {"on_error": "raise KeyError", "lr": 0.1, "epochs": 90, "note": "KeyError: 'lr' means an old config"}


def cosine(step, warmup, total, lr):
    """Return the learning rate of a step."""
    if step < warmup:
        return lr * step / warmup
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def schedule(settings, samples):
    per_epoch = samples // 256
    total = settings["epochs"] * per_epoch
    return [cosine(step, 5 * per_epoch, total, settings["lr"]) for step in range(total + 1)]


def main():
    samples = 255 if RANK == 1 else 2560
    print(f"[{RANK}] {samples} samples in this rank's shard", flush=True)
    schedule(DEFAULTS, samples)
    time.sleep(20)


main()
