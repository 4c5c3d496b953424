"""Launchers in pods of a rendered Indexed Job: process 1, found by late names, and replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cluster.hosts import until
from tests.cluster.launchers_on_hosts import PROGRAM
from tests.cluster.pods import Pods
from tests.unit.render.cluster import pods_of
from tests.unit.render.conftest import text_of

USAGE = 2
ALL = (0, 1, 2)
EVERY_RANK = range(6)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def job(hosts):
    """Return a function that makes the pods of a job of three pods with two workers each."""

    def make(*options: str, words: tuple[str, ...] = ()) -> Pods:
        size = (
            "--num-nodes=3",
            "--procs-per-node=2",
            "--image=x",
            "--token-secret=t",
            "--join-timeout=60",
        )
        text = text_of(
            "kubernetes", *size, "--grace=5", "--failure-grace=2", *options, str(PROGRAM), *words
        )
        return Pods(hosts, pods_of(list(yaml.safe_load_all(text))))

    return make


def begun(pods):
    """Start all pods, and wait for their workers."""
    for index in (1, 2, 0):
        pods.begin(index)
    pods.name(*ALL)
    return pods.wait_ready(*EVERY_RANK)


def test_pods_find_each_other_by_names_that_come_late(job):
    pods = job()
    for index in (2, 0, 1):
        pods.begin(index)
    for index in (1, 2):
        pods.by_rank[index].wait_stderr("cannot be resolved")
    pods.name(0)
    reported = pods.wait_ready(*EVERY_RANK)
    pods.put_sign("end-0")
    assert pods.exit_codes() == dict.fromkeys(ALL, 0)
    assert [each["host"] for each in reported] == [
        f"waits-for-files-{index}" for index in (0, 0, 1, 1, 2, 2)
    ]
    assert [each["NODE_RANK"] for each in reported] == list("001122")
    assert {each["DISTLAUNCH_TOKEN"] for each in reported} == {None}


@pytest.mark.parametrize(
    ("signalled", "words"),
    [(ALL, ()), ((1,), ("ignore-signals",))],
    ids=["all pods, obedient workers", "one pod, workers that ignore signals"],
)
def test_term_ends_all_pods_within_their_grace(job, words, signalled):
    pods = job(words=words)
    begun(pods)
    for index in signalled:
        pods.by_rank[index].send_signal(signal.SIGTERM)
    assert pods.exit_codes(30) == dict.fromkeys(ALL, 143)


def test_term_reaches_a_pod_that_waits_for_the_others(job):
    pods = job()
    pods.begin(1).wait_stderr("cannot be resolved")
    pods.by_rank[1].send_signal(signal.SIGTERM)
    assert pods.exit_codes(30) == {1: 143}


@pytest.mark.parametrize("index", [0, 1], ids=["coordinator", "joined launcher"])
def test_process_1_reaps_orphans_that_it_did_not_start(job, index):
    pods = job()
    begun(pods)
    launcher = pods.by_rank[index].pid
    inside = ("nsenter", "--target", str(launcher), "--pid")
    subprocess.run([*inside, "sh", "-c", "sleep 0.2 & :"], check=True, stdin=subprocess.DEVNULL)

    def orphans() -> list[str]:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        return [
            child for child in children if (lines := _command(child)) is None or b"0.2" in lines
        ]

    until(lambda: not orphans(), "no orphan is left")
    pods.put_sign("end-0")
    assert pods.exit_codes() == dict.fromkeys(ALL, 0)


def _command(pid: str) -> bytes | None:
    """Return the command line of a process; None if it only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() or None
    except FileNotFoundError:
        return b""


def test_a_mistake_in_the_options_ends_each_pod_with_2(job):
    pods = job()
    for index in ALL:
        pods.begin(index, "--no-such-option")
    assert pods.exit_codes() == dict.fromkeys(ALL, USAGE)


@pytest.mark.parametrize("failing", [0, 3])
def test_the_code_of_a_worker_is_that_of_all_pods(job, failing):
    pods = job()
    begun(pods)
    pods.put_sign(f"fail-0-{failing}")
    assert pods.exit_codes(30) == dict.fromkeys(ALL, 7)


def test_a_restart_takes_place_inside_the_pods(job):
    pods = job("--max-restarts=1", "--min-uptime=0")
    begun(pods)
    launchers = [pods.by_rank[index].pid for index in ALL]
    pods.put_sign("fail-0-4")
    pods.wait_ready(*EVERY_RANK, attempt=1)
    pods.put_sign("end-1")
    assert pods.exit_codes() == dict.fromkeys(ALL, 0)
    assert [pods.by_rank[index].pid for index in ALL] == launchers


def test_every_line_of_a_pods_log_is_json(job):
    pods = job("--format=jsonl", "--max-restarts=1", "--min-uptime=0")
    begun(pods)
    pods.put_sign("fail-0-3")
    pods.wait_ready(*EVERY_RANK, attempt=1)
    pods.put_sign("fail-1-1")
    assert pods.exit_codes() == dict.fromkeys(ALL, 7)
    for index in ALL:
        lines = pods.by_rank[index].stdout.splitlines() + pods.by_rank[index].stderr.splitlines()
        assert all(isinstance(json.loads(line), dict) for line in lines)
        for rank in (2 * index, 2 * index + 1):
            assert any(f"rank {rank} is here" in line for line in lines)


@pytest.mark.parametrize("index", [1, 0], ids=["a peer", "the coordinator"])
def test_a_replaced_pod_joins_from_its_new_address_and_the_others_stay(job, index):
    pods = job("--max-restarts=1", "--min-uptime=0")
    begun(pods)
    stay = {each: pods.by_rank[each].pid for each in ALL if each != index}
    pods.by_rank[index].send_signal(signal.SIGKILL)
    assert pods.by_rank[index].process.wait(30)
    pods.begin(index, host="n4")
    pods.name(*ALL)
    reported = pods.wait_ready(*EVERY_RANK, attempt=1)
    assert [each["NODE_RANK"] for each in reported] == list("001122")
    assert {each["TORCHELASTIC_RESTART_COUNT"] for each in reported} == {"1"}
    for each, pid in stay.items():
        assert pods.by_rank[each].pid == pid
        assert pods.by_rank[each].process.poll() is None
    pods.put_sign("end-1")
    assert pods.exit_codes() == dict.fromkeys(ALL, 0)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in stay.values())
