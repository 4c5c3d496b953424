"""The first process of a host: it makes the host's namespaces, starts its sshd, and then reaps
orphans like any init.

What a host shares with the others is the file system, as over NFS. Its own are processes, network,
name, /proc, /sys, /run, /dev/shm, /var/log, /etc/hosts, the small disk DIR/local and, if wanted,
/tmp.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence

from testbedlib import kernel, layout
from testbedlib.layout import Host, Wanted
from testbedlib.sandbox import TestbedError

SSHD = "/usr/sbin/sshd"
_READY_FOR_LINKS, _LINKED, _UP = b"n", b"l", b"u"
_SSHD_UP_S = 20.0
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a place to mount on
_TMP = "/tmp"  # noqa: S108 - a place to mount on
_TMPFS = kernel.MS_NOSUID | kernel.MS_NODEV


def be(host: Host, wanted: Wanted, directory: str, control: socket.socket) -> None:
    """Run as the first process of a host. Report progress to the switch through ``control``, and
    never return."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC)
    if host.monotonic_s:
        kernel.unshare(kernel.CLONE_NEWTIME)
        with open("/proc/self/timens_offsets", "w", encoding="ascii") as file:
            file.write(f"monotonic {host.monotonic_s} 0\nboottime {host.monotonic_s} 0\n")
    kernel.private_mounts()
    socket.sethostname(host.name)
    own = f"{directory}/hosts/{host.name}"
    _mounts(own, directory, wanted)
    control.sendall(_READY_FOR_LINKS)
    run(
        [
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            host.name,
            "-f",
            f"{own}/ssh_host_ed25519_key",
        ]
    )
    if control.recv(1) != _LINKED:
        raise TestbedError(f"{host.name}: no links came")
    ip(_addresses(host, wanted))
    with open(f"{own}/sshd_config", "w", encoding="ascii") as file:
        file.write(layout.sshd_config(host, directory))
    start_sshd(own)
    control.sendall(_UP)
    control.close()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait([signal.SIGCHLD])


def await_links_wanted(control: socket.socket) -> bool:
    """On the switch's side: wait until a host's network is there; False if the host ended
    instead."""
    return control.recv(1) == _READY_FOR_LINKS


def say_linked(control: socket.socket) -> None:
    """On the switch's side: let a host go on."""
    control.sendall(_LINKED)


def await_up(control: socket.socket) -> bool:
    """On the switch's side: wait until a host's sshd listens; False if the host ended instead."""
    return control.recv(1) == _UP


def run(argv: Sequence[str], text: str = "") -> str:
    """Run a command of the system and return its stdout; TestbedError with its words if it
    fails."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    try:
        done = subprocess.run(
            argv,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": path, "LANG": "C.UTF-8"},
        )
    except FileNotFoundError:
        raise TestbedError(
            f"{argv[0]} is not installed; Debian: apt-get install iproute2 openssh-server "
            "openssh-client"
        ) from None
    if done.returncode:
        raise TestbedError(
            f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}\n{text}"
        )
    return done.stdout


def ip(commands: Sequence[str]) -> None:
    """Change this network namespace, by the words that ip takes."""
    run(["ip", "-batch", "-"], "\n".join(commands) + "\n")


def start_sshd(own: str) -> None:
    """Start a host's sshd, from within the host, and wait until it listens: it writes its pid file
    after that."""
    pid_file = f"{own}/sshd.pid"
    if os.path.exists(pid_file):
        os.unlink(pid_file)
    run([SSHD, "-f", f"{own}/sshd_config", "-E", f"{own}/sshd.log"])
    deadline = time.monotonic() + _SSHD_UP_S
    while not os.path.exists(pid_file):
        if time.monotonic() > deadline:
            with open(f"{own}/sshd.log", encoding="utf-8", errors="replace") as log:
                raise TestbedError(f"sshd does not listen after {_SSHD_UP_S} s\n{log.read()}")
        time.sleep(0.002)


def _addresses(host: Host, wanted: Wanted) -> list[str]:
    commands = ["link set lo up"]
    for link in host.links:
        if link.ipv4:
            commands.append(f"address add {link.ipv4}/16 broadcast + dev {link.interface}")
        commands += [
            f"address add {link.ipv6}/64 nodad dev {link.interface}",
            f"link set {link.interface} up",
        ]
    if wanted.docker:
        commands += [
            f"link add name {layout.DOCKER} type bridge",
            f"address add 172.17.0.1/16 broadcast + dev {layout.DOCKER}",
            f"link set {layout.DOCKER} up",
        ]
    return commands


def _mounts(own: str, directory: str, wanted: Wanted) -> None:
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    _own_file(f"{own}/boot_id", f"{uuid.uuid4()}\n", "/proc/sys/kernel/random/boot_id")
    groups = f"{own}/cgroup"
    os.mkdir(groups)
    if os.path.isdir("/sys/fs/cgroup"):
        kernel.bind("/sys/fs/cgroup", groups)
    kernel.mount("sysfs", "/sys", "sysfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    if os.path.ismount(groups):
        kernel.bind(groups, "/sys/fs/cgroup")
        kernel.unmount(groups)
    kernel.mount("tmpfs", "/run", "tmpfs", _TMPFS, "mode=755")
    for name in ("sshd", "lock", "user"):
        os.mkdir(f"/run/{name}", 0o755)
    kernel.mount("tmpfs", _SHARED_MEMORY, "tmpfs", _TMPFS, "mode=1777")
    kernel.mount("tmpfs", "/var/log", "tmpfs", _TMPFS, "mode=755")
    if wanted.own_tmp:
        _own_tmp(own, directory)
    kernel.mount(
        "tmpfs", f"{directory}/local", "tmpfs", _TMPFS, f"mode=1777,size={wanted.disk_mb}m"
    )
    kernel.bind(f"{own}/etc_hosts", "/etc/hosts")
    for path, text in (("/etc/resolv.conf", ""), ("/etc/machine-id", f"{uuid.uuid4().hex}\n")):
        if os.path.isfile(path):
            _own_file(f"{own}/{os.path.basename(path)}", text, path)


def _own_file(source: str, text: str, target: str) -> None:
    with open(source, "w", encoding="ascii") as file:
        file.write(text)
    kernel.bind(source, os.path.realpath(target))


def _own_tmp(own: str, directory: str) -> None:
    """Return the host a /tmp of its own, which still shows the test bed's directory."""
    new = own + _TMP
    os.mkdir(new)
    kernel.mount("tmpfs", new, "tmpfs", _TMPFS, "mode=1777")
    if os.path.dirname(directory) == _TMP:
        os.mkdir(f"{new}/{os.path.basename(directory)}")
        kernel.mount(directory, f"{new}/{os.path.basename(directory)}", "none", kernel.MS_BIND)
    kernel.move(new, _TMP)
