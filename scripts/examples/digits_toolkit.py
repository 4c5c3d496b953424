"""Train a small network on scikit-learn's digits with the toolkit: DDP, FSDP or Horovod by the
launcher's flag alone.

Run it any of these ways; one file, no change:

    python digits_toolkit.py
    distlaunch train --num-procs 2 digits_toolkit.py --batch-size 32
    distlaunch train --num-procs 2 --backend fsdp -o wrap-classes=Block digits_toolkit.py --batch-size 32
    torchrun --nproc-per-node 2 digits_toolkit.py --batch-size 32

The global batch is the workers' number times ``--batch-size``; where that is the same, the losses
are the same.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from distlaunch.toolkit import heartbeat, init, wrap


class Block(nn.Module):
    """A layer and its shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many features as came in."""
        return x + nn.functional.relu(self.linear(self.norm(x)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="per worker")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Split the 1797 images of 8 x 8 pixels (inside the scikit-learn package) into training and
    test set."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:360], order[360:]
    return TensorDataset(images[rest], labels[rest]), TensorDataset(
        images[held_out], labels[held_out]
    )


def main() -> None:
    args = parse_args()
    context = init(seed=0)
    train_set, test_set = load_data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    network = nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(3)), nn.Linear(64, 10))
    model, optimizer = wrap(network, torch.optim.AdamW(network.parameters(), lr=args.lr))

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(images.to(context.device)), labels.to(context.device)
            )
            loss.backward()
            optimizer.step()
            step += 1
            heartbeat(step=step, loss=loss)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if context.rank == 0:
                print(f"step {step:3d}  loss {float(mean) / context.world_size:.6f}")

    model.eval()
    images, labels = (tensor.to(context.device) for tensor in test_set.tensors)
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean()
    if context.rank == 0:
        print(f"accuracy {float(right):.4f}")


if __name__ == "__main__":
    main()
