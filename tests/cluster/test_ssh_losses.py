"""Losses in jobs of fixed size over several hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster.hosts import HEAD, faults, until
from tests.cluster.stepping import (
    AGENT,
    SHORT,
    SPAWNER,
    STEPS,
    WATCHER,
    Stepping,
    beside,
    is_empty,
    wait_empty,
)
from tests.facts import mentions
from tests.launcher import PROGRAMS

THREE = "n1:1,n2:1,n3:1"
UNAVAILABLE, SOFTWARE = 69, 70


def begun(hosts, *options, nodes=THREE, **more):
    job = Stepping(hosts, nodes, *options, **more)
    job.up()
    job.goes_on()
    return job


def assert_lost(result, host, why):
    """Check that the job has ended for the loss of one host, and reports it once."""
    assert result.returncode == UNAVAILABLE, result.stderr
    [lost] = [event["host"] for event in result.of_type("node_lost")]
    assert lost == host
    assert mentions(result.stderr, f"on {host} failed", "lost")
    assert why in result.stderr
    assert "Traceback" not in result.stderr


# --- something is killed


@pytest.mark.parametrize("words", [(), ("ignore-signals",)], ids=["obedient", "ignore-signals"])
def test_kill_9_of_the_launcher_ends_all_on_all_hosts(hosts, words):
    with beside(hosts, "n1:1,n2:1") as others:
        job = begun(hosts, words=words)
        job.running.send_signal(signal.SIGKILL)
        job.running.wait()
        wait_empty(hosts, *hosts.names, but=others)


@pytest.mark.parametrize("agent", ["its agent reads on", "its agent is killed as well"])
def test_workers_of_a_killed_launcher_print_and_save_on_their_node(hosts, agent):
    size = 1 << 20
    program = PROGRAMS / "prints_at_the_end.py"
    options = ["--hosts", "n1:1", "--device", "cpu", "--failure-grace", "60"]
    running = hosts.start(["train", *options, program, str(size)])
    running.wait_for((hosts.work / "ready-0").exists, "the worker")
    if agent == "its agent is killed as well":
        [process] = [each for each in hosts.processes("n1") if each.argv[0].startswith(AGENT)]
        running.send_signal(signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
    else:
        running.send_signal(signal.SIGKILL)
    running.wait()
    wait_empty(hosts, HEAD, "n1")
    log = (running.run_dir / "attempt-0" / "rank-0.log").read_text()
    assert (hosts.work / "saved-0").exists(), log
    assert (log.count("saving 0".ljust(63, ".")), log.count("saved 0"), log.count("done 0")) == (
        size // 64,
        1,
        1,
    )


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (AGENT, "its agent was killed by signal 9"),
        ("sessions", "connection"),
        ("sshd", "connection"),
    ],
)
def test_a_closed_channel_ends_the_job(hosts, what, why):
    job = begun(hosts)
    match what:
        case "sessions":
            faults.kill_sessions(hosts, "n2")
        case "sshd":
            faults.kill_sshd(hosts, "n2")
        case _:
            job.kill("n2", what)
    assert_lost(job.running.wait(), "n2", why)
    hosts.assert_clean()


def test_another_job_does_not_feel_kill_9_of_an_agent(hosts):
    with beside(hosts, "n1:1,n2:1") as others:
        job = Stepping(hosts, THREE)
        job.up()
        [agent] = [
            each
            for each in hosts.processes("n2")
            if each.argv[0].startswith(AGENT) and each.pid not in others
        ]
        os.kill(agent.pid, signal.SIGKILL)
        assert job.running.wait().returncode == UNAVAILABLE
        wait_empty(hosts, "n1", "n2", "n3", but=others)


def test_kill_9_of_a_spawner_ends_the_job_as_a_fault(hosts):
    job = begun(hosts)
    job.kill("n2", SPAWNER)
    result = job.running.wait()
    assert result.returncode == SOFTWARE, result.stderr
    assert "n2" in result.stderr
    assert "Traceback" not in result.stderr
    hosts.assert_clean()


def test_kill_9_of_the_launcher_and_an_agent_at_once(hosts):
    job = begun(hosts, words=("ignore-signals",))
    agent = job.find("n2", AGENT)
    os.kill(agent.pid, signal.SIGKILL)
    job.running.send_signal(signal.SIGKILL)
    job.running.wait()
    hosts.assert_clean()


def test_term_at_a_spawner_ends_the_job_as_a_signal(hosts):
    job = begun(hosts)
    os.kill(job.find("n2", SPAWNER).pid, signal.SIGTERM)
    result = job.running.wait()
    assert result.returncode == 143, result.stderr
    assert [event["signal"] for event in result.of_type("signal")] == ["SIGTERM"]
    hosts.assert_clean()


@pytest.mark.parametrize("order", [1, -1], ids=["in this order", "in the other"])
@pytest.mark.parametrize("launcher", ["the launcher and one on each node", "two on each node"])
def test_kill_9_of_any_two_of_ours(hosts, launcher, order):
    """Each node loses another pair."""
    job = begun(hosts, words=("ignore-signals",))
    n1, n2, n3 = (
        {what: job.find(host, what).pid for what in (AGENT, SPAWNER, WATCHER)}
        for host in ("n1", "n2", "n3")
    )
    if launcher == "two on each node":
        pairs = [(n1[AGENT], n1[SPAWNER]), (n2[SPAWNER], n2[WATCHER]), (n3[WATCHER], n3[AGENT])]
    else:
        pairs = [(job.running.pid, pid) for pid in (n1[AGENT], n2[SPAWNER], n3[WATCHER])]
    for pair in pairs:
        for pid in pair[::order]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    job.running.wait()
    hosts.assert_clean()


def test_kill_9_of_the_launcher_while_it_connects(hosts):
    for name in hosts.names:
        faults.delay(hosts, name, 100)
    running = hosts.start(["train", "--hosts", THREE, STEPS], env={"SIGN_DIR": str(hosts.work)})
    until(lambda: not is_empty(hosts, "n1", "n2", "n3"), "anything on a node")
    running.send_signal(signal.SIGKILL)
    running.wait()
    hosts.assert_clean()


def test_kill_9_of_a_launcher_that_is_on_one_of_the_nodes(hosts):
    job = begun(hosts, host="n1")
    job.running.send_signal(signal.SIGKILL)
    job.running.wait()
    hosts.assert_clean()


def test_kill_9_of_the_agent_beside_the_launcher(hosts):
    job = begun(hosts, host="n1")
    job.kill("n1", AGENT)
    assert_lost(job.running.wait(), "n1", "its agent was killed by signal 9")
    hosts.assert_clean()


def test_a_connection_by_openssh_that_is_killed_ends_the_job(hosts):
    job = begun(hosts, "--ssh-command", "ssh")
    [client] = [
        each for each in hosts.processes(HEAD) if each.argv[0] == "ssh" and "n2" in each.argv
    ]
    os.kill(client.pid, signal.SIGKILL)
    assert_lost(job.running.wait(), "n2", "killed by signal 9")
    hosts.assert_clean()


def test_kill_9_of_a_launcher_that_connects_by_openssh(hosts):
    job = begun(hosts, "--ssh-command", "ssh")
    job.running.send_signal(signal.SIGKILL)
    job.running.wait()
    hosts.assert_clean()


def test_sshd_that_no_longer_listens_is_of_no_account_to_what_runs(hosts):
    job = begun(hosts)
    faults.stop_sshd(hosts, "n2")
    job.goes_on()
    job.enough()


def test_a_failure_and_a_loss_at_once_make_one_report(hosts):
    job = begun(hosts)
    job.fail()
    faults.kill_sessions(hosts, "n2")
    result = job.running.wait()
    assert result.returncode in (1, UNAVAILABLE), result.stderr
    assert len(result.of_type("failure")) == 1
    hosts.assert_clean()


# --- silence


def test_a_host_that_falls_silent_ends_the_job_and_its_workers_end_by_themselves(hosts):
    with beside(hosts, "n1:1,n3:1") as others:
        job = begun(hosts, nodes="n1:1,n2:1,n4:1")
        faults.cut(hosts, "n2")
        assert_lost(job.running.wait(), "n2", "silent for 1")
        wait_empty(hosts, "n1", "n2", "n4", but=others)  # n2 is cut off still
        faults.cut(hosts, "n2", on=False)
    hosts.assert_clean()


def three_jobs(make_hosts):
    """Start three jobs on two hosts each, to harm them at the same time: silence takes long."""
    hosts = make_hosts(6)
    return hosts, [
        begun(hosts, nodes=f"n{number}:1,n{number + 1}:1", name=f"on-n{number}")
        for number in (1, 3, 5)
    ]


def test_silence_is_a_loss_whatever_its_reason(make_hosts):
    hosts, jobs = three_jobs(make_hosts)
    faults.link(hosts, "n2", up=False)
    faults.power_off(hosts, "n4")
    os.kill(jobs[2].find("n6", AGENT).pid, signal.SIGSTOP)
    for job, host in zip(jobs, ("n2", "n4", "n6"), strict=True):
        assert_lost(job.running.wait(), host, "silent for 1")
    wait_empty(hosts, *hosts.names)  # the cable is still pulled, the agent was not continued by us
    faults.link(hosts, "n2", up=True)
    faults.power_on(hosts, "n4")
    hosts.assert_clean()


def test_short_silence_is_of_no_account_whatever_its_reason(make_hosts):
    hosts, jobs = three_jobs(make_hosts)
    faults.cut(hosts, "n2")
    stopped = [jobs[1].find("n4", AGENT).pid, jobs[2].running.pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)  # that long it lasts
    faults.cut(hosts, "n2", on=False)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    for job in jobs:
        job.goes_on()
        assert not job.enough().of_type("node_lost")


def test_a_job_on_a_slow_and_lossy_network(hosts):
    for name in ("n1", "n2", "n3"):
        faults.delay(hosts, name, 300, 1)
    job = begun(hosts)
    result = job.enough()
    assert not result.of_type("node_lost")
    assert not result.of_type("node_unreachable")


def test_a_launcher_that_was_stopped_for_long_finds_its_job_ended(hosts):
    job = begun(hosts)
    os.kill(job.running.pid, signal.SIGSTOP)
    wait_empty(hosts, "n1", "n2", "n3")
    os.kill(job.running.pid, signal.SIGCONT)
    result = job.running.wait()
    assert result.returncode == UNAVAILABLE, result.stderr
    assert mentions(result.stderr, "no message", "coordinator")
    assert mentions(result.stderr, "hint", "this launcher", "stood still")
    hosts.assert_clean()


def test_a_typed_stop_pauses_all_workers_for_as_long_as_one_likes(hosts):
    # In a group of its own, as a shell has it: in an orphaned one the kernel stops nobody on TSTP.
    job = begun(hosts, "--failure-grace", "5", "--lost-after", "6", process_group=0)
    workers = [each["pid"] for each in job.up()]
    os.kill(job.running.pid, signal.SIGTSTP)

    def states():
        return [
            process.state
            for name in ("n1", "n2", "n3")
            for process in hosts.processes(name)
            if str(STEPS) in process.argv
        ]

    until(lambda: states() == ["T"] * len(workers), "all workers are stopped")
    step = job.step
    time.sleep(9)  # longer than silence may last
    assert job.step == step
    os.kill(job.running.pid, signal.SIGCONT)
    job.goes_on()
    assert not job.enough().of_type("node_lost")


def test_a_closed_terminal_ends_the_job_everywhere(hosts):
    words = ["--hosts", THREE, "--device", "cpu", *SHORT, STEPS]
    command = " ".join(map(str, (sys.executable, "-m", "distlaunch", "train", *words)))
    folder = hosts.work / "job"
    folder.mkdir()
    terminal = hosts.popen(
        HEAD,
        ["script", "-qec", command, "/dev/null"],
        cwd=hosts.work,
        env={"SIGN_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    until((folder / "step").exists, "steps")
    terminal.kill()
    terminal.process.stdin.close()
    terminal.wait(30)
    hosts.assert_clean()
    [events] = hosts.jobs.glob("2*/events.jsonl")
    last = json.loads(events.read_text().splitlines()[-1])
    assert (last["type"], last["exit_code"]) == ("job_ended", 129)


# --- full disks


def test_a_full_disk_of_the_launcher_costs_logs_and_no_job(hosts):
    job = Stepping(hosts, THREE, "--log-dir", hosts.local, words=("chats",))
    job.up()
    job.goes_on()
    faults.fill(hosts, HEAD)
    job.running.wait_stderr("log files have stopped: the disk is full")
    job.goes_on()
    result = job.enough()
    assert "steps" not in result.stderr


def test_a_full_disk_of_a_node_costs_the_nodes_logs_and_no_job(hosts):
    job = Stepping(hosts, THREE, "--node-logs", f"{hosts.local}/logs", words=("chats",))
    job.up()
    job.goes_on()
    faults.fill(hosts, "n2")
    job.running.wait_stderr(
        "n2: the log files on this node are no longer written: the disk is full"
    )
    job.goes_on()
    job.enough()


def test_a_full_disk_for_temporary_files_on_a_node(hosts):
    with open(f"{hosts.home}/.bashrc", "w") as file:
        file.write(f"export TMPDIR={hosts.local}\n")
    faults.fill(hosts, "n2")
    job = begun(hosts, "--preload", "json")
    assert hosts.run("n1", f"cd {hosts.local} && echo *").stdout.startswith("distlaunch-agent-")
    result = job.enough()
    assert [event["problem"] for event in result.of_type("preload")] == [None] * 3
    for name in ("n1", "n2", "n3"):
        for folder in (hosts.local, "/dev/shm"):
            assert "agent" not in hosts.run(name, f"cd {folder} && echo *").stdout


def test_a_stopped_spawner_is_woken_by_its_agent(hosts):
    source = f"echo here; until [ -e {hosts.work}/go ]; do sleep 0.1; done"
    running = hosts.start(
        ["train", "--hosts", "n1:1,n2:1", "--device", "cpu", "--no-python", "sh", "-c", source]
    )
    running.wait_rank_logs("here", 2)
    [spawner] = [
        process for process in hosts.processes("n2") if process.argv[0].startswith("dl-spawner")
    ]
    os.kill(spawner.pid, signal.SIGSTOP)
    (hosts.work / "go").touch()
    assert running.wait(timeout=60).returncode == 0
