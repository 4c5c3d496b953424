"""The port that other nodes have tried can be used by torch's store, attempt after attempt."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys

import pytest

from distlaunch.core.agent.node.attempt_setup import AttemptSetup
from distlaunch.core.probe.network import probe_interfaces
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions

RANKS = """
import datetime, sys
from torch.distributed import TCPStore

is_master, libuv = sys.argv[1] == "0", sys.argv[2] == "libuv"
for line in sys.stdin:
    host, port = line.split()
    store = TCPStore(host, int(port), world_size=2, is_master=is_master, use_libuv=libuv, timeout=datetime.timedelta(seconds=60))
    store.set(f"from {sys.argv[1]}", port)
    print(store.get(f"from {1 - int(sys.argv[1])}").decode(), flush=True)
    sys.stdin.readline()
    del store
    print("closed", flush=True)
"""


def listens(port: int) -> bool:
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("::", port))
            other.listen()
        except OSError:
            return False
    return True


@pytest.mark.parametrize(("kind", "wanted"), [("libuv", "any"), ("classic", "one")])
def test_torchs_store_gets_the_port_after_others_have_tried_it(clean_env, kind, wanted):
    addresses = ["127.0.0.1", *(address for _, address, _ in probe_interfaces())]
    answers: list[m.Prepared] = []
    setup = AttemptSetup(port=None, send=answers.append, post=lambda _: None)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for rank in (0, 1)
    ]
    number = 0
    try:
        for attempt in range(4):
            host = addresses[-(attempt % len(addresses)) - 1]
            setup.prepare(m.Prepare(attempt=attempt, port=number, token="word"), owner="j", pids=())
            port = answers[-1].port
            assert port, answers
            number = port if wanted == "one" else 0
            for address in addresses:
                with socket.create_connection((address, port), timeout=30) as connection:
                    setup.on_ready()
                    assert connection.recv(10) == b"word\n"
            assert not listens(port)
            setup._close_listener()
            assert not listens(port), "it is held, though nobody listens"
            setup.share(0.0)
            for rank in ranks:
                rank.stdin.write(f"{host} {port}\n")
            assert [rank.stdout.readline() for rank in ranks] == [f"{port}\n"] * 2
            for rank in ranks:
                rank.stdin.write("end\n")
            assert [rank.stdout.readline() for rank in ranks] == ["closed\n"] * 2
            assert sum(answer.problem is None for answer in answers) == attempt + 1
    finally:
        setup.release()
        for rank in ranks:
            rank.stdin.close()
            rank.wait(60)
            rank.stdout.close()
    assert {rank.returncode for rank in ranks} == {0}


EVERY_RANK_ZERO = """
import os, time
import torch.distributed as dist

if os.environ["RANK"] == "0":
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    open("listening", "w").close()
    time.sleep(1000)
while not os.path.exists("listening"):
    time.sleep(0.01)
os.environ["RANK"] = "0"
dist.init_process_group("gloo")
"""


def test_a_script_that_gives_every_worker_rank_0_gets_a_notice(distlaunch):
    (distlaunch.work / "t.py").write_text(EVERY_RANK_ZERO)
    words = ("--num-procs", "2", "--failure-grace", "1", "t.py")
    result = distlaunch.train_warm(*words, preload="torch", timeout=120)
    assert result.returncode == 1
    text = " ".join(result.stderr.split())
    assert "hint: port " in text
    assert mentions(text, "hint", "rank 1", "rank 0", "RANK")


CONNECTS_TO_ALL = """
import os, time

if MEET:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
time.sleep(1.5)
"""
ALONE = "MASTER_PORT was never used: the 2 workers did not communicate, so each may have trained on its own"


@pytest.mark.parametrize(
    "way", [["--num-procs", "2"], ["--discover", "echo localhost:2", "--num-nodes", "1:2"]]
)
@pytest.mark.parametrize("meet", [True, False])
def test_workers_that_never_communicate_cause_one_warning(distlaunch, way, meet):
    (distlaunch.work / "t.py").write_text(CONNECTS_TO_ALL.replace("MEET", str(meet)))
    train = functools.partial(distlaunch.train_warm, preload="torch") if meet else distlaunch.train
    result = train(*way, "--min-uptime", "1", "t.py", timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(ALONE) == (0 if meet else 1)


def test_workers_that_never_communicate_cause_no_warning_in_a_job_that_trains_nothing(distlaunch):
    (distlaunch.work / "t.py").write_text(CONNECTS_TO_ALL.replace("MEET", "False"))
    result = distlaunch.train("--num-procs", "2", "--min-uptime", "1000", "t.py", timeout=120)
    assert (result.returncode, ALONE in result.stderr) == (0, False)
