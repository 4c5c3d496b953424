"""The random generators that a script is likely to use."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Read all random generators that a script is likely to use."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        states["numpy"] = np.random.get_state()  # noqa: NPY002 - the global one
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def check_random_states(states: dict[str, Any]) -> None:
    """Raise ValueError for a state that numpy would take, and then read behind its end."""
    if "numpy" in states:
        name, numbers, position, *_ = states["numpy"]
        if name != "MT19937" or not 0 <= position <= len(numbers):
            raise ValueError("the random state of numpy is none")


def set_random_states(states: dict[str, Any]) -> None:
    """Set what ``random_states`` has read."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])  # noqa: NPY002 - the global one
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
