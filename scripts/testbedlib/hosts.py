"""Several hosts on one machine: bridges, a veth pair for each of a host's links, and a real sshd in
each host.

The switch and every host live in network namespaces of their own: nothing of them is ever seen in
the machine's network, and the kernel removes all of it with the last process of the sandbox. Every
host has pids of its own, too, so that its processes neither see nor reach those of another, and
orphans find an init.
"""

from __future__ import annotations

import os
import socket
import traceback

from testbedlib import host as one_host
from testbedlib import kernel, layout, users
from testbedlib.layout import HEAD, Host, Wanted
from testbedlib.sandbox import TestbedError

SWITCH = "switch"
_PID = "pid"
"""The file with the pid of a host's first process, as the sandbox counts."""
_UP_S = 60.0


def bring_up(directory: str, wanted: Wanted) -> dict[str, str]:
    """Start the switch and all hosts, as children of the sandbox's first process; return the
    environment of users."""
    kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS)
    socket.sethostname(SWITCH)
    all_hosts = layout.hosts(wanted)
    _write_files(directory, all_hosts, wanted)
    _make_switch(all_hosts)
    started = [_start(directory, host, wanted) for host in all_hosts]
    commands = []
    for host, (pid, control) in zip(all_hosts, started, strict=True):
        if not one_host.await_links_wanted(control):
            raise TestbedError(_why(directory, host))
        for link in host.links:
            commands += [
                f"link add name {link.port} type veth peer name {link.interface} netns {pid}",
                f"link set {link.port} master {layout.bridge(link.network)} up",
            ]
    one_host.ip(commands)
    for _, control in started:
        one_host.say_linked(control)
    keys = {}
    for host, (_, control) in zip(all_hosts, started, strict=True):
        if not one_host.await_up(control):
            raise TestbedError(_why(directory, host))
        control.close()
        with open(
            f"{directory}/hosts/{host.name}/ssh_host_ed25519_key.pub", encoding="ascii"
        ) as file:
            keys[host.name] = file.read()
    with open(f"{directory}/ssh/known_hosts", "w", encoding="ascii") as file:
        file.write(layout.known_hosts(all_hosts, keys))
    return {
        "TESTBED_DIRECTORY": directory,
        "TESTBED_HOSTS": ",".join(host.name for host in all_hosts[1:]),
        "TESTBED_SSH_CONFIG": f"{directory}/ssh/config",
        "TESTBED_HOME": f"{directory}/home/root",
    }


def enter_words(directory: str, init: int, host: str = HEAD) -> list[str]:
    """Return the command that runs another one on a host, in the directory /; it ends with the host
    at the latest."""
    options = {"mnt": "mount"}
    files = namespaces(directory, init, host)
    return [
        "nsenter",
        *(f"--{options.get(name, name)}={file}" for name, file in files.items()),
        "--",
    ]


def namespaces(directory: str, init: int, host: str) -> dict[str, str]:
    """Return the files that stand for a host's namespaces, given the pid of the sandbox's first
    process."""
    pid = "1"
    if host != SWITCH:
        with open(f"{directory}/hosts/{host}/{_PID}", encoding="ascii") as file:
            pid = file.read()
    files = {
        name: f"/proc/{init}/root/proc/{pid}/ns/{name}"
        for name in ("mnt", "pid", "net", "uts", "ipc")
    }
    time = f"/proc/{init}/root/proc/{pid}/ns/time_for_children"
    if os.path.exists(time) and os.readlink(time) != os.readlink("/proc/self/ns/time_for_children"):
        files["time"] = time
    return files


def _why(directory: str, host: Host) -> str:
    try:
        with open(f"{directory}/hosts/{host.name}/failure", encoding="utf-8") as file:
            return f"{host.name}: {file.read().strip()}"
    except FileNotFoundError:
        return f"{host.name}: its first process died"


def _write_files(directory: str, all_hosts: list[Host], wanted: Wanted) -> None:
    users.install(directory)
    for name in ("hosts", "ssh", "local", "shared"):
        os.mkdir(f"{directory}/{name}", 0o755)
    os.chmod(f"{directory}/shared", 0o1777)
    one_host.run(
        [
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            "testbed",
            "-f",
            f"{directory}/ssh/id_ed25519",
        ]
    )
    texts = {
        "hosts.json": layout.to_json(all_hosts),
        "ssh/config": layout.ssh_config(all_hosts, wanted, directory),
    }
    for host in all_hosts:
        os.mkdir(f"{directory}/hosts/{host.name}")
        texts[f"hosts/{host.name}/etc_hosts"] = layout.etc_hosts(host, all_hosts, wanted)
    for name, text in texts.items():
        with open(f"{directory}/{name}", "w", encoding="ascii") as file:
            file.write(text)
    for name in ("config", "known_hosts", "id_ed25519"):
        os.symlink(f"{directory}/ssh/{name}", f"{directory}/home/root/.ssh/{name}")


def _make_switch(all_hosts: list[Host]) -> None:
    commands = ["link set lo up"]
    for network in range(layout.network_count(all_hosts)):
        name = layout.bridge(network)
        commands += [
            f"link add name {name} type bridge forward_delay 0 mcast_snooping 0",
            f"link set {name} up",
        ]
    one_host.ip(commands)


def _start(directory: str, host: Host, wanted: Wanted) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(_UP_S)
    kernel.unshare(kernel.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        kernel.children_into_own_pids()
        theirs.close()
        with open(f"{directory}/hosts/{host.name}/{_PID}", "w", encoding="ascii") as file:
            file.write(str(pid))
        return pid, ours
    status = 1
    try:
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, 65536)
        one_host.be(host, wanted, directory, theirs)
    except BaseException as error:  # noqa: BLE001 - a forked copy must never go on as the sandbox's first process
        traceback.print_exc()
        with open(f"{directory}/hosts/{host.name}/failure", "w", encoding="utf-8") as file:
            file.write(str(error) or repr(error))
    finally:
        os._exit(status)
