"""The completion scripts, one for each shell."""

from __future__ import annotations

import os

SHELLS = ("bash", "zsh", "fish")


def script_path(shell: str) -> str:
    """Return the path of the completion script of a shell."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), f"distlaunch.{shell}")
