"""Draw progress bars with the library named by the first argument: half of them, then wait for ``go``, then the rest.

Rank 1 writes a line while rank 0's bars stand half way. No bar shows times or rates, which differ from run to run.
"""

import os
import sys
import time

KIND = sys.argv[1]
RANK = int(os.environ["RANK"])
PLAIN = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"


def wait():
    open(f"half-{RANK}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.01)


def tqdm_single():
    from tqdm import tqdm

    for step in tqdm(range(4), desc="steps", bar_format=PLAIN, mininterval=0):
        if step == 2:
            wait()
    print("trained")


def tqdm_nested():
    from tqdm import tqdm

    for epoch in tqdm(range(4), desc="epochs", bar_format=PLAIN, mininterval=0):
        for step in tqdm(range(50), desc="steps", leave=False, bar_format=PLAIN, mininterval=0):
            if (epoch, step) == (2, 25):
                wait()
    print("trained")


def tqdm_kept():
    from tqdm import tqdm

    for epoch in tqdm(range(3), desc="epochs", bar_format=PLAIN, mininterval=0):
        for step in tqdm(range(50), desc=f"steps of epoch {epoch}", bar_format=PLAIN, mininterval=0):
            if (epoch, step) == (1, 25):
                wait()
    print("trained")


def tqdm_position():
    from tqdm import tqdm

    bars = [tqdm(total=20, desc=f"loader {n}", position=n, bar_format=PLAIN, mininterval=0) for n in range(3)]
    for step in range(20):
        for bar in bars:
            bar.update()
        if step == 9:
            tqdm.write("half way")
            wait()
    for bar in bars:
        bar.close()
    print("trained")


def rich_track():
    from rich.progress import track

    for step in track(range(4), description="training"):
        if step == 2:
            time.sleep(0.3)
            wait()
    print("trained")


def rich_live():
    from rich.live import Live
    from rich.table import Table

    def table(rows):
        grid = Table("step", "loss")
        for row in range(rows):
            grid.add_row(str(row), f"{1 / (row + 1):.2f}")
        return grid

    with Live(table(1), auto_refresh=False) as live:
        for rows in range(2, 6):
            live.update(table(rows), refresh=True)
            if rows == 3:
                live.console.print("a line of rank 0")
                wait()
    print("trained")


def keras():
    import keras
    import numpy

    class Half(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (self.params["epochs"], batch) == (1, 4):
                wait()

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    model.fit(numpy.ones((8, 4)), numpy.ones(8), batch_size=1, epochs=1, callbacks=[Half()])
    print("trained")


def lightning(bar, draw=lambda: None):
    import warnings

    warnings.simplefilter("ignore")
    import logging

    import torch
    from lightning.pytorch import LightningModule, Trainer

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, number):
            if number == 5 and self.current_epoch == 1:
                draw()
                wait()
            return self.layer(batch).sum()

        def validation_step(self, batch, number):
            self.layer(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        os.environ.pop(name, None)  # every rank trains by itself
    data = torch.utils.data.DataLoader(torch.ones(10, 4), batch_size=1)
    Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[bar],
    ).fit(Model(), data, data)
    print("trained")


def lightning_rich():
    from lightning.pytorch.callbacks import RichProgressBar

    bar = RichProgressBar()
    # Its thread forgets a step that ends while it draws: on a busy machine it would show an older one for ever.
    lightning(bar, lambda: bar.refresh(hard=True))


def lightning_tqdm():
    from lightning.pytorch.callbacks import TQDMProgressBar

    lightning(TQDMProgressBar())


def hostile():
    """Draw what would reach beyond the rows of this rank."""
    for text in ("\x1b[2J\x1b[1;1H\x1b[?25l", "one\ntwo\n\x1b[9A\x1b[2Kover\n", "\x1b[99B\x1b[3J\x1b[1L\x1b[5Mlow\n"):
        sys.stdout.write(text)
        sys.stdout.flush()
    for _ in range(300):
        sys.stdout.write("\x1b[A\x1b[Aup\r\x1b]0;title\x07\x1b7\x1b8\x1bM\x1b[?1049h")
    sys.stdout.flush()
    wait()
    sys.stdout.write("\ntrained\n")


if RANK == 0:
    globals()[KIND]()
else:
    if KIND == "hostile":
        print("before", flush=True)
    while not os.path.exists("half-0"):
        time.sleep(0.01)
    print("a line of rank 1", flush=True)
    wait()
