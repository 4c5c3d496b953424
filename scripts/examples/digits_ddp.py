"""Train a small network on scikit-learn's digits with DistributedDataParallel, and survive a
restart.

Run it any of these ways; one file, no change:

    python digits_ddp.py
    distlaunch train --num-procs 2 digits_ddp.py
    distlaunch train --num-procs 2 --max-restarts 1 digits_ddp.py --fail-at-epoch 4

It shows what a training script needs so that a launcher can restart it: a checkpoint that is never
half-written, and everything that decides the next step (weights, optimizer, epoch, random state) in
it. A run that was interrupted and resumed ends with exactly the accuracy of one that was not.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", help="file to save to after every epoch, and to resume from if it is there"
    )
    parser.add_argument(
        "--fail-at-epoch",
        type=int,
        help="raise in rank 1 before this epoch, in the first attempt only",
    )
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


def save_checkpoint(
    path: str, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int
) -> None:
    """Write beside the target, flush to disk, then rename: whoever kills us at any instant, one
    whole file is there."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": epoch,
        "rng": torch.get_rng_state(),
    }
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_checkpoint(path: str | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore what ``save_checkpoint`` wrote, if anything; return the epoch to go on with."""
    if path is None or not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return int(state["epoch"]) + 1


def train_one_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[tuple[torch.Tensor, ...]]
) -> torch.Tensor:
    """Return this worker's mean loss."""
    model.train()
    total = torch.zeros(())
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / len(loader)


@torch.no_grad()
def accuracy(model: nn.Module, test_set: TensorDataset) -> float:
    """Share of the test set that is classified right: every worker judges its slice, the counts are
    added up."""
    model.eval()
    images, labels = (
        tensor[dist.get_rank() :: dist.get_world_size()] for tensor in test_set.tensors
    )
    counts = torch.stack([(model(images).argmax(dim=1) == labels).sum(), torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return float(counts[0]) / float(counts[1])


def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # plain `python digits_ddp.py`: a world of one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(args.seed)  # equal weights everywhere
    torch.use_deterministic_algorithms(mode=True)

    train_set, test_set = load_data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        train_set, seed=args.seed
    )
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(network.parameters(), lr=args.lr)
    first_epoch = load_checkpoint(args.checkpoint, network, optimizer)
    model = DistributedDataParallel(network)
    if rank == 0 and first_epoch:
        print(f"resuming at epoch {first_epoch} (attempt {attempt})")

    for epoch in range(first_epoch, args.epochs):
        if epoch == args.fail_at_epoch and rank == 1 and attempt == 0:
            raise RuntimeError(f"asked to fail at epoch {epoch}")
        sampler.set_epoch(epoch)  # the order of the samples depends on seed and epoch alone
        torch.manual_seed(args.seed * 1000 + epoch)
        loss = train_one_epoch(model, optimizer, loader)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch:2d}  loss {float(loss) / dist.get_world_size():.4f}")
            if args.checkpoint:
                save_checkpoint(args.checkpoint, network, optimizer, epoch)

    result = accuracy(model, test_set)
    if rank == 0:
        print(f"accuracy {result:.4f}")
    # DDP keeps gloo's threads alive to the end of the process; one that still holds a tensor of
    # ours when Python shuts down aborts it ("terminate called without an active exception"). This
    # waits without using those threads.
    dist.monitored_barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
