"""The training of the GPU check: a small network, and data like the digits that need no package."""

import torch
from torch import nn

PIXELS, CLASSES, BLOCKS = 64, 10, 3
SAMPLES = 512


class Block(nn.Module):
    """A layer and its shortcut; it notes what it computed with, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(PIXELS), nn.Linear(PIXELS, PIXELS)
        self.calls = 0
        self.computed_in: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many features as came in."""
        inner = self.linear(self.norm(x))
        self.calls += 1
        self.computed_in |= {x.dtype, self.linear.weight.dtype, inner.dtype}
        return x + nn.functional.relu(inner)


class Network(nn.Module):
    """Blocks in a module list, which FSDP shards one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(PIXELS, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each class."""
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def network() -> Network:
    """Return the network, the same on all ranks and in every run."""
    torch.manual_seed(7)
    return Network()


def samples(seed: int = 0, count: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw images, each of the ten classes around one of its own, and their labels; on the CPU, so
    always the same."""
    centres = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return centres[labels] + 0.5 * torch.randn(count, PIXELS, generator=generator), labels
