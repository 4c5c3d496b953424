# workers: 2
# expect-rank: all
# expect-cause: devices=4
# expect-hint: devices
# misleads: firewall
"""Lightning is told devices=4 while two workers were started; it notices when the trainer is made."""
import logging
import os
import time

import torch
from lightning.pytorch import LightningModule, Trainer


class Tiny(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _index):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    open(f"up-{os.environ['RANK']}", "w").close()
    while len([name for name in os.listdir(".") if name.startswith("up-")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    trainer = Trainer(accelerator="cpu", devices=4, strategy="ddp", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4))


if __name__ == "__main__":
    main()
