"""The test bed of hosts: its promises to tests of the launcher, and that nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import HEAD, until

TESTBED = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "testbed"), "hosts"]
WAITS = "trap '' TERM HUP INT; setsid env -i sleep 1000 >/dev/null 2>&1 </dev/null & echo $!"


class Namespaces:
    """The namespaces of some processes.

    They are held open: the number of an ended namespace may be used by another test's.
    """

    KINDS = ("net", "pid", "mnt", "uts", "ipc")

    def __init__(self, pids):
        self._held = {}
        own = {os.readlink(f"/proc/self/ns/{kind}") for kind in self.KINDS}
        for pid in pids:
            for kind in self.KINDS:
                descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if name in own or name in self._held:
                    os.close(descriptor)
                else:
                    self._held[name] = descriptor

    def __len__(self) -> int:
        return len(self._held)

    def in_use(self) -> set[str]:
        """Return those that a process is in, or a file of this machine holds."""
        found = set(re.findall(r"\w+:\[\d+\]", Path("/proc/self/mountinfo").read_text()))
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for kind in self.KINDS:
                try:
                    found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
                except OSError:
                    continue
        return found & self._held.keys()

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)


def interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def test_ssh_reaches_every_host_by_name_and_address(hosts):
    for name in [HEAD, *hosts.names]:
        for address in (name, hosts.address(name), hosts.address6(name)):
            assert hosts.run(HEAD, "ssh", address, "hostname").stdout == f"{name}\n"


def test_each_host_sees_only_its_own_processes_and_addresses(hosts):
    daemon = hosts.popen("n1", ["sleep", "1000"])
    seen = {name: hosts.run(name, "ps -eo args; ip -brief address").stdout for name in ("n1", "n2")}
    assert "sleep 1000" in seen["n1"]
    assert "sleep 1000" not in seen["n2"]
    assert f"{hosts.address('n1')}/16" in seen["n1"]
    assert f"{hosts.address('n1')}/16" not in seen["n2"]
    daemon.kill()
    assert daemon.wait(timeout=30) == -signal.SIGKILL


def test_processes_that_hide_are_found(hosts):
    hosts.run(HEAD, "ssh", "n2", WAITS)
    (process,) = until(
        lambda: [p for p in hosts.processes("n2") if p.argv[0] == "sleep"], "the daemon"
    )
    assert process.argv == ("sleep", "1000")
    assert hosts.processes("n1") == []
    with pytest.raises(AssertionError, match="sleep"):
        hosts.assert_clean(within_s=0)
    os.kill(process.pid, signal.SIGKILL)
    hosts.assert_clean()


def test_two_networks(make_hosts):
    hosts = make_hosts(2, "--networks=2")
    for network in (0, 1):
        for address in (
            f"n1-net{network}",
            hosts.address("n1", network),
            hosts.address6("n1", network),
        ):
            reached = hosts.run(HEAD, "ssh", address, "echo $SSH_CONNECTION").stdout.split()[2]
            assert reached in {hosts.address("n1", network), hosts.address6("n1", network)}
    assert {link.interface for link in hosts.layout["n2"].links} == {"eth0", "eth1"}


def test_without_ipv4(make_hosts):
    hosts = make_hosts(2, "--ipv6-only")
    assert hosts.run(HEAD, "ssh", "n1", "echo $SSH_CONNECTION").stdout.split()[2] == hosts.address6(
        "n1"
    )
    assert hosts.address("n1") == hosts.address6("n1")
    assert ":" in hosts.address("n1")


def test_hosts_behind_the_first(make_hosts):
    hosts = make_hosts(3, "--jump")
    assert hosts.run(HEAD, "ssh", "n3", "hostname").stdout == "n3\n"
    direct = hosts.run(
        HEAD, "ssh", "-o", "ProxyJump=none", hosts.address("n3", 1), "true", check=False
    )
    assert direct.returncode == 255


def test_hosts_without_names(make_hosts):
    hosts = make_hosts(2, "--no-names")
    assert hosts.run(HEAD, "getent hosts n1", check=False).returncode == 2
    assert hosts.run(HEAD, "ssh", "n1", "getent hosts n1").stdout.split() == [
        hosts.address("n1"),
        "n1",
    ]


@pytest.mark.parametrize("end", ["close", "kill", "down", "init"])
def test_it_leaves_nothing_whoever_is_killed(make_hosts, end):
    hosts = make_hosts(3)
    hosts.run("n1", "ssh", "n2", WAITS)
    keeper, directory, init = hosts._keeper, hosts.directory, hosts.init
    inside = [process.pid for name in hosts.layout for process in hosts.everything(name)]
    assert len(inside) > 4
    ports = {link.port for host in hosts.layout.values() for link in host.links}
    assert ports
    assert ports.isdisjoint(interfaces())
    made = Namespaces([keeper.pid, init, *inside])
    try:
        assert len(made) > 2 * len(hosts.layout)
        assert len(made.in_use()) == len(made)
        if end == "close":
            hosts.close()
        else:
            hosts._keeper = None
            if end == "kill":
                keeper.kill()
                keeper.wait(timeout=30)
                until(lambda: not os.path.exists(f"/proc/{init}"), "end of the sandbox")
            elif end == "init":
                os.kill(init, signal.SIGKILL)
                assert keeper.wait(timeout=30) == 1
            keeper_lived = end == "down"
            if end != "init":
                done = subprocess.run(
                    [*TESTBED, "down", directory],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=True,
                )
                assert f"{directory} is gone" in done.stderr
            if keeper_lived:
                assert keeper.wait(timeout=30) == 0
            keeper.stdin.close()
            keeper.stdout.close()
        assert not os.path.exists(directory)
        assert [pid for pid in inside if os.path.exists(f"/proc/{pid}")] == []
        until(lambda: not made.in_use(), "end of the namespaces")
    finally:
        made.close()
    assert ports.isdisjoint(interfaces())
    assert directory not in Path("/proc/mounts").read_text()


SHELLS = {
    "plain": "bash",
    "noisy": "bash",
    "nohome": "bash",
    "dashuser": "dash",
    "cshuser": "tcsh",
    "fishuser": "fish",
    "zshuser": "zsh",
}


def test_users_have_the_shell_of_their_name(make_hosts):
    hosts = make_hosts(1)
    script = Path(hosts.shared, "who.py")
    script.write_text(
        "import os, pwd; print(pwd.getpwuid(os.getuid()).pw_name, os.path.basename(os.environ['SHELL']))"
    )
    for user, shell in SHELLS.items():
        assert user in hosts.users, f"the shell of {user} is not installed"
        done = hosts.run(HEAD, "ssh", "-l", user, "n1", f"{sys.executable} {script}")
        message = done.stdout.splitlines()
        assert message[-1] == f"{user} {shell}"
        assert (message[0] == "Welcome to the cluster! (.bashrc)") == (user == "noisy")
        assert ("quota exceeded" in done.stderr) == (user == "noisy")
        assert ("Could not chdir" in done.stderr) == (user == "nohome")


def test_the_keys_of_the_machine_are_out_of_sight(make_hosts):
    hosts = make_hosts(1)
    assert hosts.run("n1", "ls -d ~root/.ssh /root/.ssh", check=False).stdout.split() == [
        f"{hosts.home}/.ssh"
    ]


def test_nothing_below_its_directory_leads_to_the_machine_s_own_files(make_hosts):
    hosts = make_hosts(1, "--own-tmp")
    for where in ("n1", "switch"):
        lines = hosts.run(where, "cat /proc/self/mountinfo").stdout.splitlines()
        below = {
            fields[4]: fields[fields.index("-") + 1]
            for fields in map(str.split, lines)
            if hosts.directory in fields[4]
        }
        assert set(below) <= {hosts.directory, hosts.local}
        assert below.get(hosts.local, "tmpfs") == "tmpfs"


def test_the_launcher_itself_is_signalled(hosts):
    script = hosts.work / "waits.py"
    script.write_text("import time; time.sleep(1000)")
    running = hosts.start(["train", "--num-procs", "1", "--grace", "1", script])
    running.wait_workers(1)
    assert Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")[1:4] == [
        b"-m",
        b"distlaunch",
        b"train",
    ]
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    running = hosts.start(["train", "--num-procs", "1", script])
    running.wait_workers(1)
    running.send_signal(signal.SIGKILL)
    assert running.wait().returncode == -signal.SIGKILL
    hosts.assert_clean()


def test_a_time_of_day_that_is_ahead(make_hosts):
    hosts = make_hosts(2, "--clocks=n1=1000.5,n2=-1000.5")
    seen = [
        float(hosts.run(HEAD, "ssh", name, "date +%s.%N").stdout) for name in ("n2", HEAD, "n1")
    ]
    assert seen[1] - seen[0] >= 1000.5
    assert seen[2] - seen[1] >= 1000.5
    assert float(hosts.run("n1", "date +%s.%N").stdout) > seen[2]


def test_monotonic_clocks_apart(make_hosts):
    hosts = make_hosts(2, "--clocks-apart")
    ask = f"{sys.executable} -c 'import time; print(time.monotonic())'"
    seen = [float(hosts.run(HEAD, "ssh", name, ask).stdout) for name in (HEAD, "n1", "n2")]
    assert seen[1] - seen[0] >= 100_000
    assert seen[2] - seen[1] >= 100_000
    assert float(hosts.run("n2", ask).stdout) > seen[2]


USER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from testbedlib import faults
from testbedlib.client import Hosts
hosts = Hosts.started(2)
faults.delay(hosts, "n1", 1)
faults.pause(hosts, "n2")
command = hosts.popen("n1", ["sleep", "1000"])
print(hosts.directory, command.process.pid, *(process.pid for name in (*hosts.layout,) for process in hosts.everything(name)), flush=True)
time.sleep(1000)
"""


def test_a_killed_user_leaves_nothing():
    scripts = str(Path(TESTBED[1]).parent)
    with subprocess.Popen(
        [sys.executable, "-c", USER, scripts], stdout=subprocess.PIPE, text=True
    ) as user:
        directory, *pids = user.stdout.readline().split()
        user.kill()
    until(lambda: not os.path.exists(directory), "the end of the test bed")
    until(
        lambda: [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == [],
        "the end of all processes",
    )
