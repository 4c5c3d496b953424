"""``ps``, ``status``, ``logs``, ``events``, ``wait``, ``stop`` and ``rm`` of jobs over several hosts:
from the launcher's host, and from another one with the same home directory.

Each test is one job and everything that is asked of it.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Sequence

import pytest

from tests.cluster.hosts import HEAD, faults, until
from tests.cluster.launchers_on_hosts import HostLaunchers
from tests.cluster.stepping import AGENT, Stepping, wait_empty
from tests.facts import mentions
from tests.launcher import PROGRAMS

FOUR = "n1:1,n2:1,n3:1,n4:1"
TAKES = shlex.join([sys.executable, str(PROGRAMS / "takes_events.py")])
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"
STOPPED = 143
pytestmark = pytest.mark.timeout(240)


def run(hosts, *words: str, host: str = HEAD, **more):
    return hosts.start(words, host=host, **more).wait()


def ask(hosts, *words: str, host: str = HEAD, **more):
    result = run(hosts, *words, "--format", "json", host=host, **more)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def taken(hosts) -> list[dict]:
    path = hosts.work / "taken"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_by_ssh_is_seen_from_its_own_host_and_from_another_one(hosts):
    job = Stepping(
        hosts,
        FOUR,
        *("--num-nodes", "3:4", "--job-id", "exp", "--node-logs", "here"),
        *("--on-event", TAKES, "--metrics", "0"),
    )
    job.up()
    run_dir = job.running.run_dir
    job.running.wait_rank_logs("is up", 4)

    # On the launcher's host.
    [listed] = ask(hosts, "ps")
    assert (listed["state"], listed["world_size"], listed["host"]) == ("running", 4, HEAD)
    status = ask(hosts, "status", "exp")
    assert [(each["rank"], each["returncode"]) for each in status["workers"]] == [
        (rank, None) for rank in range(4)
    ]
    assert status["hosts"] == "n[1-4]"
    shown = run(hosts, "logs", "exp", "--rank", "3")
    assert (mentions(shown.stdout, "is up"), shown.stderr) == (True, "")

    # On another host, which sees the same files, and here their locks, too.
    assert ask(hosts, "ps", host="n2")[0]["state"] == "running"
    assert ask(hosts, "status", "exp", host="n2")["hosts"] == "n[1-4]"
    assert run(hosts, "logs", "exp", host="n2").stdout.count("is up") == 4
    assert "composed" in run(hosts, "events", "exp", host="n2").stdout
    refused = run(hosts, "stop", "exp", host="n2")
    assert refused.returncode == 2
    assert f"ssh {HEAD} distlaunch stop {run_dir}" in refused.stderr
    assert run(hosts, "rm", "exp", host="n2").returncode == 2

    # A node is lost.
    job.kill("n4", AGENT)
    job.up(1)
    assert ask(hosts, "status", "exp")["lost_nodes"] == 1
    older = run(hosts, "logs", "exp", "--attempt", "0", "--tail", "1")
    assert mentions(older.stderr, "n4", "rank 3", hosts.work / "here" / "exp" / "attempt-0")
    assert run(hosts, "logs", "exp", "--attempt", "0", "--rank", "0").stderr == ""
    [served] = [each["url"] for each in job.running.events if each["type"] == "metrics_served"]
    fetched = hosts.run(HEAD, sys.executable, "-c", FETCH, served).stdout
    assert "\ndistlaunch_node_losses_total 1\n" in fetched
    assert '\ndistlaunch_rank_up{rank="2",host="n3"} 1\n' in fetched

    # It is stopped.
    waiting = [hosts.start(["wait", "exp"], host=host) for host in (HEAD, "n2")]
    assert run(hosts, "stop", "exp").returncode == 0
    assert job.running.wait().returncode == STOPPED
    assert [each.wait().returncode for each in waiting] == [STOPPED, STOPPED]
    types = [each["event"]["type"] for each in taken(hosts)]
    assert types == ["job_started", "node_lost", "reforming", "job_ended"]
    for host in (HEAD, "n2"):
        assert ask(hosts, "status", "exp", host=host)["state"] == "stopped"
    assert run(hosts, "rm", "exp", host="n2").returncode == 0
    assert not run_dir.exists()


def test_the_launcher_answers_while_a_node_is_lost_and_comes_back_and_its_logs_are_read(hosts):
    job = Stepping(
        hosts,
        FOUR,
        *("--num-nodes", "3:4", "--job-id", "exp", "--node-logs", "here"),
        *("--lost-after", "5", "--max-restarts", "1", "--min-uptime", "0"),
        words=("chats",),
    )
    job.up()

    def answers(names: Sequence[str], *, silent: Sequence[str] = ()) -> None:
        """Check that status, top and stack know just these hosts."""
        status = ask(hosts, "status", "exp")
        assert {each["host"] for each in status["workers"]} == set(names)
        view = ask(hosts, "top", "exp", "--once")
        assert {row["host"] for row in view["ranks"]} == set(names)
        assert set(view["unanswered"]) <= set(silent)
        stack = ask(hosts, "stack", "exp")
        shown = {host for group in stack["groups"] for host in group["hosts"]}
        assert shown == set(names)

    answers(["n1", "n2", "n3", "n4"])
    faults.cut(hosts, "n4")
    # The node is silent, and then lost.
    for command in (["status"], ["top", "--once"], ["stack"]):
        assert run(hosts, *command, "exp").returncode == 0
    job.wait_attempt(("n1", "n2", "n3"))
    answers(["n1", "n2", "n3"])
    result = run(hosts, "logs", "exp", "--attempt", "0", "--rank", "3")
    assert mentions(result.stderr, "n4", "rank 3", hosts.work / "here" / "exp" / "attempt-0")
    arrived = result.stdout.splitlines()
    assert arrived

    wait_empty(hosts, "n4", within_s=30)  # its agent has noticed it, too
    faults.cut(hosts, "n4", on=False)
    job.running.wait_event("node_joined", count=5)
    answers(["n1", "n2", "n3"])
    until(
        lambda: run(hosts, "logs", "exp", "--attempt", "0", "--rank", "3").stderr == "",
        "the logs of n4",
        within_s=30,
    )
    written = (hosts.work / "here" / "exp" / "attempt-0" / "rank-3.log").read_text().splitlines()
    assert len(written) > len(arrived)
    for options, expected in (
        ([], written),
        (["--tail", "4"], written[-4:]),
        (["--since", "1h", "--grep", "workers is up"], written[:1]),
    ):
        result = run(hosts, "logs", "exp", "--attempt", "0", "--rank", "3", *options)
        assert (result.stdout.splitlines(), result.stderr) == (expected, "")
    everything = run(hosts, "logs", "exp", "--attempt", "0").stdout.splitlines()
    assert [line for line in everything if line.startswith("[3] ")] == [
        f"[3] {line}" for line in written
    ]
    job.fail()
    job.wait_attempt(["n1", "n2", "n3", "n4"], after=1)
    answers(["n1", "n2", "n3", "n4"])
    job.enough()


def test_logs_of_launchers_of_each_node_are_read_through_the_coordinator(hosts):
    launchers = HostLaunchers(hosts)
    for rank in (1, 0, 2):
        state = {"XDG_STATE_HOME": str(hosts.work / f"state-{rank}")}
        options = ("--job-id", "exp", "--on-event", TAKES, "--metrics", "0")
        launchers.start(rank, *options, env=state)
    launchers.wait_ready(0, 1, 2)
    own, other = ({"XDG_STATE_HOME": str(hosts.work / f"state-{rank}")} for rank in (0, 1))

    [listed] = ask(hosts, "ps", host="n1", env=own)
    assert (listed["state"], listed["world_size"]) == ("running", 3)
    for rank in (1, 2):
        launchers.by_rank[rank].wait_stderr("--on-event and --metrics: only the launcher of node 0")
        assert "metrics: http" not in launchers.stderr_of(rank)
    launchers.by_rank[0].wait_stderr("metrics: http")
    [url] = [word for word in launchers.stderr_of(0).split() if word.startswith("http://")]
    fetched = hosts.run("n1", sys.executable, "-c", FETCH, url).stdout
    for rank in range(3):
        assert f'distlaunch_rank_up{{rank="{rank}",host="n{rank + 1}"}} 1\n' in fetched

    lines = [f"[{rank}] rank {rank} is here" for rank in range(3)]

    def shown(*options: str):
        return run(hosts, "logs", "exp", *options, host="n1", env=own)

    until(lambda: sorted(shown().stdout.splitlines()) == lines, "the lines of all ranks")
    for options, expected in (
        (["--tail", "1", "--rank", "2"], ["rank 2 is here"]),
        (["--since", "1h", "--rank", "1-2"], lines[1:]),
        (["--grep", "rank [02]"], [lines[0], lines[2]]),
        (["--attempt", "0", "--tail", "9"], lines),
    ):
        result = shown(*options)
        assert (sorted(result.stdout.splitlines()), result.stderr) == (expected, ""), options
    following = hosts.start(["logs", "exp", "--follow", "--tail", "5"], host="n1", env=own)
    following.wait_stdout(lines[2])
    joined = run(hosts, "logs", "latest", host="n2", env=other)
    assert (joined.stdout.splitlines(), joined.stderr) == (["[1] rank 1 is here"], "")
    assert run(hosts, "stop", "latest", host="n2", env=other).returncode == 2

    # The launcher of rank 2 does not answer, and the others are shown.
    launchers.by_rank[2].send_signal(signal.SIGSTOP)
    result = shown()
    assert sorted(result.stdout.splitlines()) == lines[:2]
    assert mentions(result.stderr, "rank 2", "n3")
    assert not mentions(result.stderr, "n2")
    launchers.by_rank[2].send_signal(signal.SIGCONT)
    until(lambda: sorted(shown().stdout.splitlines()) == lines, "the lines of all ranks")

    assert run(hosts, "stop", "exp", host="n1", env=own).returncode == 0
    assert sorted(following.wait().stdout.splitlines()) == lines
    assert launchers.exit_codes() == dict.fromkeys((0, 1, 2), STOPPED)
    assert [each["event"]["type"] for each in taken(hosts)] == ["job_started", "job_ended"]
    assert ask(hosts, "status", "exp", host="n1", env=own)["state"] == "stopped"
    ended = shown()
    assert ended.stdout.splitlines() == lines[:1]
    assert mentions(ended.stderr, "rank 1", "n2")
    assert mentions(ended.stderr, "rank 2", "n3")


def test_launchers_of_each_node_refuse_to_be_detached_and_the_others_learn_it(hosts):
    launchers = HostLaunchers(hosts)
    launchers.start(1)
    launchers.start(0, "--detach", "--metrics", "0")
    launchers.start(2, "--detach", "--metrics", "0")
    assert launchers.exit_codes() == {0: 2, 1: 2, 2: 2}
    assert mentions(launchers.stderr_of(0), "--detach", "each node has a launcher")
    assert mentions(launchers.stderr_of(1), "--detach", "each node has a launcher")
