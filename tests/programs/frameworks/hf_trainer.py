"""Train a tiny transformer with the Hugging Face Trainer, all made on the spot."""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = (torch.arange(8) + index) % 16
        return {"input_ids": ids, "labels": ids}


torch.manual_seed(3)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
)
arguments = TrainingArguments(
    output_dir="out",
    use_cpu="auto" not in sys.argv,
    per_device_train_batch_size=4,
    max_steps=4,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_strategy="no",
    seed=3,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Numbers())
result = trainer.train()
assert arguments.world_size == 2
assert arguments.process_index == int(os.environ["RANK"])
assert torch.distributed.is_initialized()
print(
    "told",
    json.dumps({"precision": trainer.accelerator.mixed_precision, "processes": trainer.accelerator.num_processes}),
)
total = sum(parameter.sum() for parameter in model.parameters()).item()
print(f"done {arguments.process_index} {result.global_step} {total:.6f}")
torch.distributed.destroy_process_group()
