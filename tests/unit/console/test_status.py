from __future__ import annotations

import pytest

from distlaunch.console.status_line import next_change, status_text
from distlaunch.coordinator.policy.job_progress import Summary
from distlaunch.coordinator.runtime.sink import StatusView
from distlaunch.core.model.record import replace


def view(phase="running", max_restarts=0) -> StatusView:
    return StatusView(
        phase=phase,
        workers_up=3,
        workers_total=4,
        attempt=1,
        restarts=1 if max_restarts else 0,
        max_restarts=max_restarts,
        started_s=100.0,
        log_dir="/l",
    )


@pytest.mark.parametrize(
    ("now", "clock"), [(99.0, "00:00"), (112.9, "00:12"), (3699.9, "59:59"), (3700.0, "1:00:00")]
)
def test_elapsed_time_is_short(now, clock):
    assert status_text(view(), now) == f"distlaunch: 3/4 workers up · attempt 1 · {clock} · /l"


def test_phases_other_than_running_are_named():
    assert status_text(view("restarting", 3), 100.0) == (
        "distlaunch: restarting · 3/4 workers up · attempt 1 (restart 1 of 3) · 00:00 · /l"
    )


def test_an_ended_job_has_no_status():
    assert status_text(view("ended"), 200.0) is None
    assert next_change(view("ended"), 200.0) is None


def test_the_text_changes_on_whole_seconds_of_the_job():
    assert next_change(view(), 100.0) == 101.0
    assert next_change(view(), 105.5) == 106.0


def reporting(heard_s=110.0, **changes) -> StatusView:
    values = {
        "ranks": 4,
        "step_min": 1200,
        "step_max": 1200,
        "steps_per_s": 3.25,
        "rank": 0,
        "values": {"step": 1200, "loss": 0.314159, "samples": 40960},
    }
    return replace(view(), progress=Summary(**{**values, **changes}), heard_s=heard_s)


def shown(view: StatusView, now: float = 111.0) -> str:
    return (
        (status_text(view, now) or "")
        .removeprefix("distlaunch: 3/4 workers up · ")
        .partition(" · attempt")[0]
    )


def test_the_step_the_speed_and_some_numbers_of_the_lowest_rank_are_shown():
    assert shown(reporting()) == "step 1,200 · 3.25 steps/s · loss 0.3142 · samples 40,960"


def test_steps_that_differ_are_a_range():
    assert shown(reporting(step_max=1204)).startswith("step 1,200-1,204 · ")


def test_without_steps_there_are_only_the_numbers():
    numbers = reporting(step_min=None, step_max=None, steps_per_s=None, values={"loss": 1e-7})
    assert shown(numbers) == "loss 1e-07"


def test_a_speed_that_is_old_gives_way_to_how_old_it_is():
    assert (
        shown(reporting(), 175.0)
        == "step 1,200 · no heartbeat for 01:05 · loss 0.3142 · samples 40,960"
    )


def test_many_numbers_and_long_names_are_cut_short():
    values = {f"a very long name number {number}": 1e300 for number in range(10)}
    text = shown(reporting(values=values))
    assert text.count("·") == 4
    assert len(text) < 110
