"""Faults of the test bed of hosts begin where and when they are asked for, and end when they are
mended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import HEAD, faults, until

TESTBED = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "testbed"), "hosts"]
CONNECT = """
import socket, sys, time
begin = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 22), timeout=float(sys.argv[2])).close()
    print(time.monotonic() - begin)
except OSError as error:
    print(type(error).__name__)
"""
SOON_S, PATIENTLY_S = "0.5", "30"


@pytest.fixture
def pair(make_hosts):
    return make_hosts(2)


def connect(hosts, host, to, within_s=PATIENTLY_S):
    return hosts.run(
        host, sys.executable, "-c", CONNECT, hosts.address(to), within_s
    ).stdout.strip()


def reaches(hosts, host, to):
    """Return whether a host can be reached, after a retry: a host that was silent may count as
    unreachable until its address is resolved anew."""

    def connected():
        return connect(hosts, host, to)[0].isdigit()

    return until(connected, f"{host} reaches {to}")


def a_session(hosts):
    """Open a connection from the head to n1 that stays, and wait until its command runs."""
    client = hosts.popen(
        HEAD,
        ["ssh", "n1", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    client.process.stdin.write(b"there\n")
    client.process.stdin.flush()
    assert client.process.stdout.readline() == b"there\n"
    return client


@pytest.mark.parametrize(
    ("fault", "undone"),
    [("cut", "uncut"), ("link down", "link up"), ("off", "on"), ("delay 0 loss 100%", "delay off")],
)
def test_a_host_that_is_silent(pair, fault, undone):
    assert reaches(pair, HEAD, "n1")
    faults.apply(pair, "n1", [fault])
    assert connect(pair, HEAD, "n1", SOON_S) == "TimeoutError"
    assert reaches(pair, HEAD, "n2")
    faults.apply(pair, "n1", [undone])
    assert reaches(pair, HEAD, "n1")


def test_a_cut_is_visible_to_neither_side(pair):
    client = a_session(pair)
    faults.cut(pair, "n1")
    assert "LOWER_UP" in pair.run("n1", "ip link show eth0").stdout
    client.process.stdin.write(b"later\n")
    client.process.stdin.flush()
    faults.cut(pair, "n1", on=False)
    assert client.process.stdout.readline() == b"later\n"
    client.communicate(timeout=30)


def test_isolated_hosts_reach_all_but_each_other(make_hosts):
    hosts = make_hosts(3)
    for name in ("n1", "n2"):
        faults.isolate(hosts, name)
    assert connect(hosts, "n1", "n2", SOON_S) in {"TimeoutError", "OSError"}
    assert reaches(hosts, HEAD, "n1")
    assert reaches(hosts, "n3", "n2")
    faults.isolate(hosts, "n1", on=False)
    assert reaches(hosts, "n1", "n2")


def test_delay_is_each_way_and_can_change(pair):
    faults.apply(pair, "n1", ["delay", "100ms"])
    assert float(connect(pair, HEAD, "n1")) >= 0.2
    faults.apply(pair, "n1", ["delay", "20", "ms", "loss", "5", "%"])
    assert float(connect(pair, HEAD, "n1")) >= 0.04
    assert pair.run(HEAD, "ssh", "n1", "head -c 300000 /dev/zero | wc -c").stdout == "300000\n"
    assert connect(pair, HEAD, "n2")[0].isdigit()
    faults.delay(pair, "n1", 0)
    assert pair.run("switch", "ip -brief link").stdout.count("port1-0") == 1


def test_a_rate_holds_both_ways(pair):
    faults.rate(pair, "n1", 20)
    for device, where in (("port1-0", "switch"), ("eth0", "n1")):
        assert "tbf" in pair.run(where, f"tc qdisc show dev {device}").stdout
    sends = "import time; begin = time.monotonic(); {}; print(time.monotonic() - begin)"
    fetch = "import subprocess; subprocess.run(['ssh', 'n1', 'head -c 1000000 /dev/zero'], stdout=-3, check=True)"
    assert float(pair.run(HEAD, sys.executable, "-c", sends.format(fetch)).stdout) >= 0.3
    faults.rate(pair, "n1", None)
    assert "tbf" not in pair.run("n1", "tc qdisc show dev eth0").stdout


def test_sshd_that_no_longer_listens_keeps_its_sessions(pair):
    client = a_session(pair)
    faults.stop_sshd(pair, "n1")
    assert connect(pair, HEAD, "n1") == "ConnectionRefusedError"
    client.process.stdin.write(b"still\n")
    client.process.stdin.flush()
    assert client.process.stdout.readline() == b"still\n"
    faults.start_sshd(pair, "n1")
    assert reaches(pair, HEAD, "n1")
    faults.kill_sessions(pair, "n1")
    assert client.wait(30) == 255
    client.communicate()
    assert reaches(pair, HEAD, "n1")


def test_sshd_killed_whole(pair):
    client = a_session(pair)
    faults.apply(pair, "n1", ["sshd", "kill"])
    assert client.wait(30) == 255
    client.communicate()
    assert pair.sessions("n1") == []
    assert connect(pair, HEAD, "n1") == "ConnectionRefusedError"
    faults.apply(pair, "n1", ["sshd", "start"])
    assert pair.run(HEAD, "ssh", "n1", "hostname").stdout == "n1\n"


def test_pause_and_resume(pair):
    command = pair.popen("n1", ["sleep", "1000"])
    faults.pause(pair, "n1")
    until(lambda: {process.state for process in pair.everything("n1")} == {"T"}, "the stop")
    assert {process.state for process in pair.everything("n2")} == {"S"}
    faults.resume(pair, "n1")
    until(lambda: {process.state for process in pair.everything("n1")} == {"S"}, "the continuation")
    command.kill()
    assert command.wait(30) == -signal.SIGKILL


def test_a_full_disk_is_one_host_s_own(pair):
    faults.fill(pair, "n1")
    write = f"echo more >{pair.local}/file"
    assert pair.run("n1", write, check=False).returncode != 0
    pair.run("n2", write)
    faults.unfill(pair, "n1")
    pair.run("n1", write)


def test_mend_undoes_all(pair):
    for words in (
        "cut",
        "link down",
        "isolate",
        "rate 1",
        "delay 50",
        "fill",
        "sshd kill",
        "pause",
    ):
        faults.apply(pair, "n1", words.split())
    faults.mend(pair, "n1")
    assert pair.run(HEAD, "ssh", "n1", f"echo x >{pair.local}/x; hostname").stdout == "n1\n"
    faults.mend(pair, "n1")
