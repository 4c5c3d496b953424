"""Fit a Lightning module with DDP whose epoch prints nothing but that it begins; it ends when the sign ``enough`` is up."""

import os
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from signs import sign

torch.set_num_threads(1)


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(256, 512)


class Deep(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))

    def training_step(self, batch, index):
        if index == 0:
            print("the epoch begins", flush=True)
            sign(f"epoch-{self.global_rank}")
        # All ranks stop at the same step.
        enough = torch.tensor(float(os.path.exists("enough")))
        self.trainer.should_stop = bool(self.all_gather(enough).max())
        self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = self.trainer.should_stop
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=1,
    min_steps=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=os.getcwd(),
)
trainer.fit(Deep(), DataLoader(Endless(), batch_size=None))
print(f"done {trainer.global_rank}")
sys.stdout.flush()
os._exit(0)  # the end of an interpreter with all these modules is silent, too, and slow on a busy machine
