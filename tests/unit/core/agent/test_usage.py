"""Resource use of a node and its workers: counters of real processes, and recorded files of a
node."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.core.agent.node import usage as u
from distlaunch.core.probe import gpu_usage
from distlaunch.core.protocol import agent_messages as m
from tests.process.conftest import until

BUSY_WITH_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
memory = b"x" * (64 << 20)
print("up", flush=True)
while True: pass
"""
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 5000 1 0 0 0 0 0 0 5000 1 0 0 0 0 0 0
  eth0: 1000 1 0 0 0 0 0 0 2000 1 0 0 0 0 0 0
 bond0: 1000 1 0 0 0 0 0 0 2000 1 0 0 0 0 0 0
docker0: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0
"""
DISKS = """ 259 0 nvme0n1 10 0 100 5 20 0 200 5 0 0 0
 259 1 nvme0n1p1 10 0 100 5 20 0 200 5 0 0 0
 253 0 dm-0 10 0 100 5 20 0 200 5 0 0 0
"""


def write(root: Path, path: str, text: str = "") -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@pytest.fixture
def worker():
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY_WITH_CHILD], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline() == b"up\n"
    yield process
    os.killpg(process.pid, 9)
    process.communicate()


def start(**changed) -> m.Start:
    spec = m.WorkerSpec(rank=0, local_rank=0, argv=None, env={}, cpus=None, error_file=None)
    values = {
        "attempt": 0,
        "argv": ("python",),
        "env": {},
        "cwd": "/",
        "workers": (spec,),
        "uses_gpus": False,
        "signal_group": False,
        "terminal": False,
        "rows": 0,
        "columns": 0,
        "stdin_rank": None,
        **changed,
    }
    return m.Start(**values)


def test_a_workers_figures_include_its_children_and_grow(worker):
    first = u.ProcessTree(0, worker.pid).usage()
    assert first.processes == 2
    assert first.rss_bytes > 64 << 20
    later = until(
        lambda: (
            found if (found := u.ProcessTree(0, worker.pid).usage()).cpu_s > first.cpu_s else None
        ),
        "more processor time",
    )
    assert later.age_s >= first.age_s > 0


def test_a_worker_that_has_ended_uses_nothing(worker):
    worker.kill()
    worker.wait()
    found = u.ProcessTree(3, worker.pid).usage()
    assert (found.rank, found.cpu_s, found.rss_bytes, found.processes) == (3, 0, 0, 0)


def test_only_devices_of_their_own_count_as_interfaces_and_disks(tmp_path):
    write(tmp_path, "proc/net/dev", NET)
    write(tmp_path, "proc/diskstats", DISKS)
    write(tmp_path, "proc/meminfo", "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n")
    write(tmp_path, "sys/class/net/eth0/device/vendor")
    write(tmp_path, "sys/block/nvme0n1/device/model")
    for name, count in (("port_rcv_data", "3"), ("port_xmit_data", "4")):
        write(tmp_path, f"sys/class/infiniband/mlx5_0/ports/1/counters/{name}", count)
    found = u.node_usage(str(tmp_path))
    assert [(each.name, each.received_bytes, each.sent_bytes) for each in found.interfaces] == [
        ("eth0", 1000, 2000),
        ("mlx5_0:1", 12, 16),
    ]
    assert (found.read_bytes, found.written_bytes) == (100 * 512, 200 * 512)
    assert (found.memory_bytes, found.available_bytes) == (2 << 20, 1 << 20)


def test_without_a_device_all_interfaces_count_that_are_not_known_as_virtual(tmp_path):
    write(tmp_path, "proc/net/dev", NET)
    found = u.node_usage(str(tmp_path))
    assert [each.name for each in found.interfaces] == ["eth0", "bond0"]


def test_a_node_without_any_of_these_files_has_zeros(tmp_path):
    found = u.node_usage(str(tmp_path))
    assert found.interfaces == ()
    assert (found.read_bytes, found.memory_bytes) == (0, 0)


def test_the_answer_names_the_request(worker):
    answers: queue.Queue[m.Usage] = queue.Queue()
    reader = u.UsageReader(answers.put, environ={})
    reader.read(m.ReadUsage(attempt=2, serial=9), {0: worker.pid}, start())
    answer = answers.get(timeout=20)
    assert (answer.attempt, answer.serial) == (2, 9)
    assert answer.workers[0].pid == worker.pid
    assert answer.workers[0].gpus == ()
    assert answer.memory_bytes > answer.available_bytes > 0
    reader.close()


def test_the_processes_of_a_worker_are_looked_for_again_after_a_while(worker, monkeypatch):
    reader = u.UsageReader(print, environ={})
    first = reader._find_trees({0: worker.pid})[0]
    assert reader._find_trees({0: worker.pid})[0] is first
    assert reader._find_trees({0: os.getpid()})[0].pid == os.getpid(), "a restarted worker"
    monkeypatch.setattr(u, "_TREES_S", 0.0)
    reader._trees_until = 0.0
    again = reader._find_trees({0: worker.pid})[0]
    assert reader._find_trees({0: worker.pid})[0] is not again


def gpu(index: int, **changed) -> gpu_usage.GpuUse:
    values = {
        "index": index,
        "uuids": (f"GPU-{index}",),
        "percent": 50.0,
        "used_bytes": 1000 + index,
        "processes": {},
        **changed,
    }
    return gpu_usage.GpuUse(**values)


def with_gpus(gpus, begun: m.Start, pids=(11, 12)):
    trees = {}
    for rank, pid in enumerate(pids):
        trees[rank] = tree = u.ProcessTree.__new__(u.ProcessTree)
        tree.rank, tree.pid, tree.pids = rank, pid, [pid]
    workers = [
        m.WorkerUsage(rank=rank, pid=pid, age_s=1, processes=1, cpu_s=1, rss_bytes=1)
        for rank, pid in enumerate(pids)
    ]
    return [
        (each.gpus, each.gpu_percent, each.gpu_bytes)
        for each in u._with_gpus(workers, trees, gpus, begun)
    ]


def test_workers_are_found_on_the_gpus_that_the_driver_names():
    gpus = [
        gpu(0, processes={11: 300, 99: 5}, percent=80.0),
        gpu(1, processes={11: 400, 12: None}, percent=20.0),
    ]
    assert with_gpus(gpus, start()) == [((0, 1), 50.0, 700), ((1,), 20.0, 1001)]


@pytest.mark.parametrize("mask", ["4,5", "GPU-4,GPU-5"])
def test_if_the_driver_names_pids_of_the_host_the_mask_tells_the_gpu(mask):
    gpus = [gpu(4, processes={70001: 9}), gpu(5)]
    specs = tuple(
        m.WorkerSpec(rank=rank, local_rank=rank, argv=None, env={}, cpus=None, error_file=None)
        for rank in range(2)
    )
    begun = start(workers=specs, env={"CUDA_VISIBLE_DEVICES": mask})
    assert with_gpus(gpus, begun) == [((4,), 50.0, 1004), ((5,), 50.0, 1005)]


def test_while_nothing_uses_a_gpu_no_worker_does():
    assert with_gpus([gpu(0), gpu(1)], start()) == [((), None, None)] * 2
