from __future__ import annotations

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.events_and_actions import LossKind
from distlaunch.coordinator.policy.losses import Loss, diagnosis_of
from distlaunch.diagnosis.report import one_line, render_report
from tests.facts import mentions


def test_the_report_of_a_lost_node(make_nodes):
    job = make_nodes(3).run()
    job.lost(1)
    job.stop_others(1)
    [failed] = job.of(p.ReportFailure)
    text = render_report(
        failed.diagnosis,
        job_id="j",
        world_size=6,
        attempt=0,
        restarts=0,
        max_restarts=0,
        elapsed_s=12.0,
        run_dir="/runs/j",
        many_hosts=True,
    )
    assert text.splitlines() == [
        "ranks 2-3 of 6 on n1 failed: the node is lost: silent for 10 s",
        "  ranks 0-1,4-5: stopped by us",
        "  hint: its system's log (dmesg, journalctl -k) may tell of a crash; --num-nodes MIN:MAX goes on",
        "    without a lost node, --max-restarts waits for it, --lost-after S gives a network more time than",
        "    10 s",
        "  logs: /runs/j (rank 2 wrote none)",
        "  job j, after 12 s",
    ]
    assert mentions(one_line(failed.diagnosis, many_hosts=True), "ranks 2-3", "n1", "10 s")


def test_a_report_of_thousands_of_lost_nodes_stays_short(make_nodes):
    job = make_nodes(3000, per_node=4).run()
    lost = [node for node in range(3000) if node % 3]
    for node in lost:
        job.lost(node)
    job.stop_others(*lost)
    [failed] = job.of(p.ReportFailure)
    text = render_report(
        failed.diagnosis,
        job_id="j",
        world_size=12_000,
        attempt=0,
        restarts=0,
        max_restarts=0,
        elapsed_s=12.0,
        run_dir="/runs/j",
        many_hosts=True,
    )
    assert len(text) < 1500
    assert len(one_line(failed.diagnosis, many_hosts=True)) < 500


@pytest.mark.parametrize("may_have_bounds", [True, False])
def test_no_bounds_are_advised_where_there_can_be_none(make_nodes, may_have_bounds):
    job = make_nodes(2, may_have_bounds=may_have_bounds).run()
    job.lost(1)
    job.stop_others(1)
    [failed] = job.of(p.ReportFailure)
    assert ("--num-nodes MIN:MAX" in failed.diagnosis.hint) == may_have_bounds
    assert "--max-restarts" in failed.diagnosis.hint


@pytest.mark.parametrize(
    ("kind", "words", "not_words"),
    [
        (LossKind.GONE, "may tell of a crash", "stood still"),
        (LossKind.SILENT, "the node, its launcher or the network stood still", "MIN:MAX"),
        (LossKind.UNHEARD, "this launcher, its machine or the network stood still", "crash"),
        (LossKind.ODD, "something else than this release of distlaunch", "crash"),
    ],
)
def test_the_hint_goes_by_how_a_node_was_lost(kind, words, not_words):
    lost = Loss(node=0, host="n0", why="whatever it says", ranks=(0,), ended_s=1.0, kind=kind)
    hint = diagnosis_of([lost], (), latest={}).hint
    assert words in hint
    assert not_words not in hint


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (LossKind.RAY_DRIVER, "start the job again"),
        (LossKind.RAY_ACTOR, "ray list nodes"),
    ],
)
def test_a_node_of_rays_is_lost_with_a_hint_for_ray(kind, hint):
    lost = Loss(node=0, host="n0", why="whatever it says", ranks=(0,), ended_s=1.0, kind=kind)
    found = diagnosis_of([lost], (), latest={}).hint
    assert found is not None
    assert found.startswith(hint)
    assert "MIN:MAX" not in found
