"""Kill -9 the launcher, its spawner or a worker at random instants, again and again: nothing of the
job may stay.

Proof is a FIFO that every worker opens and all its descendants inherit: its reader sees the end
when the last of them is gone. Processes that have not come so far as to open it are found by its
path in their environment. Neither the launcher's cookie nor a name has part in it. On a failure the
seed, the round and what still runs are printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

VARIABLE = "CHAOS_FIFO"
FAILS = "CHAOS_FAILS"
GRACE_S = 0.5
BOUND_S = GRACE_S + 5.0
SPAWNER, WATCHER = "dl-spawner", "dl-watcher"
PAIRS = tuple(
    f"{first} and {second}"
    for first, second in itertools.permutations(("launcher", "spawner", "watcher"), 2)
)
VICTIMS = ("launcher", "launcher's group", "spawner", "worker", "watcher", *PAIRS)
WORKER = f"""
import os, signal, subprocess, sys
end = os.open(os.environ[{VARIABLE!r}], os.O_WRONLY)
os.write(end, b"!")
os.set_inheritable(end, True)
signal.alarm(60)  # what slips through is not left on the machine for long
if os.fork() == 0:  # a data loader
    signal.alarm(60)
    while True: signal.pause()
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":  # a daemon with neither session nor environment of its worker
    script = "trap '' TERM HUP INT; sleep 60 & exec sleep 60 &"
    subprocess.run(["env", "-i", "setsid", "sh", "-c", script], close_fds=False)
if os.environ["RANK"] == "2" and {FAILS!r} in os.environ:
    os._exit(3)
while True: signal.pause()
"""


class ChaosError(Exception):
    """Something stayed, or the launcher told the wrong story."""


def children_of(pid: int) -> list[int]:
    """List the direct children of a process."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except OSError:
        pass  # it is gone
    return found


def spawner_of(launcher: int) -> int | None:
    """Find the parent of the workers, if it is there yet."""
    children = [pid for child in children_of(launcher) for pid in (child, *children_of(child))]
    return next((pid for pid in children if name_of(pid) == SPAWNER), None)


def watcher_of(launcher: int) -> int | None:
    """Find the parent of the spawner, if it is there yet."""
    return next((pid for pid in children_of(launcher) if name_of(pid) == WATCHER), None)


def name_of(pid: int) -> str | None:
    """Return what ``ps`` calls a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return None


def has_in_environment(pid: int | str, text: str) -> bool:
    """Look at the environment that a process began with. Raises OSError if it is gone."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        return text.encode() in file.read()


def workers_of(spawner: int, fifo: str) -> list[int]:
    """List the workers: what daemons have left to the spawner has lost its environment, the warm
    server has no rank."""
    found = []
    for pid in children_of(spawner):
        with suppress(OSError):
            if has_in_environment(pid, fifo) and has_in_environment(pid, "\0RANK="):
                found.append(pid)
    return found


def find_victim(
    kind: str, launcher: subprocess.Popen[bytes], fifo: str, dice: random.Random
) -> int | None:
    """Return the pid to kill once it exists; None if the launcher ends before."""
    while launcher.poll() is None:
        if kind.startswith("launcher"):
            return launcher.pid
        spawner = spawner_of(launcher.pid)
        if kind == "watcher":
            if spawner is not None:
                return watcher_of(launcher.pid)
        elif spawner is not None:
            workers = workers_of(spawner, fifo)
            if kind == "spawner":
                return spawner
            if workers:
                return dice.choice(workers)
        time.sleep(0.001)
    return None


def related_to(fifo: str) -> dict[int, str]:
    """Find what has the FIFO open or its path in its environment; give pids with state and command
    line."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if int(name) == os.getpid():
            continue
        try:
            ours = has_in_environment(name, fifo) or fifo in map(
                os.readlink, (f"/proc/{name}/fd/{fd}" for fd in os.listdir(f"/proc/{name}/fd"))
            )
            if ours:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    command = file.read().replace(b"\0", b" ").decode(errors="replace")
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    found[int(name)] = f"({file.read().rpartition(')')[2].split()[0]}) {command}"
        except OSError:
            continue
    return found


def await_end(reader: int, fifo: str) -> bool:
    """Wait until nothing of the job is left; tell whether a worker had come so far as to open the
    FIFO."""
    deadline = time.monotonic() + BOUND_S
    opened = False
    quiet = 0
    while True:
        try:
            chunk: bytes | None = os.read(reader, 65536)
        except BlockingIOError:
            chunk = None  # somebody has it open
        opened = opened or bool(chunk)
        quiet = quiet + 1 if chunk == b"" and not related_to(fifo) else 0
        if quiet == 2:  # once could be the moment of an exec, which shows no environment
            return opened
        if time.monotonic() > deadline:
            left = "\n".join(f"  {pid} {what}" for pid, what in related_to(fifo).items())
            raise ChaosError(f"{BOUND_S:g} s after the kill this still runs:\n{left}")
        if chunk is None:
            poller = select.poll()
            poller.register(reader, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        else:
            time.sleep(0.005)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Which process is killed and when: ``delay_s`` after its start, or (except in the phase
    "starting") after the first worker's start."""

    kind: str
    phase: str
    delay_s: float

    @staticmethod
    def draw(dice: random.Random, max_delay_s: float, victim: str | None) -> Round:
        """Throw the dice."""
        kind = victim or dice.choice(VICTIMS)
        phase = dice.choice(
            ("starting", "running") if kind == "worker" else ("starting", "running", "restarting")
        )
        share = {"starting": 1.0, "running": 0.2, "restarting": 4.0}[phase]
        return Round(kind=kind, phase=phase, delay_s=dice.uniform(0, max_delay_s * share))

    def __str__(self) -> str:
        since = "its" if self.phase == "starting" else "the first worker's"
        return (
            f"kill -9 of the {self.kind} while {self.phase}, {self.delay_s * 1000:.1f} ms after "
            f"{since} start"
        )


def kill_once(
    chosen: Round, folder: str, dice: random.Random, workers: int, preload: str | None
) -> str:
    """Start a job, kill, and check; give what was seen, in words. Raises ChaosError."""
    kind = chosen.kind
    fifo = os.path.join(folder, "fifo")
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": folder,
        "LANG": "C.UTF-8",
        VARIABLE: fifo,
        "XDG_STATE_HOME": folder,
        "XDG_RUNTIME_DIR": folder,
    }
    options = [
        "--num-procs",
        str(workers),
        "--format",
        "plain",
        "--failure-grace",
        str(GRACE_S),
        "--grace",
        str(GRACE_S),
    ]
    if chosen.phase == "restarting":
        environment[FAILS] = "yes"
        options += ["--max-restarts", "1000", "--min-uptime", "0"]
    program = ["--no-python", sys.executable, "-c", WORKER]
    if preload is not None:
        program = ["--preload", preload, os.path.join(folder, "worker.py")]
        with open(program[-1], "w", encoding="utf-8") as file:
            file.write(WORKER)
    with open(os.path.join(folder, "screen"), "w+b") as screen:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "distlaunch", "train", *options, *program],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )
        try:
            first, _, second = kind.partition(" and ")
            if second:  # both are there, whoever is killed first
                find_victim("spawner", launcher, fifo, dice)
            other = find_victim(second, launcher, fifo, dice) if second else None
            victim = find_victim(first, launcher, fifo, dice)
            if chosen.phase != "starting":
                poller = select.poll()
                poller.register(reader, select.POLLIN)
                poller.poll(BOUND_S * 1000)
            time.sleep(chosen.delay_s)
            if victim is not None:
                try:
                    (os.killpg if "group" in kind else os.kill)(victim, signal.SIGKILL)
                except ProcessLookupError:
                    victim = None
            if second and other is not None:
                time.sleep(dice.choice((0.0, dice.uniform(0, GRACE_S))))
                with suppress(
                    ProcessLookupError
                ):  # the first took it along; the launcher is not reaped yet
                    os.kill(other, signal.SIGKILL)
            if kind == "watcher" and launcher.poll() is None:  # the job goes on
                launcher.terminate()
            try:
                code = launcher.wait(BOUND_S)
            except subprocess.TimeoutExpired:
                raise ChaosError(f"the launcher still runs {BOUND_S:g} s after the kill") from None
            opened = await_end(reader, fifo)
            expected = {"spawner": (70,), "worker": (137,), "watcher": (143, -signal.SIGTERM)}.get(
                kind, (-signal.SIGKILL,)
            )
            if second:
                expected = (70,) if "launcher" not in kind else (70, -signal.SIGKILL)
            screen.seek(0)
            if victim is None or code not in expected:
                text = screen.read().decode(errors="replace")
                raise ChaosError(
                    f"the launcher ended with {code}, not {expected[0]}; its last "
                    f"words:\n{text[-3000:]}"
                )
        finally:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
            for pid in related_to(fifo):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.close(reader)
    return "workers were up" if opened else "no worker had begun"


def play(options: argparse.Namespace, seed: int) -> int:
    """Run the rounds; 0 if nothing ever stayed."""
    dice = random.Random(seed)
    seen: Counter[str] = Counter()
    for number in range(options.kills):
        chosen = Round.draw(dice, options.max_delay / 1000, options.victim)
        try:
            with tempfile.TemporaryDirectory(
                prefix="distlaunch-chaos-", ignore_cleanup_errors=True
            ) as folder:
                outcome = kill_once(chosen, folder, dice, options.workers, options.preload)
        except ChaosError as failure:
            print(f"chaos: round {number}: {chosen}: {failure}")
            print(f"chaos: repeat the choices with --seed {seed}")
            return 1
        seen[f"{chosen.kind}, {chosen.phase}: {outcome}"] += 1
    for what, count in sorted(seen.items()):
        print(f"{count:5} {what}")
    print(f"chaos: {options.kills} kills, nothing left (seed {seed})")
    return 0
