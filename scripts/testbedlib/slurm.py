"""Slurm on one machine: one slurmctld, several slurmd with fake GPUs, a munged of their own.

Nothing of the system's own Slurm is used: configuration, key, sockets, state and logs lie in the
sandbox's directory, ports are free ones. Slurm's manuals describe the settings: slurm.conf(5),
gres.conf(5), cgroup.conf(5), munged(8).
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from testbedlib.sandbox import TestbedError

TRACKERS = ("linuxproc", "cgroup")
NODES = {"n1": "a100:8", "n2": "a100:8", "n3": "volta:3+kepler:1", "n4": "a100:8"}
"""The GPUs of each node, by type."""
CPUS = 64
PACKAGES = "slurm-wlm munge"
_UP_S = 30.0
_TRIES = 3


class _PortTakenError(Exception):
    """Another program was faster."""


def hierarchies(tracker: str) -> tuple[str, ...]:
    """Name the cgroup v1 hierarchies that a process tracker works in."""
    return ("freezer",) if tracker == "cgroup" else ()


def bring_up(directory: str, tracker: str) -> dict[str, str]:
    """Start Slurm as children of this process, wait until all nodes are idle, return the
    environment of its clients."""
    for name in ("etc", "dev", "log", "run", "state", *(f"spool-{node}" for node in NODES)):
        os.mkdir(f"{directory}/{name}", 0o755)
    for index in range(max(len(_gpus(types)) for types in NODES.values())):
        os.mknod(
            f"{directory}/dev/nvidia{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3)
        )  # each a /dev/null
    _start_munge(directory)
    for _ in range(_TRIES):
        try:
            return _start_slurm(directory, tracker)
        except _PortTakenError:
            continue
    raise TestbedError(f"{_TRIES} times another program took a port that had been free")


def _start_munge(directory: str) -> None:
    with open(f"{directory}/run/munge.key", "wb", opener=_secret) as file:
        file.write(os.urandom(128))
    files = {"socket": "run/munge.socket", "key-file": "run/munge.key", "pid-file": "run/munge.pid"}
    files |= {"log-file": "log/munged.log", "seed-file": "run/munge.seed"}
    options = [f"--{name}={directory}/{path}" for name, path in files.items()]
    daemon = _start(directory, "munged", [_program("munged"), "--foreground", *options])
    _wait_for(
        directory,
        lambda: os.path.exists(f"{directory}/run/munge.socket"),
        [daemon],
        "munged's socket",
    )


def _secret(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _start_slurm(directory: str, tracker: str) -> dict[str, str]:
    ports = _free_ports(len(NODES) + 1)
    for name, text in configuration(directory, tracker, ports).items():
        with open(f"{directory}/etc/{name}", "w", encoding="ascii") as file:
            file.write(text)
    environment = {"SLURM_CONF": f"{directory}/etc/slurm.conf"}
    env = {"PATH": os.environ.get("PATH", os.defpath), **environment}
    daemons = [_start(directory, "slurmctld", [_program("slurmctld"), "-D", "-i", "-c"], env)]
    daemons += [
        _start(directory, f"slurmd-{node}", [_program("slurmd"), "-D", "-N", node], env)
        for node in NODES
    ]

    def all_idle() -> bool:
        sinfo = subprocess.run(
            [_program("sinfo"), "--noheader", "--partition=all", "--Node", "--format=%T"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        return sinfo.stdout.split() == ["idle"] * len(NODES)

    try:
        _wait_for(directory, all_idle, daemons, "all nodes to be idle")
    except BaseException:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        raise
    return environment


def _start(
    directory: str, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with open(f"{directory}/log/{name}.stderr", "ab") as log:
        return subprocess.Popen(
            argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, cwd=directory
        )


def _wait_for(
    directory: str,
    condition: Callable[[], bool],
    daemons: Sequence[subprocess.Popen[bytes]],
    what: str,
) -> None:
    deadline = time.monotonic() + _UP_S
    while not condition():
        for daemon in daemons:
            if daemon.poll() is not None:
                log = _last_words(directory)
                if "address already in use" in log.lower():
                    raise _PortTakenError
                raise TestbedError(f"{daemon.args!r} ended with {daemon.returncode}\n{log}")
        if time.monotonic() > deadline:
            raise TestbedError(f"{_UP_S} s passed waiting for {what}\n{_last_words(directory)}")
        time.sleep(0.05)


def _last_words(directory: str) -> str:
    words = []
    for name in sorted(os.listdir(f"{directory}/log")):
        with open(f"{directory}/log/{name}", encoding="utf-8", errors="replace") as file:
            words += [f"  {name}: {line.rstrip()}" for line in file.readlines()[-8:]]
    return "\n".join(words)


def _program(name: str) -> str:
    path = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if path is None:
        raise TestbedError(f"{name} is not installed; Debian: apt-get install {PACKAGES}")
    return path


def _free_ports(count: int) -> list[int]:
    """Choose ports that nobody has now, below those that the kernel gives to clients."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        lowest = int(file.read().split()[0])
    found: list[int] = []
    candidates = list(range(10000, max(lowest, 20000)))
    random.shuffle(candidates)
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise TestbedError("no free ports")


# --- configuration ---------------------------------------------------------------------------------------------------


def _gpus(types: str) -> list[str]:
    """Name the type of each GPU: ``volta:2+kepler:1`` is volta, volta, kepler."""
    pairs = [item.split(":") for item in types.split("+")]
    return [name for name, count in pairs for _ in range(int(count))]


def configuration(directory: str, tracker: str, ports: Sequence[int]) -> dict[str, str]:
    """Write the texts of Slurm's configuration files."""
    host = socket.gethostname().partition(".")[0]
    settings = {
        "ClusterName": "testbed",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={directory}/run/munge.socket",
        "StateSaveLocation": f"{directory}/state",
        "SlurmdSpoolDir": f"{directory}/spool-%n",
        "SlurmctldPidFile": f"{directory}/run/slurmctld.pid",
        "SlurmdPidFile": f"{directory}/run/slurmd-%n.pid",
        "SlurmctldLogFile": f"{directory}/log/slurmctld.log",
        "SlurmdLogFile": f"{directory}/log/slurmd-%n.log",
        "PlugStackConfig": os.devnull,
        "ProctrackType": f"proctrack/{tracker}",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1",
        "SlurmdParameters": "config_overrides",
        "GresTypes": "gpu",
        "ReturnToService": 2,
        "FirstJobId": random.randrange(
            1000, 1 << 25
        ),  # what is named after it is another's in another test bed
        "MinJobAge": 86400,
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "MailProg": "/bin/true",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    gres = ["AutoDetect=off"]
    for (node, types), port in zip(NODES.items(), ports[1:], strict=True):
        wanted = ",".join(f"gpu:{item}" for item in types.split("+"))
        address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        lines.append(
            f"NodeName={node} {address} CPUs={CPUS} RealMemory=4000 Gres={wanted} State=UNKNOWN"
        )
        gres += [
            f"NodeName={node} Name=gpu Type={name} File={directory}/dev/nvidia{index} "
            "Flags=nvidia_gpu_env"
            for index, name in enumerate(_gpus(types))
        ]
    partition = f"Nodes={','.join(NODES)} MaxTime=INFINITE State=UP OverSubscribe=NO"
    lines.append(f"PartitionName=all {partition} Default=YES PreemptMode=OFF")
    # Jobs of the first take the nodes of this one's.
    lines.append(f"PartitionName=cheap {partition} PriorityTier=0 PreemptMode=REQUEUE")
    # salloc reads this where it runs: without a command it then starts a step, and the shell in
    # that.
    interactive = [
        "LaunchParameters=use_interactive_step",
        'InteractiveStepOptions="--interactive --preserve-env $SHELL"',
    ]
    cgroup = [
        "CgroupPlugin=cgroup/v1",
        f"CgroupMountpoint={directory}/cgroup",
        "CgroupAutomount=no",
    ]
    texts = {
        "slurm.conf": lines,
        "interactive.conf": [*lines, *interactive],
        "gres.conf": gres,
        "cgroup.conf": cgroup,
    }
    return {name: "\n".join(text) + "\n" for name, text in texts.items()}
