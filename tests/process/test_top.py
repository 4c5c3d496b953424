"""``top`` and ``stack``: what the ranks of a running job use, and where they are."""

from __future__ import annotations

import json
import os
import signal

import pytest

from distlaunch.core.protocol import control_messages
from tests.facts import mentions
from tests.launcher import PROGRAMS
from tests.process.conftest import is_alive

LONG_S = 60.0


@pytest.fixture
def stepping(distlaunch):
    """Start a job of ranks that report steps."""

    def start(*words: str, ranks: int = 4, args=("0.02",)):
        running = distlaunch.start(
            ["train", "--num-procs", str(ranks), *words, PROGRAMS / "steps.py", *args]
        )
        running.wait_for(
            lambda: all((distlaunch.work / f"stepping-{rank}").exists() for rank in range(ranks)),
            "steps of all ranks",
            timeout=LONG_S,
        )
        return running

    return start


def pid_of(distlaunch, rank: int) -> int:
    return int((distlaunch.work / f"stepping-{rank}").read_text())


def ask(distlaunch, *words: str):
    result = distlaunch.run([*words, "--format", "json"])
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_top_has_what_each_rank_uses_and_marks_the_slow_one(distlaunch, stepping):
    running = stepping(args=("0.02", "2"))
    view = {}

    def has_straggler() -> bool:
        view.update(ask(distlaunch, "top", "latest"))
        return any(row["straggler"] for row in view["ranks"])

    running.wait_for(has_straggler, "a slow rank", timeout=LONG_S)
    assert [row["rank"] for row in view["ranks"]] == [0, 1, 2, 3]
    for row in view["ranks"]:
        assert row["pid"] == pid_of(distlaunch, row["rank"])
        assert row["state"] == "running"
        assert row["rss_bytes"] > 1 << 20
        assert row["cpu_percent"] >= 0
        assert row["loss"] > 0
    [slow] = [row for row in view["ranks"] if row["straggler"]]
    assert (slow["rank"], slow["straggler"]["reason"]) == (2, "step_time")
    [node] = view["nodes"]
    assert node["state"] == "up"
    assert node["memory_bytes"] > node["used_bytes"] > 0
    assert node["sent_per_s"] is not None
    text = distlaunch.run(["top", "latest", "--once"]).stdout
    assert mentions(text, "RANK", "STEP-TIME", "LOSS")
    assert next(line for line in text.splitlines() if line.startswith("!")).split()[1] == "2"
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0


def test_stack_merges_equal_stacks_and_shows_the_other_first(distlaunch, stepping):
    running = stepping(args=("0.02", "1", "0.5"))
    found = running.wait_for(
        lambda: (
            groups
            if len(groups := ask(distlaunch, "stack", "latest")["groups"]) == 2
            and all("in " in (group["frame"] or "") for group in groups)
            and "load_batch" in groups[0]["frame"]
            else None
        ),
        "two groups",
        timeout=LONG_S,
    )
    assert [group["ranks"] for group in found] == [[1], [0, 2, 3]]
    assert "compute" in found[1]["frame"]
    one = ask(distlaunch, "stack", "latest", "--rank", "1")
    assert [group["ranks"] for group in one["groups"]] == [[1]]
    assert one["groups"][0]["pids"] == [pid_of(distlaunch, 1)]
    assert mentions(distlaunch.run(["stack", "latest"]).stdout, "steps.py", "load_batch")
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0


def test_a_worker_that_is_stopped_is_named_as_such(distlaunch, stepping):
    running = stepping()
    os.kill(pid_of(distlaunch, 3), signal.SIGSTOP)
    groups = ask(distlaunch, "stack", "latest")["groups"]
    assert (groups[0]["kind"], groups[0]["ranks"]) == ("stopped", [3])
    os.kill(pid_of(distlaunch, 3), signal.SIGCONT)
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0


def test_requests_for_stacks_do_not_count_for_hang_detection(distlaunch, stepping):
    """Stacks that a user asks for are no sign of life, and do not end the job."""
    running = stepping("--hang-timeout", "4", args=("0.02",))
    for _ in range(3):
        assert ask(distlaunch, "stack", "latest")["groups"]
    assert running.process.poll() is None
    assert not [event for event in running.events if event["type"] in ("hang", "silence")]
    for rank in range(4):
        os.kill(pid_of(distlaunch, rank), signal.SIGSTOP)
    while not any(event["type"] == "hang" for event in running.events):
        distlaunch.run(["stack", "latest"])
        assert running.process.poll() in (None, 124)
    assert running.wait(LONG_S).returncode == 124


@pytest.mark.parametrize("command", ["top", "stack"])
def test_a_job_that_has_ended_is_refused(distlaunch, stepping, command):
    running = stepping(ranks=1)
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0
    result = distlaunch.run([command, "latest"])
    assert (result.returncode, result.stdout) == (2, "")
    assert mentions(result.stderr, "status")


@pytest.mark.parametrize("command", ["top", "stack"])
def test_a_killed_launcher_is_said_to_be_gone(distlaunch, stepping, command):
    running = stepping(ranks=1)
    running.send_signal(signal.SIGKILL)
    running.process.wait(LONG_S)
    result = distlaunch.run([command, "latest"])
    assert (result.returncode, result.stdout) == (2, "")
    assert mentions(result.stderr, "killed")


@pytest.mark.parametrize("words", [["--rank", "4"], ["--rank", "x"], ["--tail", "1"]])
def test_wrong_words_are_refused(distlaunch, stepping, words):
    stepping()
    result = distlaunch.run(["stack", "latest", *words])
    assert (result.returncode, result.stdout) == (2, "")


def test_a_job_of_another_host_names_the_line_to_use(distlaunch, stepping):
    running = stepping(ranks=1)
    (distlaunch.work / "go").touch()
    run_dir = running.wait(LONG_S).run_dir
    events = run_dir / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    lines[0] |= {"host": "elsewhere7", "boot_id": "another"}
    kept = [line for line in lines if line["type"] != "job_ended"]
    events.write_text("".join(json.dumps(line) + "\n" for line in kept))
    for command in ("top", "stack"):
        result = distlaunch.run([command, "latest"])
        assert result.returncode == 2
        assert mentions(result.stderr, "ssh", "elsewhere7", "distlaunch", command)


def test_top_and_stack_of_a_job_without_control_socket_say_so(distlaunch, stepping):
    running = stepping(ranks=1)
    name = control_messages.socket_name(str(running.run_dir))
    paths = [os.path.join(folder, name) for folder in control_messages.control_directories()]
    path = running.wait_for(lambda: next(filter(os.path.exists, paths), None), "the socket")
    os.unlink(path)
    for command in ("top", "stack"):
        result = distlaunch.run([command, "latest"])
        assert result.returncode == 2
        assert mentions(result.stderr, "control socket")
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0


def test_top_and_stack_of_a_job_whose_launcher_is_suspended_say_so(distlaunch, stepping):
    running = stepping(ranks=1)
    running.send_signal(signal.SIGSTOP)
    for command in ("top", "stack"):
        result = distlaunch.run([command, "latest"])
        assert result.returncode == 2
        assert str(running.pid) in result.stderr
    running.send_signal(signal.SIGCONT)
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0
    assert not is_alive(running.pid)
