"""Which rank is behind at which collective, from the ranks' records."""

from __future__ import annotations

from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.collectives import group_orders
from tests.facts import mentions


def group(enqueued: int, *, pending: int | None = None, number="0", **changed) -> m.ProcessGroup:
    values = {
        "number": number,
        "name": "" if pending is None else "default_pg",
        "enqueued": enqueued,
        "pending": pending,
        "operation": "" if pending is None else "all_reduce",
        "sizes": "" if pending is None else "[[7, 8]]",
        **changed,
    }
    return m.ProcessGroup(**values)


def test_the_rank_with_fewer_collectives_is_behind_the_one_in_which_the_others_wait():
    [order] = group_orders({0: [group(7, pending=7)], 1: [group(6)], 2: [group(7, pending=7)]})
    assert (order.behind, order.enqueued, order.waiting, order.pending) == ((1,), 6, (0, 2), 7)
    assert mentions(
        order.words, "default_pg", "rank 1", 6, "ranks 0,2", 7, "all_reduce", "[[7, 8]]"
    )


def test_ranks_that_run_ahead_wait_in_the_first_collective_that_is_missing():
    ahead = group(9, pending=7, operation="broadcast")
    [order] = group_orders({0: [ahead], 1: [group(6)], 2: [group(8, pending=8)]})
    assert (order.behind, order.waiting, order.pending, order.operation) == (
        (1,),
        (0,),
        7,
        "broadcast",
    )


def test_if_all_are_in_the_same_collective_nobody_is_behind():
    [order] = group_orders({0: [group(7, pending=7)], 1: [group(7, pending=7)]})
    assert (order.behind, order.pending, order.waiting) == ((), 7, (0, 1))
    [order] = group_orders({0: [group(7)], 1: [group(7)]})
    assert (order.behind, order.pending, order.enqueued) == ((), None, 7)
    assert order.words


def test_a_rank_behind_without_anybody_who_waits_is_named_all_the_same():
    [order] = group_orders({0: [group(7)], 1: [group(3)]})
    assert (order.behind, order.waiting, order.pending) == ((1,), (), None)
    assert mentions(order.words, "rank 1", 3)


def test_groups_in_which_a_rank_is_behind_come_first():
    ranks = {
        0: [group(7), group(2, pending=2, number="1")],
        1: [group(7), group(1, number="1")],
    }
    assert [(order.number, order.behind) for order in group_orders(ranks)] == [
        ("1", (1,)),
        ("0", ()),
    ]


def test_a_rank_that_has_begun_no_collective_is_before_the_first():
    waits = group(1, pending=1, operation="barrier", sizes="[]")
    [order] = group_orders({0: [waits], 1: [group(0)], 2: [waits]}, world=(0, 1, 2))
    assert (order.behind, order.waiting, order.enqueued) == ((1,), (0, 2), 0)
    assert mentions(order.words, "rank 1 is behind", "before collective 1", "ranks 0,2", "barrier")
    assert "[]" not in order.words


def test_all_ranks_are_named_as_such_only_if_all_of_the_job_have_a_record():
    waits = group(1, pending=1)
    [order] = group_orders({0: [waits], 2: [waits]}, world=(0, 1, 2))
    assert not order.is_whole
    assert "ranks 0,2 are in" in order.words
    [order] = group_orders({0: [waits], 1: [waits]}, world=(0, 1))
    assert "all ranks are in" in order.words
    [order] = group_orders({2: [group(211)]}, world=(0, 1, 2))
    assert "rank 2 is after collective 211" in order.words


def test_ranks_that_were_read_at_different_times_are_not_behind():
    first = {0: [group(270)], 1: [group(271, pending=271)], 2: [group(271, pending=271)]}
    later = {0: [group(275, pending=275)], 1: [group(275, pending=275)], 2: [group(274)]}
    [order] = group_orders(first, later, world=(0, 1, 2))
    assert (order.behind, order.waiting, order.enqueued, order.furthest) == ((), (), 274, 275)
    assert mentions(order.words, "go on", 274, 275)
    [order] = group_orders(first, first, world=(0, 1, 2))
    assert order.behind == (0,)
    [order] = group_orders(first, {rank: [group(280)] for rank in range(3)}, world=(0, 1, 2))
    assert "all ranks are after collective 280" in order.words


def test_a_difference_of_one_without_anybody_who_waits_is_none():
    [order] = group_orders({0: [group(270)], 1: [group(271)]})
    assert (order.behind, order.enqueued, order.furthest) == ((), 270, 271)


def test_a_group_is_called_by_its_description_if_it_has_one():
    for name, words in (("mesh_dp", "group mesh_dp:"), ("undefined", "group 3:"), ("", "group 3:")):
        assert words in group_orders({0: [group(2, number="3", name=name)]})[0].words


def test_a_group_without_any_collective_is_left_out():
    assert group_orders({0: [group(0)], 1: [group(0)]}) == []


def test_without_process_groups_there_is_nothing_to_say():
    assert group_orders({0: [], 1: []}) == []
