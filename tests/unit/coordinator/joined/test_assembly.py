"""The node rank of each launcher, and the events for the policy."""

from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.joined.launchers import PING_TIMEOUT_S
from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.core.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from tests.facts import mentions
from tests.unit.coordinator.joined.assembling import APPLY, answers
from tests.unit.coordinator.remote_agents import GONE

# --- node ranks


def test_the_policy_gets_events_of_other_nodes_and_of_its_own_at_once(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers.connect(0, 0.0)
    assembly.joined_launchers.connect(1, 0.0)
    assembly.calls(1, "n1")
    assembly.calls(2, "n2")
    assembly.pump(lambda: len(assembly.of(a.Joined)) == 2)
    assert assembly.of(a.Joined) == [a.Joined(node=0, host="n0"), a.Joined(node=1, host="n1")]
    assembly.joined_launchers.connect(2, 5.0)
    assembly.pump(lambda: True)
    assert assembly.joined_launchers.deadline() <= assembly.now + 5.0
    assembly.now += 5.0
    assembly.pump(lambda: len(assembly.of(a.Joined)) == 3)


def test_a_rank_outside_the_job_and_the_coordinators_own_are_rejected(make_assembly):
    assembly = make_assembly()
    beyond, own = assembly.calls(3, "n3"), assembly.calls(0, "other")
    assert (beyond.exit_code, beyond.again) == (EXIT_USAGE, False)
    assert mentions(beyond.text, "rank 3", "2")
    assert (own.exit_code, own.again) == (EXIT_USAGE, False)
    assert mentions(own.text, "rank 0", "n0", "other")
    assert len(assembly.notices) == 1
    assert mentions(assembly.notices, own.text)


def test_a_second_launcher_with_a_rank_is_rejected_once_the_first_has_answered(make_assembly):
    assembly = make_assembly()
    first = assembly.calls(1, "n1")
    assert assembly.calls(1, "n9").again
    for ping in (assembly.sent_to(first, m.Ping), first.sent_to(m.Ping)[-1]):
        first.say(m.Pong(serial=ping.serial, clock=7.0))
    assembly.now += 0.5
    first.say(m.Pong(serial=99, clock=7.0))
    assembly.pump(
        lambda: assembly.joined_launchers._node_connections[1].received_at == assembly.now
    )
    answer = assembly.calls(1, "n9")
    assert (answer.again, answer.exit_code) == (False, EXIT_USAGE)
    assert mentions(answer.text, "rank 1", "n1", "n9")
    assert not assembly.of(a.Lost)


def test_an_answer_does_not_count_for_whoever_calls_later(make_assembly):
    """A pod is replaced some seconds after its launcher was asked, for another's sake, and had
    answered."""
    assembly = make_assembly()
    assembly.joined_launchers.connect(1, 0.0)
    first = assembly.calls(1, "n1")
    assembly.pump(lambda: assembly.of(a.Joined))
    assert assembly.calls(1, "n9").again
    answers(assembly, first, 1)
    assert not assembly.calls(1, "n9").again
    assembly.now += PING_TIMEOUT_S
    assert assembly.calls(1, "n1", instance="a new pod").again
    assembly.now += PING_TIMEOUT_S
    assembly.calls(1, "n1", instance="a new pod")
    assert [event.node for event in assembly.of(a.Lost)] == [1]


def test_repeated_rejections_are_reported_in_one_line(make_assembly):
    assembly = make_assembly(10)
    for number in range(50):
        assert not assembly.calls(0, f"x{number}").again
    assembly.joined_launchers.send(0, m.Prepare(attempt=0, port=0))
    for number in range(1, 10):
        assembly.calls(number, f"n{number}", command="other", wall=-1.0)
    same_rank, differs = assembly.notices
    assert mentions(same_rank, "rank 0", "n0", "x0")
    assert mentions(differs, "n1 differs")
    assert assembly.joined_launchers.deadline() <= assembly.now + 60.0
    assembly.now += 60.0
    assembly.pump(lambda: len(assembly.notices) > 2)
    same_rank, differs = assembly.notices[2:]
    assert mentions(same_rank, "49", "rank 0", "n0", "x49")
    assert mentions(differs, "8", "n9 differs")


def test_the_second_with_a_rank_takes_the_place_of_one_that_does_not_answer(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers.connect(1, 0.0)
    assembly.calls(1, "n1")
    assembly.pump(lambda: assembly.of(a.Joined))
    assert assembly.calls(1, "n1", instance="a new pod").again
    assembly.now += PING_TIMEOUT_S / 2
    assert assembly.calls(1, "n1", instance="a new pod").again
    assembly.now += PING_TIMEOUT_S / 2
    second = assembly.calls(1, "n1", instance="a new pod")
    (lost,) = assembly.of(a.Lost)
    assert lost.node == 1
    assert mentions(lost.why, "n1", "place")
    assembly.joined_launchers.connect(1, 0.0)
    assembly.pump(lambda: len(assembly.of(a.Joined)) == 2)
    assert second.rank == 1


def test_a_launcher_that_calls_again_has_its_place_at_once(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers.connect(1, 0.0)
    assembly.calls(1, "n1")
    assembly.pump(lambda: assembly.of(a.Joined))
    again = assembly.calls(1, "n1")
    assert again.rank == 1
    assert [event.node for event in assembly.of(a.Lost)] == [1]


def test_launchers_without_a_rank_get_the_next_and_keep_it(make_assembly):
    assembly = make_assembly(4)
    assert [assembly.calls(None, host).rank for host in ("x", "y")] == [1, 2]
    assembly.links[0].theirs.close()
    assembly.pump(lambda: 1 not in assembly.joined_launchers._node_connections)
    assert (
        assembly.calls(None, "z").rank == 3
    )  # one that is new, before the place of one that may come back
    assert assembly.calls(None, "x", instance="a new one").rank == 1
    full = assembly.calls(None, "w")
    assert (full.again, full.exit_code) == (True, EXIT_UNAVAILABLE)


# --- what they say


def test_launchers_with_other_options_end_the_job_before_it_has_begun_and_later_only_theirs(
    make_assembly,
):
    assembly = make_assembly()
    assembly.calls(1, "n1", command="other")
    assert assembly.of(a.JobRefused)[0].text == "n1 differs"
    assembly.joined_launchers.send(0, m.Prepare(attempt=0, port=0))
    late = assembly.calls(2, "n2", command="other")
    verdict = assembly.sent_to(late, p.ExitLauncher)
    assert (verdict.exit_code, "n2 differs" in verdict.text) == (EXIT_USAGE, True)
    assert len(assembly.of(a.JobRefused)) == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_refused_launcher_is_ignored_and_frees_its_rank(make_assembly, has_begun):
    assembly = make_assembly()
    if has_begun:
        assembly.joined_launchers.send(0, m.Prepare(attempt=0, port=0))
    assembly.joined_launchers.connect(1, 0.0)
    refused, other = assembly.calls(1, "n1", command="other"), assembly.calls(2, "n2")
    refused.say(p.LauncherSignalled(signum=signal.SIGTERM), p.LauncherInfo(**APPLY), GONE)
    answers(assembly, refused, 1)
    other.say(p.LauncherSignalled(signum=signal.SIGUSR1))
    assembly.pump(lambda: assembly.of(a.Signalled))
    assert assembly.of(a.Signalled) == [a.Signalled(signum=signal.SIGUSR1, node=2)]
    assert not assembly.of(a.Joined)
    assert assembly.calls(1, "n1", instance="with the right command").rank == 1
    assembly.pump(lambda: assembly.of(a.Joined))


def test_a_launcher_that_cannot_take_part_ends_the_job_before_it_has_begun_and_later_is_reported(
    make_assembly,
):
    assembly = make_assembly()
    assembly.calls(1, "n1", ending="script train.py\n not found")
    text = r"node rank 1 (n1) cannot take part: script train.py\n not found"
    assembly.pump(lambda: assembly.of(a.JobRefused))
    assert assembly.of(a.JobRefused) == [a.JobRefused(text=text)]
    assembly.joined_launchers.send(0, m.Prepare(attempt=0, port=0))
    assembly.calls(1, "n1", ending="script train.py\n not found")
    assembly.pump(lambda: assembly.notices)
    assert assembly.notices == [text]
    assert len(assembly.of(a.JobRefused)) == 1
    assert not assembly.of(a.Lost)
    assert assembly.calls(1, "n1").rank == 1


def test_an_elastic_job_does_without_a_launcher_that_cannot_take_part(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers._rules.bounds = (1, 3)
    assembly.calls(1, "n1", ending="no script")
    assembly.pump(lambda: assembly.notices)
    assert len(assembly.notices) == 1
    assert mentions(assembly.notices, "rank 1", "n1", "no script")
    assert not assembly.of(a.JobRefused)
