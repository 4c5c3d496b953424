"""Train with Accelerate, which comes to precision and DeepSpeed by what the launcher has set."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from learning import Block, network, samples
from observations import report
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4

accelerator = Accelerator()
bare = network()
loader = DataLoader(TensorDataset(*samples()), batch_size=64)
model, optimizer, loader = accelerator.prepare(
    bare, torch.optim.SGD(bare.parameters(), lr=0.05), loader
)
losses = []
for _ in range(EPOCHS):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
stage = getattr(model, "zero_optimization_stage", None)
report(
    device=accelerator.device,
    processes=accelerator.num_processes,
    precision=accelerator.mixed_precision,
    kind=accelerator.distributed_type.value,
    stage=stage() if stage else None,
    losses=losses,
    computed_in=sorted(
        {
            str(dtype)
            for each in model.modules()
            if isinstance(each, Block)
            for dtype in each.computed_in
        }
    ),
)
accelerator.end_training()
if dist.is_initialized():
    dist.destroy_process_group()
