"""Fit a tiny Lightning module with DDP, as a script written for torchrun does: devices and nodes from the launcher."""

import os
import warnings

warnings.simplefilter("ignore")

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


L.seed_everything(7, verbose=False)
x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
world = int(os.environ["WORLD_SIZE"])
trainer = L.Trainer(
    accelerator="cpu",
    devices=world,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=os.getcwd(),
)
model = Line()
trainer.fit(model, data)
assert trainer.world_size == world == 2
assert trainer.global_rank == int(os.environ["RANK"])
assert type(trainer.strategy.cluster_environment).__name__ == "TorchElasticEnvironment"
print(f"done {trainer.global_rank} {trainer.global_step} {model.layer.weight.sum().item():.6f}")
