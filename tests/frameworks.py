"""Frameworks that the tests' own interpreter does not have: a Python for each, made beside the other tests.

What is not there yet is made by a process that has only the time that nobody else wants, while the tests that need none
of it run; files with tests that do come last. A fixture waits for its own, or makes it if that process could not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments import FRAMEWORKS

_ROOT = Path(__file__).resolve().parents[1]
_STARTED: list[subprocess.Popen[bytes]] = []


def _needed(item: pytest.Item) -> list[str]:
    """Name the frameworks of a test, in the order in which they are made."""
    return [name for name in FRAMEWORKS if f"{name}_python" in getattr(item, "fixturenames", ())]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(FRAMEWORKS, 1)}
    last: dict[Path, int] = {}
    for item in items:
        last[item.path] = max([last.get(item.path, 0), *(order[name] for name in _needed(item))])
    items.sort(key=lambda item: last[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    needed = {name for item in session.items for name in _needed(item)}
    if needed:
        words = [sys.executable, "-m", "tests.environments", *(name for name in FRAMEWORKS if name in needed)]
        _STARTED.append(subprocess.Popen(words, cwd=_ROOT, stdin=subprocess.DEVNULL, start_new_session=True))


def pytest_sessionfinish() -> None:
    for process in _STARTED:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _STARTED.clear()


def _python(name: str, config: pytest.Config) -> str:
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return str(FRAMEWORKS[name]())


@pytest.fixture(scope="session")
def deepspeed_python(pytestconfig: pytest.Config) -> str:
    return _python("deepspeed", pytestconfig)


@pytest.fixture(scope="session")
def pyarrow_python(pytestconfig: pytest.Config) -> str:
    return _python("pyarrow", pytestconfig)


@pytest.fixture(scope="session")
def tensorflow_python(pytestconfig: pytest.Config) -> str:
    return _python("tensorflow", pytestconfig)


@pytest.fixture(scope="session")
def ray_python(pytestconfig: pytest.Config) -> str:
    return _python("ray", pytestconfig)


@pytest.fixture(scope="session")
def horovod_python(pytestconfig: pytest.Config) -> str:
    return _python("horovod", pytestconfig)
