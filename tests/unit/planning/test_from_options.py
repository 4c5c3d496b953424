from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from distlaunch.planning.allocation import Origin
from distlaunch.planning.hosts.from_options import discovered_hosts, find
from tests.examples import examples
from tests.facts import mentions

EXAMPLES = examples(60)


def refused(**given_: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        find(**given_)
    assert caught.value.hint
    return caught.value


def test_nothing_given_is_no_allocation():
    assert find() is None


def test_hosts_of_the_command_line():
    found = find(hosts="n[01-03]:4,big:8")
    assert found.source == "flags"
    assert found.part == "all"
    assert [(host.name, host.slots) for host in found.hosts] == [
        ("n01", 4),
        ("n02", 4),
        ("n03", 4),
        ("big", 8),
    ]
    assert found.origins == (
        Origin(value="hosts", shown="n[01-03],big", source="--hosts"),
        Origin(value="slots", shown="4(x3),8", source="--hosts"),
    )


def test_slots_that_only_the_nodes_know_have_no_origin():
    assert [origin.value for origin in find(hosts="a,b").origins] == ["hosts"]


def test_host_file_is_its_own_source():
    found = find(hostfile="hosts.txt", texts={"hosts.txt": "a slots=2\nb slots=2\n"})
    assert found.source == "hostfile"
    assert {origin.source for origin in found.origins} == {"hosts.txt"}
    assert [host.slots for host in found.hosts] == [2, 2]


def test_empty_host_file_is_an_error():
    assert mentions(refused(hostfile="h", texts={"h": "# nobody\n"}).message, "h", "no host")


def test_discovered_hosts():
    found = find(discover="./who.sh --all", discovered="a:2\nb:4\n\n")
    assert found.source == "discover"
    assert [(host.name, host.slots) for host in found.hosts] == [("a", 2), ("b", 4)]
    assert found.origins[0] == Origin(value="hosts", shown="a,b", source="--discover")


@pytest.mark.parametrize("output", [None, "", "\n"])
def test_discovering_nobody_is_an_error_at_the_start_and_none_later(output):
    assert mentions(refused(discover="./who.sh", discovered=output).message, "no host")
    assert discovered_hosts(output or "", "./who.sh") == ()


def test_error_in_discovered_hosts_names_command_and_line():
    error = refused(discover="./who.sh", discovered="a:2\nTraceback (most recent call last):\n")
    assert error.message.startswith(
        "--discover './who.sh', line 2: 'Traceback (most recent call last):'"
    )


@given(st.text(max_size=40), st.text(max_size=20))
@settings(max_examples=EXAMPLES, deadline=None)
def test_nothing_but_a_config_error_comes_of_any_output(output, command):
    try:
        found = find(discover=command, discovered=output)
    except ConfigError as error:
        found, notices = None, error
    if found is None:
        assert notices.message.startswith("--discover ")
        assert notices.message.isprintable()
        assert notices.hint
    else:
        assert all(
            origin.source.isprintable() and origin.shown.isprintable() for origin in found.origins
        )
