from __future__ import annotations

import pytest

from distlaunch.jobs.top import RankOrder, sorted_ranks, view_of
from tests.unit.jobs.test_top_screen import snapshot, usage


def test_rates_are_between_two_answers():
    view = view_of(snapshot(4, 2), usage(4, 2, 4), usage(4, 2, 2))
    assert [row.cpu_percent for row in view.ranks] == [50.0, 60.0, 70.0, 80.0]
    first, second = view.nodes
    assert (first.received_per_s, first.sent_per_s, second.sent_per_s) == (
        30 << 20,
        1 << 20,
        2 << 20,
    )
    assert (first.read_per_s, first.written_per_s) == (4096, 1 << 30)
    assert (first.cpu_percent, first.agent_cpu_percent) == (110.0, 0.5)


def test_with_one_answer_there_are_no_rates_and_the_processor_use_since_the_start():
    view = view_of(snapshot(4, 1), usage(4, 1, 2))
    assert view.nodes[0].received_per_s is None
    assert view.ranks[0].cpu_percent == pytest.approx(11 / 60 * 100, abs=0.1)


def test_a_worker_that_was_restarted_has_no_rate_with_the_one_before():
    earlier = usage(4, 1, 0)
    earlier["nodes"][0]["usage"]["workers"][0]["pid"] = 1
    view = view_of(snapshot(4, 1), usage(4, 1, 2), earlier)
    assert view.ranks[0].cpu_percent is None
    earlier = {**usage(4, 1, 0), "attempt": 0}
    view = view_of(snapshot(4, 1), usage(4, 1, 2), earlier)
    assert view.nodes[0].sent_per_s is None


def test_without_any_answer_the_ranks_are_there():
    view = view_of(snapshot(4, 2), None, name="exp-2")
    assert (view.name, view.job_id) == ("exp-2", snapshot(4, 2)["job_id"])
    assert [row.rank for row in view.ranks] == [0, 1, 2, 3]
    assert {row.rss_bytes for row in view.ranks} == {None}
    assert view.nodes[0].used_bytes is None


def test_a_node_that_did_not_answer_is_silent():
    view = view_of(snapshot(4, 2), usage(4, 2, 2, silent=1), usage(4, 2, 0))
    assert [node.state for node in view.nodes] == ["up", "silent"]
    assert view.unanswered == ("gpu001.cluster",)


def test_only_running_ranks_are_stragglers():
    given = snapshot(4, 1)
    given["workers"][2]["state"] = "ended"
    assert not any(row.straggler for row in view_of(given, None).ranks)
    given["workers"][2]["state"] = "running"
    assert [row.rank for row in view_of(given, None).ranks if row.straggler] == [2]


def test_equal_step_times_of_the_running_ranks_are_known():
    given = snapshot(4, 1)
    assert not view_of(given, None).equal_step_times
    given["workers"][2]["state"] = "ended"
    assert view_of(given, None).equal_step_times


@pytest.mark.parametrize(
    ("order", "first"),
    [
        (RankOrder.SLOWEST, 6),
        (RankOrder.RANK, 0),
        (RankOrder.CPU, 7),
        (RankOrder.MEMORY, 7),
        (RankOrder.SILENT, 3),
    ],
)
def test_ranks_can_be_sorted(order, first):
    view = view_of(snapshot(8, 1), usage(8, 1, 2), usage(8, 1, 0))
    assert sorted_ranks(view.ranks, order)[0].rank == first
    assert len(sorted_ranks(view.ranks, order)) == 8


def test_ranks_without_a_figure_come_last():
    given = snapshot(4, 1)
    given["workers"][0]["step_s"] = None
    assert sorted_ranks(view_of(given, None).ranks, RankOrder.SLOWEST)[-1].rank == 0
