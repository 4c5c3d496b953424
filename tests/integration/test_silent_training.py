"""Trainings without output and heartbeats under --hang-timeout: those that work, and those that
hang."""

from __future__ import annotations

from pathlib import Path

from tests.facts import mentions

PROGRAMS = Path(__file__).parents[1] / "programs" / "frameworks"
TIMEOUT_S = 4.0
BOUND_S = 120.0


def start(distlaunch, program: str, *words: str):
    options = [
        "--num-procs",
        "2",
        "--format",
        "plain",
        "--hang-timeout",
        str(TIMEOUT_S),
        "--failure-grace",
        "2",
    ]
    return distlaunch.start(["train", *options, PROGRAMS / program, *words])


def postponed_in(running, where: str) -> bool:
    """Return whether the verdict has been postponed for a rank that was seen at work there."""
    events = [event for event in running.events if event["type"] == "hang_postponed"]
    return any(where in (event["frame"] or "") for event in events)


def wait_for_sign(running, distlaunch, name: str) -> None:
    running.wait_for((distlaunch.work / name).exists, f"sign {name}", timeout=BOUND_S)


def test_a_long_step_of_ddp_on_gloo_is_no_hang(distlaunch):
    running = start(distlaunch, "silent_ddp.py", "long")
    wait_for_sign(running, distlaunch, "third-step")
    running.wait_for(
        lambda: postponed_in(running, "in hold_up"),
        "postponed verdict on the long step",
        timeout=BOUND_S,
    )
    (distlaunch.work / "enough").touch()
    result = running.wait(BOUND_S)
    assert result.stdout.count("done") == 2, result.stderr
    assert result.of_type("hang") == []
    notices = [
        line for line in result.stderr.splitlines() if mentions(line, "40 s", "--hang-timeout")
    ]
    assert len(notices) == 1


def test_ranks_that_wait_in_backward_for_one_that_is_stuck_hang(distlaunch):
    result = start(distlaunch, "silent_ddp.py", "stuck").wait(BOUND_S)
    assert result.returncode == 124, result.stderr
    [hang] = result.of_type("hang")
    assert hang["behind"] == [1]
    assert "in hold_up" in hang["frame"]
    assert not [
        event for event in result.of_type("hang_postponed") if "hold_up" in (event["frame"] or "")
    ]


def test_an_epoch_of_lightning_that_prints_nothing_is_no_hang(distlaunch):
    running = start(distlaunch, "silent_lightning.py")
    for rank in (0, 1):
        wait_for_sign(running, distlaunch, f"epoch-{rank}")
    count = len([event for event in running.events if event["type"] == "hang_postponed"])
    running.wait_event("hang_postponed", count=count + 1, timeout=BOUND_S)
    (distlaunch.work / "enough").touch()
    result = running.wait(BOUND_S)
    assert result.stdout.count("done") == 2, result.stderr
    assert result.of_type("hang") == []
