"""torchrun's options on two hosts."""

from __future__ import annotations

import pytest

from tests.cluster.launchers_on_hosts import PORT, PROGRAM, HostLaunchers
from tests.facts import mentions

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def launchers(hosts):
    return HostLaunchers(hosts)


def start(launchers: HostLaunchers, node: int, *words: str) -> None:
    args = [
        "torchrun",
        "--nnodes",
        "2",
        *words,
        "--rdzv-endpoint",
        f"n1:{PORT}",
        "--rdzv-id",
        "7",
        PROGRAM,
    ]
    launchers.by_rank[node] = launchers.hosts.start(
        args,
        host=f"n{node + 1}",
        env={"SIGN_DIR": str(launchers.hosts.work), "CUDA_VISIBLE_DEVICES": ""},
    )


def test_the_same_words_on_all_nodes_are_one_job_by_c10d(launchers):
    for node in (1, 0):
        start(launchers, node, "--rdzv-backend", "c10d")
    reported = launchers.wait_ready(0, 1)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0, 1: 0}
    assert [each["host"] for each in reported] == ["n1", "n2"]


def test_a_static_launcher_on_another_host_than_the_endpoints_is_not_taken_for_node_0(launchers):
    start(launchers, 1)
    assert launchers.exit_codes() == {1: 2}
    assert mentions(launchers.stderr_of(1), "--rdzv-endpoint", "n1", "--node-rank", "node 0")
    start(launchers, 0)
    start(launchers, 1, "--node-rank", "1")
    launchers.wait_ready(0, 1)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0, 1: 0}
