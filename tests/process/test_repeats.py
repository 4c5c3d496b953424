"""A node that repeats valid messages without end is dropped by name, and delays no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.facts import mentions
from tests.ports import free_port
from tests.process.conftest import PROGRAMS
from tests.process.loopback import LoopbackLaunchers
from tests.sshd import Sshd

REPEATS = PROGRAMS / "repeats.py"
DROPPED = "it sends what no agent of ours does: more messages than were asked for, the last of them"
APART = "unshare --mount" if os.getuid() == 0 else "unshare --map-root-user --mount"
"""A node of its own, though it is on this machine."""


def flowing(text):
    """Undo the line breaks of a report."""
    return " ".join(text.split())


class Nodes:
    """Two nodes with an sshd each, of which ``bad`` repeats messages of a type."""

    def __init__(self, distlaunch, tmp_path) -> None:
        self.distlaunch = distlaunch
        self._tmp_path = tmp_path
        self.sign = tmp_path / "repeats"
        self._servers = []

    def start(self, kind, *options, words=("stay",)):
        bad = self._serve(
            "bad", f"ForceCommand {APART} {sys.executable} {REPEATS} session {kind} {self.sign}"
        )
        config = self._serve("good").config(host="good")
        config.write_text(config.read_text() + bad.config(host="bad").read_text())
        (self.distlaunch.work / "t.py").write_text(WORKER)
        hosts = ["--hosts", "good:1,bad:1", "--ssh-config", str(config), "--device", "cpu"]
        return self.distlaunch.start(
            ["train", *hosts, "--format", "plain", "--failure-grace", "1", *options, "t.py", *words]
        )

    def _serve(self, name, *settings):
        self._servers.append(Sshd(self._tmp_path / name, *settings))
        return self._servers[-1]

    def close(self) -> None:
        for server in self._servers:
            server.close()


WORKER = """
import sys, time
print("here", flush=True)
while "stay" in sys.argv:
    time.sleep(0.1)
"""


@pytest.fixture
def nodes(distlaunch, tmp_path):
    made = Nodes(distlaunch, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["Hello", "Reached", "Started", "RankEnded"])
def test_a_node_reached_by_ssh_that_repeats_a_message_is_dropped_by_name(nodes, kind):
    running = nodes.start(
        kind, "--join-timeout", "10", words=() if kind == "RankEnded" else ("stay",)
    )
    result = running.wait(90)
    assert nodes.sign.exists()
    if (
        kind == "RankEnded" and result.returncode == 0
    ):  # all workers had ended with 0 before it was dropped
        assert all(DROPPED in event["why"] for event in result.of_type("node_lost"))
        assert {event["host"] for event in result.of_type("node_lost")} <= {"bad"}
        return
    assert result.returncode == 69, result.stderr
    assert DROPPED in flowing(result.stderr)
    assert {event["host"] for event in result.of_type("node_lost")} == {"bad"}
    assert "bad" in result.stderr


def test_a_signal_ends_a_job_whose_node_repeats_output(nodes):
    running = nodes.start("Output")
    running.wait_for(nodes.sign.exists, "output is repeated")
    running.wait_for(lambda: running.stdout.count("here") > 1000, "output that was repeated")
    running.send_signal(signal.SIGTERM)
    result = running.wait(60)
    assert result.returncode == 143, result.stderr
    assert result.of_type("node_lost") == []


# --- agents that srun starts, which call by TCP


@pytest.mark.parametrize("kind", ["Hello", "Surveyed", "Pong"])
def test_a_node_of_slurm_that_repeats_a_message_is_dropped_by_name(
    distlaunch, batch, tmp_path, kind
):
    sign = tmp_path / "repeats"
    relay = f"{sys.executable} {REPEATS} step {kind} {sign}"
    options = ("--procs-per-node", "1", "--join-timeout", "10", "--failure-grace", "1")
    result = distlaunch.train(
        *options, "t.py", "stay", env={**batch, "RELAYED": "n2", "RELAY": relay}, timeout=90
    )
    assert sign.exists()
    assert result.returncode == 69, result.stderr
    lost = result.of_type("node_lost")
    assert {event["host"] for event in lost} == {"n2"}
    assert DROPPED in lost[0]["why"]
    assert "n2" in result.stderr


# --- one launcher per node


@pytest.fixture
def launchers(distlaunch):
    return LoopbackLaunchers(distlaunch)


@pytest.fixture
def relayed(launchers, tmp_path):
    """Return a port whose connections are relayed to the coordinator. The relay repeats messages of
    one type."""
    with ExitStack() as stack:

        def start(kind):
            listen = free_port()
            process = subprocess.Popen(
                [
                    *(sys.executable, REPEATS, "port", kind, tmp_path / "repeats"),
                    *(str(listen), "127.0.0.1", str(launchers.port)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(process.stdout.close)
            stack.callback(process.wait, 30)
            stack.callback(process.stdin.close)
            assert process.stdout.readline() == b"up\n"
            return listen

        yield start


def start_through(launchers, port, rank, *words):
    """Start a launcher that connects to the others at another port."""
    own, launchers.port = launchers.port, port
    try:
        return launchers.start(rank, *words, size=3)
    finally:
        launchers.port = own


@pytest.mark.parametrize("kind", ["LauncherInfo", "Started", "Pong"])
def test_a_launcher_that_repeats_a_message_is_dropped_by_name(launchers, relayed, kind, tmp_path):
    port = relayed(kind)
    for rank in (0, 1):
        launchers.start(rank, "--join-timeout", "10", size=3)
    start_through(launchers, port, 2, "--join-timeout", "10")
    codes = launchers.exit_codes()
    assert (tmp_path / "repeats").exists()
    assert codes[0] == codes[1] == 69, launchers.stderr_of(0)
    lost = [event for event in launchers.by_rank[0].events if event["type"] == "node_lost"]
    assert {event["node"] for event in lost} == {2}
    assert DROPPED in lost[0]["why"]
    assert mentions(
        launchers.stderr_of(0), "error", "1 of 3"
    ) or "rank 2 of 3 on" in launchers.stderr_of(0)


@pytest.mark.parametrize("kind", ["Call", "Proof"])
def test_a_call_that_repeats_itself_keeps_nobody_out(launchers, relayed, kind, tmp_path):
    port = relayed(kind)
    launchers.start(0, size=3)
    start_through(launchers, port, 2, "--join-timeout", "60")
    launchers.by_rank[0].wait_for((tmp_path / "repeats").exists, f"{kind} is repeated")
    launchers.start(1, size=3).wait_stderr("joined")
    launchers.by_rank[0].send_signal(signal.SIGTERM)
    assert launchers.by_rank[0].wait(60).returncode == 143
