"""``train`` in a batch script of Slurm, with a fake srun. tests/cluster has the real one."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.facts import mentions


def test_srun_starts_an_agent_on_each_node_and_the_launcher_decides_how_it_ends(distlaunch, batch):
    result = distlaunch.train(
        "--procs-per-node", "1", "--srun-args=--container-image 'a b'", "t.py", env=batch
    )
    assert result.returncode == 0, result.stderr
    for rank, node in enumerate(("n1", "n2")):
        assert f"rank {rank} of 2 on {node}\n" in result.stdout
    assert "token None" in result.stdout
    [call] = Path(batch["CALLS"]).read_text().splitlines()
    assert "--nodes=2 " in call
    assert call.endswith("--container-image a b")


def test_the_token_is_in_no_argument(distlaunch, batch):
    running = distlaunch.start(
        ["train", "--procs-per-node", "1", "t.py", "stay"],
        env=batch | {"DISTLAUNCH_TOKEN": "s3cret"},
    )
    running.wait_event("workers_started", count=2)
    arguments = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            arguments.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    assert not [words for words in arguments if b"s3cret" in words]
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143


def test_the_message_of_an_srun_that_starts_nothing_is_reported(distlaunch, batch):
    says = "srun: error: Unable to create step for job 4711: Invalid generic resource (gres) specification"
    result = distlaunch.train("--procs-per-node", "1", "t.py", env=batch | {"SAYS": says})
    assert result.returncode == 69
    assert mentions(result.stderr, "n1", "srun", "status 1")
    assert says in result.stderr
    assert "--source flags" in result.stderr


def test_a_node_that_does_not_call_is_named(distlaunch, batch):
    options = ("--procs-per-node", "1", "--join-timeout", "6")
    running = distlaunch.start(["train", *options, "t.py"], env=batch | {"LATE": "n2"})
    result = running.wait(90)
    assert result.returncode == 69
    assert "1 of 2" in result.stderr
    assert "n2" in result.stderr


def test_an_srun_that_waits_silently_leaves_a_hint(distlaunch, batch):
    options = ("--procs-per-node", "1", "--join-timeout", "2")
    result = distlaunch.train(*options, "t.py", env=batch | {"WAITS": " "})
    assert result.returncode == 69
    assert mentions(result.stderr, "another step")


def test_agents_may_have_weeks_to_call(distlaunch, batch):
    result = distlaunch.train("--procs-per-node", "1", "--join-timeout", "1000h", "t.py", env=batch)
    assert result.returncode == 0, result.stderr


def test_without_srun_nothing_begins(distlaunch, batch, tmp_path):
    (tmp_path / "programs" / "srun").unlink()
    alone = batch | {"PATH": os.path.dirname(sys.executable)}
    result = distlaunch.train("--procs-per-node", "1", "t.py", env=alone)
    assert (result.returncode, result.run_dir) == (2, None)
    assert mentions(result.stderr, "no srun")
    assert "--source flags" in result.stderr


def test_srun_args_that_are_no_words_are_refused(distlaunch, batch):
    result = distlaunch.train("--procs-per-node", "1", "--srun-args=--x 'y", "t.py", env=batch)
    assert (result.returncode, result.run_dir) == (2, None)
    assert "--srun-args: no closing quotation" in result.stderr


def test_the_end_of_srun_alone_harms_nobody(distlaunch, batch):
    running = distlaunch.start(["train", "--procs-per-node", "1", "t.py", "stay"], env=batch)
    running.wait_event("workers_started", count=2)
    tasks = Path(f"/proc/{running.pid}/task").iterdir()
    children = [pid for task in tasks for pid in (task / "children").read_text().split()]
    [srun] = [int(pid) for pid in children if b"/srun" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(srun, signal.SIGKILL)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert "stopped: 2 workers ended" in result.stderr


def test_the_reason_why_srun_waits_is_reported_at_the_timeout(distlaunch, batch):
    options = ("--procs-per-node", "1", "--join-timeout", "2")
    result = distlaunch.train(
        *options, "t.py", env=batch | {"WAITS": "srun: retrying (Requested nodes are busy)"}
    )
    assert result.returncode == 69
    assert "distlaunch: srun: retrying (Requested nodes are busy)" in result.stderr
    assert mentions(result.stderr, "in time", "srun: retrying")


def test_agents_and_workers_end_with_a_launcher_that_is_killed(distlaunch, batch):
    running = distlaunch.start(
        ["train", "--procs-per-node", "1", "--failure-grace", "1", "t.py", "stay"], env=batch
    )
    running.wait_event("workers_started", count=2)
    started = [event for event in running.events if event["type"] == "workers_started"]
    workers = [pid for event in started for pid in event["pids"].values()]
    running.process.kill()
    running.process.wait()
    until_gone(workers)


def until_gone(pids) -> None:
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_pending_srun_ends_with_a_launcher_that_is_killed(distlaunch, batch):
    running = distlaunch.start(
        ["train", "--procs-per-node", "1", "t.py"], env=batch | {"WAITS": "srun: retrying"}
    )
    running.wait_stderr("srun: retrying")
    # It says so before it becomes the program that waits.
    [srun] = running.wait_for(
        lambda: [
            pid
            for pid in filter(str.isdecimal, os.listdir("/proc"))
            if is_waiting(pid, batch["CALLS"])
        ],
        "the srun that waits",
    )
    running.process.kill()
    running.process.wait()
    until_gone([int(srun)])


def is_waiting(pid: str, calls: str) -> bool:
    """Return whether this is the srun of this test that waits for resources."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return (
            words == b"sleep\0001000\0"
            and f"CALLS={calls}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        )
    except OSError:
        return False


def test_after_a_restart_a_signal_to_an_agent_is_the_jobs_again(distlaunch, batch):
    options = (
        "--procs-per-node",
        "1",
        "--max-restarts",
        "1",
        "--min-uptime",
        "0",
        "--failure-grace",
        "1",
    )
    running = distlaunch.start(["train", *options, "t.py", "stay"], env=batch)
    running.wait_event("workers_started", count=2)
    first = agents(batch["CALLS"])
    os.kill(first["n1"], signal.SIGKILL)
    running.wait_event("node_lost", count=1)
    os.kill(first["n2"], signal.SIGTERM)  # as Slurm does
    running.wait_event("workers_started", count=4)
    os.kill(agents(batch["CALLS"])["n2"], signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143, result.stderr
    assert "stopped: 2 workers ended" in result.stderr


def agents(calls: str) -> dict[str, int]:
    """Return the pids of this test's agents, by node."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words.startswith(b"dl-agent") and f"CALLS={calls}" in environ:
            node = next(entry for entry in environ if entry.startswith("SLURMD_NODENAME="))
            found[node.partition("=")[2]] = int(pid)
    return found
