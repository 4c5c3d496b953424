from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def this_tree(distlaunch) -> None:
    """Make launcher and workers import the package beside these tests."""
    distlaunch.env["PYTHONPATH"] = str(Path(__file__).parents[2])
