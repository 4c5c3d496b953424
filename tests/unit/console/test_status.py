from __future__ import annotations

import pytest

from distlaunch.job.sink import StatusView
from distlaunch.ui.console.status import next_change, status_text


def view(phase="running", max_restarts=0) -> StatusView:
    return StatusView(
        phase=phase,
        workers_up=3,
        workers_total=4,
        attempt=1,
        max_restarts=max_restarts,
        started_s=100.0,
        log_dir="/l",
    )


@pytest.mark.parametrize(("now", "clock"), [(99.0, "00:00"), (112.9, "00:12"), (3699.9, "59:59"), (3700.0, "1:00:00")])
def test_elapsed_time_is_short(now, clock):
    assert status_text(view(), now) == f"distlaunch: 3/4 workers up · attempt 1 · {clock} · /l"


def test_phases_other_than_running_are_named():
    assert status_text(view("restarting", 3), 100.0) == (
        "distlaunch: restarting · 3/4 workers up · attempt 1/3 · 00:00 · /l"
    )


def test_an_ended_job_has_no_status():
    assert status_text(view("ended"), 200.0) is None
    assert next_change(view("ended"), 200.0) is None


def test_the_text_changes_on_whole_seconds_of_the_job():
    assert next_change(view(), 100.0) == 101.0
    assert next_change(view(), 105.5) == 106.0
