"""Several launchers with other launchers' options whose nodes do not become one job."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.facts import mentions
from tests.ports import free_port
from tests.process.conftest import PROGRAMS, until


@pytest.fixture
def port() -> int:
    return free_port()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def by_torchrun(port: int, rank: int, job: str) -> list[str]:
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        job,
    ]
    return ["torchrun", "--nnodes", "2", "--node-rank", str(rank), *rendezvous]


def by_deepspeed(port: int, rank: int, job: str) -> list[str]:
    rendezvous = [
        "--hosts",
        "n0:1,n1:1",
        "--no_ssh",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(port),
    ]
    return [
        "deepspeed",
        *rendezvous,
        "--node_rank",
        str(rank),
        "--job-id",
        job,
        "--python",
        sys.executable,
    ]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            by_torchrun,
            "give all launchers of a job the same --rdzv-id, and each job its own port in --rdzv-endpoint",
        ),
        (
            by_deepspeed,
            "give all launchers of a job the same --job-id, and each job its own port in --master_port",
        ),
    ],
    ids=["torchrun", "deepspeed"],
)
def test_a_launcher_of_another_job_is_refused_with_the_options_that_it_has(
    distlaunch, port, words, hint
):
    distlaunch.pretend("deepspeed")
    program = str(PROGRAMS / "waits_for_signs.py")
    distlaunch.start([*words(port, 0, "7"), program])
    until(lambda: is_open(port), "the first launcher has the port")
    first, *others = words(port, 1, "8")
    soon = ["--rdzv-conf", "join_timeout=8"] if first == "torchrun" else ["--join-timeout", "8"]
    ended = distlaunch.run([first, *soon, *others, program])
    assert (
        ended.returncode == 69
    )  # whoever has the port has proved nothing: it is called until the time is over
    assert mentions(ended.stderr, "another job", "'7'")
    assert hint in ended.stderr


def test_a_second_node_0_of_a_static_rendezvous_gets_a_hint_how_to_be_another(distlaunch, port):
    words = [
        "torchrun",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        str(PROGRAMS / "waits_for_signs.py"),
    ]
    distlaunch.start(words)
    until(lambda: is_open(port), "the first launcher has the port")
    ended = distlaunch.run(words)
    assert ended.returncode == 2
    assert mentions(ended.stderr, f"port {port}", "in use")
    assert mentions(ended.stderr, "hint", "--node-rank N")
    assert "--rdzv-backend c10d" in ended.stderr
    message = distlaunch.run([*words[:3], "--node-rank", "0", *words[3:]])
    assert mentions(message.stderr, "hint", "--rdzv-endpoint HOST:PORT")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--rdzv-endpoint", "192.0.2.1:{port}"], "--rdzv-endpoint"),
        (["--master-addr", "192.0.2.1", "--master-port", "{port}"], "--master-addr"),
    ],
    ids=["endpoint", "master"],
)
def test_a_static_launcher_that_cannot_be_node_0_ends_at_once(distlaunch, port, words, option):
    rendezvous = [word.format(port=port) for word in words]
    ended = distlaunch.run(
        ["torchrun", "--nnodes", "2", *rendezvous, str(PROGRAMS / "waits_for_signs.py")]
    )
    assert ended.returncode == 2
    message = (
        f"{option}: 192.0.2.1 is another machine, but without --node-rank this launcher is node 0"
    )
    assert message in ended.stderr
    assert mentions(ended.stderr, "hint", "--node-rank N")
