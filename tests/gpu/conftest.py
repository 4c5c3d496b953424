"""Tests of scripts/gpu-check; those marked ``gpu`` are not there where there is no GPU, and that is
said."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
_path = list(sys.path)
sys.path.insert(0, str(SCRIPTS))
try:
    from gpulib import checks, failing, frameworks, ground, launching, machine, report, training
finally:
    sys.path[:] = _path

__all__ = ["checks", "failing", "frameworks", "ground", "launching", "report", "training"]
_said = pytest.StashKey[str]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them, rather than skip: CI takes a skip as a failure, and nobody there can put it
    right."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    try:
        config.stash[_said] = f"gpu: {machine.find_gpu(os.environ)}"
    except machine.NoGpuError as exc:
        config.stash[_said] = f"gpu: {exc}; {len(marked)} tests that need one are deselected"
        items[:] = [item for item in items if item not in marked]
        config.hook.pytest_deselected(items=marked)


def pytest_report_collectionfinish(config: pytest.Config) -> str | list[str]:
    return config.stash.get(_said, [])


@pytest.fixture(scope="session")
def lib():
    """Return the modules that scripts/gpu-check is made of."""
    return sys.modules[__name__]


@pytest.fixture
def on_cpu(lib, clean_env):
    """Return the ground of a check where there is no GPU: its jobs are started on the CPU."""
    nothing = machine.Gpu(
        index=0, uuid="", name="no GPU", memory_mib=None, driver="", visible=0, torch="", cuda=""
    )
    with lib.ground.Ground(nothing, clean_env, limit_s=100) as it:
        yield it
