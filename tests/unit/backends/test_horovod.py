from __future__ import annotations

import re

import pytest

from distlaunch.backends.backend_options import chosen_options
from distlaunch.backends.horovod import Horovod
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from tests.facts import mentions


def topology(**slots: int) -> Topology:
    nodes = tuple(Node(host=host.rstrip("_"), slots=count) for host, count in slots.items())
    return Topology(nodes=nodes, source="flags", device="cpu")


def backend(*words: str) -> Horovod:
    return Horovod(chosen_options(words, Horovod.options(), "horovod"), {})


def places(found: Topology) -> list[tuple[int, int, int, int]]:
    """Return rank, local rank, cross rank and cross size of every worker, by rank."""
    horovod, all_of, rank = backend(), [], 0
    for node_rank, node in enumerate(found.nodes):
        for local_rank in range(node.slots or 0):
            env = horovod.worker_variables(found, node_rank, local_rank, rank)
            names = ("RANK", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")
            all_of.append(tuple(int(env[f"HOROVOD_{name}"]) for name in names))
            rank += 1
    return all_of


def test_even_nodes():
    assert places(topology(a=2, b=2)) == [(0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 1, 2), (3, 1, 1, 2)]


def test_a_cross_rank_counts_only_nodes_that_have_the_local_rank():
    assert places(topology(a=1, b=3, c=2)) == [
        (0, 0, 0, 3),
        (1, 0, 1, 3),
        (2, 1, 0, 2),
        (3, 2, 0, 1),
        (4, 0, 2, 3),
        (5, 1, 1, 2),
    ]


@pytest.mark.parametrize(
    "hosts",
    [
        ("a", "a", "b"),
        ("node-2", "a", "a", "node-1"),
        ("node-1", "::1"),
        ("a_b", "c"),
        ("", "node-0"),
        ("a", "b"),
    ],
)
def test_names_of_nodes_are_unique_and_valid_in_a_url(hosts):
    nodes = tuple(Node(host=host, slots=rank + 1) for rank, host in enumerate(hosts))
    found = Topology(nodes=nodes, source="flags", device="cpu")
    variables = [backend().node_variables(found, rank) for rank in range(len(hosts))]
    names = [each["HOROVOD_HOSTNAME"] for each in variables]
    assert len(set(names)) == len(hosts)
    assert all(re.fullmatch(r"[\w.\-]+", name) for name in names)
    assert [each["HOROVOD_LOCAL_SIZE"] for each in variables] == [
        str(rank + 1) for rank in range(len(hosts))
    ]


def test_nodes_keep_suitable_names():
    found = topology(a=1, b=1)
    assert [backend().node_variables(found, rank)["HOROVOD_HOSTNAME"] for rank in range(2)] == [
        "a",
        "b",
    ]


def test_one_machine_stays_on_its_loopback_and_several_use_what_the_nodes_have_found():
    assert backend().default_variables(topology(a=2)) == {
        "HOROVOD_GLOO_IFACE": "lo",
        "PYTHONFAULTHANDLER": "1",
    }
    assert backend().default_variables(topology(a=2, b=1)) == {"PYTHONFAULTHANDLER": "1"}
    assert backend().repeated()["HOROVOD_GLOO_IFACE"] == "GLOO_SOCKET_IFNAME"


def test_options_become_variables():
    words = (
        "fusion-threshold-mb=2",
        "cycle-time-ms=0.5",
        "gloo-timeout-seconds=90",
        "log-with-timestamp=on",
        "autotune-gaussian-process-noise=0.5",
        "stall-check=off",
        "autotune",
        "log-level=debug",
        "timeline-filename=t",
    )
    env = backend(*words).job_variables(topology(a=2, b=1))
    assert env == {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_SIZE": "3",
        "HOROVOD_FUSION_THRESHOLD": "2097152",
        "HOROVOD_CYCLE_TIME": "0.5",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "90",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_LOG_LEVEL": "DEBUG",
        "HOROVOD_LOG_HIDE_TIME": "0",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
        "HOROVOD_TIMELINE": "t",
    }


def test_a_setting_without_the_one_it_depends_on_gives_a_notice_and_is_not_set():
    idle = backend("autotune-log-file=f", "autotune=off", "timeline-mark-cycles")
    log_file, mark_cycles = idle.notes
    assert mentions(log_file, "-o autotune-log-file", "no effect", "-o autotune")
    assert mentions(mark_cycles, "-o timeline-mark-cycles", "no effect", "-o timeline-filename")
    assert set(idle.job_variables(topology(a=1))) == {
        *("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_SIZE", "HOROVOD_AUTOTUNE"),
    }
    assert backend("autotune-log-file=f", "autotune").notes == []


def test_a_wrong_option_is_named():
    with pytest.raises(ConfigError, match=r"-o autotune-gaussian-process-noise=2\.0: .* 1"):
        backend("autotune-gaussian-process-noise=2")
    with pytest.raises(ConfigError, match=r"compression takes none\|fp16"):
        backend("compression=zip")
