from __future__ import annotations

import pytest

from distlaunch.coordinator.policy.job_nodes import JobNode, why_not, without
from distlaunch.transport.connect_errors import ConnectFailure
from tests.facts import mentions


def failures(*hosts):
    return [ConnectFailure(host=host, step="connect", text="connection refused") for host in hosts]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["n1"], "--exclude n1 goes on"),
        (["n1", "login"], "--exclude n1,login goes on"),
        ([f"n{number:02}" for number in range(1, 13)], "--exclude 'n[01-12]' goes on"),
        (["fd00::1"], "--exclude '[fd00::1]' goes on"),
    ],
)
def test_all_hosts_that_fail_are_in_the_hint_as_a_list(hosts, words):
    assert words in without(failures(*hosts))


def test_the_hint_counts_the_hosts_that_it_leaves_out():
    names = [f"{chr(97 + number % 26)}{chr(97 + number // 26)}-node" for number in range(300)]
    hint = without(failures(*names))
    listed, _, rest = hint.partition("--exclude ")[2].partition(" and ")
    assert len(listed.split(",")) + int(rest.split()[0]) == 300
    assert rest.split()[1] == "more"


def test_a_node_that_was_logged_in_to_is_not_called_unreachable():
    node = JobNode(0, "n1")
    assert mentions(why_not(node, waited_s=12.0).text, "12 s")
    node.logged_in = True
    found = why_not(node, waited_s=12.0)
    assert found.step == "agent"
    assert mentions(found.text, "12 s")
    assert mentions(found.hint, "login shell")
