"""Train with Accelerate's loop: prepare, backward, gather."""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(5)
model = torch.nn.Linear(4, 1)
x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), data)
steps = 0
for inputs, wanted in data:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
    optimizer.step()
    steps += 1
assert accelerator.num_processes == 2
assert accelerator.process_index == int(os.environ["RANK"])
assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
total = sum(parameter.sum() for parameter in model.parameters()).item()
print(f"done {accelerator.process_index} {steps} {total:.6f}")
accelerator.end_training()
