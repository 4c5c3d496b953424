"""Which node rank each launcher gets, and what the policy hears of them."""

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


def test_the_policy_gets_events_of_other_nodes_and_of_its_own_at_once(meeting):
    meet = meeting()
    meet.joined_launchers.connect(0, 0.0)
    meet.joined_launchers.connect(1, 0.0)
    meet.calls(1, "n1")
    meet.calls(2, "n2")
    meet.pump(lambda: len(meet.of(a.Joined)) == 2)
    assert meet.of(a.Joined) == [a.Joined(node=0, host="n0"), a.Joined(node=1, host="n1")]
    meet.joined_launchers.connect(2, 5.0)
    meet.pump(lambda: True)
    assert meet.joined_launchers.deadline() <= meet.now + 5.0
    meet.now += 5.0
    meet.pump(lambda: len(meet.of(a.Joined)) == 3)


def test_a_rank_that_there_is_not_and_the_coordinators_own_are_turned_away(meeting):
    meet = meeting()
    beyond, own = meet.calls(3, "n3"), meet.calls(0, "other")
    assert (beyond.exit_code, beyond.again) == (EXIT_USAGE, False)
    assert mentions(beyond.text, "rank 3", "2")
    assert (own.exit_code, own.again) == (EXIT_USAGE, False)
    assert mentions(own.text, "rank 0", "n0", "other")
    assert len(meet.notices) == 1
    assert mentions(meet.notices, own.text)


def test_the_second_with_a_rank_is_turned_away_once_the_first_has_answered(meeting):
    meet = meeting()
    first = meet.calls(1, "n1")
    assert meet.calls(1, "n9").again
    for ping in (meet.hears(first, m.Ping), first.hears(m.Ping)[-1]):
        first.say(m.Pong(serial=ping.serial, clock=7.0))
    meet.now += 0.5
    first.say(m.Pong(serial=99, clock=7.0))
    meet.pump(lambda: meet.joined_launchers._node_connections[1].received_at == meet.now)
    answer = meet.calls(1, "n9")
    assert (answer.again, answer.exit_code) == (False, EXIT_USAGE)
    assert mentions(answer.text, "rank 1", "n1", "n9")
    assert not meet.of(a.Lost)


def test_an_answer_does_not_count_for_whoever_calls_later(meeting):
    """A pod is replaced some seconds after its launcher was asked, and had answered, for another's
    sake."""
    meet = meeting()
    meet.joined_launchers.connect(1, 0.0)
    first = meet.calls(1, "n1")
    meet.pump(lambda: meet.of(a.Joined))
    assert meet.calls(1, "n9").again
    answers(meet, first, 1)
    assert not meet.calls(1, "n9").again
    meet.now += PING_TIMEOUT_S
    assert meet.calls(1, "n1", instance="a new pod").again
    meet.now += PING_TIMEOUT_S
    meet.calls(1, "n1", instance="a new pod")
    assert [event.node for event in meet.of(a.Lost)] == [1]


def test_of_launchers_that_are_turned_away_again_and_again_one_line_is_reported(meeting):
    meet = meeting(10)
    for number in range(50):
        assert not meet.calls(0, f"x{number}").again
    meet.joined_launchers.send(0, m.Prepare(attempt=0, port=0))
    for number in range(1, 10):
        meet.calls(number, f"n{number}", command="other", wall=-1.0)
    same_rank, differs = meet.notices
    assert mentions(same_rank, "rank 0", "n0", "x0")
    assert mentions(differs, "n1 differs")
    assert meet.joined_launchers.deadline() <= meet.now + 60.0
    meet.now += 60.0
    meet.pump(lambda: len(meet.notices) > 2)
    same_rank, differs = meet.notices[2:]
    assert mentions(same_rank, "49", "rank 0", "n0", "x49")
    assert mentions(differs, "8", "n9 differs")


def test_the_second_with_a_rank_takes_the_place_of_one_that_does_not_answer(meeting):
    meet = meeting()
    meet.joined_launchers.connect(1, 0.0)
    meet.calls(1, "n1")
    meet.pump(lambda: meet.of(a.Joined))
    assert meet.calls(1, "n1", instance="a new pod").again
    meet.now += PING_TIMEOUT_S / 2
    assert meet.calls(1, "n1", instance="a new pod").again
    meet.now += PING_TIMEOUT_S / 2
    second = meet.calls(1, "n1", instance="a new pod")
    (lost,) = meet.of(a.Lost)
    assert lost.node == 1
    assert mentions(lost.why, "n1", "place")
    meet.joined_launchers.connect(1, 0.0)
    meet.pump(lambda: len(meet.of(a.Joined)) == 2)
    assert second.rank == 1


def test_a_launcher_that_calls_again_has_its_place_at_once(meeting):
    meet = meeting()
    meet.joined_launchers.connect(1, 0.0)
    meet.calls(1, "n1")
    meet.pump(lambda: meet.of(a.Joined))
    again = meet.calls(1, "n1")
    assert again.rank == 1
    assert [event.node for event in meet.of(a.Lost)] == [1]


def test_launchers_without_a_rank_get_the_next_and_keep_it(meeting):
    meet = meeting(4)
    assert [meet.calls(None, host).rank for host in ("x", "y")] == [1, 2]
    meet.links[0].theirs.close()
    meet.pump(lambda: 1 not in meet.joined_launchers._node_connections)
    assert (
        meet.calls(None, "z").rank == 3
    )  # one that is new, before the place of one that may come back
    assert meet.calls(None, "x", instance="a new one").rank == 1
    full = meet.calls(None, "w")
    assert (full.again, full.exit_code) == (True, EXIT_UNAVAILABLE)


# --- what they say


def test_launchers_with_other_options_end_the_job_before_it_has_begun_and_later_only_theirs(
    meeting,
):
    meet = meeting()
    meet.calls(1, "n1", command="other")
    assert meet.of(a.JobRefused)[0].text == "n1 differs"
    meet.joined_launchers.send(0, m.Prepare(attempt=0, port=0))
    late = meet.calls(2, "n2", command="other")
    verdict = meet.hears(late, p.ExitLauncher)
    assert (verdict.exit_code, "n2 differs" in verdict.text) == (EXIT_USAGE, True)
    assert len(meet.of(a.JobRefused)) == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_refused_launcher_is_ignored_and_frees_its_rank(meeting, has_begun):
    meet = meeting()
    if has_begun:
        meet.joined_launchers.send(0, m.Prepare(attempt=0, port=0))
    meet.joined_launchers.connect(1, 0.0)
    refused, other = meet.calls(1, "n1", command="other"), meet.calls(2, "n2")
    refused.say(p.LauncherSignalled(signum=signal.SIGTERM), p.LauncherInfo(**APPLY), GONE)
    answers(meet, refused, 1)
    other.say(p.LauncherSignalled(signum=signal.SIGUSR1))
    meet.pump(lambda: meet.of(a.Signalled))
    assert meet.of(a.Signalled) == [a.Signalled(signum=signal.SIGUSR1, node=2)]
    assert not meet.of(a.Joined)
    assert meet.calls(1, "n1", instance="with the right command").rank == 1
    meet.pump(lambda: meet.of(a.Joined))


def test_a_launcher_that_cannot_take_part_ends_the_job_before_it_has_begun_and_later_is_reported(
    meeting,
):
    meet = meeting()
    meet.calls(1, "n1", ending="script train.py\n not found")
    text = r"node rank 1 (n1) cannot take part: script train.py\n not found"
    meet.pump(lambda: meet.of(a.JobRefused))
    assert meet.of(a.JobRefused) == [a.JobRefused(text=text)]
    meet.joined_launchers.send(0, m.Prepare(attempt=0, port=0))
    meet.calls(1, "n1", ending="script train.py\n not found")
    meet.pump(lambda: meet.notices)
    assert meet.notices == [text]
    assert len(meet.of(a.JobRefused)) == 1
    assert not meet.of(a.Lost)
    assert meet.calls(1, "n1").rank == 1


def test_an_elastic_job_does_without_a_launcher_that_cannot_take_part(meeting):
    meet = meeting()
    meet.joined_launchers._rules.bounds = (1, 3)
    meet.calls(1, "n1", ending="no script")
    meet.pump(lambda: meet.notices)
    assert len(meet.notices) == 1
    assert mentions(meet.notices, "rank 1", "n1", "no script")
    assert not meet.of(a.JobRefused)
