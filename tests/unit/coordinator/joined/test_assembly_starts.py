"""An attempt of launchers that have met: started, heard, lost, ended."""

from __future__ import annotations

import signal
import threading

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.connections import START_S
from distlaunch.core.model.record import replace
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import encode
from tests.facts import mentions
from tests.unit.coordinator.joined.assembling import APPLY, Peer, answers
from tests.unit.coordinator.remote_agents import GONE, WITHIN_S, exited


def commenced(meet, workers: int = 2) -> Peer:
    """Return a joined launcher that was asked to start so many workers."""
    meet.joined_launchers.connect(1, 0.0)
    peer = meet.calls(1, "n1")
    meet.pump(lambda: meet.of(a.Joined))
    start = p.StartWorkers(
        attempt=0,
        restarts=0,
        node_rank=0,
        local_ranks=tuple(range(workers)),
        hosts=("n1",),
        slots=(workers,),
        master_addr="n0",
        master_port=5,
        interface="",
    )
    meet.joined_launchers.send(1, start)
    meet.hears(peer, p.StartWorkers)
    return peer


def says(meet, peer, *messages) -> None:
    """Send these messages of a launcher and pass the events to the policy."""
    before = len(meet.of(a.FromNode))
    peer.say(*messages)
    meet.pump(lambda: len(meet.of(a.FromNode)) == before + len(messages))


def test_a_launcher_whose_workers_never_start_is_lost_though_it_answers(meeting):
    meet = meeting()
    meet.joined_launchers.silence_s = 1e9
    peer = commenced(meet)
    says(meet, peer, m.Started(attempt=0, pids={0: 5}))
    assert meet.joined_launchers.deadline() <= meet.now + START_S
    meet.now += START_S - 1.0
    answers(meet, peer, 1)
    assert not meet.of(a.Lost)
    meet.now += 0.5
    meet.pump(lambda: meet.of(a.Lost))
    (lost,) = meet.of(a.Lost)
    assert lost.node == 1
    assert mentions(lost.why, "60 s")


@pytest.mark.parametrize(
    "last",
    [
        [m.Started(attempt=0, pids={0: 5}), m.Started(attempt=0, pids={1: 6})],
        [exited(6.0, rank=1)],
        [GONE],
    ],
    ids=["all have started", "one has ended", "all are gone"],
)
def test_a_launcher_whose_workers_have_started_or_ended_is_not_late(meeting, last):
    meet = meeting()
    meet.joined_launchers.silence_s = 1e9
    peer = commenced(meet)
    says(meet, peer, *last)
    meet.now += 10 * START_S
    answers(meet, peer, 1)
    assert not meet.of(a.Lost)


def test_a_launcher_that_says_what_takes_long_has_more_time(meeting):
    meet = meeting()
    meet.joined_launchers.silence_s = 1e9
    peer = commenced(meet)
    began = meet.now
    for elapsed_s in (15.0, 30.0, 60.0, 120.0, 240.0):
        meet.now = began + elapsed_s
        says(meet, peer, m.AgentNotice(text="still importing torch", warning=True))
    meet.now = began + 240.0 + 240.0 + START_S - 1.0
    answers(meet, peer, 1)
    assert not meet.of(a.Lost)
    meet.now += 1.0
    meet.pump(lambda: meet.of(a.Lost))


def test_restarts_that_a_launcher_knows_of_are_no_more_than_the_job_may_have(meeting):
    meet = meeting()
    meet.joined_launchers.connect(1, 0.0)
    meet.calls(1, "n1", attempt=1 << 19, restarts=1 << 19)
    meet.pump(lambda: meet.of(a.Joined))
    assert meet.of(a.AttemptsKnown) == [a.AttemptsKnown(attempt=1 << 19, restarts=3)]


def test_attempts_that_a_launcher_knows_of_are_reported_before_it_has_joined(meeting):
    meet = meeting()
    meet.joined_launchers.connect(1, 0.0)
    meet.calls(1, "n1", attempt=4, restarts=2, wall=-1.0)
    meet.pump(lambda: meet.of(a.Joined))
    assert [
        type(event) for event in meet.events if isinstance(event, (a.AttemptsKnown, a.Joined))
    ] == [
        a.AttemptsKnown,
        a.Joined,
    ]
    assert meet.of(a.AttemptsKnown) == [a.AttemptsKnown(attempt=4, restarts=2)]
    assert len(meet.notices) == 1
    assert mentions(meet.notices, "n1")


def test_only_messages_of_admitted_launchers_are_used_and_times_are_on_our_clock(meeting):
    meet = meeting()
    meet.joined_launchers.connect(1, 0.0)
    first, second = meet.calls(1, "n1"), meet.calls(2, "n2")
    start = p.StartWorkers(
        attempt=0,
        restarts=0,
        node_rank=1,
        local_ranks=(0,),
        hosts=("n0", "n1"),
        slots=(1, 1),
        master_addr="n0",
        master_port=5,
        interface="",
    )
    meet.joined_launchers.send(1, start)
    second.say(
        GONE, p.LauncherSignalled(signum=signal.SIGTERM), p.LauncherSignalled(signum=signal.SIGKILL)
    )
    first.say(exited(6.0, rank=1))
    meet.pump(lambda: meet.of(a.FromNode) and meet.of(a.Signalled))
    [event] = meet.of(a.FromNode)
    assert (event.node, event.message) == (1, replace(exited(6.0, rank=1), ended=99.0))
    assert meet.of(a.Signalled) == [a.Signalled(signum=signal.SIGTERM, node=2)]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (m.Started(attempt=0, pids={2: 5}), "it tells of rank 2, which it does not run"),
        (exited(1.0, rank=2), "it tells of rank 2, which it does not run"),
        (exited(1.0, returncode=300), "no process ends with 300"),
    ],
)
def test_a_launcher_that_says_of_the_attempt_what_cannot_be_is_lost(meeting, message, why):
    meet = meeting()
    commenced(meet, 1).say(message, exited(2.0), GONE)
    meet.pump(lambda: meet.of(a.Lost))
    assert meet.of(a.Lost) == [a.Lost(node=1, why=why)]
    assert not meet.of(a.FromNode)


@pytest.mark.parametrize("attempt", [-2, 3, 5])
def test_words_of_another_coordinators_attempt_do_no_harm(meeting, attempt):
    meet = meeting()
    commenced(meet, 1).say(
        exited(2.0, rank=7, attempt=attempt), m.AttemptEnded(attempt=attempt, left=()), GONE
    )
    meet.pump(lambda: meet.of(a.FromNode))
    assert [event.message for event in meet.of(a.FromNode)] == [GONE]
    assert not meet.of(a.Lost)


def test_commands_never_leave_the_coordinator(meeting):
    meet = meeting()
    meet.joined_launchers.connect(1, 0.0)
    peer = meet.calls(1, "n1")
    survey = m.Survey(
        serial=5,
        workdir="/",
        pythons=("p",),
        script="s",
        program="",
        run_dir="/r",
        gpus=False,
        topology=False,
    )
    for node in (0, 1):
        meet.joined_launchers.send(node, survey)
    assert meet.own.handled == [survey]
    assert meet.hears(peer, p.SurveyNode) == p.SurveyNode(serial=5)


def test_a_launcher_that_is_gone_is_lost_and_one_that_talks_nonsense_too(meeting):
    meet = meeting()
    for node in (1, 2):
        meet.joined_launchers.connect(node, 0.0)
    first, second = meet.calls(1, "n1"), meet.calls(2, "n2")
    meet.pump(lambda: len(meet.of(a.Joined)) == 2)
    first.link.theirs.close()
    second.link.theirs.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    meet.pump(lambda: len(meet.of(a.Lost)) == 2)
    assert {event.node for event in meet.of(a.Lost)} == {1, 2}


def test_why_a_launcher_that_has_called_was_dropped_is_reported_to_whoever_waits_for_it(meeting):
    meet = meeting()
    meet.joined_launchers.connect(1, 0.0)
    meet.calls(
        1, "n1", first=encode(p.LauncherInfo(**APPLY)).replace(b'"attempt":-1', b'"attempt":-7')
    )
    meet.pump(lambda: meet.of(a.Unreachable))
    [unreachable] = meet.of(a.Unreachable)
    failure = unreachable.failure
    assert (unreachable.node, failure.host, failure.step, failure.passing) == (
        1,
        "node rank 1 (n1)",
        "call",
        True,
    )
    assert failure.text
    meet.joined_launchers.connect(1, 0.0)
    meet.calls(1, "n1")
    meet.pump(lambda: meet.of(a.Joined))


def test_at_the_end_all_get_the_exit_code_and_are_waited_for(meeting):
    meet = meeting()
    peers = [meet.calls(rank, f"n{rank}") for rank in (1, 2)]
    meet.joined_launchers.verdict = p.ExitLauncher(exit_code=7, text="why")
    heard = []

    def leave(peer) -> None:
        while not peer.hears(p.ExitLauncher):
            pass
        heard.append((peer.rank, peer.hears(p.ExitLauncher)))
        peer.link.theirs.close()

    leaving = [threading.Thread(target=leave, args=(peer,)) for peer in peers]
    for thread in leaving:
        thread.start()
    meet.joined_launchers.close()
    for thread in leaving:
        thread.join(WITHIN_S)
    assert meet.own.closed
    assert sorted(heard, key=str) == [
        (rank, [p.ExitLauncher(exit_code=7, text="why")]) for rank in (1, 2)
    ]
    assert not meet.joined_launchers._node_connections
    meet.joined_launchers.close = lambda: None
