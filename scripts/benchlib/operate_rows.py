"""Measurements of the commands that look at jobs: `scripts/bench operate`."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal
from urllib.request import urlopen

from .launchers import WORKERS, Launcher
from .process import BenchError, Command, cpu_s, now_ns, running
from .rows import Measurement, Row, Sample, Scale, expect

JOBS = 50
RANKS = 64
REPLAYED_NODES, REPLAYED_EACH = 64, 8
WATCH_ROUNDS, WATCH_S = 15, 3.0
"""Rounds with observers, each beside one without, and how long each takes."""
SCRAPE_S = 5.0


def _environment(directory: str) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": directory,
        "LANG": "C.UTF-8",
        "TERM": "xterm",
        "PYTHONDONTWRITEBYTECODE": "1",
        "BENCH_DIR": directory,
    }


def _timed(launcher: Launcher, directory: str, *words: str) -> float:
    """Return how long a command takes, from its start to its end."""
    argv = [f"{launcher.bin}/distlaunch", *words, "--log-dir", f"{directory}/logs"]
    began = now_ns()
    done = subprocess.run(
        argv, env=_environment(directory), capture_output=True, text=True, check=False, timeout=60
    )
    took = (now_ns() - began) / 1e9
    if done.returncode or not done.stdout:
        raise BenchError(f"{words}: {done.returncode}\n{done.stderr[-1500:]}")
    return took


def _copy_jobs(logs: str, count: int) -> None:
    """Make further jobs that have ended, from the files of the one that runs."""
    [name] = [each for each in os.listdir(logs) if each != "latest"]
    for number in range(count):
        copy = f"{logs}/copy-{number:03}"
        shutil.copytree(f"{logs}/{name}", copy, ignore=shutil.ignore_patterns("launcher.pid"))
        with open(f"{copy}/events.jsonl", "a", encoding="ascii") as file:
            file.write('{"time": 1795000000.0, "type": "job_ended", "exit_code": 0}\n')


def commands(launcher: Launcher, scale: Scale) -> Sample:
    """Ask about a job of 64 ranks, with 49 others beside it."""
    with running(lambda directory: launcher.command(RANKS, ["beats.py"], directory)) as command:
        command.stamps("start", 0, RANKS, within_s=120)
        logs = f"{command.directory}/logs"
        for rank in range(RANKS):
            with open(f"{logs}/latest/attempt-0/rank-{rank}.log", "w", encoding="ascii") as file:
                file.writelines(f"step {step} of rank {rank}\n" for step in range(10_000))
        _copy_jobs(logs, JOBS - 1)
        name = os.path.basename(os.path.realpath(f"{logs}/latest"))
        words = {
            "operate_ps": ["ps", "--all"],
            "operate_status": ["status", name],
            "operate_logs": ["logs", name, "--tail", "20"],
        }
        return {key: _timed(launcher, command.directory, *each) for key, each in words.items()}


def stop(launcher: Launcher, scale: Scale) -> Sample:
    """Stop a job of 8 workers that obey SIGTERM."""
    with running(lambda directory: launcher.command(8, ["idle.py"], directory)) as command:
        command.stamps("start", 0, 8, within_s=60)
        pids = command.stamps("pid", 0, 8, within_s=1)
        poll = select.poll()
        descriptors = [os.pidfd_open(pid) for pid in pids]
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        left, gone = set(descriptors), threading.Event()
        ended_ns = [0]

        def follow() -> None:
            while left and (ready := poll.poll(60_000)):
                for descriptor, _ in ready:
                    poll.unregister(descriptor)
                    left.discard(descriptor)
            ended_ns[0] = now_ns()
            gone.set()

        thread = threading.Thread(target=follow)
        thread.start()
        began = now_ns()
        subprocess.run(
            [
                f"{launcher.bin}/distlaunch",
                "stop",
                "latest",
                "--log-dir",
                f"{command.directory}/logs",
            ],
            env=_environment(command.directory),
            capture_output=True,
            check=True,
            timeout=60,
        )
        took = (now_ns() - began) / 1e9
        gone.wait(60)
        thread.join()
        for descriptor in descriptors:
            os.close(descriptor)
        command.wait(within_s=60)
        return {"operate_stop": (ended_ns[0] - began) / 1e9, "operate_stop_command": took}


def watch(launcher: Launcher, scale: Scale) -> Sample:
    """Replay a job of 512 ranks, and look at it."""
    argv = [
        f"{launcher.bin}/python",
        os.path.join(WORKERS, "watch.py"),
        str(REPLAYED_NODES),
        str(REPLAYED_EACH),
    ]
    with running(lambda directory: (argv, _environment(directory))) as command:
        with open(f"{command.directory}/train.py", "w", encoding="utf-8"):
            pass
        if command.wait(within_s=120):
            raise BenchError(command.errors()[-1500:])
        figures: dict[str, float] = json.loads(command.output)
        return figures


@contextmanager
def _observers(launcher: Launcher, command: Command, url: str) -> Iterator[None]:
    """Run ``top`` on a terminal, ``logs --follow`` and a scraper beside a job."""
    env = _environment(command.directory)
    where = ("latest", "--log-dir", f"{command.directory}/logs")
    master, slave = pty.openpty()
    programs = [
        subprocess.Popen(
            [f"{launcher.bin}/distlaunch", "top", *where],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
        ),
        subprocess.Popen(
            [f"{launcher.bin}/distlaunch", "logs", "--follow", *where],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
        ),
    ]
    os.close(slave)
    over = threading.Event()

    def read_screen() -> None:
        while not over.is_set():
            if select.select([master], [], [], 0.2)[0]:
                try:
                    os.read(master, 65536)
                except OSError:
                    return

    def scrape() -> None:
        while not over.wait(SCRAPE_S / 5):
            with urlopen(url, timeout=30) as answer:  # noqa: S310 - our own
                answer.read()

    threads = [threading.Thread(target=each) for each in (read_screen, scrape)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        os.write(master, b"q")
        programs[1].send_signal(signal.SIGINT)
        for program in programs:
            try:
                program.wait(10)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        for thread in threads:
            thread.join()
        os.close(master)


def _url(command: Command) -> str:
    command.until(lambda: "metrics: http" in command.errors(), "URL of the metrics", within_s=30)
    found = re.search(r"metrics: (http\S+)", command.errors())
    if found is None:
        raise BenchError("no URL")
    return found[1]


def watched_steps(launcher: Launcher, scale: Scale) -> Sample:
    """Compare steps with observers and without, in turns within one job of one worker.

    The machine has a second core for the observers, which usually run on another machine.
    """
    rounds = 2 if scale.idle_s < 5 else WATCH_ROUNDS
    options = ("--metrics", "0")
    with running(
        lambda directory: launcher.command(1, ["steps.py"], directory, options=options)
    ) as command:
        command.stamps("start", 0, 1, within_s=60)
        url = _url(command)
        time.sleep(1.0)
        phases: list[tuple[bool, int, int]] = []
        for number in range(2 * rounds):
            if (number + number // 2) % 2:  # without and with, then with and without
                with _observers(launcher, command, url):
                    time.sleep(1.5)  # their start does not count
                    began = now_ns()
                    time.sleep(WATCH_S)
                    phases.append((True, began, now_ns()))
            else:
                time.sleep(0.5)
                began = now_ns()
                time.sleep(WATCH_S)
                phases.append((False, began, now_ns()))
        with open(f"{command.directory}/enough", "w", encoding="ascii"):
            pass
        expect(command, command.wait(within_s=60), 0)
        with open(f"{command.directory}/steps-0", encoding="ascii") as file:
            steps = [tuple(map(int, line.split())) for line in file if line.count(" ") == 2]
    walls: dict[bool, list[float]] = {True: [], False: []}
    used: dict[bool, list[float]] = {True: [], False: []}
    for watched, first, last in phases:
        inside = [(wall, cpu) for at, wall, cpu in steps if first <= at <= last]
        walls[watched].append(statistics.median(wall for wall, _ in inside))
        used[watched].append(statistics.median(cpu for _, cpu in inside))
    pairs = list(zip(walls[True], walls[False], strict=True))
    ratios = sorted(100 * (with_ / without - 1) for with_, without in pairs)
    cpu_ratios = [
        100 * (with_ / without - 1) for with_, without in zip(used[True], used[False], strict=True)
    ]
    return {
        "operate_steps": statistics.median(ratios),
        "operate_steps_lowest": ratios[0],
        "operate_steps_highest": ratios[-1],
        "operate_steps_cpu": statistics.median(cpu_ratios),
        "operate_step_ms": statistics.median(walls[False]) / 1e6,
    }


def idle_ranks(launcher: Launcher, scale: Scale) -> Sample:
    """64 ranks that report a step each second: the processor time of all that is ours."""
    options = ("--metrics", "0")
    with running(
        lambda directory: launcher.command(RANKS, ["beats.py"], directory, options=options)
    ) as command:
        command.stamps("start", 0, RANKS, within_s=120)
        workers = command.stamps("pid", 0, RANKS, within_s=1)
        url = _url(command)
        time.sleep(3.0)
        ours = [command.pid, *(pid for pid in command.related() if pid not in workers)]
        alone = _percent(ours, scale.idle_s)

        over = threading.Event()

        def scrape() -> None:
            while not over.wait(SCRAPE_S):
                with urlopen(url, timeout=30) as answer:  # noqa: S310 - our own
                    answer.read()

        thread = threading.Thread(target=scrape)
        thread.start()
        scraped = _percent(ours, 3 * scale.idle_s)
        over.set()
        thread.join()
        with _observers(launcher, command, url):
            time.sleep(2.0)
            watched = _percent(ours, scale.idle_s)
        return {
            "operate_cpu": alone,
            "operate_cpu_scraped": scraped,
            "operate_cpu_watched": watched,
        }


def _percent(pids: Sequence[int], seconds: float) -> float:
    """Return how much of one core these processes use over this time."""
    before, began = sum(map(cpu_s, pids)), time.monotonic()
    time.sleep(seconds)
    return 100 * (sum(map(cpu_s, pids)) - before) / (time.monotonic() - began)


def _row(key: str, title: str, unit: str, most: float) -> Row:
    return Row(
        key=key,
        title=title,
        unit=unit,
        goal=f"< {most:g} {unit}",
        reached=lambda row: row["distlaunch"] < most,
    )


_ALONE: tuple[Literal["distlaunch"], ...] = ("distlaunch",)
OPERATE = (
    Measurement(
        name="commands",
        run=commands,
        launchers=_ALONE,
        rows=(
            _row("operate_ps", "`ps --all`, 50 jobs of 64 ranks", "s", 0.2),
            _row("operate_status", "`status` of a job of 64 ranks", "s", 0.2),
            _row("operate_logs", "`logs --tail 20` of 64 ranks with 10,000 lines each", "s", 0.2),
        ),
    ),
    Measurement(
        name="stop",
        run=stop,
        launchers=_ALONE,
        rows=(_row("operate_stop", "`stop` to the last of 8 workers gone", "s", 0.5),),
    ),
    Measurement(
        name="watch",
        run=watch,
        launchers=_ALONE,
        rows=(
            _row(
                "watch_snapshot",
                "a refresh of `top` at 512 ranks (replayed): the launcher's main loop",
                "ms",
                10,
            ),
            _row("watch_screen", "the same: the screen, in the process of `top`", "ms", 50),
        ),
    ),
    Measurement(
        name="watched_steps",
        run=watched_steps,
        launchers=_ALONE,
        share=0.1,
        rows=(
            _row(
                "operate_steps",
                "step time with `top`, `logs --follow` and metrics beside it: longer by (15 "
                "rounds in turns)",
                "%",
                1.0,
            ),
            _row("operate_steps_cpu", "the same: processor time of a step", "%", 1.0),
        ),
    ),
    Measurement(
        name="idle_ranks",
        run=idle_ranks,
        launchers=_ALONE,
        share=0.4,
        rows=(
            _row(
                "operate_cpu",
                "launcher and helpers, 64 ranks that report each second: of one core",
                "%",
                1.0,
            ),
            _row("operate_cpu_scraped", "the same, metrics read every 5 s", "%", 1.0),
        ),
    ),
)
