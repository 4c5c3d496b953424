"""Tests of scripts/gpu-check. Those marked ``gpu`` are deselected where there is no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
_path = list(sys.path)
sys.path.insert(0, str(SCRIPTS))
try:
    from gpulib import (
        check_environment,
        checks,
        failing,
        frameworks,
        launching,
        machine,
        report,
        training,
    )
finally:
    sys.path[:] = _path

__all__ = [
    "check_environment",
    "checks",
    "failing",
    "frameworks",
    "launching",
    "report",
    "training",
]
_summary = pytest.StashKey[str]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``gpu`` where there is no GPU: CI would count a skip as a failure."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    try:
        config.stash[_summary] = f"gpu: {machine.find_gpu(os.environ)}"
    except machine.NoGpuError as exc:
        config.stash[_summary] = f"gpu: {exc}; {len(marked)} tests that need one are deselected"
        items[:] = [item for item in items if item not in marked]
        config.hook.pytest_deselected(items=marked)


def pytest_report_collectionfinish(config: pytest.Config) -> str | list[str]:
    return config.stash.get(_summary, [])


@pytest.fixture(scope="session")
def lib():
    """Return this module, which has the modules of scripts/gpu-check."""
    return sys.modules[__name__]


@pytest.fixture
def on_cpu(lib, clean_env):
    """Yield the environment of a check without a GPU. Its jobs run on the CPU."""
    nothing = machine.Gpu(
        index=0, uuid="", name="no GPU", memory_mib=None, driver="", visible=0, torch="", cuda=""
    )
    with lib.check_environment.CheckEnvironment(nothing, clean_env, limit_s=100) as it:
        yield it
