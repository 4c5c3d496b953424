"""--include and --exclude, with DeepSpeed's own examples, and those of its issues 6671 and 8304."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from distlaunch.planning.hosts.hostfile import parse_hosts
from distlaunch.planning.hosts.include_exclude import Chosen, apply_filters
from tests.examples import examples
from tests.facts import mentions

EXAMPLES = examples(60)
FOUR = "worker-0:4,worker-1:4,worker-2:2,worker-10:4"
DOMAINS = "gpu1.a.x:2,gpu2.a.x:2,gpu2.b.x:2,fs-ib.a.x:2,[fe80::1]:2,10.0.0.1:2"


def brief(chosen: tuple[Chosen, ...]) -> str:
    """Return the remaining hosts and slots in the syntax of the options."""
    return "@".join(f"{each.host.name}:{','.join(map(str, each.slots or ()))}" for each in chosen)


def choose(include: str | None = None, exclude: str | None = None, hosts: str = FOUR) -> str:
    return brief(apply_filters(parse_hosts(hosts), include, exclude))


def refused(
    include: str | None = None, exclude: str | None = None, hosts: str = FOUR
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        choose(include, exclude, hosts)
    assert caught.value.message.startswith(("--include", "--exclude"))
    assert caught.value.message.isprintable()
    assert caught.value.hint
    return caught.value


def test_no_filter_leaves_everything():
    assert choose() == "worker-0:0,1,2,3@worker-1:0,1,2,3@worker-2:0,1@worker-10:0,1,2,3"


@pytest.mark.parametrize(
    ("include", "left"),
    [
        pytest.param("worker-1", "worker-1:0,1,2,3", id="whole host"),
        pytest.param(
            "worker-0@worker-1:0,2", "worker-0:0,1,2,3@worker-1:0,2", id="DeepSpeed's own example"
        ),
        pytest.param(
            "worker-1:2,0@worker-0:1", "worker-0:1@worker-1:0,2", id="order is that of the hosts"
        ),
        pytest.param(
            "worker-0,worker-2", "worker-0:0,1,2,3@worker-2:0,1", id="commas between whole hosts"
        ),
        pytest.param(
            "worker-[0-1]:0-1,3", "worker-0:0,1,3@worker-1:0,1,3", id="ranges of hosts and slots"
        ),
        pytest.param("worker-?:1", "worker-0:1@worker-1:1@worker-2:1", id="question mark"),
        pytest.param("*1*", "worker-1:0,1,2,3@worker-10:0,1,2,3", id="star"),
        pytest.param(
            "*", "worker-0:0,1,2,3@worker-1:0,1,2,3@worker-2:0,1@worker-10:0,1,2,3", id="all"
        ),
        pytest.param("worker-0:0@worker-0:2", "worker-0:0,2", id="a host twice"),
        pytest.param("worker-0@worker-0:2", "worker-0:0,1,2,3", id="a host whole and in part"),
        pytest.param("WORKER-2", "worker-2:0,1", id="no case"),
        pytest.param(" worker-2 @ worker-0:1 ", "worker-0:1@worker-2:0,1", id="blanks"),
    ],
)
def test_include_leaves_what_it_names(include, left):
    assert choose(include) == left


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ("worker-0@worker-[1-2]", "worker-10:0,1,2,3"),
        ("worker-0:1-3@worker-2:0@worker-1*", "worker-0:0@worker-2:1"),
        ("worker-2:0-1", "worker-0:0,1,2,3@worker-1:0,1,2,3@worker-10:0,1,2,3"),
    ],
)
def test_exclude_takes_away_what_it_names(exclude, left):
    assert choose(exclude=exclude) == left


def test_exclude_takes_away_from_what_include_leaves():
    assert choose("worker-[0-1]:0-2", "worker-1@worker-0:1") == "worker-0:0,2"
    assert choose("worker-0", "worker-2") == "worker-0:0,1,2,3"


@pytest.mark.parametrize(
    ("include", "left"),
    [
        ("gpu1", "gpu1.a.x:0,1"),
        ("gpu2.b.x", "gpu2.b.x:0,1"),
        ("gpu*", "gpu1.a.x:0,1@gpu2.a.x:0,1@gpu2.b.x:0,1"),
        ("*-ib", "fs-ib.a.x:0,1"),
        ("*.a.x:1", "gpu1.a.x:1@gpu2.a.x:1@fs-ib.a.x:1"),
        ("[fe80::1]:1", "fe80::1:1"),
        ("10.0.0.1", "10.0.0.1:0,1"),
    ],
)
def test_domain_may_be_left_out_and_addresses_named(include, left):
    assert choose(include, hosts=DOMAINS) == left


def test_name_without_domain_that_two_hosts_have_is_refused():
    assert "'gpu2' may be gpu2.a.x and gpu2.b.x" in refused("gpu2", hosts=DOMAINS).message


def test_name_that_matches_nothing_names_the_nearest():
    error = refused("worker-0@wroker-2")
    assert mentions(error.message, "--include 'worker-0@wroker-2'", "'wroker-2'")
    assert mentions(error.hint, "'worker-2'", "worker-[0-2,10]")
    assert refused(exclude="worker-[0-3]").message.endswith("'worker-3'")
    assert refused("zz").hint == "there are worker-[0-2,10]"
    assert refused("zz", hosts="localhost:2").hint == "there is localhost"
    assert "no host '10'" in refused("10", hosts=DOMAINS).message
    assert "no host 'gpu9*'" in refused("gpu9*", hosts=DOMAINS).message


@pytest.mark.parametrize(
    ("include", "exclude"),
    [
        (None, "*"),
        ("worker-0", "worker-0"),
        ("worker-0:1", "worker-0:0-3"),
        (None, "worker-[0-2,10]"),
    ],
)
def test_leaving_nothing_is_refused(include, exclude):
    error = refused(include, exclude)
    assert error.message.endswith("left")
    assert repr(exclude) in error.message


@pytest.mark.parametrize(
    ("include", "shown"),
    [
        ("worker-2:2", "worker-2 has no slot 2"),
        ("worker-?:0-3", "worker-2 has no slot 3"),
        ("", "a host is missing"),
        ("worker-0@", "a host is missing"),
        ("worker-0,", "a host is missing"),
        (":0", "a host is missing"),
        ("worker-0:", "'' is not a slot"),
        ("worker-0:0,worker-1", "'worker-1' is not a slot"),
        ("worker-0:-1", "'-1' is not a slot"),
        ("worker-0:3-1", "ends before it starts"),
        ("worker-0:99999999", "is more than any host has"),
        ("worker-0:0-65535,0", "more slots than any host has"),
        ("worker-0,worker-1:0", "slots for several hosts at once"),
        ("worker-0:0:1", "more than one colon"),
        ("fe80::1", "more than one colon"),
        ("worker-[0", "a bracket is not closed"),
        ("[fe80::1]x", "expected :SLOTS after the address"),
        ("worker-[3-1]", "runs backwards"),
        ("worker;0", "has ';'"),
        ("w[0-2000]*", "no host 'w0*'"),
    ],
)
def test_an_invalid_filter_is_refused(include, shown):
    assert shown in refused(include).message


def test_more_patterns_than_anyone_means_are_refused():
    assert "more than 1,000 patterns" in refused("@".join(["w*"] * 1001)).message


def test_hosts_of_unknown_size_keep_the_filters():
    def of(include, exclude):
        return [
            (c.host.name, c.slots, c.without)
            for c in apply_filters(parse_hosts("a,b"), include, exclude)
        ]

    assert of(None, None) == [("a", None, ()), ("b", None, ())]
    assert of("a:2,0", None) == [("a", (0, 2), ())]
    assert of("a", "a:1") == [("a", None, (1,))]
    assert of("a:0,1", "a:1") == [("a", (0,), ())]
    assert of(None, "b@a:0") == [("a", None, (0,))]


PIECES = st.sampled_from(
    [
        *"ab01:,@[]*?- .\n\x00",
        "a",
        "b",
        "a:0",
        "@b",
        "[0-1]",
        "[::1]",
        "a[0-65535]",
        "\u0661",
        "99999",
    ]
)
TEXTS = st.one_of(st.none(), st.text(max_size=40), st.lists(PIECES, max_size=12).map("".join))


@given(TEXTS, TEXTS)
@settings(max_examples=EXAMPLES, deadline=None)
def test_nothing_but_a_config_error_comes_of_any_filter(include, exclude):
    hosts = parse_hosts("a:2,b:1,a0,a1.b:3,[::1]:2")
    try:
        chosen = apply_filters(hosts, include, exclude)
    except ConfigError as error:
        chosen = ()
        shown = error
    if chosen:
        places = [hosts.index(each.host) for each in chosen]
        assert places == sorted(set(places))
        assert all(
            each.slots is None or each.slots == tuple(sorted(set(each.slots))) for each in chosen
        )
    else:
        assert shown.message.startswith(("--include", "--exclude"))
        assert shown.message.isprintable()
        assert shown.hint
