from __future__ import annotations

import pytest

from distlaunch.console.prefixes import Prefixes, parse_output_ranks
from distlaunch.core.errors import ConfigError
from tests.facts import mentions


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", None),
        ("none", frozenset()),
        ("0", frozenset({0})),
        ("0,2-5", frozenset({0, 2, 3, 4, 5})),
        (" 1 , 3 - 4 ", frozenset({1, 3, 4})),
        ("2-2,2", frozenset({2})),
        ("007", frozenset({7})),
    ],
)
def test_output_option_names_ranks(text, ranks):
    assert parse_output_ranks(text, 8) == ranks


@pytest.mark.parametrize(
    "text", ["", ",", "0,", "a", "1-", "-1", "1-2-3", "some", "1.5", "²", "0x1"]
)
def test_text_that_is_not_a_rank_is_refused(text):
    with pytest.raises(ConfigError) as raised:
        parse_output_ranks(text, 8)
    assert mentions(raised.value.message, "not a rank")
    assert raised.value.exit_code == 2


def test_a_missing_rank_is_reported_with_the_existing_ones():
    with pytest.raises(ConfigError) as raised:
        parse_output_ranks("0,2-9", 8)
    assert "no rank 9" in raised.value.message
    assert mentions(raised.value.hint, "ranks 0-7")


def test_a_rank_of_many_digits_is_refused_at_once():
    with pytest.raises(ConfigError, match="no rank 9999"):
        parse_output_ranks("9" * 5000, 8)


def test_a_backward_range_is_refused_with_the_forward_one():
    with pytest.raises(ConfigError) as raised:
        parse_output_ranks("5-2", 8)
    assert raised.value.hint == "write 2-5"


def test_prefixes_name_ranks_shortly():
    prefixes = Prefixes(colour=False)
    assert prefixes(3) == b"[3] "
    assert prefixes(frozenset({0, 2, 3})) == b"[0,2-3] "


def test_a_ranks_colour_is_stable_and_not_that_of_errors():
    first, second = Prefixes(colour=True), Prefixes(colour=True)
    seen = {first(rank) for rank in range(10)}
    assert all(first(rank) == second(rank) for rank in range(30))
    assert len({prefix.partition(b"m")[0] for prefix in seen}) == 10
    assert not any(prefix.startswith((b"\x1b[31m", b"\x1b[91m")) for prefix in seen)
