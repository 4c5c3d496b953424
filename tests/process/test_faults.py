"""Faults of ours are planted in parts of the launcher that only observe the job."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from distlaunch.coordinator.policy.advisory import AdvisoryPart
from distlaunch.core.protocol.control_messages import ControlError
from distlaunch.jobs.control import NoControlError, ask

WRAPPER = """#!{python}
import importlib, os, sys

def fail(*_, **__):
    raise TypeError("planted")

for place in os.environ.pop("PLANTED", "").split():
    module, _, path = place.partition(":")
    owner = importlib.import_module(f"distlaunch.{{module}}")
    *names, last = path.split(".")
    for name in names:
        owner = getattr(owner, name)
    setattr(owner, last, fail)
sys.argv[1:3] = []
from distlaunch.__main__ import main
main()
"""
REPORTS = """
import os, sys, time
from pathlib import Path
from distlaunch.toolkit import heartbeat

heartbeat(step=5, loss=0.5)
print("last words", file=sys.stderr, flush=True)
while not Path("go").exists():
    time.sleep(0.01)
sys.exit(3)
"""
PLANTED = {
    "coordinator.policy.hang_detection:HangDetector.on_alive": AdvisoryPart.HANG_DETECTION,
    "coordinator.policy.job_progress:Progress.on_heartbeats": AdvisoryPart.PROGRESS,
    "diagnosis.first_cause:diagnose": AdvisoryPart.FIRST_CAUSE,
    "diagnosis.report:render_report": AdvisoryPart.REPORT,
    "coordinator.runtime.series_file:SeriesFile.add": AdvisoryPart.SERIES,
    "coordinator.runtime.snapshot:take_snapshot": AdvisoryPart.SNAPSHOT,
    "coordinator.runtime.runner:Runner._on_stacks_request": AdvisoryPart.CONTROL,
    "coordinator.runtime.event_command:EventCommand.observe": AdvisoryPart.ON_EVENT,
}


@pytest.fixture
def start(distlaunch, tmp_path):
    """Return a function that starts a job with faults in these places."""
    wrapper = tmp_path / "launcher"
    wrapper.write_text(WRAPPER.format(python=sys.executable))
    wrapper.chmod(0o700)
    (distlaunch.work / "train.py").write_text(REPORTS)

    def start(*places: str):
        distlaunch.python = str(wrapper)
        words = ["--num-procs", "1", "--python", sys.executable, "--hang-timeout", "600"]
        observers = ["--metrics", "0", "--on-event", "true"]
        running = distlaunch.start(
            ["train", *words, *observers, "train.py"], env={"PLANTED": " ".join(places)}
        )
        distlaunch.python = sys.executable
        return running

    return start


def test_a_job_goes_on_with_a_fault_in_each_part(distlaunch, start):
    running = start(*PLANTED)
    url = running.wait_event("metrics_served")["url"]
    running.wait_rank_logs("last words", 1)
    running.wait_for(lambda: has_refused(running), "fault of the request")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(url, timeout=30)
    running.wait_for(lambda: len(running_faults(running)) >= 6, "faults")
    Path(distlaunch.work / "go").touch()
    result = running.wait()
    assert result.returncode == 3, result.stderr
    assert sorted(running_faults(running)) == sorted(part.value for part in PLANTED.values())
    assert result.stderr.count("TypeError: planted; the traceback is in") == len(PLANTED)
    assert (result.run_dir / "faults.log").read_text().count("TypeError: planted") >= len(PLANTED)
    log = result.run_dir / "attempt-0" / "rank-0.log"
    report = (result.run_dir / "report.txt").read_text()
    assert "rank 0 failed: exit code 3" in report
    assert str(log) in report
    assert json.loads((result.run_dir / "report.json").read_text())["exit_code"] == 3


def has_refused(running) -> bool:
    with suppress(ControlError, NoControlError):  # there is no socket yet
        ask(str(running.run_dir), "stacks")
    return "control" in running_faults(running)


def running_faults(running) -> list[str]:
    return [event["part"] for event in running.events if event["type"] == "fault"]


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("coordinator.runtime.metrics:metrics_text", AdvisoryPart.METRICS),
        ("coordinator.runtime.series_file:pack_block", AdvisoryPart.SERIES),
    ],
)
def test_a_fault_behind_another_one(distlaunch, start, place, part):
    running = start(place)
    url = running.wait_event("metrics_served")["url"]
    running.wait_rank_logs("last words", 1)
    if part is AdvisoryPart.METRICS:
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(url, timeout=30)
    running.wait_for(lambda: running_faults(running), "fault")
    Path(distlaunch.work / "go").touch()
    assert running.wait().returncode == 3
    assert running_faults(running) == [part.value]
