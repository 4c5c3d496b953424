"""Jobs of which no node can be reached any more."""

from __future__ import annotations

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.restarts import Final, FinalReason
from tests.facts import mentions

WHY = "Ray's driver was killed by signal 9"


def cut_off(job, *nodes: int) -> list[p.Action]:
    lost = [p.Lost(node=node, why=WHY, final=True, kind=p.LossKind.RAY_DRIVER) for node in nodes]
    return [action for event in lost for action in job.step(event)]


def test_a_job_ends_at_once_and_counts_no_restart(make_nodes):
    job = make_nodes(2, max_restarts=3).run()
    actions = cut_off(job, 0, 1)
    assert job.exit_code == 69
    assert not job.of(p.Connect, actions)
    assert not job.entries("restarting")
    [failed] = job.of(p.ReportFailure)
    assert failed.final
    assert failed.decision == Final(reason=FinalReason.NO_NODE)
    assert mentions(failed.diagnosis.cause.summary, "2 nodes", WHY)
    assert failed.diagnosis.hint


def test_nothing_is_reported_about_restarts_that_nobody_wanted(make_nodes):
    job = make_nodes(2).run()
    cut_off(job, 0, 1)
    [failed] = job.of(p.ReportFailure)
    assert (failed.decision, job.exit_code) == (Final(reason=FinalReason.NOT_WANTED), 69)


def test_a_failure_that_came_before_is_what_the_job_ends_by(make_nodes):
    job = make_nodes(2, max_restarts=3).run()
    job.exited(0, 7, tail=job.RAISED)
    cut_off(job, 0, 1)
    [failed] = job.of(p.ReportFailure)
    assert failed.decision == Final(reason=FinalReason.NO_NODE)
    assert job.exit_code == 7


def test_workers_that_had_all_ended_well_are_a_job_that_went_well(make_nodes):
    job = make_nodes(2).run()
    for rank in job.ranks:
        job.exited(rank)
    cut_off(job, 0, 1)
    assert job.exit_code == 0


@pytest.mark.parametrize("come", ["some are here", "all prepare"])
def test_a_job_that_has_not_started_its_workers_ends_at_once(make_nodes, come):
    job = make_nodes(2, max_restarts=3)
    job.step(p.Begin())
    job.gather(*([0] if come == "some are here" else [0, 1]))
    assert job.phase == ("connecting" if come == "some are here" else "preparing")
    actions = cut_off(job, 0)
    assert job.exit_code == 69
    assert not job.of(p.Connect, actions)
    assert mentions(job.notices, WHY)
