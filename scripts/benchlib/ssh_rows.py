"""Measurements of jobs over several hosts: `scripts/bench ssh`, on the test bed (network
namespaces, real sshd)."""

from __future__ import annotations

import os
import resource
import select
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from testbedlib import faults
from testbedlib.client import Hosts
from testbedlib.layout import HEAD

from .counting import count_lines, log_bytes
from .launchers import WORKERS, Launcher
from .process import BenchError, Command, context_switches, cpu_s, running, status_kib
from .rows import Sample, Scale, expect

MANY, SOME, FEW = 32, 16, 8
LINES = 600_000
FAILURE_GRACE_S = 5.0
"""--failure-grace's default: the cost of workers that ignore SIGTERM."""
ONE_MACHINE = "one machine"
SAMPLE_S = 0.1
PASSES = "python3 -c pass"


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(1, count + 1)]


class Bed:
    """A test bed for one sample, and commands on its head."""

    def __init__(self, hosts: Hosts, launcher: Launcher) -> None:
        self.hosts = hosts
        self._launcher = launcher

    def start(
        self, argv: Sequence[str], *, env: dict[str, str], **popen: Any
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Start a command on the head; see ``process.Start``."""
        started = self.hosts.popen(HEAD, argv, env=env, **popen)
        return started.process, started.pid

    @contextmanager
    def running(self, make: Callable[[str], Sequence[str]]) -> Iterator[Command]:
        """Run a command on the head, with what every launcher gets."""

        def command(directory: str) -> tuple[Sequence[str], dict[str, str]]:
            os.chmod(directory, 0o755)
            return make(directory), {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": f"{directory}/state"}

        with running(command, start=self.start) as command_of_it:
            yield command_of_it

    def job(self, count: int, worker: Sequence[str], directory: str, *options: str) -> list[str]:
        """Return the words that run one worker on each of the first hosts, with this launcher."""
        words = [f"{WORKERS}/{worker[0]}", *worker[1:]]
        python = f"{self._launcher.bin}/python"
        if self._launcher.name == "mpirun":
            head = [
                *(
                    "mpirun",
                    "--host",
                    ",".join(names(count)),
                    "-np",
                    str(count),
                    "--bind-to",
                    "none",
                    "--oversubscribe",
                ),
                *(
                    "--allow-run-as-root",
                    "--mca",
                    "plm_rsh_agent",
                    f"ssh -F {self.hosts.ssh_config}",
                    "-x",
                    "BENCH_DIR",
                ),
            ]
            return [*head, python, *words]
        if self._launcher.name == ONE_MACHINE:
            where = ["--num-procs", str(count)]
        else:
            where = ["--hosts", ",".join(f"{name}:1" for name in names(count))]
        head = [
            f"{self._launcher.bin}/distlaunch",
            "train",
            *where,
            "--device",
            "cpu",
            "--log-dir",
            f"{directory}/logs",
        ]
        return [*head, *options, *words]

    def everywhere(self, count: int, command: str) -> list[str]:
        """Return the words with which a tool for commands on many hosts runs one."""
        if self._launcher.name == "clush":
            return ["clush", "-f", "64", "-w", f"n[1-{count}]", command]
        if self._launcher.name == "pdsh":
            return ["pdsh", "-R", "ssh", "-f", "64", "-w", f"n[1-{count}]", command]
        each = f"for each in {' '.join(names(count))}; do ssh $each '{command}' & done; wait"
        return ["sh", "-c", each]

    def workers(self, script: str, hosts: Sequence[str]) -> list[int]:
        """Return the pids of the workers that run a script of bench_workers, as this machine
        counts."""
        found = []
        for host in hosts:
            for process in self.hosts.processes(host):
                words = [os.path.basename(word) for word in process.argv]
                if script in words and words[0].startswith("python"):
                    found.append(process.pid)
        return found


@contextmanager
def bed(launcher: Launcher, count: int) -> Iterator[Bed]:
    with Hosts.started(count) as hosts:
        yield Bed(hosts, launcher)


class Ends:
    """When each of some processes has ended."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._poll = select.poll()
        self._open = [os.pidfd_open(pid) for pid in pids]
        for descriptor in self._open:
            self._poll.register(descriptor, select.POLLIN)

    def last_ns(self, within_s: float) -> int:
        """Wait for the last one's end."""
        deadline = time.monotonic() + within_s
        while self._open:
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                raise BenchError(f"{len(self._open)} processes still run after {within_s} s")
            for descriptor, _ in ready:
                self._poll.unregister(descriptor)
                self._open.remove(descriptor)
                os.close(descriptor)
        return time.monotonic_ns()


# --- starting --------------------------------------------------------------------------------------------------------


def cpu_per_node(launcher: Launcher, scale: Scale) -> Sample:
    """Compare the processor time of a job on 32 hosts, and of its children here, with that on
    one."""

    def used_s(on: Bed, count: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if launcher.name == "distlaunch":
            with on.running(lambda directory: on.job(count, ["start.py"], directory)) as command:
                expect(command, command.wait(within_s=120), 0)
        else:
            with on.running(lambda _: on.everywhere(count, PASSES)) as command:
                expect(command, command.wait(within_s=120), 0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    with bed(launcher, MANY) as on:
        few, many = used_s(on, 1), used_s(on, MANY)
    return {"cpu_per_node": (many - few) / (MANY - 1) * 1000, "cpu_of_one": few * 1000}


def first(launcher: Launcher, scale: Scale, count: int, key: str) -> Sample:
    """Command to every worker's first instruction; tools that run commands: to their end, of
    ``python3 -c pass``."""
    with bed(launcher, count) as on:
        if launcher.name in {"distlaunch", "mpirun"}:
            with on.running(lambda directory: on.job(count, ["start.py"], directory)) as command:
                expect(command, command.wait(within_s=120), 0)
                last = max(command.stamps("start", 0, count, within_s=1))
                ended = command.ended_ns
            return {
                key: (last - command.started_ns) / 1e9,
                f"{key}_to_the_end": (ended - command.started_ns) / 1e9,
            }
        with on.running(lambda _: on.everywhere(count, PASSES)) as command:
            expect(command, command.wait(within_s=120), 0)
        sample = {key: (command.ended_ns - command.started_ns) / 1e9}

        def same(directory: str) -> list[str]:
            worker = (
                f"RANK=$(hostname | tr -d n) BENCH_DIR={directory} {launcher.bin}/python "
                f"{WORKERS}/start.py"
            )
            return on.everywhere(
                count, worker if launcher.name != "ssh" else worker.replace("'", "")
            )

        with on.running(same) as command:
            expect(command, command.wait(within_s=120), 0)
            last = max(command.stamps("start", 0, count, within_s=1, ranks=range(1, count + 1)))
            sample[f"{key}_same_worker"] = (last - command.started_ns) / 1e9
        return sample


def first32(launcher: Launcher, scale: Scale) -> Sample:
    return first(launcher, scale, MANY, "first32")


def first16(launcher: Launcher, scale: Scale) -> Sample:
    return first(launcher, scale, SOME, "first16")


# --- ends ------------------------------------------------------------------------------------------------------------


def failure8(launcher: Launcher, scale: Scale) -> Sample:
    with (
        bed(launcher, FEW) as on,
        on.running(lambda directory: on.job(FEW, ["fail.py"], directory)) as command,
    ):
        command.stamps("start", 0, FEW, within_s=60)
        ends = Ends(on.workers("fail.py", names(FEW)))
        gone = ends.last_ns(within_s=60)
        expect(command, command.wait(within_s=60), 1, 3)
        failed = command.stamps("fail", 0, 1, within_s=1, ranks=(1,))[0]
        return {
            "failure8": (gone - failed) / 1e9,
            "failure8_to_the_end": (command.ended_ns - failed) / 1e9,
        }


def lost(launcher: Launcher, key: str, fault: Callable[[Hosts, str], None], *worker: str) -> Sample:
    """Lose one of four nodes, three being enough: when have the others met again, and when are its
    workers gone?"""
    with (
        bed(launcher, 4) as on,
        on.running(
            lambda directory: on.job(4, ["meet.py", *worker], directory, "--num-nodes", "3:4")
        ) as command,
    ):
        command.stamps("met", 0, 4, within_s=60)
        time.sleep(1.0)  # let it come to rest
        ends = Ends(on.workers("meet.py", ["n4"]))
        began = time.monotonic_ns()
        fault(on.hosts, "n4")
        [world] = command.stamps("world", 1, 1, within_s=60)
        met = max(command.stamps("met", 1, world, within_s=60))
        gone = ends.last_ns(within_s=60)
        expect(command, command.wait(within_s=60), 0)
        return {
            key: (met - began) / 1e9,
            f"{key}_workers_there_gone": (gone - began) / 1e9,
            f"{key}_nodes_after": world,
        }


def silent(launcher: Launcher, scale: Scale) -> Sample:
    return lost(launcher, "silent", lambda hosts, host: faults.link(hosts, host, up=False))


def closed(launcher: Launcher, scale: Scale) -> Sample:
    return lost(launcher, "closed", faults.kill_sessions)


def closed_deaf(launcher: Launcher, scale: Scale) -> Sample:
    return lost(launcher, "closed_deaf", faults.kill_sessions, "ignore-signals")


# --- output ----------------------------------------------------------------------------------------------------------


def lines8(launcher: Launcher, scale: Scale) -> Sample:
    """Eight workers on eight hosts (or on one machine, by the same launcher) print all they can."""
    total = min(LINES, FEW * scale.lines_per_worker)
    with (
        bed(launcher, FEW) as on,
        on.running(
            lambda directory: on.job(FEW, ["lines.py", "print", str(total // FEW)], directory)
        ) as command,
    ):
        command.sample(SAMPLE_S)
        expect(command, command.wait(within_s=300), 0)
        began = min(command.stamps("start", 0, FEW, within_s=1))
        arrived, intact = count_lines(command.output)
        return {
            "lines8": total / ((command.last_output_ns - began) / 1e9),
            "lines8_lost": total - arrived,
            "lines8_torn": arrived - intact,
            "lines8_lost_in_files": max(0, total * 130 - log_bytes(command.directory)) // 130,
            "lines8_peak_mib": command.peaks["VmHWM"] / 1024,
        }


def flat(launcher: Launcher, scale: Scale) -> Sample:
    """Print five times as much, for what grows with it."""
    total = 5 * min(LINES, FEW * scale.lines_per_worker)

    def make(directory: str) -> list[str]:
        job = on.job(FEW, ["lines.py", "print", str(total // FEW)], directory)
        return ["sh", "-c", 'exec "$@" >/dev/null', "sh", *job]

    with bed(launcher, FEW) as on, on.running(make) as command:
        command.sample(SAMPLE_S)
        expect(command, command.wait(within_s=300), 0)
        sizes = [size for size in command.sizes_kib if size]
        third = len(sizes) // 3
        return {
            "flat": (statistics.median(sizes[-third:]) - statistics.median(sizes[third:-third]))
            / 1024,
            "flat_peak_mib": command.peaks["VmHWM"] / 1024,
            "flat_lost_in_files": max(0, total * 130 - log_bytes(command.directory)) // 130,
        }


# --- at rest ---------------------------------------------------------------------------------------------------------


def idle32(launcher: Launcher, scale: Scale) -> Sample:
    """Weigh the launcher of 32 sleeping workers on 32 hosts, and count what wakes it; compare with
    one host."""

    def rest(on: Bed, count: int, seconds: float) -> tuple[float, float, int, list[int]]:
        with on.running(lambda directory: on.job(count, ["idle.py"], directory)) as command:
            command.stamps("start", 0, count, within_s=60)
            time.sleep(3.0)  # whatever follows the start
            used, woken, began = (
                cpu_s(command.pid),
                context_switches([command.pid]),
                time.monotonic(),
            )
            time.sleep(seconds)
            passed = time.monotonic() - began
            used, woken = cpu_s(command.pid) - used, context_switches([command.pid]) - woken
            workers = on.workers("idle.py", names(1))
            helpers = [each.pid for each in on.hosts.processes("n1") if each.pid not in workers]
            weight = status_kib(command.pid, "VmRSS")
            return (
                used / passed * 60,
                woken / passed,
                weight,
                [status_kib(pid, "VmRSS") for pid in helpers],
            )

    with bed(launcher, MANY) as on:
        _, _, one, _ = rest(on, 1, 0.1)
        used, woken, many, helpers = rest(on, MANY, scale.idle_s * 3)
    return {
        "idle_cpu": used,
        "idle_wakeups": woken,
        "memory_per_node": (many - one) / 1024 / (MANY - 1),
        "idle_launcher_mib": many / 1024,
        "idle_processes_of_a_node": len(helpers),
        "idle_mib_of_a_node": sum(helpers) / 1024,
    }
