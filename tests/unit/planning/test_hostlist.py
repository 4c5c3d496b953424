"""Slurm's node lists, with the output of ``scontrol show hostnames`` 22.05; tests/integration asks
it again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import (
    MOST_HOSTS,
    expand_nodelist,
    fold_counts,
    fold_hosts,
    parse_counts,
)
from tests.examples import examples

EXAMPLES = examples(60)
WHERE = "SLURM_JOB_NODELIST"


def expand(text: str) -> list[str]:
    return expand_nodelist(text, where=WHERE)


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        expand(text)
    error = caught.value
    assert error.message.startswith(f"{WHERE}: ")
    assert error.message.isprintable()
    assert error.hint
    return error


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("gpu-a[08-10]", "gpu-a08 gpu-a09 gpu-a10"),
        ("n[9-011]", "n9 n10 n11"),
        ("n[008-011]", "n008 n009 n010 n011"),
        ("n[01,3,005-006]", "n01 n3 n005 n006"),
        ("n[1-2][3-4]", "n13 n14 n23 n24"),
        ("rack[0-1]node[0-1]", "rack0node0 rack0node1 rack1node0 rack1node1"),
        ("x[1-2]y[1-2]z[1-2]", "x1y1z1 x1y1z2 x2y1z1 x2y1z2 x1y2z1 x1y2z2 x2y2z1 x2y2z2"),
        (
            "a[1-2]b[1-2]c[1-2]d[1]",
            "a1b1c1d1 a2b1c1d1 a1b2c1d1 a2b2c1d1 a1b1c2d1 a2b1c2d1 a1b2c2d1 a2b2c2d1",
        ),
        ("cpu1,gpu-a[08,10]", "cpu1 gpu-a08 gpu-a10"),
        ("a1,a1,a2", "a1 a1 a2"),
        ("n[1-2],n[1-2]", "n1 n2 n1 n2"),
        ("[1-3]", "1 2 3"),
        (",n1,,n2,", "n1 n2"),
        ("a1 a2, a3\n", "a1 a2 a3"),
        ("n1.cluster.example", "n1.cluster.example"),
    ],
)
def test_list_expands_as_scontrol_has_it(text, names):
    assert expand(text) == names.split()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[01, 03]", "n01 n03"),
        ("n[ 1-2 ,4 ],m", "n1 n2 n4 m"),
        ("h0-h2", "h0-h2"),
        ("h0-2,x", "h0-2 x"),
    ],
)
def test_blanks_in_brackets_are_passed_over_and_a_hyphen_outside_is_part_of_a_name(text, names):
    assert expand(text) == names.split()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("rack[1-2]-ib", "rack1-ib rack2-ib"),
        ("c[3,5]x", "c3x c5x"),
        ("a[1-2]b[1-2]c", "a1b1c a1b2c a2b1c a2b2c"),
    ],
)
def test_suffix_after_the_last_bracket_is_taken(text, names):
    assert expand(text) == names.split()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "names no host"),
        (" , ", "names no host"),
        ("n[3-1]", "the range '3-1' runs backwards"),
        ("n[]", "an entry in brackets is empty"),
        ("n[1,]", "an entry in brackets is empty"),
        ("n[1-9:2]", "'1-9:2' is no number or range"),
        ("n[1-9/2]", "'1-9/2' is no number or range"),
        ("n[a-c]", "'a-c' is no number or range"),
        ("n[1-]", "'1-' is no number or range"),
        ("n[-1]", "'-1' is no number or range"),
        ("n[1 -2]", "'1 -2' is no number or range"),
        ("n[\u0661]", "is no number or range"),
        ("a1,n[1", "the bracket at character 5 has no partner"),
        ("n1]", "the bracket at character 3 has no partner"),
        ("n[[1]]", "has no partner"),
        ("n[0-65536]", "the range '0-65536' has more than 65,536 hosts"),
        ("n[1-65536]m[1-5]", "more than 262,144 hosts"),
        (f"n[{'1,' * MOST_HOSTS}x]", "more than 262,144 hosts"),  # counted before all of it is read
        ("n[99999999999999999999]", "is too large"),
        ("(null)", "has '(', which no host name has"),
        ("-oProxyCommand=x", "has '='"),
        ("-l", "is no host name"),
        ("a\x1b[2J", "has '\\x1b'"),
        ("a\x1bb", "has '\\x1b'"),
        ("a" * 300, "is longer than a host name may be"),
        ("n[1]" * 200, "names that are too long"),
    ],
)
def test_a_contradiction_is_refused(text, shown):
    assert shown in refused(text).message


def test_list_may_be_as_large_as_the_largest_cluster_and_no_larger():
    assert len(expand("n[0-65535],m[0-65535],o[0-65535],p[0-65535]")) == MOST_HOSTS
    refused("n[0-65535],m[0-65535],o[0-65535],p[0-65535],q")


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ("n01 n02 n03 n04 n07", "n[01-04,07]"),
        ("n9 n10 n11", "n[9-11]"),
        ("n08 n09 n10", "n[08-10]"),
        ("n3 n1 n2", "n[3,1-2]"),
        ("n1 n1 n2", "n1,n[1-2]"),
        ("n1 n2 n2", "n[1-2,2]"),
        ("n1 n01", "n[1,01]"),
        ("rack1-ib rack2-ib", "rack[1-2]-ib"),
        ("n1.c2.example n2.c2.example", "n[1-2].c2.example"),
        ("a0b0 a0b1 a1b0 a1b1", "a0b[0-1],a1b[0-1]"),
        ("10.0.0.1 10.0.0.2 10.0.0.4", "10.0.0.[1-2,4]"),
        ("fe80::1 fe80::2", "fe80::1,fe80::2"),
        ("login n1 n2 gpu", "login,n[1-2],gpu"),
        ("n1", "n1"),
        ("", ""),
    ],
)
def test_names_fold_for_people(names, folded):
    assert fold_hosts(names.split()) == folded


@given(
    st.lists(
        st.from_regex(r"[a-c]{0,1}[0-9]{1,3}([.x-][0-9]{0,2}){0,2}", fullmatch=True),
        min_size=1,
        max_size=30,
    )
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_folded_names_expand_to_the_same_names(names):
    assert expand(fold_hosts(names)) == names


def test_folding_keeps_within_what_can_be_expanded():
    names = [f"n{number}" for number in range(70_000)]
    assert fold_hosts(names) == "n[0-65535,65536-69999]"
    assert expand(fold_hosts(names)) == names


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("2(x3),1", [2, 2, 2, 1]),
        ("4", [4]),
        ("4,1", [4, 1]),
        ("1(x2)", [1, 1]),
        ("16(x2),8(x1)", [16, 16, 8]),
    ],
)
def test_counts_per_node_are_read_and_written(text, counts):
    assert parse_counts(text, where="SLURM_TASKS_PER_NODE") == counts
    assert parse_counts(fold_counts(counts)) == counts


@pytest.mark.parametrize(
    "text", ["", "2(x3", "2x3", "2(3)", "-1", "0", "2(x0)", "1,,2", "1(x999999999)", "9" * 30, "a"]
)
def test_an_invalid_count_is_refused(text):
    with pytest.raises(ConfigError, match=r"^SLURM_TASKS_PER_NODE: ") as caught:
        parse_counts(text, where="SLURM_TASKS_PER_NODE")
    assert caught.value.hint


def test_unknown_counts_are_shown_as_such():
    assert fold_counts([4, None, None, 2]) == "4,?(x2),2"


PIECES = st.sampled_from(
    [
        *"n,[]-0189:. ()\n\x00@/",
        "[1-3]",
        "[0",
        "65536",
        "n[1-",
        "\u0661",
        "é",
        "99999999999999999999",
    ]
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=15).map("".join))


def outcome_of(call, text: str) -> list | ConfigError:
    try:
        return call(text, where=WHERE)
    except ConfigError as error:
        return error


def check_error(error: ConfigError) -> None:
    assert error.message.startswith(f"{WHERE}: ")
    assert error.message.isprintable()
    assert error.hint


@given(TEXTS)
@settings(max_examples=EXAMPLES, deadline=None)
def test_nothing_but_a_config_error_comes_of_any_list(text):
    names = outcome_of(expand_nodelist, text)
    if isinstance(names, ConfigError):
        check_error(names)
    else:
        assert names
        assert all(name.isascii() and (name[0].isalnum() or name[0] == "_") for name in names)


COUNTS = st.lists(st.sampled_from([*"0129(x),x ", "(x3)", "(x2),", "\u0662"]), max_size=10).map(
    "".join
)


@given(st.one_of(st.text(max_size=30), COUNTS))
@settings(max_examples=EXAMPLES, deadline=None)
def test_nothing_but_a_config_error_comes_of_any_counts(text):
    counts = outcome_of(parse_counts, text)
    if isinstance(counts, ConfigError):
        check_error(counts)
    else:
        assert counts
        assert all(count > 0 for count in counts)


@given(st.lists(st.text(max_size=20), max_size=10))
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_names_can_be_shown(names):
    assert fold_hosts(names).isprintable()
