"""Measurements of warm start, progress and hangs: `scripts/bench warm`."""

from __future__ import annotations

import os
import socket
import subprocess
import time

from .launchers import Launcher
from .process import BenchError, running, status_kib
from .rows import Measurement, Row, Sample, Scale, expect, ratio

HANG_TIMEOUT_S = 3.0
RESTARTS = 100
MEMORY_MIB = 2
"""So much more memory after all those restarts is a leak; less is the allocator's affair."""


def _port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def allreduce(launcher: Launcher, scale: Scale) -> Sample:
    port = _port()

    def make(directory: str) -> tuple[list[str], dict[str, str]]:
        argv, env = launcher.command(8, ["allreduce.py"], directory, options=("--preload", "torch"))
        return argv, {**env, "BENCH_PORT": port}

    with running(make) as command:
        expect(command, command.wait(within_s=120), 0)
        return {
            "warm_allreduce": (
                max(command.stamps("reduced", 0, 8, within_s=1)) - command.started_ns
            )
            / 1e9
        }


def torch_restart(launcher: Launcher, scale: Scale) -> Sample:
    """Restart a gloo job. torchrun gets 2 workers: with 4 and 8 its restarted groups seldom come
    up.

    Even with 2 its second attempt may fail; that is counted beside the row, not held against the
    run.
    """
    workers = 8 if launcher.name == "distlaunch" else 2

    def make(directory: str) -> tuple[list[str], dict[str, str]]:
        return launcher.command(
            workers, ["allreduce_restart.py"], directory, restarts=1, options=("--preload", "torch")
        )

    with running(make) as command:
        code = command.wait(within_s=180)
        if launcher.name == "torchrun" and code != 0:
            return {"torch_restart_failed": 1}
        expect(command, code, 0)
        failed = command.stamps("fail", 0, 2, within_s=1, ranks=(1,))[0]
        return {
            "torch_restart_failed": 0,
            "torch_restart": (max(command.stamps("reduced", 1, workers, within_s=1)) - failed)
            / 1e9,
            "torch_restart_pss_mb": max(command.stamps("pss", 1, workers, within_s=1)) * 1024 / 1e6,
        }


def memory(launcher: Launcher, scale: Scale) -> Sample:
    """Weigh 8 torch workers that stand after an all-reduce."""

    def make(directory: str) -> tuple[list[str], dict[str, str]]:
        argv, env = launcher.command(
            8, ["allreduce_weigh.py"], directory, options=("--preload", "torch")
        )
        return argv, env

    with running(make) as command:
        expect(command, command.wait(within_s=180), 0)
        pss = command.stamps("pss", 0, 8, within_s=1)
        return {"pss": sum(pss) / len(pss) * 1024 / 1e6, "pss_largest": max(pss) * 1024 / 1e6}


def plain_restart(launcher: Launcher, scale: Scale) -> Sample:
    def make(directory: str) -> tuple[list[str], dict[str, str]]:
        return launcher.command(
            4, ["fail.py"], directory, restarts=1, options=("--preload", "json")
        )

    with running(make) as command:
        expect(command, command.wait(within_s=60), 0)
        failed = command.stamps("fail", 0, 2, within_s=1, ranks=(1,))[0]
        return {"plain_restart": (max(command.stamps("start", 1, 4, within_s=1)) - failed) / 1e9}


def hundred_restarts(launcher: Launcher, scale: Scale) -> Sample:
    """Restart again and again; weigh the launcher and count its descriptors and helpers early and
    late."""

    def make(directory: str) -> tuple[list[str], dict[str, str]]:
        worker = ["fail_often.py", str(RESTARTS)]
        return launcher.command(
            2, worker, directory, restarts=RESTARTS, options=("--preload", "torch")
        )

    def weigh() -> tuple[int, int, int]:
        # What an attempt leaves would be seen in the launcher, its helpers, or as one more process.
        pids = [pid for pid, line in command.related().items() if "fail_often" not in line]
        descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (command.pid, *pids))
        return descriptors, status_kib(command.pid, "VmRSS"), len(pids)

    with running(make) as command:
        command.stamps("start", 10, 2, within_s=120)
        early = weigh()
        command.stamps("start", RESTARTS - 5, 2, within_s=300)
        late = weigh()
        expect(command, command.wait(within_s=120), 0)
        times = command.stamps("start", RESTARTS, 2, within_s=1)
        began = command.stamps("start", 0, 2, within_s=1)
        more = {
            "restarts_descriptors_more": late[0] - early[0],
            "restarts_memory_more_mib": (late[1] - early[1]) / 1024,
            "restarts_helpers_more": late[2] - early[2],
            "restarts_left": len(command.related()),
        }
        leaks = [
            key for key, figure in more.items() if figure >= (MEMORY_MIB if "memory" in key else 1)
        ]
        return {
            "restarts_each": (max(times) - min(began)) / 1e9 / RESTARTS,
            "restarts_leaks": len(leaks),
            **more,
        }


def hang(launcher: Launcher, scale: Scale) -> Sample:
    """Time from the timeout's end to the report that names the stuck rank and its function."""

    def make(directory: str) -> tuple[list[str], dict[str, str]]:
        return launcher.command(
            4, ["hang.py"], directory, options=("--hang-timeout", str(HANG_TIMEOUT_S))
        )

    with running(make) as command:
        last = max(command.stamps("last", 0, 4, within_s=60))
        command.until(
            lambda: " in stuck" in command.errors(), "report that names stuck()", within_s=30
        )
        named = time.monotonic_ns()
        code = command.wait(within_s=60)
        expect(command, code, 124)
        if "rank 2" not in command.errors():
            raise BenchError(f"rank 2 is not named\n{command.errors()[-1500:]}")
        return {
            "hang": (named - last) / 1e9 - HANG_TIMEOUT_S,
            "hang_to_exit": (command.ended_ns - last) / 1e9 - HANG_TIMEOUT_S,
        }


def no_alarm(launcher: Launcher, scale: Scale) -> Sample:
    seconds = 60 if scale.idle_s >= 10 else 6

    def make(directory: str) -> tuple[list[str], dict[str, str]]:
        return launcher.command(
            2, ["hang.py", "busy", str(seconds)], directory, options=("--hang-timeout", "2")
        )

    with running(make) as command:
        expect(command, command.wait(within_s=seconds * 2 + 60), 0)
        return {"no_alarm": float("hang" in command.errors().replace("hang.py", ""))}


def heartbeat(launcher: Launcher, scale: Scale) -> Sample:
    """Time one rate-limited call of the helper, in a worker's situation: a pipe that somebody else
    reads."""
    program = (
        "import os, time, timeit\n"
        "read, write = os.pipe(); os.set_blocking(write, False)\n"
        "os.environ['DISTLAUNCH_PROGRESS_FD'] = str(write)\n"
        "from distlaunch.toolkit import heartbeat\n"
        "heartbeat(step=0, loss=0.5)\n"
        "print(min(timeit.repeat(lambda: heartbeat(step=1, loss=0.5), number=200000, repeat=5)) / "
        "200000 * 1e6)\n"
    )
    done = subprocess.run(
        [f"{launcher.bin}/python", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode:
        raise BenchError(done.stderr)
    return {"heartbeat": float(done.stdout)}


WARM = (
    Measurement(
        name="warm_allreduce",
        run=allreduce,
        launchers=("distlaunch", "torchrun"),
        share=0.7,
        rows=(
            Row(
                key="warm_allreduce",
                title="command to 8 torch workers through one gloo all-reduce, `--preload torch`",
                unit="s",
                goal="3.5x faster than torchrun",
                reached=lambda row: ratio(row, "torchrun") >= 3.5,
            ),
        ),
    ),
    Measurement(
        name="memory",
        run=memory,
        launchers=("distlaunch", "torchrun"),
        share=0.4,
        rows=(
            Row(
                key="pss",
                title="memory of a torch worker, PSS, 8 workers, `--preload torch`",
                unit="MB",
                goal="<= 60 MB",
                reached=lambda row: row["distlaunch"] <= 60,
            ),
        ),
    ),
    Measurement(
        name="torch_restart",
        run=torch_restart,
        launchers=("distlaunch", "torchrun"),
        share=0.7,
        rows=(
            Row(
                key="torch_restart",
                title="failure to 8 restarted torch workers through an all-reduce, `--preload "
                "torch` (torchrun: 2)",
                unit="s",
                goal="<= 1 s",
                reached=lambda row: row["distlaunch"] <= 1,
            ),
        ),
    ),
    Measurement(
        name="plain_restart",
        run=plain_restart,
        launchers=("distlaunch", "torchrun"),
        rows=(
            Row(
                key="plain_restart",
                title="failure to 4 restarted plain Python workers' first instruction, `--preload "
                "json`",
                unit="s",
                goal="8x faster than torchrun",
                reached=lambda row: ratio(row, "torchrun") >= 8,
            ),
        ),
    ),
    Measurement(
        name="hundred_restarts",
        run=hundred_restarts,
        launchers=("distlaunch",),
        share=0.2,
        rows=(
            Row(
                key="restarts_each",
                title="100 restarts in a row, `--preload torch`, 2 workers: each",
                unit="s",
                goal="",
                reached=lambda _: True,
            ),
            Row(
                key="restarts_leaks",
                title="kinds of leak over these: descriptors, helpers, processes left, 2 MiB of "
                "memory",
                unit="",
                goal="0",
                reached=lambda row: row["distlaunch"] == 0,
            ),
        ),
    ),
    Measurement(
        name="hang",
        run=hang,
        launchers=("distlaunch",),
        share=0.7,
        rows=(
            Row(
                key="hang",
                title="hang timeout over to the report that names the stuck rank and its function",
                unit="s",
                goal="<= 3 s",
                reached=lambda row: row["distlaunch"] <= 3,
            ),
        ),
    ),
    Measurement(
        name="no_alarm",
        run=no_alarm,
        launchers=("distlaunch",),
        share=0.1,
        rows=(
            Row(
                key="no_alarm",
                title="false alarms while workers compute 60 s without output, but with heartbeats "
                "(timeout 2 s)",
                unit="",
                goal="0",
                reached=lambda row: row["distlaunch"] == 0,
            ),
        ),
    ),
    Measurement(
        name="heartbeat",
        run=heartbeat,
        launchers=("distlaunch",),
        share=0.4,
        rows=(
            Row(
                key="heartbeat",
                title="one rate-limited heartbeat() call",
                unit="us",
                goal="< 2 us",
                reached=lambda row: row["distlaunch"] < 2,
            ),
        ),
    ),
)
