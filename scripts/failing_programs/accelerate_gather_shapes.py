# workers: 2
# expect-rank: all
# expect-cause: shape mismatch | shapes
# expect-cause: gather
# expect-frame: evaluate
# expect-hint: shape | pad_across_processes | gather_for_metrics
# misleads: network
"""The last batches have different lengths; accelerate in debug mode refuses to gather them, on each rank."""
import os

os.environ["ACCELERATE_DEBUG_MODE"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "1"

import torch
from accelerate import Accelerator


def evaluate(accelerator):
    rows = 4 if accelerator.process_index == 0 else 3
    predictions = torch.zeros(rows, 5)
    return accelerator.gather(predictions)


def main():
    accelerator = Accelerator(cpu=True)
    accelerator.print("***** Running evaluation *****\n  Num examples = 7\n  Batch size = 4")
    evaluate(accelerator)


main()
