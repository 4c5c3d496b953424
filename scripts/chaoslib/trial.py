"""One round of chaos on a test bed: a job is started, harmed, mended and looked at; ``Miss`` says
what was not kept."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from testbedlib import faults
from testbedlib.client import Hosts, Process, Started
from testbedlib.layout import HEAD

from chaoslib.processes import name_of
from chaoslib.rounds import GRACE_S, JOIN_S, Round

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.path.join(TREE, "tests", "programs", "nodes", "steps.py")
BED_OPTIONS = () if TREE.startswith("/tmp/") else ("--own-tmp",)  # noqa: S108 - else hosts would not see this tree
UP_S = 30.0
CLEAN_S = 6.0
"""What is left on a host that is reached again and has a second to wake."""
NOTED_S = 1.5
"""How long what can be noticed may take to show in what the job does."""
SLACK_S = 5.0
"""For a busy machine."""


class Miss(Exception):  # noqa: N818 - it is a finding
    """The job did not do what is promised."""


@dataclass
class Job:
    """A job of steps.py under way. ``place`` is a directory that all hosts share."""

    hosts: Hosts
    launcher: Started
    place: str
    innocent: frozenset[int]
    """Pids of the jobs beside it."""
    began: float = field(default_factory=time.monotonic)

    @property
    def step(self) -> int:
        """Return how far it has come."""
        try:
            with open(f"{self.place}/step", encoding="ascii") as file:
                return int(file.read())
        except (OSError, ValueError):
            return 0

    def attempt(self) -> int:
        """Return the newest attempt of which all workers have come up; -1 if there is none."""
        numbers = [int(name[8:]) for name in os.listdir(self.place) if name.startswith("attempt-")]
        for number in sorted(numbers, reverse=True):
            reported = self.reported(number)
            if reported and len(reported) == int(reported[0]["WORLD_SIZE"]):
                return number
        return -1

    def reported(self, attempt: int) -> list[dict[str, str]]:
        """Return what the workers of an attempt were told that have come up."""
        found = []
        with suppress(OSError):
            folder = f"{self.place}/attempt-{attempt}"
            for name in os.listdir(folder):
                if not name.endswith(".new"):
                    with open(f"{folder}/{name}", encoding="utf-8") as file:
                        found.append(json.load(file))
        return found

    def say(self, word: str) -> None:
        """Leave a file for rank 0, or all."""
        with open(f"{self.place}/{word}", "w", encoding="ascii"):
            pass

    def events(self, kind: str) -> list[dict[str, object]]:
        """Return what ``events.jsonl`` has of one kind."""
        logs = f"{self.place}/logs"
        names = [
            name for name in (os.listdir(logs) if os.path.isdir(logs) else ()) if name != "latest"
        ]
        found = []
        for name in names:
            with suppress(OSError), open(f"{logs}/{name}/events.jsonl", "rb") as file:
                for line in file.read().rpartition(b"\n")[0].splitlines():
                    with suppress(ValueError):  # a full disk has cut it
                        found.append(json.loads(line))
        return [event for event in found if event.get("type") == kind]

    def screen(self) -> str:
        """Return all that the launcher has said."""
        with open(f"{self.place}/screen", encoding="utf-8", errors="replace") as file:
            return file.read()

    # --- its processes

    def processes(self, host: str) -> list[Process]:
        """List the job's processes on a host."""
        return [
            process for process in self.hosts.processes(host) if process.pid not in self.innocent
        ]

    def find(self, host: str, what: str) -> list[int]:
        """Find the agent, spawner or workers of a host."""
        if what == "worker":
            found = [process.pid for process in self.processes(host) if PROGRAM in process.argv]
            return [pid for pid in found if pid != self.launcher.pid and name_of(pid) != "dl-warm"]
        return [
            process.pid
            for process in self.processes(host)
            if process.argv[0].startswith(f"dl-{what}")
        ]

    def left(self) -> list[str]:
        """Name what runs on any host."""
        return [
            f"{host}: {process.pid} {process.state} {' '.join(process.argv)[:200]}"
            for host in self.hosts.layout
            for process in self.processes(host)
        ]


def environment(place: str) -> dict[str, str]:
    """Return what a launcher gets that works in this directory; its code is that of this tree."""
    return {
        "SIGN_DIR": place,
        "XDG_STATE_HOME": place,
        "XDG_RUNTIME_DIR": place,
        "PYTHONPATH": TREE,
    }


def start(hosts: Hosts, chosen: Round, place: str, innocent: frozenset[int]) -> Job:
    """Start the job on the head."""
    os.makedirs(place)
    logs = f"{hosts.local}/logs" if "disk" in chosen.fault.name else f"{place}/logs"
    options = [
        "--hosts",
        ",".join(f"{name}:1" for name in hosts.names),
        "--device",
        "cpu",
        "--min-uptime",
        "0",
        "--grace",
        f"{GRACE_S}",
        "--failure-grace",
        f"{GRACE_S}",
        "--join-timeout",
        f"{JOIN_S}",
        "--log-dir",
        logs,
        *chosen.shape.options,
        *(("--preload", "json") if chosen.warm else ()),
    ]
    with open(f"{place}/screen", "wb") as screen:
        launcher = hosts.launch(
            ["train", *options, PROGRAM, *chosen.words],
            host=chosen.launcher_on,
            cwd=place,
            env=environment(place),
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=screen,
        )
    return Job(hosts, launcher, place, innocent)


# --- harm and mending ------------------------------------------------------------------------------------------------


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def harm(job: Job, chosen: Round, dice: random.Random) -> Callable[[], None]:
    """Cause the fault. Return what undoes it."""
    hosts, host, words = job.hosts, chosen.host, chosen.fault.name.split()
    if words[0] == "STOP" and words[1] != "host":
        pids = [job.launcher.pid] if words[1] == "launcher" else job.find(host, words[1])
        _signal(pids, signal.SIGSTOP)
        return lambda: _signal(pids, signal.SIGCONT)
    if words[0] == "kill":
        return _kill(job, chosen, dice)
    match chosen.fault.name:
        case "cut":
            faults.cut(hosts, host)
        case "link down":
            faults.link(hosts, host, up=False)
        case "power off":
            faults.power_off(hosts, host)
            return lambda: faults.power_on(hosts, host)
        case "delay":
            faults.delay(hosts, host, 300, 1)
        case "STOP host":
            faults.pause(hosts, host)
        case "stop sshd":
            faults.stop_sshd(hosts, host)
        case "disk full":
            faults.fill(hosts, host)
        case "launcher's disk full":
            faults.fill(hosts, chosen.launcher_on)
            return lambda: faults.unfill(hosts, chosen.launcher_on)
    return lambda: faults.mend(hosts, host)


def _kill(job: Job, chosen: Round, dice: random.Random) -> Callable[[], None]:
    hosts, host = job.hosts, chosen.host
    match chosen.fault.name.removeprefix("kill -9 "):
        case "launcher":
            job.launcher.kill()
        case "launcher and agent":
            agents = job.find(host, "agent")
            job.launcher.kill()
            _signal(agents, signal.SIGKILL)
        case "sessions":
            faults.kill_sessions(hosts, host)
        case "sshd":
            faults.kill_sshd(hosts, host)
        case "all":
            faults.kill_all(hosts, host)
        case what:
            pids = job.find(host, what)
            _signal([dice.choice(pids)] if pids else [], signal.SIGKILL)
    return lambda: faults.start_sshd(hosts, host)


# --- the trial -------------------------------------------------------------------------------------------------------


class Trial:
    """Watches one round to its end."""

    def __init__(self, job: Job, chosen: Round, dice: random.Random) -> None:
        self.job = job
        self.chosen = chosen
        self.dice = dice
        self.story: list[str] = []
        self.settled_s = 0.0
        """How long it took until the job had ended or went on."""
        self._harmed = 0.0
        self._mended: float | None = None
        self._mend: Callable[[], None] | None = None

    def note(self, text: str) -> None:
        """Add to the transcript."""
        self.story.append(f"{time.monotonic() - self.job.began:8.3f} s  {text}")

    def run(self) -> str:
        """Do it; give the outcome in words. Raises Miss."""
        job, chosen = self.job, self.chosen
        try:
            self._reach_moment()
            before = job.attempt()
            self._harmed = time.monotonic()
            self._mend = harm(job, chosen, self.dice)
            self.note(f"harmed ({chosen.fault.name}); attempt {before} is up, step {job.step}")
            if chosen.second is not None:
                time.sleep(chosen.second[1])
                _signal(agents := job.find(chosen.second[0], "agent"), signal.SIGKILL)
                self.note(f"killed {len(agents)} agent on {chosen.second[0]}")
            outcome = self._settle(before)
            self._heal()
            self._finish(outcome)
        finally:
            self._heal()
        self._look_for_remains()
        return outcome

    # --- its turns

    def _reach_moment(self) -> None:
        job, chosen = self.job, self.chosen
        if chosen.moment != "connecting":
            self._wait(lambda: job.attempt() >= 0, "the workers to come up", UP_S)
            self.note("up")
        if chosen.moment == "restarting":
            job.say("fail")
        if chosen.moment == "ending":
            job.say("enough")
        time.sleep(chosen.delay_s)

    def _settle(self, before: int) -> str:
        """Wait until the job has ended or goes on as it should."""
        job, chosen, fault = self.job, self.chosen, self.chosen.fault
        step = job.step
        shows = chosen.is_certain and fault.loses
        deadline = self._harmed + chosen.bound_s + SLACK_S
        while True:
            self._heal_in_time()
            code = job.launcher.poll()
            if code is not None:
                self.settled_s = time.monotonic() - self._harmed
                self.note(f"ended with {code}")
                self._judge_code(code)
                return f"ended with {code}"
            over = (
                self._mended is not None
                and time.monotonic() > self._harmed + fault.noticed_s + NOTED_S
            )
            losses = 2 if chosen.second is not None else 1
            if (
                shows
                and len(job.events("node_lost")) >= losses
                and (not chosen.hits_trainer or job.attempt() > before)
            ):
                over = True
            elif shows:
                over = False
            if not over:
                step = job.step
            elif job.step >= step + 3:
                break
            if time.monotonic() > deadline:
                raise Miss(
                    f"{chosen.bound_s:.0f} s + {SLACK_S:.0f} s after the fault the job neither "
                    "goes on nor has ended"
                )
            time.sleep(0.02)
        self.settled_s = time.monotonic() - self._harmed
        self.note(f"goes on: attempt {job.attempt()}, step {job.step}")
        if not chosen.may_go_on():
            raise Miss("the job goes on")
        return "went on"

    def _judge_code(self, code: int) -> None:
        chosen, screen = self.chosen, self.job.screen()
        has_reported = chosen.moment == "ending"
        allowed = chosen.may_end_with() | (
            {0} if has_reported and not chosen.kills_launcher else set()
        )
        if has_reported and chosen.kills_launcher:
            allowed |= {0}
        if code not in allowed:
            raise Miss(
                f"the launcher ended with {code}, not with one of {sorted(allowed) or 'none'}"
            )
        if "Traceback" in screen:
            raise Miss("the launcher shows a traceback")

    def _heal_in_time(self) -> None:
        now = time.monotonic()
        due = self._harmed + self.chosen.lasts_s
        if self._mended is not None or now < due:
            return
        if self.chosen.checks_before_healing and self.chosen.fault.what == "network":
            self._await_silent_end()
        self._heal()

    def _await_silent_end(self) -> None:
        """Wait until a host that is cut off has ended all its processes by itself."""
        job, chosen = self.job, self.chosen
        until = self._harmed + chosen.bound_s + SLACK_S
        while left := job.processes(chosen.host):
            if time.monotonic() > until:
                raise Miss(f"on the host that was cut off there is still {left[0].argv}")
            time.sleep(0.05)
        self.note(f"nothing runs on {chosen.host}, which is still cut off")

    def _heal(self) -> None:
        if self._mend is not None:
            mend, self._mend = self._mend, None
            mend()
            self._mended = time.monotonic()
            self.note("mended")

    def _finish(self, outcome: str) -> None:
        """Check that a job that goes on makes progress, and let it end with 0."""
        job, chosen = self.job, self.chosen
        if job.launcher.poll() is not None or outcome != "went on":
            return
        if chosen.fails_after and not os.path.exists(f"{job.place}/enough"):
            before = job.attempt()
            job.say("fail")
            self._wait(lambda: job.attempt() > before, "another attempt after a failure", UP_S)
            self.note(
                f"failed, attempt {job.attempt()} is up on {len(job.reported(job.attempt()))} hosts"
            )
        step = job.step
        self._wait(lambda: job.step > step + 3, "steps after all is mended", UP_S)
        job.say("enough")
        self._wait(
            lambda: job.launcher.poll() is not None, "the end of a job that has enough", UP_S
        )
        self.note(f"ended with {job.launcher.poll()}")
        if job.launcher.poll() != 0:
            raise Miss(f"the launcher ended with {job.launcher.poll()} though all is mended")
        if "Traceback" in job.screen():
            raise Miss("the launcher shows a traceback")

    def _wait(self, condition: Callable[[], bool], what: str, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if self.job.launcher.poll() is not None and "end of" not in what:
                raise Miss(
                    f"waiting for {what}: the launcher ended with {self.job.launcher.poll()}"
                )
            if time.monotonic() > deadline:
                raise Miss(f"waited {within_s} s in vain for {what}")
            time.sleep(0.02)

    def _look_for_remains(self) -> None:
        job = self.job
        deadline = time.monotonic() + GRACE_S + CLEAN_S + SLACK_S
        while left := job.left():
            if time.monotonic() > deadline:
                raise Miss("still there:\n" + "\n".join(left))
            time.sleep(0.02)
        self.note("nothing runs any more")
        for host in job.hosts.layout:
            files = folders_of_ours(job.hosts, host)
            if (
                files and self.chosen.fault.wipes and host == self.chosen.host
            ):  # nobody was left to remove them
                job.hosts.run(host, "rm", "-rf", *files)
            elif files:
                raise Miss(f"{host} keeps {files}")


def folders_of_ours(hosts: Hosts, host: str) -> list[str]:
    """Find what agents have made for themselves on a host, and anything in its shared memory."""
    bases = [hosts.local, "/tmp"] if BED_OPTIONS else [hosts.local]  # noqa: S108 - the host's own
    places = " ".join([*(f"{base}/distlaunch-agent*" for base in bases), "/dev/shm/*"])  # noqa: S108 - the same
    return hosts.run(host, f"ls -d {places} 2>/dev/null; true").stdout.split()


def clear(job: Job) -> None:
    """Kill what a missed round has left, and remove its files."""
    for host in job.hosts.layout:
        _signal([process.pid for process in job.processes(host)], signal.SIGKILL)
        if files := folders_of_ours(job.hosts, host):
            job.hosts.run(host, "rm", "-rf", *files)
    for host in (HEAD, job.hosts.names[0]):
        job.hosts.run(host, "rm", "-rf", f"{job.hosts.local}/logs")
    with suppress(Exception):
        job.launcher.wait(10)
    shutil.rmtree(job.place, ignore_errors=True)
