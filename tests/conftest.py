"""Shared by all tests: no silent skips in CI, leak checks, a minimal environment and the launcher
in it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadFileScheduling

from tests import frameworks
from tests.launcher import Launcher, give_children_default_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xdist.remote import Producer

import distlaunch.__main__  # installs the command's handler of Ctrl-C, which would end pytest

# Python's own, also where the session was started in the background, which ignores the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
give_children_default_signals()

# --- in CI a skip is a failure -------------------------------------------------------------------------------------


class NoSkips:
    """Fail the session if anything was skipped."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self.skipped:
            terminalreporter.write_line(f"skipped, which CI takes as a failure: {nodeid}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        config.pluginmanager.register(NoSkips(), "no-skips")
    config.pluginmanager.register(frameworks, "frameworks")


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that the collection has made: a collection of it takes 0.3 s."""
    gc.collect()
    gc.freeze()


# --- several tests at a time (-n N) ----------------------------------------------------------------------------------


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Keep a file's tests together, and the files in their order: frameworks come last."""
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


# --- nothing leaks out of a test -----------------------------------------------------------------------------------


def _descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[f"fd {fd}"] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return found


def _threads() -> dict[str, str]:
    return {f"thread {thread.ident}": thread.name for thread in threading.enumerate()}


def _children() -> dict[str, str]:
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            children = Path(f"/proc/self/task/{task}/children").read_text().split()
        except FileNotFoundError:
            continue
        for pid in children:
            try:
                found[f"child {pid}"] = (
                    Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[0].partition("(")[2]
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _environment() -> dict[str, str]:
    return {
        f"${name}": value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
    }


def _snapshot() -> dict[str, str]:
    return (
        _descriptors()
        | _threads()
        | _children()
        | _environment()
        | {"working directory": os.getcwd()}
    )


def _difference(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    lines = [
        f"left behind: {name} = {value}"
        for name, value in after.items()
        if before.get(name) != value
    ]
    # Descriptors, threads and children that ended were not the test's to end, but only a variable
    # can be missed by others.
    lines += [
        f"taken away: {name}" for name in before if name.startswith("$") and name not in after
    ]
    return lines


@pytest.fixture(autouse=True)
def leaks_nothing() -> Iterator[None]:
    """Fail a test that leaves descriptors, threads, child processes or environment variables
    behind."""
    before = _snapshot()
    yield
    deadline = time.monotonic() + 30.0
    while leaks := _difference(before, _snapshot()):
        if time.monotonic() > deadline:
            pytest.fail("\n".join(leaks), pytrace=False)
        gc.collect()
        time.sleep(0.02)


# --- the launcher as a user runs it --------------------------------------------------------------------------------


@pytest.fixture
def clean_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace the environment by PATH, HOME (a private one) and LANG, also for the test itself.
    Return a copy."""
    home = tmp_path / "home"
    home.mkdir()
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LANG": "C.UTF-8"}
    for name in list(os.environ):
        if name != "PYTEST_CURRENT_TEST":
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env


@pytest.fixture
def distlaunch(tmp_path: Path, clean_env: dict[str, str]) -> Iterator[Launcher]:
    """Return the launcher as a user runs it, in a minimal environment with state directories of its
    own."""
    launcher = Launcher(tmp_path, clean_env)
    yield launcher
    launcher.close()
