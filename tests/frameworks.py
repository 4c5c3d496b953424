"""Frameworks that the tests' own interpreter does not have: a Python for each, made beside the
other tests.

A process of low priority makes what is not there yet, while the tests that need none of it run.
Files with tests that need a framework come late. A fixture waits for its own framework, or makes it
if that process could not.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.environments import FRAMEWORKS, start_at_low_priority
from tests.launcher import TRAINING, Launcher

_FILLS = Path(__file__).parent / "unit"
"""Many short files. A third of them comes last, so that all processes of a session end at about the
same time."""
_COMPUTES = Path(__file__).parent / "integration"
"""Files that use CPUs all the time. Most others wait for the most part, so these are spread among
them."""


def _needed(item: pytest.Item) -> list[str]:
    """Return the frameworks of a test, in the order in which they are made."""
    return [name for name in FRAMEWORKS if f"{name}_python" in getattr(item, "fixturenames", ())]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(FRAMEWORKS, 1)}
    files: dict[Path, int] = {}
    for item in items:
        files[item.path] = max([files.get(item.path, 0), *(order[name] for name in _needed(item))])
    short = [path for path, place in files.items() if place == 0 and path.is_relative_to(_FILLS)]
    files.update(dict.fromkeys(short, -1))
    if any(place > 0 for place in files.values()):
        files.update(dict.fromkeys(short[2 * len(short) // 3 :], len(order) + 1))
    spread: dict[Path, float] = {}
    for ours in (True, False):
        paths = [
            path
            for path, place in files.items()
            if place == 0 and path.is_relative_to(_COMPUTES) is ours
        ]
        spread |= {path: number / len(paths) for number, path in enumerate(paths)}
    items.sort(key=lambda item: (files[item.path], spread.get(item.path, 0.0)))


def pytest_collection_finish(session: pytest.Session) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if session.config.option.collectonly or worker not in {None, "gw0"}:
        return
    needed = {name for item in session.items for name in _needed(item)}
    if needed:
        # Not until the end of a worker of xdist: the first of them ends while others may still wait
        # for a framework.
        session_pid = os.getpid() if worker is None else os.getppid()
        start_at_low_priority(
            [name for name in FRAMEWORKS if name in needed], until_end_of=session_pid
        )


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


@pytest.fixture
def horovod_launcher(distlaunch: Launcher, horovod_python: str) -> Launcher:
    """Return launchers that Horovod's interpreter runs and that import Horovod once for all workers
    of a job."""
    distlaunch.python = horovod_python
    distlaunch.env["DISTLAUNCH_PRELOAD"] = f"horovod.torch,{TRAINING},sklearn.datasets"
    return distlaunch
