"""The sets of modules that each command may load, read from ``sys.modules`` at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import sys
sys.path[:0] = {paths!r}
sys.argv[0] = "distlaunch"
import distlaunch.__main__ as command
{setup}
try:
    command.main()
finally:
    with open({out!r}, "w") as file:
        file.write(chr(10).join(sys.modules))
"""
LATE = "from distlaunch.launch import process; process._HOUSEKEEPING_S = 60.0"
"""Has a job of any length load what explains a failure only after its end, so never here: on a busy
machine a short job may last longer than the delay."""
HEAVY = {"torch", "numpy", "paramiko", "asyncio", "psutil", "multiprocessing", "concurrent"}
NOT_ON_THE_START_PATH = HEAVY | {
    "typer",
    "click",
    "rich",
    "pydantic",
    "argparse",
    "dataclasses",
    "inspect",
    "logging",
    "pathlib",
    "subprocess",
    "shutil",
    "tempfile",
    "traceback",
    "importlib.metadata",
    "email",
    "http",
    "ssl",
    "urllib",
    "datetime",
    "random",
}
TRAIN_MAY_LOAD = {
    "__future__", "_abc", "_ctypes", "_json", "_operator", "_socket", "_sre", "_struct", "_typing", "_collections",
    "_functools", "_opcode", "array", "collections", "contextlib", "copyreg", "ctypes", "enum", "errno", "fcntl",
    "functools", "importlib", "itertools", "json", "keyword", "math", "operator", "re", "reprlib", "resource", "select",
    "selectors", "signal", "socket", "struct", "termios", "threading", "_thread", "types", "typing", "warnings",
    "_weakrefset", "weakref", "_signal", "_string", "string", "gc",
}  # fmt: skip
"""Top-level modules of the standard library, beyond what an interpreter has with ``os`` alone (3.10
to 3.13)."""


def modules_of(
    distlaunch, *words: str, code: int = 0, site: bool = False, setup: str = ""
) -> set[str]:
    """Run a command in an interpreter without site packages (unless ``site``). Return the modules
    that are loaded at its end."""
    out = distlaunch.tmp_path / "modules"
    paths = [str(ROOT), *(path for path in sys.path if site and path.endswith("-packages"))]
    source = RUN.format(paths=paths, out=str(out), setup=setup)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source, *words],
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return set(out.read_text().split())


def bare() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import os, sys; print(*sys.modules)"],
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def unwanted(modules: set[str], names: set[str]) -> set[str]:
    return {
        module
        for module in modules
        for name in names
        if module == name or module.startswith(name + ".")
    }


TRAINS = {
    "workers": ["--num-procs", "2", "--no-python", "/bin/true"],
    "one worker": ["--num-procs", "1", "--no-python", "/bin/true"],
    "jsonl": ["--format", "jsonl", "--num-procs", "2", "--no-python", "/bin/true"],
    "bound": ["--bind", "cores", "--num-procs", "2", "--no-python", "/bin/true"],
}


@pytest.mark.parametrize("words", TRAINS.values(), ids=TRAINS)
def test_a_local_train_loads_the_standard_library_alone_and_little_of_it(distlaunch, words):
    modules = modules_of(distlaunch, "train", *words, setup=LATE) - bare()
    assert unwanted(modules, NOT_ON_THE_START_PATH) == set()
    assert {name.partition(".")[0] for name in modules} - {"distlaunch"} <= TRAIN_MAY_LOAD


def test_a_local_train_that_goes_well_loads_no_diagnosis_and_no_typer(distlaunch):
    ours = {
        name
        for name in modules_of(distlaunch, "train", *TRAINS["workers"], setup=LATE)
        if name.startswith("distlaunch.")
    }
    assert (
        unwanted(
            ours,
            {
                "distlaunch.cli.app",
                "distlaunch.cli.commands.plan_tables",
                "distlaunch.core.probe.gpus",
                "distlaunch.core.probe.nvidia",
            },
        )
        == set()
    )
    assert not {name for name in ours if name.startswith("distlaunch.diagnosis.")} - {
        "distlaunch.diagnosis.model"
    }


@pytest.mark.parametrize(
    "words", [["bash", "distlaunch train --num-g", "--num-g"], ["zsh", "deepspeed", "--launch"]]
)
def test_a_tab_loads_no_typer_and_nothing_heavy(distlaunch, words):
    modules = modules_of(distlaunch, "completion", "--words", *words) - bare()
    assert unwanted(modules, NOT_ON_THE_START_PATH | {"distlaunch.cli.app"}) == set()


def test_a_local_train_looks_for_no_other_node(distlaunch):
    modules = modules_of(
        distlaunch, "train", "--num-procs", "2", "--num-nodes", "1", "--no-python", "/bin/true"
    )
    around = {
        *("launch.surroundings", "core.probe.network", "core.model.host_list"),
        *("planning.node_source", "planning.allocation", "planning.explain", "planning.hosts"),
    }
    sources = {name for name in modules if name.startswith("distlaunch.planning.clusters.")}
    assert unwanted(modules, {f"distlaunch.{name}" for name in around}) == set()
    assert sources <= {"distlaunch.planning.clusters.select"}


def test_a_failing_train_loads_nothing_heavy_to_explain_it(distlaunch):
    modules = modules_of(
        distlaunch, "train", "--num-procs", "2", "--no-python", "/bin/false", code=1, setup=LATE
    )
    assert unwanted(modules, NOT_ON_THE_START_PATH) == set()


def test_a_plan_as_json_loads_nothing_heavy(distlaunch):
    words = ["--format", "json", "--num-procs", "2", "--no-python", "/bin/true"]
    modules = modules_of(distlaunch, "plan", *words) - bare()
    assert unwanted(modules, NOT_ON_THE_START_PATH) == set()
    assert {name.partition(".")[0] for name in modules} - {"distlaunch"} <= TRAIN_MAY_LOAD


@pytest.mark.parametrize(
    ("nodes", "parts"),
    [
        (["--num-procs", "2"], {"coordinator.policy", "diagnosis", "core.protocol", "core.agent"}),
        (["--hosts", "a:2,b:2"], {"coordinator.policy", "diagnosis", "core.agent"}),
    ],
    ids=["one node", "hosts"],
)
def test_a_plan_loads_nothing_that_only_a_running_job_needs(distlaunch, nodes, parts):
    modules = modules_of(distlaunch, "plan", "--format", "json", *nodes, "--no-python", "/bin/true")
    assert unwanted(modules, {f"distlaunch.{part}" for part in parts} | {"threading"}) == set()


def test_a_wrong_option_is_reported_without_the_command_line_framework(distlaunch):
    modules = modules_of(distlaunch, "train", "--num-proc", "2", "x.py", code=2)
    assert unwanted(modules, HEAVY | {"typer", "click", "rich", "pydantic", "argparse"}) == set()


@pytest.mark.parametrize(
    "words",
    [
        *([], ["--help"], ["train", "--help"], ["plan", "-h"], ["render", "slurm", "--help"]),
        *(["accelerate", "-h"], ["horovodrun", "-h"], ["deepspeed", "-h"]),
        *(["torchrun", "-h"], ["backends", "-h"], ["help"], ["help", "logs"], ["--version"]),
        ["version"],
    ],
    ids=" ".join,
)
def test_help_loads_neither_the_command_line_framework_nor_a_part_of_a_job(distlaunch, words):
    modules = modules_of(distlaunch, *words, site=True)
    assert unwanted(modules, NOT_ON_THE_START_PATH) == set()
    parts = ("core.agent", "coordinator", "diagnosis", "launch", "transport")
    assert unwanted(modules, {f"distlaunch.{part}" for part in parts}) == set()
