"""Shard a model as Accelerate does by what the launcher has set, and train it; ``told`` says how it was read.

Accelerate itself shards on GPUs alone, so its plugin and its sharding are called here as ``prepare`` calls them.
"""

import json
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model


class Block(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).relu()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(3)))
        self.head = torch.nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.blocks(x))


accelerator = Accelerator()
plugin = FullyShardedDataParallelPlugin()
if accelerator.mixed_precision != "no":
    plugin.set_mixed_precision(accelerator.mixed_precision)
as_accelerator = SimpleNamespace(
    state=SimpleNamespace(fsdp_plugin=plugin),
    mixed_precision=accelerator.mixed_precision,
    device=accelerator.device,
    is_main_process=accelerator.is_main_process,
    parallelism_config=None,
)
torch.manual_seed(5)
model = Model()
if plugin.activation_checkpointing:
    plugin.set_auto_wrap_policy(model)
    model = fsdp2_apply_ac(as_accelerator, model)
model = fsdp2_prepare_model(as_accelerator, model)
sharded = sum(type(module).__name__.startswith("FSDP") for module in model.modules())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(8, 16, generator=torch.Generator().manual_seed(accelerator.process_index))
for _ in range(5):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
total = sum(parameter.full_tensor().sum() for parameter in model.parameters()).item()
reported = {
    "version": plugin.fsdp_version,
    "reshard": plugin.reshard_after_forward,
    "offload": type(plugin.cpu_offload).__name__,
    "min": plugin.min_num_params,
    "classes": plugin.transformer_cls_names_to_wrap,
    "checkpointing": plugin.activation_checkpointing,
    "precision": accelerator.mixed_precision,
    "compute": str(getattr(plugin.mixed_precision_policy, "param_dtype", None)),
    "processes": accelerator.num_processes,
    "type": str(accelerator.distributed_type),
    "sharded": sharded,
}
print("told", json.dumps(reported))
print(f"done {accelerator.process_index} 5 {total:.4f}")
dist.monitored_barrier()
accelerator.end_training()
