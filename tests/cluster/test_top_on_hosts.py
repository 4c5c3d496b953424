"""``top`` and ``stack`` of jobs over several hosts: by SSH, and with one launcher per node."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cluster.hosts import until
from tests.cluster.launchers_on_hosts import HostLaunchers
from tests.facts import mentions

STEPS = Path(__file__).parents[1] / "programs" / "steps.py"
LONG_S = 60.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def job(hosts):
    """Start a job of one worker on each of four hosts. Rank 2 is slow."""
    words = ["--hosts", "n1,n2,n3,n4", "--device", "cpu", "--job-id", "exp"]
    running = hosts.start(["train", *words, STEPS, "0.02", "2", "0.2"])
    running.wait_for(
        lambda: all((hosts.work / f"stepping-{rank}").exists() for rank in range(4)),
        "steps of all ranks",
        timeout=LONG_S,
    )
    return running


def ask(hosts, *words: str, **more):
    result = hosts.start([*words, "--format", "json"], **more).wait(LONG_S)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_all_hosts_answer_and_a_host_that_does_not_is_named(hosts, job):
    view = ask(hosts, "top", "exp")
    while not any(row["straggler"] for row in view["ranks"]):
        view = ask(hosts, "top", "exp")
    assert [row["host"] for row in view["ranks"]] == ["n1", "n2", "n3", "n4"]
    assert [row["rank"] for row in view["ranks"] if row["straggler"]] == [2]
    assert all(row["rss_bytes"] for row in view["ranks"])
    assert all(node["received_per_s"] > 0 for node in view["nodes"]), "at least pings"
    assert view["unanswered"] == []
    groups = ask(hosts, "stack", "exp")["groups"]
    assert sorted(rank for group in groups for rank in group["ranks"]) == [0, 1, 2, 3]

    [agent] = [each.pid for each in hosts.processes("n4") if each.argv[0].startswith("dl-agent")]
    os.kill(agent, signal.SIGSTOP)
    view = ask(hosts, "top", "exp")
    assert view["unanswered"] == ["n4"]
    assert [node["state"] for node in view["nodes"]] == ["up", "up", "up", "silent"]
    os.kill(agent, signal.SIGCONT)  # before the node counts as lost
    until(lambda: ask(hosts, "top", "exp")["unanswered"] == [], "an answer of n4")
    os.kill(agent, signal.SIGSTOP)
    stack = ask(hosts, "stack", "exp")
    assert stack["unanswered"] == [3]
    assert next(group for group in stack["groups"] if group["kind"] == "unanswered")["hosts"] == [
        "n4"
    ]
    os.kill(agent, signal.SIGCONT)
    (hosts.work / "go").touch()
    assert job.wait(LONG_S).returncode == 0
    hosts.assert_clean()


def test_on_another_host_the_line_to_use_is_named(hosts, job):
    for command in ("top", "stack"):
        result = hosts.start([command, "exp"], host="n2").wait(LONG_S)
        assert result.returncode == 2
        assert mentions(result.stderr, "ssh", "distlaunch", command)
    (hosts.work / "go").touch()
    assert job.wait(LONG_S).returncode == 0


def test_with_a_launcher_per_node_the_coordinator_answers_for_all_nodes(hosts):
    launchers = HostLaunchers(hosts)
    own, other = ({"XDG_STATE_HOME": str(hosts.work / f"state-{rank}")} for rank in (0, 1))
    for rank, state in enumerate((own, other)):
        launchers.start(rank, size=2, env=state)
    launchers.wait_ready(0, 1)
    view = ask(hosts, "top", "latest", host="n1", env=own)
    assert [(row["rank"], row["host"]) for row in view["ranks"]] == [(0, "n1"), (1, "n2")]
    assert all(row["rss_bytes"] for row in view["ranks"])
    stack = ask(hosts, "stack", "latest", host="n1", env=own)
    assert sorted(rank for group in stack["groups"] for rank in group["ranks"]) == [0, 1]
    for command in ("top", "stack"):
        result = hosts.start([command, "latest"], host="n2", env=other).wait(LONG_S)
        assert result.returncode == 2
        assert mentions(result.stderr, "node 0", "n1")
    hosts.start(["stop", "latest"], host="n1", env=own).wait(LONG_S)
    launchers.exit_codes()
