from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.console.repeated_blocks import RepeatedBlocks, comparison_key, without_rank
from tests.examples import examples

PEER = "[rank{0}]: RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:{1}"


def traceback(rank: int, port: int) -> list[bytes]:
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in <module>',
        "    dist.all_reduce(x)",
    ]
    return [*(f"[rank{rank}]: {line}".encode() for line in lines), PEER.format(rank, port).encode()]


class Shown:
    def __init__(self) -> None:
        self.lines: list[tuple[object, bytes]] = []
        self.repeats = RepeatedBlocks(
            lambda who, lines: self.lines.extend((who, line) for line in lines)
        )


@pytest.fixture
def shown():
    return Shown()


def test_the_first_block_is_shown_at_once_and_its_repetitions_become_one_line_with_a_count(shown):
    first = traceback(0, 41001)
    shown.repeats.add(0, first, 0.0)
    assert shown.lines == [(0, line) for line in first]
    for rank in range(1, 8):
        for line in traceback(rank, 41001 + rank):  # all of them line by line, half a second apart
            shown.repeats.add(rank, [line], rank / 10)
        shown.repeats.flush_due(rank / 10)
    for now in (1.0, 2.5):
        shown.repeats.flush_due(now)
    assert shown.lines[len(first) :] == [
        (frozenset(range(1, 8)), b"... 7 ranks repeated 4 lines of rank 0 above (numbers differ)")
    ]


def test_blocks_that_come_line_by_line_from_all_ranks_are_folded_too(shown):
    blocks = [traceback(rank, 41000 + rank) for rank in range(4)]
    for at, lines in enumerate(zip(*blocks, strict=True)):
        for rank, line in enumerate(lines):
            shown.repeats.add(rank, [line], at / 5)
    for now in (2.0, 3.1):
        shown.repeats.flush_due(now)
    assert [who for who, _ in shown.lines] == [0, 0, 0, 0, frozenset({1, 2, 3})]


def test_a_traceback_that_ends_differently_is_shown_in_full(shown):
    shown.repeats.add(
        0, [b"Traceback (most recent call last):", b"  File x", b"ValueError: bad sample 17"], 0.0
    )
    shown.repeats.add(
        1, [b"Traceback (most recent call last):", b"  File x", b"ValueError: bad sample 23"], 0.5
    )
    shown.repeats.flush(1.0)
    assert [who for who, _ in shown.lines] == [0, 0, 0, 1, 1, 1]
    assert shown.lines[-1] == (1, b"ValueError: bad sample 23")


def test_lines_after_a_repetition_are_shown_below_it(shown):
    shown.repeats.add(0, [b"block one", b"block two"], 0.0)
    shown.repeats.add(1, [b"block one", b"block two", b"mine", b"more"], 0.5)
    shown.repeats.flush_due(0.9)
    assert shown.lines[2:] == [
        (1, b"... repeated 2 lines of rank 0 above"),
        (1, b"mine"),
        (1, b"more"),
    ]


def test_a_single_equal_line_is_shown_soon(shown):
    shown.repeats.add(0, [b"epoch 1"], 0.0)
    shown.repeats.add(1, [b"epoch 1"], 0.5)
    assert shown.repeats.flush_due(0.5) == pytest.approx(0.8)
    shown.repeats.flush_due(0.8)
    assert shown.lines == [(0, b"epoch 1"), (1, b"epoch 1")]


def test_old_lines_and_lines_of_the_same_rank_are_no_repetition(shown):
    shown.repeats.add(0, [b"block one", b"block two"], 0.0)
    shown.repeats.add(0, [b"block one", b"block two"], 1.0)
    assert len(shown.lines) == 4
    shown.repeats.add(1, [b"block one", b"block two"], 20.0)
    assert len(shown.lines) == 6


def test_a_rank_that_goes_on_alone_after_an_equal_line_is_shown_within_half_a_second(shown):
    shown.repeats.add(0, [b"loading data"], 0.0)
    shown.repeats.add(1, [b"loading data"], 0.1)
    for step in range(1, 400):
        now = 0.1 + step / 5
        shown.repeats.add(1, [b"step %d" % step], now)
        shown.repeats.flush_due(now)
        own = [line for who, line in shown.lines if who == 1]
        assert step - len(own) + 1 <= 3
    shown.repeats.flush(now)
    assert [line for who, line in shown.lines if who == 1] == [
        b"loading data",
        *(b"step %d" % at for at in range(1, 400)),
    ]


def test_equal_lines_of_one_rank_are_all_shown_when_the_first_of_them_is_due(shown):
    shown.repeats.add(0, [b"loading data"], 0.0)
    shown.repeats.add(1, [b"loading data"] * 20, 0.1)
    assert shown.repeats.flush_due(0.1) == pytest.approx(0.4)
    assert shown.repeats.flush_due(0.41) is None
    assert shown.lines == [(0, b"loading data")] + [(1, b"loading data")] * 20


def test_many_new_lines_end_a_candidate_at_once(shown):
    shown.repeats.add(0, [b"loading data"], 0.0)
    burst = [b"step %d" % step for step in range(100)]
    shown.repeats.add(1, [b"loading data", *burst], 0.1)
    assert [line for who, line in shown.lines if who == 1] == [b"loading data", *burst]


def test_lines_that_the_first_rank_shows_later_belong_to_the_repetition(shown):
    shown.repeats.add(0, [b"block one"], 0.0)
    shown.repeats.add(1, [b"block one", b"block two"], 0.1)
    shown.repeats.add(0, [b"block two"], 0.2)
    shown.repeats.flush_due(0.41)
    shown.repeats.flush(2.0)
    assert shown.lines[2:] == [(1, b"... repeated 2 lines of rank 0 above")]


@pytest.mark.parametrize(("length", "apart"), [(10, 0.1), (10, 0.001), (4000, 0.05)])
def test_an_endless_repetition_is_reported_periodically(shown, length, apart):
    now = 0.0
    for step in range(1000):
        now += apart
        line = b"%d " % step + b"x" * length
        shown.repeats.add(0, [line], now)
        shown.repeats.add(1, [line], now)
        shown.repeats.flush_due(now)
    shown.repeats.flush(now)
    own = [line for who, line in shown.lines if who == 1]
    counts = [int(line.split()[2]) if line.startswith(b"...") else 1 for line in own]
    assert sum(counts) == 1000
    assert max(counts) <= 400
    assert max(counts) * apart <= 10.5
    assert max(counts) * length <= 300_000
    assert [line for who, line in shown.lines if who == 0][-1].startswith(b"999 ")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (b"[rank1]: Traceback (most", b"[rank12]: Traceback (most", True),
        (
            b"frame #3: f + 0x88 (0x7f12 in libtorch.so)",
            b"frame #3: f + 0x88 (0x7fab in libtorch.so)",
            True,
        ),
        (PEER.format(1, 5).encode(), PEER.format(2, 6).encode(), True),
        (b"step 1 loss 0.5", b"step 1 loss 0.6", False),
        (b"ValueError: bad sample 1", b"ValueError: bad sample 2", False),
        (b"connected to peer 1", b"connected to peer 2", False),
    ],
)
def test_lines_are_alike_if_they_differ_in_what_each_rank_has_for_itself(one, other, equal):
    assert (comparison_key(one) == comparison_key(other)) == equal


def test_only_torchs_own_prefix_is_removed():
    assert without_rank(b"[rank3]: a") == b"a"
    assert without_rank(b"[rank3] a") == b"[rank3] a"
    assert without_rank(b"[ranks]: a") == b"[ranks]: a"


LINES = st.sampled_from([b"alpha", b"beta line", b"gamma", b"delta", b"epsilon"])


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, frozenset({0, 1}), frozenset({1, 2})]),
            st.lists(LINES, max_size=6),
            st.floats(0, 0.6),
        ),
        max_size=30,
    )
)
def test_each_ranks_own_order_never_changes(calls):
    shown = Shown()
    written: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    now = 0.0
    for who, lines, wait in calls:
        now += wait
        shown.repeats.add(who, lines, now)
        shown.repeats.flush_due(now)
        for rank in (who,) if isinstance(who, int) else who:
            written[rank] += lines
    shown.repeats.flush(now)
    for rank, lines in written.items():
        own = [
            line
            for who, line in shown.lines
            if who == rank or (isinstance(who, frozenset) and rank in who)
        ]
        at = 0
        for line in own:
            if line.startswith(b"..."):
                count = int(line.partition(b"repeated ")[2].split()[0])
                at += count
            else:
                assert lines[at] == line
                at += 1
        assert at == len(lines)
