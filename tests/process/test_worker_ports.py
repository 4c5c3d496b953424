"""Ports that are held for every worker and listed to all by TF_CONFIG, without TensorFlow."""

from __future__ import annotations

import json
import sys

import pytest

from tests.facts import mentions
from tests.ports import free_port, is_free
from tests.process.conftest import PROGRAMS, until

CONNECTS_TO_ALL = PROGRAMS / "connects_to_all.py"
TENSORFLOW = ("--backend", "tensorflow", "--python", sys.executable)


@pytest.fixture(autouse=True)
def installed(distlaunch):
    distlaunch.pretend("tensorflow", "tf_keras")


def reported(text: str) -> list[dict]:
    """Return the reports of the workers, by attempt and rank."""
    reports = [json.loads(line[line.index("{") :]) for line in text.splitlines() if "{" in line]
    return sorted(reports, key=lambda each: (each["attempt"], each["rank"]))


def ports_of(reports: dict) -> list[int]:
    return [
        int(place.rpartition(":")[2])
        for part in reports["config"]["cluster"].values()
        for place in part
    ]


def test_every_worker_has_a_port_that_is_held_for_it(distlaunch):
    result = distlaunch.train(
        *TENSORFLOW, "--num-procs", "3", CONNECTS_TO_ALL, "local", env={"TF_CONFIG": "stale"}
    )
    assert result.returncode == 0, result.stderr
    reports = reported(result.stdout)
    [cluster] = {json.dumps(each["config"]["cluster"]) for each in reports}
    assert list(json.loads(cluster)) == ["worker"]
    assert [each["config"]["task"] for each in reports] == [
        {"type": "worker", "index": index} for index in range(3)
    ]
    [started] = result.of_type("attempt_started")
    assert len({*ports_of(reports[0]), started["master_port"]}) == 4
    assert [each["free"] for each in reports] == [[]] * 3, "a stranger could have had them"
    assert [each["met"] for each in reports] == [json.loads(cluster)["worker"]] * 3


@pytest.mark.parametrize("fmt", ["table", "json"])
def test_a_plan_shows_when_the_ports_are_settled_and_which_variable_has_them(distlaunch, fmt):
    result = distlaunch.run(
        ["plan", "--format", fmt, *TENSORFLOW, "--num-procs", "2", CONNECTS_TO_ALL]
    )
    assert mentions(" ".join(result.stdout.split()), "the ports", "TF_CONFIG")


def test_a_restart_has_new_ports(distlaunch):
    words = (
        *TENSORFLOW,
        "--num-procs",
        "2",
        "--max-restarts",
        "1",
        "--min-uptime",
        "0",
        CONNECTS_TO_ALL,
        "fail",
    )
    result = distlaunch.train(*words)
    assert result.returncode == 0, result.stderr
    reports = reported(result.stdout)
    assert [(each["attempt"], each["rank"]) for each in reports[-2:]] == [(1, 0), (1, 1)]
    first, second = (
        ports_of(reports[0]),
        ports_of(reports[-1]),
    )  # of the first attempt, one may have been stopped early
    assert reports[0]["attempt"] == 0
    assert second == ports_of(reports[-2])
    assert not {*first} & {*second}
    for port in (*first, *second):
        # A program beside the tests may have got it since.
        until(lambda port=port: is_free(port), f"port {port} is free")


def test_chief_and_evaluator_are_ranks_of_their_own(distlaunch):
    words = (*TENSORFLOW, "-o", "chief", "-o", "evaluator", "--num-procs", "4", CONNECTS_TO_ALL)
    result = distlaunch.train(*words)
    assert result.returncode == 0, result.stderr
    reports = reported(result.stdout)
    tasks = [(each["config"]["task"]["type"], each["config"]["task"]["index"]) for each in reports]
    assert tasks == [("chief", 0), ("worker", 0), ("worker", 1), ("evaluator", 0)]
    cluster = reports[0]["config"]["cluster"]
    assert [len(part) for part in cluster.values()] == [1, 2]
    assert [each.get("met") for each in reports] == [
        [*cluster["chief"], *cluster["worker"]]
    ] * 3 + [None]


@pytest.mark.parametrize("slots", [1, 2])
def test_launchers_of_one_job_give_all_workers_the_same_values(distlaunch, slots):
    port = free_port()
    launchers = [
        distlaunch.start(
            [
                *(
                    "train",
                    "--rendezvous",
                    f"127.0.0.1:{port}",
                    "--num-nodes",
                    "2",
                    "--node-rank",
                    str(rank),
                ),
                *("--procs-per-node", str(slots), *TENSORFLOW, CONNECTS_TO_ALL, "local"),
            ]
        )
        for rank in (1, 0)
    ]
    results = [each.wait() for each in launchers]
    assert [each.returncode for each in results] == [0, 0], [each.stderr for each in results]
    reports = reported("\n".join(each.stdout for each in results))
    assert [each["rank"] for each in reports] == list(range(2 * slots))
    [cluster] = {json.dumps(each["config"]["cluster"]) for each in reports}
    assert len(set(ports_of(reports[0]))) == 2 * slots
    assert [each["free"] for each in reports] == [[]] * 2 * slots
    assert [each["met"] for each in reports] == [json.loads(cluster)["worker"]] * 2 * slots


# --- what Linux passes on

MOST = 131_071
"""Bytes of NAME=VALUE."""
WORDY = """
import os
from distlaunch.backends.base import Backend

class Wordy(Backend):
    name, about, worker_ports = "wordy", "tells much once it knows ports", 1

    def cluster_variables(self, cluster):
        ports = [int(place.rpartition(":")[2]) for place in cluster]
        return {"PEERS": "x" * (int(os.environ["WORDY"]) - len("PEERS=") if min(ports) > 1024 else 0)}
"""
COUNTS = "import os, sys; sys.stdout.write(f'{len(os.environ[\"PEERS\"])}\\n')"


@pytest.fixture
def long_variable(distlaunch, tmp_path):
    """Install a backend of another package whose variable is as long as WORDY says, once ports are
    known."""
    folder = tmp_path / "wordy"
    about = folder / "wordy-1.dist-info"
    about.mkdir(parents=True)
    (folder / "wordy.py").write_text(WORDY)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: wordy\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[distlaunch.backends]\nwordy = wordy:Wordy\n")
    distlaunch.env["PYTHONPATH"] = str(folder)
    (distlaunch.work / "counts.py").write_text(COUNTS)
    return ("--backend", "wordy", "--num-procs", "2", "counts.py")


def test_workers_get_as_much_as_linux_passes_on(distlaunch, long_variable):
    result = distlaunch.train(*long_variable, env={"WORDY": str(MOST)})
    assert result.returncode == 0, result.stderr
    assert [result.lines_of(rank) for rank in range(2)] == [[str(MOST - len("PEERS="))]] * 2


def test_a_byte_more_ends_the_job_before_a_worker_starts_and_once(distlaunch, long_variable):
    result = distlaunch.train(*long_variable, "--max-restarts", "3", env={"WORDY": str(MOST + 1)})
    assert (result.returncode, result.stdout) == (2, "")
    errors = [
        line
        for line in result.stderr.splitlines()
        if mentions(line, "error", "PEERS", "131,072 bytes", "131,071")
    ]
    assert len(errors) == 1
    assert mentions(result.stderr, "hint", "fewer workers")
    assert result.of_type("worker_exited") == []
    report = (result.run_dir / "report.txt").read_text()
    assert mentions(report, "error", "PEERS", "131,072 bytes", "131,071")


def test_launchers_of_one_job_all_report_it(distlaunch, long_variable):
    port = free_port()
    words = (
        "train",
        "--rendezvous",
        f"127.0.0.1:{port}",
        "--num-nodes",
        "2",
        "--procs-per-node",
        "1",
    )
    env = {"WORDY": str(MOST + 1)}
    launchers = [
        distlaunch.start(
            [*words, "--node-rank", str(rank), "--backend", "wordy", "counts.py"], env=env
        )
        for rank in (1, 0)
    ]
    results = [each.wait() for each in launchers]
    assert [each.returncode for each in results] == [2, 2], [each.stderr for each in results]
    assert all("error: PEERS of 2 workers: it has 131,072 bytes" in each.stderr for each in results)
    assert [each.stdout for each in results] == ["", ""]


@pytest.mark.parametrize("command", [("plan",), ("train", "--dry-run")], ids=" ".join)
def test_a_plan_fails_if_no_address_is_short_enough(distlaunch, command):
    words = (
        "--backend",
        "tensorflow",
        "--hosts",
        "n[1-2000]:6",
        "--python",
        "python3",
        CONNECTS_TO_ALL,
    )
    result = distlaunch.run([*command, *words])
    assert (result.returncode, result.stdout) == (2, "")
    assert mentions(result.stderr, "TF_CONFIG", "12,000 workers", "156")
    assert "-o per=node" in result.stderr
