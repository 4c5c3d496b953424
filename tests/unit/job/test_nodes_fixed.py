"""A job of a fixed number of nodes, from the list of hosts to its end."""

from __future__ import annotations

from distlaunch.core.wire import messages as m
from distlaunch.core.wire import remote as r
from distlaunch.job import actions as p


def test_all_nodes_are_connected_at_once_and_each_is_surveyed_as_it_joins(make_nodes):
    job = make_nodes(3)
    job.begin()
    assert job.connects() == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert [node for node, _ in job.sent(r.Survey, job.joined(1))] == [1]
    assert job.phase == "gathering"


def test_the_way_from_hosts_to_running_workers(make_nodes):
    job = make_nodes(3, master_port=29500)
    job.begin()
    job.gather()
    assert job.phase == "preparing"
    assert job.sent(m.Prepare) == [
        (0, m.Prepare(attempt=0, port=29500, token="word0")),
        (1, m.Prepare(attempt=0, port=None)),
        (2, m.Prepare(attempt=0, port=None)),
    ]
    job.prepared(0, port=29500)
    job.prepared(2)
    assert job.sent(r.Reach) == []
    job.prepared(1)
    question = r.Reach(attempt=0, addresses=("10.0.0.1", "n0"), port=29500, token="word0", bound_s=5.0)
    assert job.sent(r.Reach) == [(1, question), (2, question)]
    job.reached(2)
    [start] = job.of(p.StartAttempt, job.reached(1))
    assert (start.attempt, start.port, start.composition, start.meeting.address) == (
        0, 29500, job.composed[0], "10.0.0.1",
    )  # fmt: skip
    for rank in job.ranks:
        job.started(rank)
    assert (job.phase, job.policy.up, job.policy.world_size) == ("running", 6, 6)
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0
