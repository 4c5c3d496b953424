"""Measurements: one function for each, for any launcher. A measurement may feed several rows."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from .counting import count_lines, log_bytes
from .launchers import Launcher
from .process import BenchError, Command, HangError, context_switches, running, status_kib

Sample = dict[str, float]
"""Figures of one run, by name; those that are row keys go into the table, the others into the JSON
beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is done: whole, or (--quick) just enough to see that it works."""

    lines_per_worker: int = 300_000
    idle_s: float = 10.0
    many: tuple[int, ...] = (128, 256, 512, 1024)
    steps: int = 3000
    """Of a training."""


def expect(command: Command, code: int, *wanted: int) -> None:
    if code not in wanted:
        raise BenchError(f"exit code {code}, expected {wanted}\n{command.errors()[-1500:]}")


def first_worker(launcher: Launcher, scale: Scale) -> Sample:
    with running(lambda directory: launcher.command(2, ["start.py"], directory)) as command:
        expect(command, command.wait(within_s=60), 0)
        return {
            "first": (min(command.stamps("start", 0, 2, within_s=1)) - command.started_ns) / 1e9
        }


def idle(launcher: Launcher, scale: Scale) -> Sample:
    """Eight sleeping workers: what the launcher weighs, and how often it is woken."""
    with running(lambda directory: launcher.command(8, ["idle.py"], directory)) as command:
        command.stamps("start", 0, 8, within_s=60)
        workers = command.stamps("pid", 0, 8, within_s=1)
        time.sleep(1.0)  # whatever follows the start
        helpers = [pid for pid in command.related() if pid not in workers]
        before = context_switches([command.pid, *helpers])
        began = time.monotonic()
        time.sleep(scale.idle_s)
        woken = (context_switches([command.pid, *helpers]) - before) / (time.monotonic() - began)
        return {
            "wakeups": woken,
            "memory": status_kib(command.pid, "VmHWM") / 1024,
            "helpers": len(helpers),
            "helpers_memory": sum(status_kib(pid, "VmHWM") for pid in helpers) / 1024,
        }


def idle_tee(launcher: Launcher, scale: Scale) -> Sample:
    with running(
        lambda directory: launcher.command(8, ["idle.py"], directory, lines=True)
    ) as command:
        command.stamps("start", 0, 8, within_s=60)
        time.sleep(1.0)
        before = context_switches([command.pid])
        began = time.monotonic()
        time.sleep(scale.idle_s)
        return {
            "wakeups_tee": (context_switches([command.pid]) - before) / (time.monotonic() - began)
        }


def allreduce(launcher: Launcher, scale: Scale) -> Sample:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def make(directory: str) -> tuple[list[str], dict[str, str]]:
        argv, env = launcher.command(8, ["allreduce.py"], directory)
        return argv, {**env, "BENCH_PORT": port}

    with running(make) as command:
        expect(command, command.wait(within_s=120), 0)
        return {
            "allreduce": (max(command.stamps("reduced", 0, 8, within_s=1)) - command.started_ns)
            / 1e9
        }


def failure(launcher: Launcher, scale: Scale) -> Sample:
    with running(lambda directory: launcher.command(4, ["fail.py"], directory)) as command:
        code = command.wait(within_s=60)
        expect(command, code, 1, 3)
        failed = int(_read(f"{command.directory}/fail-0-1"))
        return {"failure": (command.ended_ns - failed) / 1e9, "failure_code": code}


def restart(launcher: Launcher, scale: Scale) -> Sample:
    with running(
        lambda directory: launcher.command(4, ["fail.py"], directory, restarts=1)
    ) as command:
        expect(command, command.wait(within_s=60), 0)
        failed = int(_read(f"{command.directory}/fail-0-1"))
        return {"restart": (max(command.stamps("start", 1, 4, within_s=1)) - failed) / 1e9}


def _lines(launcher: Launcher, scale: Scale, key: str, how: str, *equal: str) -> Sample:
    """Lines a second over the whole command, as a user would time it; the rate without its start is
    noted beside it."""
    worker = ["lines.py", how, str(scale.lines_per_worker), *equal]
    with running(lambda directory: launcher.command(2, worker, directory, lines=True)) as command:
        command.sample(0.1)
        expect(command, command.wait(within_s=300), 0)
        began = min(command.stamps("start", 0, 2, within_s=1))
        total = 2 * scale.lines_per_worker
        arrived, intact = count_lines(command.output)
        return {
            key: total / ((command.ended_ns - command.started_ns) / 1e9),
            f"{key}_per_s_after_start": total / ((command.last_output_ns - began) / 1e9),
            f"{key}_lost": total - arrived,
            f"{key}_torn": arrived - intact,
            f"{key}_lost_in_files": max(0, total * 130 - log_bytes(command.directory)) // 130,
            f"{key}_peak_mib": command.peaks["VmRSS"] / 1024,
            f"{key}_end_mib": command.last["VmRSS"] / 1024,
        }


def lines(launcher: Launcher, scale: Scale) -> Sample:
    return _lines(launcher, scale, "lines", "print")


def lines_equal(launcher: Launcher, scale: Scale) -> Sample:
    return _lines(launcher, scale, "lines_equal", "print", "equal")


def lines_block(launcher: Launcher, scale: Scale) -> Sample:
    return _lines(launcher, scale, "lines_block", "block")


def sigterm(launcher: Launcher, scale: Scale) -> Sample:
    with running(lambda directory: launcher.command(4, ["idle.py"], directory)) as command:
        command.stamps("start", 0, 4, within_s=60)
        time.sleep(0.5)
        reported = time.monotonic_ns()
        os.kill(command.pid, signal.SIGTERM)
        code = command.wait(within_s=60)
        left = len(command.related())
        return {
            "sigterm": (command.ended_ns - reported) / 1e9,
            "sigterm_code": code,
            "sigterm_left": left,
        }


def help_text(launcher: Launcher, scale: Scale) -> Sample:
    with running(lambda _: launcher.help()) as command:
        expect(command, command.wait(within_s=60), 0)
        if not command.output:
            raise BenchError("--help printed nothing")
        return {"help": (command.ended_ns - command.started_ns) / 1e9}


def many(launcher: Launcher, scale: Scale) -> Sample:
    """/bin/true in growing numbers, for the shape of the curve; the largest is the row's figure.

    mpirun 4.1 sometimes misses the end of workers that live so shortly and waits for ever: such a
    run is ended, counted as a hang, and tried again.
    """
    sample: Sample = {"many_hangs": 0}
    for count in scale.many:
        for _ in range(5):
            try:
                sample |= _many(launcher, count, within_s=10 + count / 20)
                break
            except HangError:
                sample["many_hangs"] += 1
    if f"many_{scale.many[-1]}" in sample:
        sample["many"] = sample[f"many_{scale.many[-1]}"]
    return sample


def _many(launcher: Launcher, count: int, *, within_s: float) -> Sample:
    with running(lambda directory: launcher.command(count, ["/bin/true"], directory)) as command:
        command.sample(0.05)
        expect(command, command.wait(within_s=within_s), 0)
        return {
            f"many_{count}": (command.ended_ns - command.started_ns) / 1e9,
            f"many_{count}_threads": command.peaks["Threads"],
            f"many_{count}_fds_at_end": command.last["fds"],
        }


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


Verdict = Callable[[Mapping[str, float]], bool]
"""Judges the medians of one row, by launcher."""


def ratio(row: Mapping[str, float], other: str, *, more: bool = False) -> float:
    """Return how many times better distlaunch is than ``other``."""
    return row["distlaunch"] / row[other] if more else row[other] / row["distlaunch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    key: str
    title: str
    unit: str
    goal: str
    reached: Verdict
    more_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One thing that is run, for each launcher in turn, and the rows that it feeds."""

    name: str
    run: Callable[[Launcher, Scale], Sample]
    rows: tuple[Row, ...]
    launchers: tuple[Literal["distlaunch", "torchrun", "mpirun"], ...] = (
        "distlaunch",
        "torchrun",
        "mpirun",
    )
    share: float = 1.0
    """Part of the rounds that it gets: long ones get fewer."""


MEASUREMENTS = (
    Measurement(
        name="first",
        run=first_worker,
        rows=(
            Row(
                key="first",
                title="command to first worker's first instruction, 2 workers",
                unit="s",
                goal="12x faster than torchrun, within 2x of mpirun",
                reached=lambda row: ratio(row, "torchrun") >= 12 and ratio(row, "mpirun") >= 0.5,
            ),
        ),
    ),
    Measurement(
        name="idle",
        run=idle,
        share=0.6,
        rows=(
            Row(
                key="memory",
                title="peak memory of the launcher process",
                unit="MiB",
                goal="<= 30 MB",
                reached=lambda row: row["distlaunch"] <= 30e6 / 2**20,
            ),
            Row(
                key="wakeups",
                title="wake-ups a second of the idle launcher, 8 workers",
                unit="/s",
                goal="< 1",
                reached=lambda row: row["distlaunch"] < 1,
            ),
        ),
    ),
    Measurement(
        name="idle_tee",
        run=idle_tee,
        share=0.2,
        launchers=("torchrun",),
        rows=(
            Row(
                key="wakeups_tee",
                title="the same, torchrun with `--tee 3` (log files, as distlaunch always has)",
                unit="/s",
                goal="",
                reached=lambda _: True,
            ),
        ),
    ),
    Measurement(
        name="allreduce",
        run=allreduce,
        share=0.6,
        rows=(
            Row(
                key="allreduce",
                title="command to 8 torch workers through one gloo all-reduce",
                unit="s",
                goal="faster than torchrun",
                reached=lambda row: ratio(row, "torchrun") > 1,
            ),
        ),
    ),
    Measurement(
        name="failure",
        run=failure,
        rows=(
            Row(
                key="failure",
                title="one of 4 workers exits 3 to launcher's exit",
                unit="s",
                goal="15x faster than both, exit code 3",
                reached=lambda row: min(ratio(row, "torchrun"), ratio(row, "mpirun")) >= 15,
            ),
        ),
    ),
    Measurement(
        name="restart",
        run=restart,
        launchers=("distlaunch", "torchrun"),
        rows=(
            Row(
                key="restart",
                title="failure to all 4 restarted workers' first instruction",
                unit="s",
                goal="4x faster than torchrun",
                reached=lambda row: ratio(row, "torchrun") >= 4,
            ),
        ),
    ),
    Measurement(
        name="lines",
        run=lines,
        share=0.6,
        rows=(
            Row(
                key="lines",
                title="600,000 lines of 130 bytes from 2 workers, rank prefix and files",
                unit="lines/s",
                goal="3.5x torchrun's, 2.5x mpirun's rate; 0 lost, memory flat",
                more_is_better=True,
                reached=lambda row: (
                    ratio(row, "torchrun", more=True) >= 3.5
                    and ratio(row, "mpirun", more=True) >= 2.5
                ),
            ),
        ),
    ),
    Measurement(
        name="lines_equal",
        run=lines_equal,
        share=0.6,
        rows=(
            Row(
                key="lines_equal",
                title="the same, lines equal over the ranks (distlaunch folds them)",
                unit="lines/s",
                goal="0 lost",
                more_is_better=True,
                reached=lambda _: True,
            ),
        ),
    ),
    Measurement(
        name="lines_block",
        run=lines_block,
        share=0.6,
        rows=(
            Row(
                key="lines_block",
                title="the same, workers that write 500 lines at a time (no worker holds the "
                "launcher up)",
                unit="lines/s",
                goal="0 lost",
                more_is_better=True,
                reached=lambda _: True,
            ),
        ),
    ),
    Measurement(
        name="sigterm",
        run=sigterm,
        rows=(
            Row(
                key="sigterm",
                title="SIGTERM to exit with workers that obey",
                unit="s",
                goal="10x faster than both",
                reached=lambda row: min(ratio(row, "torchrun"), ratio(row, "mpirun")) >= 10,
            ),
        ),
    ),
    Measurement(
        name="help",
        run=help_text,
        launchers=("distlaunch", "torchrun"),
        rows=(
            Row(
                key="help",
                title="`--help`",
                unit="s",
                goal="6x faster than torchrun; no torch, paramiko or asyncio imported",
                reached=lambda row: ratio(row, "torchrun") >= 6,
            ),
        ),
    ),
    Measurement(
        name="many",
        run=many,
        share=0.4,
        launchers=("distlaunch", "mpirun"),
        rows=(
            Row(
                key="many",
                title="1,024 local workers of `/bin/true --no-python`",
                unit="s",
                goal="all started and reaped, no thread or descriptor per worker left, time linear",
                reached=lambda row: row["distlaunch"] <= row["mpirun"],
            ),
        ),
    ),
)
