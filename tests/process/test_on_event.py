from __future__ import annotations

import json
import shlex
import signal
import sys

import pytest

from tests.facts import mentions
from tests.launcher import PROGRAMS

TAKES = shlex.join([sys.executable, str(PROGRAMS / "takes_events.py")])
LONG_S = 60.0


def taken(distlaunch) -> list[dict]:
    path = distlaunch.work / "taken"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_command_gets_the_important_events_in_order(distlaunch):
    (distlaunch.work / "go").touch()
    (distlaunch.work / "go-1").touch()
    result = distlaunch.train(
        *("--num-procs", "2", "--max-restarts", "1", "--min-uptime", "0", "--job-id", "exp"),
        *("--on-event", TAKES, PROGRAMS / "prints_and_waits.py", "1", "5"),
        env={"DISTLAUNCH_TOKEN": "secret of the launchers"},
    )
    assert result.returncode == 0, result.stderr
    got = taken(distlaunch)
    types = [each["event"]["type"] for each in got]
    assert types == ["job_started", "failure", "restarting", "job_ended"]
    run_dir = str(result.run_dir)
    of_fields = [
        {},
        {"DISTLAUNCH_ATTEMPT": "0", "DISTLAUNCH_FINAL": "0"},
        {"DISTLAUNCH_ATTEMPT": "1"},
        {"DISTLAUNCH_EXIT_CODE": "0"},
    ]
    for each, kind, more in zip(got, types, of_fields, strict=True):
        in_log = result.of_type(kind)[0]
        assert each["event"] == {"job_id": "exp", "run_dir": run_dir, **in_log}
        assert each["variables"] == {
            "DISTLAUNCH_JOB_ID": "exp",
            "DISTLAUNCH_RUN_DIR": run_dir,
            "DISTLAUNCH_EVENT": kind,
            **more,
        }


def test_a_command_that_does_not_end_delays_nothing_but_the_end_and_a_signal_ends_that(distlaunch):
    running = distlaunch.start(
        [
            *("train", "--num-procs", "1", "--on-event", f"{TAKES} hold"),
            *(PROGRAMS / "prints_and_waits.py", "1"),
        ]
    )
    running.wait_for(lambda: taken(distlaunch), "the first event")
    (distlaunch.work / "go").touch()
    running.wait_event("job_ended")
    running.wait_stderr("signal")  # it says that it waits
    running.send_signal(signal.SIGINT)
    result = running.wait(LONG_S)
    assert result.returncode == 0
    assert mentions(result.stderr, "2 events", "--on-event")
    distlaunch.assert_no_survivors()


def test_the_command_ends_with_a_launcher_that_is_killed(distlaunch):
    running = distlaunch.start(
        [
            *("train", "--num-procs", "1", "--on-event", f"{TAKES} hold"),
            *(PROGRAMS / "prints_and_waits.py", "1"),
        ]
    )
    running.wait_for(lambda: taken(distlaunch), "the first event")
    running.wait_for(distlaunch.holding, "the command holds the file")
    running.send_signal(signal.SIGKILL)
    assert running.wait(LONG_S).returncode == -signal.SIGKILL
    distlaunch.assert_no_survivors()


def test_a_command_that_fails_is_said_once_with_its_last_line(distlaunch):
    (distlaunch.work / "go").touch()
    result = distlaunch.train(
        *("--num-procs", "1", "--on-event", "sh -c 'cat; echo no network >&2; exit 7'"),
        *(PROGRAMS / "prints_and_waits.py", "1"),
    )
    assert result.returncode == 0
    said = [line for line in result.stderr.splitlines() if "--on-event" in line]
    assert len(said) == 1
    assert mentions(said, "7", "no network", "job_started", result.run_dir / "on-event.log")
    log = (result.run_dir / "on-event.log").read_text()
    assert log.count("no network") == 2
    assert '"job_ended"' in log
    distlaunch.run(["rm", "latest"])
    assert not result.run_dir.exists()


@pytest.mark.parametrize("command", ["", " ", "no-such-program", "'open", "t.py", "./t.py", "a\nb"])
def test_a_wrong_command_is_refused_before_anything_is_made(distlaunch, command):
    (distlaunch.work / "t.py").write_text("print('not reached')")
    result = distlaunch.train("--num-procs", "1", "--on-event", command, "t.py")
    assert (result.returncode, result.stdout, result.run_dir) == (2, "", None)
    assert "--on-event" in result.stderr
