from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest

from distlaunch.coordinator.policy.advisory import Advisory
from distlaunch.coordinator.runtime.main_loop_calls import MainLoopCalls
from distlaunch.coordinator.runtime.run_directory import make_run_dir
from distlaunch.core.protocol import control_messages
from distlaunch.launch import process


class FakeRunner:
    def __init__(self) -> None:
        self.calls = MainLoopCalls()
        self.advisory = Advisory(lambda _: None)
        self.asked = threading.Event()

    def handlers(self):
        return {}

    def warn_of_no_control_socket(self) -> None:
        self.asked.set()


@pytest.fixture
def short_dir():
    """Return a directory whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.mark.parametrize("usable", [True, False])
def test_a_launcher_warns_if_it_has_no_control_socket(tmp_path, short_dir, monkeypatch, usable):
    base = short_dir / "base"
    base.mkdir() if usable else base.touch()
    monkeypatch.setattr(control_messages, "_BASES", (str(base),))
    monkeypatch.setattr(process, "_HOUSEKEEPING_S", 0.0)
    runner = FakeRunner()
    run_dir = make_run_dir(str(tmp_path / "jobs"), "job", {})
    housekeeping = process.Housekeeping(run_dir)
    housekeeping.start_for(runner)
    housekeeping.join()
    runner.calls.run()
    housekeeping.finish()
    run_dir.close()
    runner.calls.close()
    assert runner.asked.is_set() is not usable
