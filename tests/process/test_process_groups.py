"""``stack`` names the rank that is behind in torch's collectives, also while others wait in gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher import PROGRAMS

LONG_S = 90.0


def threads_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Threads:")).split()[1])


def wait_until_ready(distlaunch, running) -> None:
    """Wait until the three workers have their process groups."""
    running.wait_for(
        lambda: all((distlaunch.work / f"ready-{rank}").exists() for rank in range(3)),
        "process groups",
        timeout=LONG_S,
    )


def stacks_of_latest(distlaunch) -> dict:
    result = distlaunch.run(["stack", "latest", "--format", "json"])
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("words", [(), ("--preload", "torch")], ids=["cold", "preloaded"])
def test_the_rank_that_is_behind_is_named_with_the_collective(distlaunch, words):
    running = distlaunch.start(
        ["train", "--num-procs", "3", *words, PROGRAMS / "left_behind.py", "1"]
    )
    wait_until_ready(distlaunch, running)

    def waits() -> dict | None:
        found = stacks_of_latest(distlaunch)
        [group] = found["process_groups"]
        return group if group["waiting"] == [0, 2] else None

    group = running.wait_for(waits, "ranks that wait", timeout=LONG_S)
    assert (group["behind"], group["operation"]) == ([1], "all_reduce")
    assert group["pending"] == group["enqueued"] + 1
    assert json.loads(group["sizes"]) == [[7, 8]]
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0


def test_a_rank_that_has_begun_no_collective_is_behind_in_each_of_its_groups(distlaunch):
    running = distlaunch.start(["train", "--num-procs", "3", PROGRAMS / "first_collective.py"])
    wait_until_ready(distlaunch, running)

    def waits() -> dict | None:
        found = stacks_of_latest(distlaunch)
        is_there = [group["waiting"] for group in found["process_groups"]] == [[0], [2]]
        return found if is_there else None

    found = running.wait_for(waits, "ranks that wait", timeout=LONG_S)
    left, right = found["process_groups"]
    assert (left["name"], left["ranks"], left["behind"]) == ("left", [0, 1], [1])
    assert (right["name"], right["ranks"], right["behind"]) == ("right", [1, 2], [1])
    assert found["groups"][0]["ranks"] == [1]
    text = distlaunch.run(["stack", "latest"]).stdout
    assert text.count("rank 1 is behind, before collective 1") == 2
    assert "all ranks" not in text
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0


def test_a_worker_without_torch_has_no_further_thread(distlaunch):
    running = distlaunch.start(["train", "--num-procs", "1", PROGRAMS / "steps.py", "0.02"])
    sign = distlaunch.work / "stepping-0"
    running.wait_for(sign.exists, "steps")
    assert threads_of(int(sign.read_text())) == 1
    result = distlaunch.run(["stack", "latest", "--format", "json"])
    assert json.loads(result.stdout)["process_groups"] == []
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0
