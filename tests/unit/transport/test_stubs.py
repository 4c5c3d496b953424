"""Programs for a node's Python (``-c``) import an entry point that exists."""

from __future__ import annotations

import importlib
import re

import pytest

from distlaunch.transport import bootstrap
from distlaunch.transport.slurm import step


@pytest.mark.parametrize("stub", [bootstrap.STUB, step._STUB], ids=["streams", "connecting back"])
def test_a_stub_calls_the_main_of_a_module_of_the_agent(stub):
    [module] = re.findall(r"from (distlaunch\.[\w.]+) import main\b", stub)
    assert callable(importlib.import_module(module).main)
