"""The start path: the quick parser loads nothing beyond what typing needs, and our own few
modules."""

from __future__ import annotations

import os
import subprocess
import sys

MAY_LOAD = {
    "distlaunch",
    "distlaunch.core",
    "distlaunch.core.errors",
    "distlaunch.core.model",
    "distlaunch.core.model.duration",
    "distlaunch.core.model.option_names",
    "distlaunch.core.model.run_files",
    "distlaunch.core.model.record",
    "distlaunch.core.model.text",
    "distlaunch.planning",
    "distlaunch.planning.train_options",
    "distlaunch.cli",
    "distlaunch.cli.option",
    "distlaunch.cli.option_table",
    "distlaunch.cli.parser",
}
HEAVY = (
    "typer",
    "click",
    "rich",
    "torch",
    "paramiko",
    "psutil",
    "asyncio",
    "argparse",
    "json",
    "pathlib",
    "subprocess",
)


def loaded(source: str) -> set[str]:
    """Run ``source`` in a bare interpreter and return the modules that it has loaded."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # -S: the site packages' own start-up files load modules of their own.
    code = f"import sys; sys.path.insert(0, {root!r})\n{source}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def test_parsing_train_loads_our_few_modules_and_nothing_else():
    # typing loads re itself; what counts is that the parser adds nothing.
    before = loaded("import __future__, collections.abc, typing")
    after = loaded(
        "from distlaunch.cli.parser import parse_train\n"
        "parse_train(['--num-gpus=2', '--grace', '5m', '-x', 'A=1', '--bind', 'cores', 'train.py'], {})"
    )
    assert after - before <= MAY_LOAD
    assert not after.intersection(HEAVY)


def test_an_error_of_the_command_line_is_reported_without_typer_and_rich():
    after = loaded(
        "import distlaunch.__main__ as command\n"
        "from distlaunch.cli.error_output import guarded\n"
        "assert guarded(lambda: command.run(['train', '--num-gpu', '2', 'train.py'], {})) == 2"
    )
    assert not after & {
        "typer",
        "click",
        "rich",
        "torch",
        "paramiko",
        "psutil",
        "asyncio",
        "argparse",
    }


def test_the_application_loads_nothing_that_only_a_job_needs():
    code = (
        "import sys, os, distlaunch.cli.app as cli\n"
        "for words in (['--help'], ['train', '--help']):\n    assert cli.run_app(words, {}) == 0\n"
        "print('MODULES', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    modules = set(done.stdout.partition("MODULES")[2].split())
    assert "typer" in modules
    assert not modules & {"torch", "paramiko", "psutil", "asyncio", "numpy", "pydantic"}
