"""An Accelerate script that knows nothing of DeepSpeed: what it runs with comes from the launcher."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for inputs, labels in loader:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
stage = model.zero_optimization_stage()
print("ran", accelerator.distributed_type.value, accelerator.num_processes, stage, flush=True)
dist.monitored_barrier()
dist.destroy_process_group()
