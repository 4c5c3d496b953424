"""torchrun's words on two hosts: how they meet, and what is said where nobody tells which node is
which."""

from __future__ import annotations

import pytest

from tests.cluster.meeting import CREW, PORT, Meeting
from tests.facts import mentions

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def meeting(hosts):
    return Meeting(hosts)


def start(meeting: Meeting, node: int, *words: str) -> None:
    args = [
        "torchrun",
        "--nnodes",
        "2",
        *words,
        "--rdzv-endpoint",
        f"n1:{PORT}",
        "--rdzv-id",
        "7",
        CREW,
    ]
    meeting.launchers[node] = meeting.hosts.start(
        args,
        host=f"n{node + 1}",
        env={"PLACE": str(meeting.hosts.work), "CUDA_VISIBLE_DEVICES": ""},
    )


def test_the_same_words_on_all_nodes_are_one_job_by_c10d(meeting):
    for node in (1, 0):
        start(meeting, node, "--rdzv-backend", "c10d")
    told = meeting.ready(0, 1)
    meeting.put("end-0")
    assert meeting.codes() == {0: 0, 1: 0}
    assert [each["host"] for each in told] == ["n1", "n2"]


def test_a_static_launcher_on_another_host_than_the_endpoints_is_not_taken_for_node_0(meeting):
    start(meeting, 1)
    assert meeting.codes() == {1: 2}
    assert mentions(meeting.said(1), "--rdzv-endpoint", "n1", "--node-rank", "node 0")
    start(meeting, 0)
    start(meeting, 1, "--node-rank", "1")
    meeting.ready(0, 1)
    meeting.put("end-0")
    assert meeting.codes() == {0: 0, 1: 0}
