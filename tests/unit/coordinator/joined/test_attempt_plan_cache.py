from __future__ import annotations

import pytest

from distlaunch.core.errors import NodesError


def restart(job, **flaws) -> None:
    job.exited(0, 1, tail=job.RAISED)
    job.pass_time(1.0)
    for rank in job.ranks[1:]:
        job.exited(rank, -15, reported=True)
    job.all_gone()
    job.surveyed(1)
    job.surveyed(0, **flaws)


def test_nodes_with_equal_surveys_get_the_same_plan(make_nodes):
    job = make_nodes(2, max_restarts=1).run()
    restart(job)
    assert job.phase == "preparing"
    assert len(job.composed) == 1
    assert job.policy._run.nodes.attempt_plan is job.composed[0]


@pytest.mark.parametrize(
    "flaws", [{"environ": {"CUDA_VISIBLE_DEVICES": "1"}}, {"script_sha256": "77"}]
)
def test_another_survey_makes_a_new_plan(make_nodes, flaws):
    job = make_nodes(2, max_restarts=1).run()
    restart(job, **flaws)
    assert len(job.composed) == 2


def test_other_nodes_have_another_plan(make_nodes):
    job = make_nodes(3, bounds=(1, 3)).run()
    job.lost(2)
    job.stop_others(2)
    job.survey_all()
    assert [attempt_plan.node_numbers for attempt_plan in job.composed] == [(0, 1, 2), (0, 1)]


def test_an_error_is_not_kept(make_nodes):
    job = make_nodes(2, max_restarts=1).run()
    job.refuses = NodesError("no")
    restart(job, script_sha256="77")
    assert job.exit_code == 69
