"""Chaos on several hosts: rounds on test beds beside each other, the jobs that must not notice, and
the sums."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from testbedlib.client import Hosts, Started
from testbedlib.sandbox import TestbedError

from chaoslib.rounds import FAULTS, Round
from chaoslib.trial import BED_OPTIONS, PROGRAM, Job, Miss, Trial, clear, environment, start

UP_S = 30.0
_RESPONSE_S = 10.0


@dataclass
class Neighbour:
    """A job of one host's own that has nothing to do with ours, and must not notice."""

    host: str
    launcher: Started
    place: str
    pids: frozenset[int] = frozenset()

    @staticmethod
    def begun(hosts: Hosts, host: str) -> Neighbour:
        """Start one and wait until all its processes are there."""
        place = f"{hosts.shared}/neighbour-{host}"
        shutil.rmtree(place, ignore_errors=True)
        os.mkdir(place)
        before = {process.pid for process in hosts.processes(host)}
        launcher = hosts.launch(
            ["train", "--num-procs", "1", PROGRAM],
            host=host,
            cwd=place,
            env=environment(place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        neighbour = Neighbour(host, launcher, place)
        deadline = time.monotonic() + UP_S
        while neighbour.step < 1 or not {
            "1000",
            "1001",
            "1002",
        } <= {  # the last that a worker has started
            process.argv[-1] for process in hosts.processes(host) if process.pid not in before
        }:
            if time.monotonic() > deadline:
                raise Miss(f"the job beside, on {host}, does not come up")
            time.sleep(0.02)
        neighbour.pids = frozenset(process.pid for process in hosts.processes(host)) - before
        return neighbour

    @property
    def step(self) -> int:
        """Return how far it has come."""
        return Job(None, self.launcher, self.place, frozenset()).step  # type: ignore[arg-type]  # of no host

    def check(self, hosts: Hosts) -> None:
        """Check that every process is still there and that the job makes progress. Raises Miss."""
        missing = self.pids - {process.pid for process in hosts.processes(self.host)}
        if missing:
            raise Miss(f"of the job beside, on {self.host}, {len(missing)} processes are gone")
        step, deadline = self.step, time.monotonic() + _RESPONSE_S
        while self.step <= step:
            if time.monotonic() > deadline:
                raise Miss(f"the job beside, on {self.host}, stands still")
            time.sleep(0.02)


class Bed:
    """One test bed with its neighbours, on which one round follows the other."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        with open(f"{hosts.home}/.bashrc", "w", encoding="ascii") as file:
            file.write(f"export TMPDIR={hosts.local}\n")
        self.neighbours = {host: Neighbour.begun(hosts, host) for host in hosts.layout}

    @property
    def innocent(self) -> frozenset[int]:
        """Return the pids of all neighbours."""
        return frozenset(pid for neighbour in self.neighbours.values() for pid in neighbour.pids)

    def play(self, chosen: Round, dice: random.Random, number: int) -> dict[str, Any]:
        """Play one round; give what was seen."""
        place = f"{self.hosts.shared}/round-{number}"
        job = start(self.hosts, chosen, place, self.innocent)
        trial = Trial(job, chosen, dice)
        reported: dict[str, Any] = {
            "round": number,
            "what": str(chosen),
            "fault": chosen.fault.name,
            "miss": None,
        }
        reported["kind"] = _kind(chosen)
        try:
            reported["outcome"] = trial.run()
            for host, neighbour in self.neighbours.items():
                if not (chosen.fault.wipes and host == chosen.host):
                    neighbour.check(self.hosts)
        except (Miss, AssertionError, OSError, TestbedError) as miss:
            reported["outcome"] = "missed"
            reported["miss"] = f"{type(miss).__name__}: {miss}"
            reported["transcript"] = self._transcript(trial)
        reported["settled_s"] = trial.settled_s
        clear(job)
        if reported["miss"] is None and chosen.fault.wipes:
            self.neighbours[chosen.host] = Neighbour.begun(self.hosts, chosen.host)
        return reported

    @staticmethod
    def _transcript(trial: Trial) -> str:
        job = trial.job
        trial.note("missed")
        events = "".join(
            f"  {event}\n"
            for kind in (
                "node_joined",
                "node_lost",
                "node_unreachable",
                "composed",
                "attempt_started",
                "workers_started",
                "failure",
                "restarting",
                "fault",
                "job_ended",
            )
            for event in job.events(kind)
        )
        left = "\n".join(job.left())
        return "\n".join(
            [
                *trial.story,
                "--- screen",
                job.screen()[-6000:],
                "--- events",
                events,
                "--- left",
                left,
            ]
        )


def _play_all(
    options: argparse.Namespace, seed: int, numbers: Sequence[int], reported: Any
) -> None:
    """Play these rounds, in a process of its own; a bed that a round has missed on is replaced."""
    bed: Bed | None = None
    try:
        for number in numbers:
            bed = bed or Bed(Hosts.started(options.hosts, *BED_OPTIONS))
            dice = random.Random(f"{seed}/{number}")
            chosen = Round.draw(dice, bed.hosts.names, options.only)
            result = bed.play(chosen, dice, number)
            reported.put(result)
            if result["miss"] is not None:
                bed.hosts.close()
                bed = None
    except BaseException as exc:
        reported.put({"broken": f"{type(exc).__name__}: {exc}"})
        raise
    finally:
        if bed is not None:
            bed.hosts.close()


def play(options: argparse.Namespace, seed: int) -> int:
    """Play all rounds; 0 if all ended in the state that is promised, and nothing stayed."""
    numbers = [options.round] if options.round is not None else list(range(options.faults))
    context = multiprocessing.get_context("fork")
    reported: Any = context.Queue()
    beds = [
        context.Process(
            target=_play_all, args=(options, seed, numbers[index :: options.beds], reported)
        )
        for index in range(min(options.beds, len(numbers)))
    ]
    for bed in beds:
        bed.start()
    results: list[dict[str, Any]] = []
    broken = 0
    while len(results) < len(numbers) and broken < len(beds):
        result = reported.get()
        if "broken" in result:
            broken += 1
            print(f"chaos: a test bed broke: {result['broken']}", flush=True)
            continue
        results.append(result)
        _show(result, seed, options)
    for bed in beds:
        bed.join()
    return _sum_up(results, len(numbers), seed)


def _show(result: dict[str, Any], seed: int, options: argparse.Namespace) -> None:
    print(
        f"{result['round']:4} {result['what']}: {result['outcome']} after "
        f"{result['settled_s']:.1f} s",
        flush=True,
    )
    if result["miss"] is not None:
        print(f"chaos: MISSED: {result['miss']}\n{result['transcript']}")
        only = f" --only '{options.only}'" if options.only else ""
        print(
            f"chaos: repeat it with --hosts {options.hosts} --seed {seed} --round "
            f"{result['round']}{only}",
            flush=True,
        )


def _sum_up(results: Sequence[dict[str, Any]], wanted: int, seed: int) -> int:
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    for result in results:
        seen[result["fault"], result["outcome"]].append(result["settled_s"])
    print("\ncount  fault, outcome, seconds from the fault to it (median, most)")
    for (fault, outcome), times in sorted(seen.items()):
        print(
            f"{len(times):5}  {fault}: {outcome}, {sorted(times)[len(times) // 2]:.1f}, "
            f"{max(times):.1f}"
        )
    for kind in sorted({result["kind"] for result in results} - {""}):
        times = sorted(
            result["settled_s"]
            for result in results
            if result["kind"] == kind and result["miss"] is None
        )
        if times:
            middle, most = times[len(times) // 2], times[-1]
            print(
                f"{kind}: re-formed after {middle:.1f} s, at most {most:.1f} s ({len(times)} times)"
            )
    missed = sum(result["miss"] is not None for result in results)
    kinds = len({fault.name for fault in FAULTS})
    print(
        f"chaos: {len(results)} of {wanted} faults of {kinds} kinds, {missed} missed (seed {seed})"
    )
    return 1 if missed or len(results) < wanted else 0


def _kind(chosen: Round) -> str:
    """Name the row of the table of what is to be reached to which a re-forming belongs, if to
    any."""
    fault = chosen.fault
    if not (fault.loses and chosen.shape.elastic and chosen.is_certain and chosen.hits_trainer):
        return ""
    obey = (
        "workers that trap TERM"
        if {"ignore-signals", "slow"} & set(chosen.words)
        else "workers that obey"
    )
    return f"{'silence' if fault.noticed_s else 'closed channel'}, {obey}"
