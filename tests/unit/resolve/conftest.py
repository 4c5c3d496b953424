"""Facts built by hand: a machine, a directory and an environment that no test finds by accident."""

from __future__ import annotations

from collections import defaultdict

import pytest

from distlaunch.core.model.gpus import GpuInventory
from distlaunch.core.model.node import CpuInventory
from distlaunch.resolve.facts import Facts


def facts(*, environ=None, gpus=None, paths=None, texts=None, programs=None, **changed) -> Facts:
    """Give a machine of 16 CPUs; ``/w/train.py`` is there, and nothing else unless ``paths`` says so."""
    known = defaultdict(lambda: "missing", {"/w": "directory", "/w/train.py": "file", **(paths or {})})
    values = {
        "environ": environ or {},
        "cwd": "/w",
        "hostname": "nodeA",
        "python": "/usr/bin/python3",
        "cpus": CpuInventory(allowed=tuple(range(16)), online=16),
        "gpus": gpus or GpuInventory(),
        "paths": known,
        "texts": texts or {},
        "programs": programs or {},
    }
    return Facts(**{**values, **changed})


@pytest.fixture(scope="session")
def make_facts():
    return facts
