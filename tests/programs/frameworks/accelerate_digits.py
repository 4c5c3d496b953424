"""Train on the digits with Accelerate, the batch split between all processes; tell the loss of each step."""

import json

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset
from digits import load_digits

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
pixels, digits = load_digits()
images = torch.tensor(pixels[:1536], dtype=torch.float32) / 16
labels = torch.tensor(digits[:1536])
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
loader = DataLoader(TensorDataset(images, labels), batch_size=64)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(3):
    for inputs, wanted in loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = torch.nn.functional.cross_entropy(outputs, wanted)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
reported = {
    "processes": accelerator.num_processes,
    "precision": accelerator.mixed_precision,
    "type": accelerator.distributed_type.value,
    "dynamo": accelerator.state.dynamo_plugin.backend.value,
    "losses": losses,
}
print("told", json.dumps(reported))
print(f"done {accelerator.process_index} {len(losses)} {losses[-1]:.6f}")
if dist.is_initialized():
    dist.monitored_barrier()
accelerator.end_training()
