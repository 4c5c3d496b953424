"""Environments for frameworks that the tests' own interpreter does not have: made once, and kept.

One is a virtual environment that sees all packages of the interpreter that runs the tests, so that torch is there and
not installed twice; only what is missing comes into it. It lies in ``$XDG_CACHE_HOME`` (or ``~/.cache``), under a name
that changes with the requirements, the interpreter and its torch. Two test sessions make it one after the other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PATIENCE_S = 1800


def environment(
    name: str, requirements: Sequence[str], *, pip: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Path:
    """Give the Python of an environment with these requirements; make it if it is not there.

    ``pip``: further words for ``pip install``; ``variables``: set while packages are built. Call it from a fixture of
    module or session scope: the tests' own environment variables do not lead to pip's index.
    """
    variables = variables or {}
    of = [sys.version, sys.prefix, version("torch"), *requirements, *pip, *map("=".join, sorted(variables.items()))]
    digest = hashlib.sha256("\0".join(of).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distlaunch-tests"
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / f"{name}-{digest}"
    whole, python = root / "whole", root / "bin" / "python"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(root, ignore_errors=True)
            # pip's cache does not know with which variables a wheel was built.
            no_cache = ["--no-cache-dir"] if variables else []
            _make(root, python, ["--no-build-isolation", *no_cache, *pip, *requirements], variables)
            whole.touch()
    return python


def _make(root: Path, python: Path, words: Sequence[str], variables: Mapping[str, str]) -> None:
    _run([sys.executable, "-m", "venv", "--without-pip", str(root)])
    site = sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)})
    ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(site) / "packages_of_the_tests.pth").write_text(ours)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    _run([*pip, "install", "--quiet", *words], **variables)


def _run(argv: Sequence[str], **variables: str) -> None:
    done = subprocess.run(
        argv,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    if done.returncode != 0:
        msg = f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        raise RuntimeError(msg)
