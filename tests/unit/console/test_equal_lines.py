from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.console.equal_lines import LineFolder
from tests.examples import examples

LINES = st.lists(
    st.sampled_from([b"", b"a", b"b", b"epoch 1", b"x" * 300]), min_size=1, max_size=30
)


class Shown:
    def __init__(self) -> None:
        self.lines: list[tuple[frozenset[int], bytes]] = []

    def __call__(self, who, lines) -> None:
        ranks = frozenset({who}) if isinstance(who, int) else who
        self.lines += [(ranks, line) for line in lines]

    def of(self, rank: int) -> list[bytes]:
        return [line for ranks, line in self.lines if rank in ranks]


def folder(ranks: int) -> tuple[LineFolder, Shown]:
    shown = Shown()
    return LineFolder(range(ranks), shown), shown


def test_a_line_that_all_ranks_have_is_shown_at_once_and_once():
    fold, shown = folder(3)
    for rank in range(3):
        fold.add(rank, b"hello", 0.0)
    assert shown.lines == [(frozenset({0, 1, 2}), b"hello")]


def test_a_line_that_some_ranks_have_is_shown_after_a_tenth_of_a_second():
    fold, shown = folder(3)
    fold.add(0, b"hello", 0.0)
    fold.add(2, b"hello", 0.09)
    assert fold.flush_due(0.09) == 0.1
    assert shown.lines == []
    assert fold.flush_due(0.1) is None
    assert shown.lines == [(frozenset({0, 2}), b"hello")]


def test_a_late_line_is_shown_separately():
    fold, shown = folder(2)
    fold.add(0, b"hello", 0.0)
    fold.flush_due(0.1)
    fold.add(1, b"hello", 0.11)
    fold.flush_due(1.0)
    assert shown.lines == [(frozenset({0}), b"hello"), (frozenset({1}), b"hello")]


def test_a_rank_never_joins_a_line_that_stands_before_its_own_previous_one():
    fold, shown = folder(2)
    fold.add(0, b"a\nb", 0.0)
    fold.add(1, b"b\na", 0.0)
    fold.flush()
    assert shown.of(0) == [b"a", b"b"]
    assert shown.of(1) == [b"b", b"a"]
    assert (frozenset({0, 1}), b"b") in shown.lines


def test_repeated_lines_are_paired_in_order():
    fold, shown = folder(2)
    fold.add(0, b"x\nx\nx", 0.0)
    fold.add(1, b"x\nx", 0.0)
    fold.flush()
    assert shown.lines == [(frozenset({0, 1}), b"x")] * 2 + [(frozenset({0}), b"x")]


def test_a_rank_that_has_ended_is_not_waited_for():
    fold, shown = folder(3)
    fold.add(0, b"bye", 0.0)
    fold.add(1, b"bye", 0.0)
    assert shown.lines == []
    fold.ended(2)
    assert shown.lines == [(frozenset({0, 1}), b"bye")]


def test_last_lines_of_ranks_that_end_one_after_the_other_are_folded():
    fold, shown = folder(2)
    fold.add(0, b"bye", 0.0)
    fold.ended(0)
    fold.add(1, b"bye", 0.01)
    fold.ended(1)
    assert shown.lines == [(frozenset({0, 1}), b"bye")]


def test_big_blocks_fold_where_they_are_equal():
    fold, shown = folder(2)
    common = [b"line %d" % number for number in range(3000)]
    mine = {rank: list(common) for rank in (0, 1)}
    mine[1][1000] = b"other"
    for rank in (0, 1):
        fold.add(rank, b"\n".join(mine[rank]), 0.0)
    assert [shown.of(rank) for rank in (0, 1)] == [mine[0], mine[1]]
    assert sum(len(ranks) == 2 for ranks, _ in shown.lines) == 2999


def test_big_blocks_that_are_out_of_step_are_realigned():
    fold, shown = folder(2)
    common = [b"line %d" % number for number in range(3000)]
    fold.add(0, b"\n".join(common), 0.0)
    fold.add(1, b"\n".join([b"only rank 1", *common]), 0.0)
    fold.flush()
    assert sum(len(ranks) == 2 for ranks, _ in shown.lines) >= 2999
    assert shown.of(1) == [b"only rank 1", *common]


def test_pending_single_lines_go_in_step_into_the_blocks():
    fold, shown = folder(2)
    common = [b"line %d" % number for number in range(3000)]
    fold.add(0, b"\n".join(common[:10]), 0.0)
    fold.add(1, b"\n".join(common[:4]), 0.0)
    fold.add(0, b"\n".join(common[10:]), 0.0)
    fold.add(1, b"\n".join(common[4:]), 0.0)
    assert shown.lines == [(frozenset({0, 1}), line) for line in common]


def test_a_big_block_of_one_rank_waits_a_tenth_of_a_second_at_most():
    fold, shown = folder(2)
    lines = [b"%d" % number for number in range(5000)]
    fold.add(0, b"\n".join(lines), 5.0)
    assert fold.flush_due(5.05) == 5.1
    assert shown.lines == []
    assert fold.flush_due(5.1) is None
    assert shown.of(0) == lines


def test_the_backlog_is_bounded_when_one_rank_floods():
    fold, shown = folder(2)
    block = b"\n".join([b"z" * 99] * 600)
    for _ in range(100):
        fold.add(0, block, 0.0)
    pending = 100 * 600 - len(shown.lines)
    assert pending * 100 < 2 << 20


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), LINES, st.booleans(), st.sampled_from([1, 1, 1, 40])),
        max_size=25,
    )
)
def test_every_rank_keeps_its_lines_and_their_order(steps):
    fold, shown = folder(3)
    written: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    now = 0.0
    for rank, some, wait, times in steps:
        lines = some * times
        fold.add(rank, b"\n".join(lines), now)
        written[rank] += lines
        now += 0.06 if wait else 0.0
        due = fold.flush_due(now)
        assert due is None or now < due <= now + 0.1
    fold.flush()
    assert {rank: shown.of(rank) for rank in written} == written
