"""Host files of every dialect, with lines of the documentation of Open MPI, Horovod, DeepSpeed and
Hydra."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from distlaunch.planning.allocation import Host
from distlaunch.planning.hosts.hostfile import parse_hosts, read_hostfile, read_lines
from tests.examples import examples
from tests.facts import mentions

EXAMPLES = examples(60)


def brief(hosts: tuple[Host, ...]) -> list[tuple]:
    """Return the set fields of each host."""
    return [
        tuple(v for v in (host.name, host.slots, host.user, host.port) if v is not None)
        for host in hosts
    ]


def read(text: str) -> list[tuple]:
    return brief(read_hostfile(text, "hosts.txt"))


def refusal(call, *args) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    assert caught.value.message.isprintable()
    assert caught.value.hint
    return caught.value


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "host"),
    [
        pytest.param("a slots=4", ("a", 4), id="Open MPI, Horovod, DeepSpeed"),
        pytest.param("a:4", ("a", 4), id="Horovod, Hydra"),
        pytest.param("a", ("a",), id="bare"),
        pytest.param("a slots=4 max_slots=8", ("a", 4), id="Open MPI: max_slots"),
        pytest.param("a slots=4 max-slots=8", ("a", 4), id="Open MPI: max-slots"),
        pytest.param("a slots = 4  sockets = 2 cores=8", ("a", 4), id="Open MPI: blanks around ="),
        pytest.param("a cpu=4", ("a", 4), id="Open MPI: cpu"),
        pytest.param("a slots=4 port=2222", ("a", 4, 2222), id="Open MPI: port"),
        pytest.param("a username=bob", ("a", "bob"), id="Open MPI: username"),
        pytest.param("bob@a slots=2", ("a", 2, "bob"), id="user@"),
        pytest.param("a:4 user=bob ifname=ib0 binding=cell:1", ("a", 4, "bob"), id="Hydra"),
        pytest.param("a:4:port=2222", ("a", 4, 2222), id="as in --hosts"),
        pytest.param("w slots=2 # x", ("w", 2), id="trailing comment"),
        pytest.param("w slots=2#x", ("w", 2), id="comment without a blank"),
        pytest.param("w slots=2 // x", ("w", 2), id="Open MPI: // comment"),
        pytest.param("\tw\tslots=2\t", ("w", 2), id="tabs"),
        pytest.param("w\tslots\t=\t2", ("w", 2), id="tabs around ="),
        pytest.param("w slots=2\r", ("w", 2), id="CRLF"),
        pytest.param("\ufeffw slots=2", ("w", 2), id="BOM"),
        pytest.param("w\u00a0slots=2", ("w", 2), id="no-break space"),
        pytest.param("w slots\u00a0=\u00a02 sockets= 1", ("w", 2), id="no-break spaces around ="),
        pytest.param("[::1]:2", ("::1", 2), id="IPv6 in brackets"),
        pytest.param("[::1] slots=2", ("::1", 2), id="IPv6 in brackets, slots="),
        pytest.param("2001:db8::1 slots=2", ("2001:db8::1", 2), id="IPv6 as Open MPI has it"),
        pytest.param("u@[fe80::1%eth0]:4", ("fe80::1%eth0", 4, "u"), id="IPv6 with zone"),
        pytest.param("10.0.0.1 slots=8", ("10.0.0.1", 8), id="IPv4"),
        pytest.param(
            "job-worker-0.job-worker.default.svc slots=8",
            ("job-worker-0.job-worker.default.svc", 8),
            id="MPIJob",
        ),
    ],
)
def test_line_of_every_dialect_is_understood(line, host):
    assert read(line) == [host]


def test_dialects_may_be_mixed_and_order_is_the_files():
    assert read("# c\r\nz:4\r\n\r\na slots=2\r\n  m slots=1 # x\r\n") == [
        ("z", 4),
        ("a", 2),
        ("m", 1),
    ]


def test_range_of_hosts_shares_its_line():
    assert read("n[09-11] slots=8 port=22") == [("n09", 8, 22), ("n10", 8, 22), ("n11", 8, 22)]


def test_blanks_in_the_brackets_of_a_range_are_passed_over():
    assert read("n[01, 03] slots=2\nm[ 3-4 ]:1\nh0-h2\n") == read(
        "n[01,03] slots=2\nm[3-4]:1\nh0-h2\n"
    )
    assert mentions(refusal(read, "n[1 2]\n").message, "bracket")
    assert brief(parse_hosts("n[01, 03]:2,h0-h2:1")) == [("n01", 2), ("n03", 2), ("h0-h2", 1)]


def test_host_listed_again_adds_its_slots_where_it_was_first():
    assert read("b slots=2\na slots=1\nB slots=3\n[::1]:1\n[0:0::1]:1") == [
        ("b", 5),
        ("a", 1),
        ("::1", 2),
    ]


def test_a_host_per_slot_is_counted_once_any_host_repeats():
    assert read("n2\nn2\nn1\nn2\n") == [("n2", 3), ("n1", 1)]
    assert read("n2\nn1\n") == [("n2",), ("n1",)]
    assert read("n2\nn2\nm slots=4") == [("n2", 2), ("m", 4)]


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("a\n\nw slots=2abc", 3, "from 1 to 65536, not '2abc'"),
        ("w slots=0", 1, "not '0'"),
        ("w slots=-1", 1, "not '-1'"),
        ("w slots=", 1, "not ''"),
        ("w slots=65537", 1, "not '65537'"),
        ("w slots=\u0662", 1, "from 1 to 65536"),
        ("w:", 1, "not ''"),
        ("w gpus=3", 1, "the key 'gpus' is not known"),
        ("w 4", 1, "expected key=value, found '4'"),
        ("w 4 all.q@w UNDEFINED", 1, "expected key=value, found '4'"),
        ("w:4 slots=4", 1, "slots is given twice"),
        ("w slots=1 cpus=4", 1, "slots is given twice"),
        ("w slots=4 max_slots=2", 1, "more slots (4) than the largest number allows (2)"),
        ("w slots=4 sockets=x", 1, "sockets has to be a whole number"),
        ("w ifname=", 1, "ifname= has no value"),
        ("w port=0", 1, "the port of SSH has to be a whole number from 1 to 65535"),
        ("w port=65536", 1, "the port of SSH"),
        ("bob@w user=al", 1, "it names two users"),
        ("b;b@w", 1, "is not a user name"),
        ("-bob@w", 1, "is not a user name"),
        ("^w", 1, "this is not a host"),
        ("+n2", 1, "this is not a host"),
        ("-oProxyCommand", 1, "this is not a host"),
        (":4", 1, "the host is missing"),
        ("10.0.0.300", 1, "'10.0.0.300' is not an IPv4 address"),
        ("10.0.0.[254-256]", 1, "'10.0.0.256' is not an IPv4 address"),
        ("10.0.0.01", 1, "'10.0.0.01' is not an IPv4 address"),
        ("10.0.1:2", 1, "'10.0.1' is not an IPv4 address"),
        ("[::1", 1, "expected ] and optionally"),
        ("[::1]4", 1, "expected ] and optionally"),
        ("[::x]", 1, "is not an IPv6 address"),
        ("[::1%$(x)]", 1, "is not an IPv6 address"),
        ("n[3-1] slots=2", 1, "runs backwards"),
        ("a\x00b", 1, "has '\\x00'"),
        (
            "a slots=1\na",
            2,
            "'a' is named with a number of slots and without (the first is hosts.txt:1)",
        ),
        ("a port=1\nb\na port=2", 3, "different port of SSH, 1 and 2 (the first is hosts.txt:1)"),
        ("a slots=2\na slots=2 port=2", 2, "different port of SSH, none and 2"),
        ("a:1\nbob@a:1", 2, "different user, none and 'bob'"),
        ("a:65536\na:1", 2, "more than 65,536 slots"),
        ("n[1-65536]\n" * 65, 65, "named more than 4,194,304 times"),
    ],
)
def test_error_names_file_line_and_what_was_expected(text, line, shown):
    error = refusal(read, text)
    assert error.message.startswith(f"hosts.txt:{line}: ")
    assert shown in error.message


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "\ufeff", "  \t\r\n"])
def test_file_that_names_no_host_is_refused(text):
    assert mentions(refusal(read, text).message, "hosts.txt")


def test_hostile_path_and_line_are_shown_safely():
    error = refusal(read_hostfile, "a \x1b]0;x\x07=1", "ho\nsts")
    assert error.message.startswith("ho\\nsts:1: 'a \\x1b]0;x\\x07=1'")


def test_lines_of_a_script_may_name_nobody():
    assert read_lines("\n", "line ") == ()
    assert brief(read_lines("a:2\nb\n", "line ")) == [("a", 2), ("b",)]


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:2", [("a", 4), ("b", 2)]),
        ("a", [("a",)]),
        ("a:4, b:2 ", [("a", 4), ("b", 2)]),
        ("user@h:2", [("h", 2, "user")]),
        ("me@corp@h:2", [("h", 2, "me@corp")]),
        ("CORP\\me@h:2", [("h", 2, "CORP\\me")]),
        ("[::1]:2", [("::1", 2)]),
        ("[::1]", [("::1",)]),
        ("user@[fe80::1%eth0]:4", [("fe80::1%eth0", 4, "user")]),
        ("n[01-03]:8", [("n01", 8), ("n02", 8), ("n03", 8)]),
        ("n[1,3]:2,b", [("n1", 2), ("n3", 2), ("b",)]),
        ("[1-2]:2", [("1", 2), ("2", 2)]),
        ("10.0.0.[1-2]:2", [("10.0.0.1", 2), ("10.0.0.2", 2)]),
        ("n[1-2]-ib:4", [("n1-ib", 4), ("n2-ib", 4)]),
        ("a:4:port=2222", [("a", 4, 2222)]),
        ("a:port=2222", [("a", 2222)]),
        ("[::1]:4:port=2222", [("::1", 4, 2222)]),
        ("a:2,b:1,a:3", [("a", 5), ("b", 1)]),
        ("a,a,b", [("a", 2), ("b", 1)]),
    ],
)
def test_hosts_of_the_command_line_are_understood(text, hosts):
    assert brief(parse_hosts(text)) == hosts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "an entry is empty"),
        (",", "an entry is empty"),
        ("a:4,,b:2", "an entry is empty"),
        ("a:4,", "an entry is empty"),
        ("a:4, ,b", "an entry is empty"),
        ("a b:2", "'a b' has ' '"),
        ("a: 2", "'a: 2': the number of slots"),
        ("x,a:0", "'a:0': the number of slots has to be a whole number from 1 to 65536, not '0'"),
        ("a:-1", "'a:-1': "),
        ("a:2abc", "'a:2abc': "),
        ("a:", "'a:': "),
        ("a:4096000", "'a:4096000': "),
        ("a:22:4", "slots is given twice"),
        ("::1", "an IPv6 address needs brackets"),
        ("fe80::1:4", "an IPv6 address needs brackets"),
        ("@a", "'' is not a user name"),
        ("n[1", "has no partner"),
        ("n[1-2", "has no partner"),
        ("a:2,a:2:port=3", "different port of SSH, none and 3"),
        ("a:2:port=4,a:2:port=3", "different port of SSH, 4 and 3"),
        ("a:2,a", "with a number of slots and without"),
        ("n[1-65536],m[1-65536],o[1-65536],p[1-65536],q", "more than 262,144 hosts"),
    ],
)
def test_an_invalid_host_is_refused_by_name(text, shown):
    error = refusal(parse_hosts, text)
    assert error.message.startswith("--hosts: ")
    assert shown in error.message


def test_the_user_names_the_environment():
    assert refusal(parse_hosts, "a:0", "DISTLAUNCH_HOSTS").message.startswith(
        "DISTLAUNCH_HOSTS: 'a:0'"
    )


# --- anything else ------------------------------------------------------------------------------------------------

KEYS = ["slots", "slots=", "port=", "user=", "max_slots=9", "binding=", "cpu=4"]
HOSTS = ["n[1-3]", "[::1]", "::1", "fe80::1%e", "10.0.0.1", "300.1.1.1", "a slots=2\n", "a\n", "b@"]
ODD = ["\u0664", "\ufeff", "65536", "99999999999", "// x", "\udc80"]
PIECES = st.sampled_from([*"ab4:,@[]=# \t\n\r\x00/.%-^+", *KEYS, *HOSTS, *ODD])
TEXTS = st.one_of(st.text(max_size=80), st.lists(PIECES, max_size=25).map("".join))


def check(outcome: tuple[Host, ...] | ConfigError, *places: str) -> None:
    if isinstance(outcome, ConfigError):
        assert outcome.message.startswith(places)
        assert outcome.message.isprintable()
        assert outcome.hint
        return
    assert outcome
    assert len({host.name.lower() for host in outcome}) == len(outcome)
    for host in outcome:
        assert host.name.isascii()
        assert not host.name.startswith("-")
        assert host.slots is None or host.slots > 0
        assert host.port is None or 0 < host.port < 65_536
        assert host.user is None or not host.user.startswith("-")


def outcome_of(call, *args) -> tuple[Host, ...] | ConfigError:
    try:
        return call(*args)
    except ConfigError as error:
        return error


@given(TEXTS)
@settings(max_examples=EXAMPLES, deadline=None)
def test_nothing_but_a_config_error_comes_of_any_file(text):
    check(outcome_of(read_hostfile, text, "f"), "f: ", "f:")


@given(TEXTS)
@settings(max_examples=EXAMPLES, deadline=None)
def test_nothing_but_a_config_error_comes_of_any_flag(text):
    check(outcome_of(parse_hosts, text), "--hosts: ")


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,6}(\.[a-z]{1,3}){0,2}", fullmatch=True)


@given(
    st.dictionaries(NAMES, st.integers(1, 64), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_dialect_says_the_same(slots, rng):
    forms = ["{}:{}", "{} slots={}", "{}  slots = {} # c", "\t{}\tslots={} max_slots=99\r"]
    lines = "\n".join(rng.choice(forms).format(*each) for each in slots.items())
    flag = ",".join(f"{name}:{count}" for name, count in slots.items())
    assert read(lines) == brief(parse_hosts(flag)) == list(slots.items())
