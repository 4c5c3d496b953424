"""The layers hold, and the import contracts would notice if they did not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "import sys; from importlinter.cli import lint_imports_command; sys.argv = ['lint-imports', '--no-cache']; lint_imports_command()"


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(directory),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", LINT]
    return subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "distlaunch", tmp_path / "distlaunch", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_import_contract_is_kept():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("core/errors.py", "import distlaunch.core.model.text"),
        ("core/model/text.py", "import distlaunch.core.agent"),
        ("core/probe/__init__.py", "import distlaunch.core.protocol"),
        ("core/agent/__init__.py", "import distlaunch.coordinator"),
        ("core/agent/__init__.py", "import psutil"),
        ("core/agent/__init__.py", "import asyncio"),
        ("planning/train_options.py", "import distlaunch.backends"),
        ("coordinator/runtime/sink.py", "import distlaunch.console"),
        ("coordinator/runtime/sink.py", "import distlaunch.launch.run"),
        ("cli/__init__.py", "import torch"),
        ("toolkit/__init__.py", "import distlaunch.core.protocol"),
        ("toolkit/__init__.py", "import distlaunch.coordinator"),
        ("launch/run.py", "import distlaunch.toolkit"),
        ("coordinator/policy/job.py", "import distlaunch.coordinator.runtime.runner"),
        ("coordinator/runtime/runner.py", "import distlaunch.coordinator.joined.launcher"),
        ("core/agent/workers/spawner.py", "import distlaunch.core.agent.node.ports"),
        ("planning/facts.py", "import distlaunch.core.agent.frames"),
        ("planning/hosts/hostfile.py", "import distlaunch.planning.build_plan"),
        ("transport/ssh/client.py", "import distlaunch.transport.slurm.nodes"),
        ("cli/compat/torchrun/command.py", "import distlaunch.cli.compat.accelerate.options"),
        ("cli/commands/train.py", "import distlaunch.cli.compat.drop_in"),
        ("console/console.py", "import distlaunch.launch.run"),
    ],
)
def test_an_upward_or_forbidden_import_breaks_a_contract(copy, module, statement):
    with (copy / "distlaunch" / module).open("a") as file:
        file.write(f"\n\ndef _late() -> None:\n    {statement}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


def test_an_import_cycle_breaks_a_contract(copy):
    with (copy / "distlaunch/diagnosis/model.py").open("a") as file:
        file.write("\n\ndef _late() -> None:\n    import distlaunch.diagnosis.report\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "No cycles are allowed in distlaunch.diagnosis" in result.stdout


def test_a_package_outside_the_layers_is_refused(copy):
    (copy / "distlaunch" / "helpers").mkdir()
    (copy / "distlaunch" / "helpers" / "__init__.py").write_text("")
    result = lint_imports(copy)
    assert result.returncode == 1
    assert "helpers" in result.stdout + result.stderr
