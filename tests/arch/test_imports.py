"""Each command loads only what it needs, and nothing heavy before the first worker."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "paramiko", "asyncio", "psutil", "pydantic"}
CLI = {"typer", "click", "rich"}


def top_level(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def loaded(importtime: str) -> set[str]:
    """Return the modules that ``python -X importtime`` reported."""
    return set(
        re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s+([\w.]+)$", importtime, flags=re.MULTILINE)
    )


def modules_of(distlaunch, *args: str) -> set[str]:
    command = [sys.executable, "-X", "importtime", "-m", "distlaunch", *args]
    result = subprocess.run(
        command,
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    modules = loaded(result.stderr)
    assert "distlaunch" in modules
    return modules


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"]])
def test_help_loads_no_heavy_module(distlaunch, args):
    assert not top_level(modules_of(distlaunch, *args)) & (
        HEAVY - {"pydantic"}
    )  # typer 0.29 itself loads pydantic


def test_version_of_typer_apart_a_plan_loads_no_heavy_module(distlaunch):
    modules = modules_of(distlaunch, "plan", "--num-procs", "2", "--no-python", "/bin/true")
    assert not top_level(modules) & (HEAVY - {"pydantic"})


def test_a_local_train_loads_neither_the_command_line_framework_nor_anything_heavy(distlaunch):
    modules = modules_of(distlaunch, "train", "--num-procs", "2", "--no-python", "/bin/true")
    assert not top_level(modules) & (HEAVY | CLI)


def test_a_local_train_stays_within_its_budget_of_modules(distlaunch):
    """The modules of a bare interpreter (about 40, with its site directory) are subtracted."""
    bare = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "this"],
        env=distlaunch.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    modules = modules_of(
        distlaunch, "train", "--num-procs", "2", "--no-python", "/bin/true"
    ) - loaded(bare.stderr)
    ours = {module for module in modules if module.startswith("distlaunch")}
    assert len(modules - ours) <= STANDARD_LIBRARY_BUDGET, sorted(modules - ours)
    assert not modules & FORBIDDEN_IN_TRAIN


def test_modules_that_reach_nodes_by_ssh_load_paramiko_only_when_they_connect():
    """``load_paramiko`` must come first: it leaves out half of paramiko, and keeps its log and
    tracebacks off the terminal."""
    code = "import sys, distlaunch.launch.remote, distlaunch.transport.ssh.nodes; "
    code += "print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not top_level(set(done.stdout.split())) & HEAVY


STANDARD_LIBRARY_BUDGET = 60
FORBIDDEN_IN_TRAIN = {
    "inspect",
    "importlib.metadata",
    "email",
    "http",
    "urllib.request",
    "logging",
    "argparse",
    "ssl",
    "multiprocessing",
}
