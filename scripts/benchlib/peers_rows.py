"""Measurements of jobs with a launcher on each node: `scripts/bench peers`; four nodes are the
test bed's hosts."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from testbedlib import faults
from testbedlib.client import Hosts

from .launchers import WORKERS, Launcher
from .process import BenchError, now_ns
from .rows import Measurement, Row, Sample, Scale, ratio

NODES, MANY = 4, 64
PORT = 29400
STATIC = "torchrun static"
CAP_S = 60.0
"""So long a launcher may go on after a failure; torchrun's would for five minutes."""
LONG_S = 120.0
_ESTABLISHED = "01"

Start = Callable[[int, Sequence[str], dict[str, str]], "subprocess.Popen[bytes]"]


class Team:
    """Launchers of one job, by node rank; ``directory`` is the same for all, and is where workers
    write stamps."""

    def __init__(
        self, launcher: Launcher, directory: str, start: Start, place: tuple[str, int]
    ) -> None:
        self.directory = directory
        self._launcher, self._start = launcher, start
        self._host, self._port = place
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self.started_ns = 0
        """When the last launcher was started."""

    def start(self, rank: int, size: int | str, worker: str) -> None:
        """Start the launcher of a node, whose worker is a script of bench_workers."""
        tools = self._launcher.bin
        match self._launcher.name:
            case "distlaunch":
                place = [
                    "--rendezvous",
                    f"{self._host}:{self._port}",
                    "--num-nodes",
                    str(size),
                    "--node-rank",
                    str(rank),
                ]
                logs = ["--log-dir", f"{self.directory}/logs"]
                words = [
                    f"{tools}/distlaunch",
                    "train",
                    *place,
                    "--procs-per-node",
                    "1",
                    "--device",
                    "cpu",
                    *logs,
                ]
                words += ["--join-timeout", str(LONG_S), "--grace", "5"]
            case "torchrun":
                place = [
                    "--rdzv-backend",
                    "c10d",
                    "--rdzv-endpoint",
                    f"{self._host}:{self._port}",
                    "--rdzv-id",
                    "bench",
                ]
                words = [
                    f"{tools}/torchrun",
                    *place,
                    "--nnodes",
                    str(size),
                    "--nproc-per-node",
                    "1",
                ]
            case _:
                place = [
                    "--master-addr",
                    self._host,
                    "--master-port",
                    str(self._port),
                    "--node-rank",
                    str(rank),
                ]
                words = [
                    f"{tools}/torchrun",
                    *place,
                    "--nnodes",
                    str(size),
                    "--nproc-per-node",
                    "1",
                ]
        env = {
            "OMP_NUM_THREADS": "1",
            "BENCH_DIR": self.directory,
            "XDG_STATE_HOME": f"{self.directory}/state",
        }
        self.started_ns = now_ns()
        self.launchers[rank] = self._start(rank, [*words, f"{WORKERS}/{worker}"], env)

    def errors(self) -> str:
        """Return the last that each launcher wrote to stderr, those of some."""
        message = []
        for rank in sorted(self.launchers)[:NODES]:
            with open(
                f"{self.directory}/stderr-{rank}", encoding="utf-8", errors="replace"
            ) as file:
                message.append(f"launcher {rank}: {file.read()[-800:]}")
        return "\n".join(message)

    def until(self, condition: Callable[[], bool], what: str, *, within_s: float = LONG_S) -> None:
        """Wait for a condition. Raises BenchError with what the launchers said."""
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                raise BenchError(f"no {what} within {within_s} s\n{self.errors()}")
            time.sleep(0.01)

    def stamps(self, name: str, ranks: Sequence[int], *, attempt: int = 0) -> list[int]:
        """Wait until these ranks of an attempt have written this stamp; give the times."""
        paths = [f"{self.directory}/{name}-{attempt}-{rank}" for rank in ranks]
        self.until(
            lambda: all(map(os.path.exists, paths)), f"stamps {name!r} of {len(paths)} workers"
        )
        times = []
        for path in paths:
            with open(path, encoding="ascii") as file:
                times.append(int(file.read()))
        return times

    def codes(self, within_s: float) -> tuple[list[int | None], int]:
        """Wait for the end of all launchers; give their exit codes (None: it runs on), and when the
        last one ended."""
        deadline = time.monotonic() + within_s
        while (
            any(each.poll() is None for each in self.launchers.values())
            and time.monotonic() < deadline
        ):
            time.sleep(0.002)
        return [self.launchers[rank].poll() for rank in sorted(self.launchers)], now_ns()

    def expect(self, codes: Sequence[int | None], wanted: int) -> None:
        """Raise BenchError unless all launchers have ended with this code."""
        if set(codes) != {wanted}:
            raise BenchError(f"exit codes {codes}, expected {wanted}\n{self.errors()}")

    def close(self) -> None:
        """End the launchers: by TERM, which distlaunch hands on to its workers, then by KILL."""
        for number, within_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 30.0)):
            for each in self.launchers.values():
                if each.poll() is None:
                    each.send_signal(number)
            self.codes(within_s)


@contextmanager
def on_hosts(launcher: Launcher) -> Iterator[tuple[Team, Hosts]]:
    """Return a team whose launchers are on hosts of their own, in a test bed for this sample."""
    directory = tempfile.mkdtemp(prefix="distlaunch-bench-")
    try:
        with Hosts.started(NODES) as hosts:

            def start(
                rank: int, argv: Sequence[str], env: dict[str, str]
            ) -> subprocess.Popen[bytes]:
                with open(f"{directory}/stderr-{rank}", "wb") as errors:
                    return hosts.popen(
                        f"n{rank + 1}",
                        argv,
                        env=env,
                        cwd=directory,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                    ).process

            team = Team(launcher, directory, start, ("n1", PORT))
            try:
                yield team, hosts
            finally:
                team.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def here(launcher: Launcher) -> Iterator[Team]:
    """Return a team whose launchers are all on this machine, and meet on loopback."""
    directory = tempfile.mkdtemp(prefix="distlaunch-bench-")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def start(rank: int, argv: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        base = {"PATH": os.environ.get("PATH", os.defpath), "HOME": directory, "LANG": "C.UTF-8"}
        with open(f"{directory}/stderr-{rank}", "wb") as errors:
            return subprocess.Popen(
                argv,
                env={**base, **env},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    team = Team(launcher, directory, start, ("127.0.0.1", port))
    try:
        yield team
    finally:
        team.close()
        shutil.rmtree(directory, ignore_errors=True)


def callers(pid: int, port: int) -> int:
    """Count the connections that other hosts have to a port, in a process's network."""
    count = 0
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                _, local, remote, state, *_ = line.split()
                address, _, number = local.rpartition(":")
                other = remote.rpartition(":")[0]
                count += (
                    state == _ESTABLISHED and int(number, 16) == port and other[-8:] != address[-8:]
                )
    return count


def cpu_ms(pid: int) -> float:
    """Return how much processor time the threads of a process have used, its children left out."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as file:
            total += int(file.read().split()[0])
    return total / 1e6


def begun(team: Team, hosts: Hosts, worker: str) -> None:
    """Start all launchers but the last, wait until they have called, let them come to rest, and
    start the last."""
    for rank in range(NODES - 1):
        team.start(rank, NODES, worker)
    [inside] = hosts.processes("n1")[:1]
    team.until(lambda: callers(inside.pid, PORT) >= NODES - 2, "calls of the others")
    time.sleep(1.0)
    team.start(NODES - 1, NODES, worker)


def first(launcher: Launcher, scale: Scale) -> Sample:
    """Time from the last launcher's start to all workers' first instruction."""
    with on_hosts(launcher) as (team, hosts):
        begun(team, hosts, "start.py")
        last = max(team.stamps("start", range(NODES)))
        codes, ended = team.codes(LONG_S)
        team.expect(codes, 0)
        return {
            "peers_first": (last - team.started_ns) / 1e9,
            "peers_first_to_the_end": (ended - team.started_ns) / 1e9,
        }


def failure(launcher: Launcher, scale: Scale) -> Sample:
    """Time from the failure of a worker that is not on node 0 to the end of all launchers."""
    with on_hosts(launcher) as (team, hosts):
        begun(team, hosts, "fail.py")
        [failed] = team.stamps("fail", [1])
        codes, ended = team.codes(CAP_S)
        if launcher.name == "distlaunch":
            team.expect(codes, 3)
        return {
            "peers_failure": (ended - failed) / 1e9,
            "peers_failure_still_running": codes.count(None),
            "peers_failure_exit_0": codes.count(0),
        }


def lost(launcher: Launcher, scale: Scale) -> Sample:
    """Cut one of four nodes off, three being enough: when have the others met again?"""
    with on_hosts(launcher) as (team, hosts):
        for rank in range(NODES):
            team.start(rank, f"{NODES - 1}:{NODES}", "meet.py")
        team.stamps("met", range(NODES))
        time.sleep(1.0)  # let it come to rest
        began = now_ns()
        faults.link(hosts, f"n{NODES}", up=False)
        met = max(team.stamps("met", range(NODES - 1), attempt=1))
        away = team.launchers.pop(NODES - 1)  # it calls node 0 until --join-timeout
        codes, _ = team.codes(LONG_S)
        team.launchers[NODES - 1] = away
        team.expect(codes, 0)
        return {"peers_lost": (met - began) / 1e9}


def joining(launcher: Launcher, scale: Scale) -> Sample:
    """Measure what each of many launchers costs a coordinator that they join in any order. One more
    then starts the job."""
    size = MANY + 2
    with here(launcher) as team:
        team.start(0, size, "start.py")
        coordinator = team.launchers[0].pid
        errors = f"{team.directory}/stderr-0"
        team.until(lambda: os.path.getsize(errors) > 0, "sign of the coordinator")
        time.sleep(1.0)
        before, began = cpu_ms(coordinator), time.monotonic()
        ranks = list(range(1, MANY + 1))
        random.Random(6).shuffle(ranks)
        for rank in ranks:
            team.start(rank, size, "start.py")

        def joined(rank: int) -> bool:
            with open(
                f"{team.directory}/stderr-{rank}", encoding="utf-8", errors="replace"
            ) as file:
                return "joined" in file.read()

        team.until(
            lambda: all(map(joined, ranks)), f"{MANY} launchers that have joined", within_s=LONG_S
        )
        in_s = time.monotonic() - began
        time.sleep(1.0)
        used = cpu_ms(coordinator) - before
        rest = cpu_ms(coordinator)
        time.sleep(scale.idle_s / 2)
        idle = (cpu_ms(coordinator) - rest) / (scale.idle_s / 2)
        team.start(size - 1, size, "start.py")
        last = max(team.stamps("start", range(size)))
        codes, _ = team.codes(LONG_S)
        team.expect(codes, 0)
        return {
            "peers_join": MANY,
            "peers_join_cpu": used / MANY,
            "peers_join_all_s": in_s,
            "peers_join_idle_ms_per_s": idle,
            "peers_join_last_to_all_workers_s": (last - team.started_ns) / 1e9,
        }


PEERS = (
    Measurement(
        name="first",
        run=first,
        launchers=("distlaunch", "torchrun", STATIC),
        rows=(
            Row(
                key="peers_first",
                title="4 nodes: last launcher started to all workers' first instruction",
                unit="s",
                goal="<= 0.6 s",
                reached=lambda row: row["distlaunch"] <= 0.6,
            ),
        ),
    ),
    Measurement(
        name="failure",
        run=failure,
        launchers=("distlaunch", "torchrun", STATIC),
        share=0.4,
        rows=(
            Row(
                key="peers_failure",
                title="4 nodes: a worker's failure on node 1 to the end of all launchers (given up "
                "after 60 s)",
                unit="s",
                goal="<= 2 s",
                reached=lambda row: row["distlaunch"] <= 2 and ratio(row, "torchrun") >= 1,
            ),
        ),
    ),
    Measurement(
        name="lost",
        run=lost,
        launchers=("distlaunch",),
        share=0.4,
        rows=(
            Row(
                key="peers_lost",
                title="link of one of 4 nodes down (`--num-nodes 3:4`) to the others' workers "
                "having met again",
                unit="s",
                goal="<= 20 s",
                reached=lambda row: row["distlaunch"] <= 20,
            ),
        ),
    ),
    Measurement(
        name="joining",
        run=joining,
        launchers=("distlaunch",),
        share=0.4,
        rows=(
            Row(
                key="peers_join",
                title="of 64 launchers that call one coordinator on loopback, join",
                unit="",
                goal="64",
                reached=lambda row: row["distlaunch"] == MANY,
                more_is_better=True,
            ),
            Row(
                key="peers_join_cpu",
                title="coordinator's processor time for each of them",
                unit="ms",
                goal="<= 5 ms",
                reached=lambda row: row["distlaunch"] <= 5,
            ),
        ),
    ),
)
