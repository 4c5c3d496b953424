"""The real Ray: clusters of several nodes on this machine, started here, and by ``ray://``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.facts import mentions
from tests.launcher import PROGRAMS
from tests.ports import free_port

# A cluster takes ten seconds to start on two cores, and each job's actors a few; a busy machine
# takes much more.
pytestmark = pytest.mark.timeout(600)

PROGRAM = PROGRAMS / "frameworks" / "in_ray.py"
PATIENCE_S = 200
NODES, CPUS, GPUS = 3, 2, 2
STARTS = 3
KILLED = {
    "spawner": (
        70,
        "internal error: the spawner (the parent of the workers) was killed by signal 9",
    ),
    "agent": (69, "its agent was killed by signal 9"),
    "actor": (69, "Ray has lost the actor there"),
}
"""Processes above a worker whose end costs an attempt: the job's exit code if it is killed, and
what is said."""
SOON = ["--failure-grace", "1"]
"""So long are workers waited for where their agent is lost, before their node is used again."""
# Places bundles with GPUs and asks each node's agent; there are no such devices here, so that no
# job can use them.
MASKS = """
import json, os, select, sys
from distlaunch.core.protocol import agent_messages as r
from distlaunch.core.protocol.codec import Decoder, encode
from distlaunch.transport.connection import Target
from distlaunch.transport.ray.nodes import RayCluster

places, masks = RayCluster(os.environ), []
each = {"CPU": 1.0, "GPU": 1.0}
for place in places.place_bundles(sys.argv[1], [each] * 3, each=each, strategy="PACK", within_s=60.0, say=print):
    link = places.open(Target(host=place.host), 120.0)
    link.send(encode(r.Survey(serial=1, workdir="/", pythons=(), script="", program="", run_dir="/", gpus=True, topology=False)))
    decoder, surveyed = Decoder(r.FROM_REMOTE, r.REMOTE_NESTED_TYPES), None
    while surveyed is None:
        select.select([link], [], [])
        for message in decoder.feed(link.receive()):
            surveyed = message if isinstance(message, r.Surveyed) else surveyed
    masks.append(surveyed.environ["CUDA_VISIBLE_DEVICES"])
    link.close()
places.cancel()
places.close()
print("masks", json.dumps(masks))
"""


@pytest.fixture(scope="module")
def python(ray_python) -> str:
    return ray_python


class Cluster:
    def __init__(self, python: str, port: int, env: dict[str, str]) -> None:
        words = [
            python,
            Path(__file__).parents[1] / "ray_cluster.py",
            *map(str, (port, NODES, CPUS, GPUS)),
        ]
        pipe = subprocess.PIPE
        self._folder = env["RAY_TMPDIR"]
        self.process = subprocess.Popen(
            words, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self.address = self._answer().removeprefix("cluster ")
        self.client = f"ray://127.0.0.1:{port}"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the cluster ended with {self.process.wait()}"
        return line

    def logs(self, pattern: str) -> str:
        """Return the ends of Ray's own logs."""
        return "\n".join(
            f"{path}: {path.read_text(errors='replace')[-2000:]}"
            for path in Path(self._folder).rglob(pattern)
            if path.is_file()
        )

    def do(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self._answer() == "done"

    def end(self) -> None:
        self.process.communicate(timeout=PATIENCE_S)


def started(python: str, port: int, env: dict[str, str]) -> Cluster:
    """Start a cluster, with retries: Ray gives its own processes 30 s, which are not enough on a
    busy machine."""
    for _ in range(STARTS - 1):
        with suppress(AssertionError):
            return Cluster(python, port, env)
    return Cluster(python, port, env)


@pytest.fixture
def folder():
    """Return a folder with a short name, since sockets of Ray's are below it."""
    made = tempfile.mkdtemp(prefix="dlr", dir="/tmp")
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(python):
    made = tempfile.mkdtemp(prefix="dlr", dir="/tmp")
    env = {
        "PATH": os.defpath,
        "HOME": made,
        "RAY_TMPDIR": made,
        "LANG": "C.UTF-8",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": str(PATIENCE_S),  # not 30
    }
    port = free_port()
    running = started(python, port, env)
    yield running
    running.end()
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def in_ray(distlaunch, python):
    distlaunch.python = python

    def start(address: str, *words: str | os.PathLike[str], env: dict[str, str] | None = None):
        first = ["train", "--backend", "ray", "--format", "plain", "--address", address]
        return distlaunch.start([*first, *words], env=env)

    return start


def driver_of(job) -> int:
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return next(
        int(pid)
        for pid in children
        if b"distlaunch.transport.ray.driver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def above(worker: int, what: str) -> int:
    """Return the pid of a worker's ancestor: a process of ours by its name, the actor as the
    agent's parent."""
    if what == "actor":
        return parent_of(above(worker, "agent"))
    pid = parent_of(worker)
    while Path(f"/proc/{pid}/comm").read_text().strip() != f"dl-{what}":
        pid = parent_of(pid)
    return pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def words_of(cmdline: Path) -> bytes:
    with suppress(OSError):
        return cmdline.read_bytes()
    return b""


def reported(output: str) -> list[list[str]]:
    """Return the reports of the workers, by rank: rank, attempt, sum of ranks if they reduce, sizes
    and ranks, mask."""
    return sorted(
        line.partition("told ")[2].split() for line in output.splitlines() if "told " in line
    )


def test_workers_of_each_node_are_together_and_reduce_over_all_nodes(in_ray, cluster):
    result = in_ray(
        cluster.address, "--num-nodes", "2", "--procs-per-node", "2", PROGRAM, "reduce"
    ).wait(PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert reported(result.stdout) == [
        [str(r), "0", "6", "4", str(r // 2), str(r % 2), "2", "-"] for r in range(4)
    ]


def test_a_launcher_outside_of_the_cluster_needs_no_way_but_rays_client(in_ray, cluster):
    for _ in range(STARTS):  # the process that Ray starts for each client may end on a busy machine
        result = in_ray(cluster.client, "--num-procs", "4", PROGRAM).wait(PATIENCE_S)
        if "Starting Ray client server failed" not in result.stderr:
            break
    assert result.returncode == 0, f"{result.stderr}\n{cluster.logs('ray_client_server*.err')}"
    assert reported(result.stdout) == [
        [str(r), "0", "-", "4", str(r // 2), str(r % 2), "2", "-"] for r in range(4)
    ]


def test_an_agent_sees_the_gpus_of_all_bundles_on_its_node(distlaunch, python, cluster):
    done = subprocess.run(
        [python, "-c", MASKS, cluster.address],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=distlaunch.env,
    )
    assert done.returncode == 0, done.stderr
    both, one = json.loads(done.stdout.partition("masks ")[2])
    assert both in {"0,1", "1,0"}
    assert one in {"0", "1"}


def test_bundles_without_a_place_are_named(in_ray, cluster):
    words = ["--num-nodes", "4", "--procs-per-node", "2", "--join-timeout", "1"]
    result = in_ray(cluster.address, *words, PROGRAM).wait(PATIENCE_S)
    assert result.returncode == 69
    assert mentions(result.stderr, "1 s", "1 of 4", "(3)", "CPU 2")
    assert mentions(result.stderr, "its own")


def test_a_failed_attempt_is_run_again_in_the_same_places(in_ray, cluster):
    result = in_ray(
        cluster.address, "--num-procs", "3", "--max-restarts", "1", PROGRAM, "fail"
    ).wait(PATIENCE_S)
    assert result.returncode == 0, result.stderr
    where = {(rank, attempt): place for rank, attempt, *place in reported(result.stdout)}
    assert {rank for rank, attempt in where if attempt == "1"} == {"0", "1", "2"}
    assert ("1", "0") in where  # the others may have been stopped before they could tell
    assert all(where[rank, "1"] == place for (rank, _), place in where.items())
    assert "this rank fails" in result.stderr


def test_a_lost_node_is_replaced_by_another_of_the_cluster(in_ray, cluster):
    words = ["--num-nodes", "2", "--procs-per-node", "1", "--max-restarts", "1", *SOON]
    job = in_ray(cluster.address, *words, PROGRAM, "reduce", "wait")
    job.wait_rank_logs("waits", 2, timeout=PATIENCE_S)
    lost = job.wait_event("composed")["hosts"].rpartition("-")[2].strip("[]")
    cluster.do(f"kill {lost}")
    cluster.do("add")  # for the other tests
    result = job.wait(PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert [line[:3] for line in reported(result.stdout)] == [
        [str(r), a, "1"] for r in range(2) for a in "01"
    ]
    assert mentions(result.stderr, "Ray", "replaced")


def test_an_actor_that_hangs_is_replaced_by_one_in_the_same_place(in_ray, cluster):
    placing = [
        "--num-procs",
        "2",
        "-o",
        "strategy=strict-pack",
        "--join-timeout",
        "48",
    ]  # a quarter of it may it hang
    job = in_ray(
        cluster.address,
        *placing,
        "--lost-after",
        "5",
        "--max-restarts",
        "1",
        *SOON,
        PROGRAM,
        "wait",
    )
    job.wait_rank_logs("waits", 2, timeout=PATIENCE_S)
    worker = job.wait_workers(2)[0]
    actor, agent = above(worker, "actor"), above(worker, "agent")
    for pid in (actor, agent):
        os.kill(pid, signal.SIGSTOP)
    try:
        result = job.wait(PATIENCE_S)
    finally:
        for pid in (actor, agent):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert result.returncode == 0, result.stderr
    assert [line[:2] for line in reported(result.stdout)] == [
        [str(r), a] for r in range(2) for a in "01"
    ]


@pytest.mark.parametrize(("what", "restarts"), [*((what, 0) for what in KILLED), ("actor", 1)])
def test_a_kill_on_a_node_costs_an_attempt(distlaunch, in_ray, cluster, what, restarts):
    code, why = KILLED[what]
    words = ["--num-nodes", "2", "--procs-per-node", "1", "--max-restarts", str(restarts), *SOON]
    job = in_ray(cluster.address, *words, PROGRAM, "wait")
    job.wait_rank_logs("waits", 2, timeout=PATIENCE_S)
    os.kill(above(job.wait_workers(2)[0], what), signal.SIGKILL)
    result = job.wait(PATIENCE_S)
    assert result.returncode == (0 if restarts else code), result.stderr
    [lost] = result.of_type("node_lost")
    message = " ".join(result.stderr.split())
    assert mentions(message, lost["host"], "lost", why), message
    assert "MIN:MAX" not in message, "which Ray cannot have"
    assert len(reported(result.stdout)) == 2 * (1 + restarts)
    distlaunch.assert_no_survivors(within_s=60)


def test_workers_save_though_rays_driver_is_asked_to_end_with_the_launcher(in_ray, cluster):
    job = in_ray(cluster.address, "--num-procs", "2", "--grace", "25", *SOON, PROGRAM, "save")
    job.wait_rank_logs("waits", 2, timeout=PATIENCE_S)
    os.kill(driver_of(job), signal.SIGTERM)
    job.send_signal(signal.SIGTERM)
    result = job.wait(PATIENCE_S)
    assert result.returncode == 143
    assert result.stdout.count("saved") == 2, result.stderr


def test_a_signal_while_ray_places_is_reported_and_ends_the_job(in_ray, cluster):
    words = ["--num-nodes", "4", "--procs-per-node", "2", PROGRAM]
    jobs = {number: in_ray(cluster.address, *words) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, job in jobs.items():
        job.wait_stderr("waiting for Ray", timeout=PATIENCE_S)
        job.send_signal(number)
    for number, job in jobs.items():
        result = job.wait(PATIENCE_S)
        assert result.returncode == 128 + number
        assert mentions(result.stderr, number.name, "stopped", "Ray", "no worker")


def test_a_ray_that_was_interrupted_while_it_started_here_leaves_nothing(in_ray, folder):
    job = in_ray("local", "--num-procs", "2", PROGRAM, env={"RAY_TMPDIR": folder})
    job.wait_for(
        lambda: list(Path(folder).glob("dl-ray-*/session_*")), "Ray's folder", timeout=PATIENCE_S
    )
    job.send_signal(signal.SIGTERM)
    result = job.wait(PATIENCE_S)
    assert result.returncode == 143, result.stderr
    of_it = [
        each for each in Path("/proc").glob("[0-9]*/cmdline") if folder.encode() in words_of(each)
    ]
    assert not of_it
    assert not list(Path(folder).glob("dl-ray-*"))


def test_a_killed_launcher_leaves_neither_workers_nor_bundles(distlaunch, in_ray, cluster):
    all_of_it = ["--num-nodes", str(NODES), "--procs-per-node", str(CPUS)]
    job = in_ray(cluster.address, *all_of_it, PROGRAM, "wait")
    job.wait_rank_logs("waits", NODES * CPUS, timeout=PATIENCE_S)
    job.send_signal(signal.SIGKILL)
    distlaunch.assert_no_survivors(within_s=60)
    again = in_ray(cluster.address, *all_of_it, PROGRAM).wait(PATIENCE_S)
    assert again.returncode == 0, again.stderr


def test_local_starts_ray_here_and_leaves_nothing_of_it(distlaunch, in_ray, folder):
    words = ["--num-procs", "3", "-o", "resources=seat=0.5,memory=100000000", PROGRAM]
    result = in_ray("local", *words, env={"RAY_TMPDIR": folder}).wait(PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert [line[:2] for line in reported(result.stdout)] == [[str(rank), "0"] for rank in range(3)]
    distlaunch.assert_no_survivors()
    assert not list(Path(folder).glob("dl-ray-*"))


def test_rays_driver_killed_costs_the_job_its_nodes_and_leaves_nothing(distlaunch, in_ray, folder):
    words = ["--num-procs", "2", "--max-restarts", "1", PROGRAM, "wait"]
    job = in_ray("local", *words, env={"RAY_TMPDIR": folder})
    job.wait_rank_logs("waits", 2, timeout=PATIENCE_S)
    os.kill(driver_of(job), signal.SIGKILL)
    result = job.wait(PATIENCE_S)
    assert result.returncode == 69
    assert mentions(result.stderr, "driver", "signal 9")
    assert result.of_type("failure")[-1]["reason"] == "no_node"
    assert not result.of_type("restarting")
    distlaunch.assert_no_survivors(within_s=60)
    assert not list(Path(folder).glob("dl-ray-*"))


def test_workers_that_local_ray_cannot_place_are_reported_soon(in_ray, folder):
    words = ["--num-nodes", "2", "--procs-per-node", "1", PROGRAM]
    result = in_ray("local", *words, env={"RAY_TMPDIR": folder}).wait(PATIENCE_S)
    assert result.returncode == 69
    assert mentions(result.stderr, "error", "--backend ray", "1 of 2", "(1)"), (
        "nobody waits for nodes"
    )
    assert not list(Path(folder).glob("dl-ray-*"))


def test_a_cluster_that_is_not_there_is_an_error_with_the_way_out(in_ray):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        result = in_ray(f"127.0.0.1:{free.getsockname()[1]}", "--num-procs", "1", PROGRAM).wait(
            PATIENCE_S
        )
    assert result.returncode == 2
    assert mentions(result.stderr, "error", "127.0.0.1")
    assert mentions(result.stderr, "hint", "--address local")
