"""Attempts of connected launchers."""

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
from tests.unit.coordinator.joined.assembling import APPLY, FakeLauncher, answers
from tests.unit.coordinator.remote_agents import GONE, WITHIN_S, exited


def commenced(assembly, workers: int = 2) -> FakeLauncher:
    """Return a joined launcher that was asked to start so many workers."""
    assembly.joined_launchers.connect(1, 0.0)
    launcher = assembly.calls(1, "n1")
    assembly.pump(lambda: assembly.of(a.Joined))
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
    assembly.joined_launchers.send(1, start)
    assembly.sent_to(launcher, p.StartWorkers)
    return launcher


def send_all(assembly, launcher, *messages) -> None:
    """Send these messages of a launcher and pass the events to the policy."""
    before = len(assembly.of(a.FromNode))
    launcher.say(*messages)
    assembly.pump(lambda: len(assembly.of(a.FromNode)) == before + len(messages))


def test_a_launcher_whose_workers_never_start_is_lost_though_it_answers(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers.silence_s = 1e9
    launcher = commenced(assembly)
    send_all(assembly, launcher, m.Started(attempt=0, pids={0: 5}))
    assert assembly.joined_launchers.deadline() <= assembly.now + START_S
    assembly.now += START_S - 1.0
    answers(assembly, launcher, 1)
    assert not assembly.of(a.Lost)
    assembly.now += 0.5
    assembly.pump(lambda: assembly.of(a.Lost))
    (lost,) = assembly.of(a.Lost)
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
def test_a_launcher_whose_workers_have_started_or_ended_is_not_late(make_assembly, last):
    assembly = make_assembly()
    assembly.joined_launchers.silence_s = 1e9
    launcher = commenced(assembly)
    send_all(assembly, launcher, *last)
    assembly.now += 10 * START_S
    answers(assembly, launcher, 1)
    assert not assembly.of(a.Lost)


def test_a_launcher_that_reports_a_slow_step_has_more_time(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers.silence_s = 1e9
    launcher = commenced(assembly)
    began = assembly.now
    for elapsed_s in (15.0, 30.0, 60.0, 120.0, 240.0):
        assembly.now = began + elapsed_s
        send_all(assembly, launcher, m.AgentNotice(text="still importing torch", warning=True))
    assembly.now = began + 240.0 + 240.0 + START_S - 1.0
    answers(assembly, launcher, 1)
    assert not assembly.of(a.Lost)
    assembly.now += 1.0
    assembly.pump(lambda: assembly.of(a.Lost))


def test_restarts_that_a_launcher_knows_of_are_no_more_than_the_job_may_have(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers.connect(1, 0.0)
    assembly.calls(1, "n1", attempt=1 << 19, restarts=1 << 19)
    assembly.pump(lambda: assembly.of(a.Joined))
    assert assembly.of(a.AttemptsKnown) == [a.AttemptsKnown(attempt=1 << 19, restarts=3)]


def test_attempts_that_a_launcher_knows_of_are_reported_before_it_has_joined(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers.connect(1, 0.0)
    assembly.calls(1, "n1", attempt=4, restarts=2, wall=-1.0)
    assembly.pump(lambda: assembly.of(a.Joined))
    assert [
        type(event) for event in assembly.events if isinstance(event, (a.AttemptsKnown, a.Joined))
    ] == [
        a.AttemptsKnown,
        a.Joined,
    ]
    assert assembly.of(a.AttemptsKnown) == [a.AttemptsKnown(attempt=4, restarts=2)]
    assert len(assembly.notices) == 1
    assert mentions(assembly.notices, "n1")


def test_only_messages_of_admitted_launchers_are_used_and_times_are_on_our_clock(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers.connect(1, 0.0)
    first, second = assembly.calls(1, "n1"), assembly.calls(2, "n2")
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
    assembly.joined_launchers.send(1, start)
    second.say(
        GONE, p.LauncherSignalled(signum=signal.SIGTERM), p.LauncherSignalled(signum=signal.SIGKILL)
    )
    first.say(exited(6.0, rank=1))
    assembly.pump(lambda: assembly.of(a.FromNode) and assembly.of(a.Signalled))
    [event] = assembly.of(a.FromNode)
    assert (event.node, event.message) == (1, replace(exited(6.0, rank=1), ended=99.0))
    assert assembly.of(a.Signalled) == [a.Signalled(signum=signal.SIGTERM, node=2)]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (m.Started(attempt=0, pids={2: 5}), "it tells of rank 2, which it does not run"),
        (exited(1.0, rank=2), "it tells of rank 2, which it does not run"),
        (exited(1.0, returncode=300), "no process ends with 300"),
    ],
)
def test_a_launcher_with_an_impossible_message_about_the_attempt_is_lost(
    make_assembly, message, why
):
    assembly = make_assembly()
    commenced(assembly, 1).say(message, exited(2.0), GONE)
    assembly.pump(lambda: assembly.of(a.Lost))
    assert assembly.of(a.Lost) == [a.Lost(node=1, why=why)]
    assert not assembly.of(a.FromNode)


@pytest.mark.parametrize("attempt", [-2, 3, 5])
def test_words_of_another_coordinators_attempt_do_no_harm(make_assembly, attempt):
    assembly = make_assembly()
    commenced(assembly, 1).say(
        exited(2.0, rank=7, attempt=attempt), m.AttemptEnded(attempt=attempt, left=()), GONE
    )
    assembly.pump(lambda: assembly.of(a.FromNode))
    assert [event.message for event in assembly.of(a.FromNode)] == [GONE]
    assert not assembly.of(a.Lost)


def test_commands_never_leave_the_coordinator(make_assembly):
    assembly = make_assembly()
    assembly.joined_launchers.connect(1, 0.0)
    launcher = assembly.calls(1, "n1")
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
        assembly.joined_launchers.send(node, survey)
    assert assembly.own.handled == [survey]
    assert assembly.sent_to(launcher, p.SurveyNode) == p.SurveyNode(serial=5)


def test_a_launcher_that_is_gone_or_sends_invalid_messages_is_lost(make_assembly):
    assembly = make_assembly()
    for node in (1, 2):
        assembly.joined_launchers.connect(node, 0.0)
    first, second = assembly.calls(1, "n1"), assembly.calls(2, "n2")
    assembly.pump(lambda: len(assembly.of(a.Joined)) == 2)
    first.link.theirs.close()
    second.link.theirs.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    assembly.pump(lambda: len(assembly.of(a.Lost)) == 2)
    assert {event.node for event in assembly.of(a.Lost)} == {1, 2}


def test_why_a_launcher_that_has_called_was_dropped_is_reported_to_whoever_waits_for_it(
    make_assembly,
):
    assembly = make_assembly()
    assembly.joined_launchers.connect(1, 0.0)
    assembly.calls(
        1, "n1", first=encode(p.LauncherInfo(**APPLY)).replace(b'"attempt":-1', b'"attempt":-7')
    )
    assembly.pump(lambda: assembly.of(a.Unreachable))
    [unreachable] = assembly.of(a.Unreachable)
    failure = unreachable.failure
    assert (unreachable.node, failure.host, failure.step, failure.passing) == (
        1,
        "node rank 1 (n1)",
        "call",
        True,
    )
    assert failure.text
    assembly.joined_launchers.connect(1, 0.0)
    assembly.calls(1, "n1")
    assembly.pump(lambda: assembly.of(a.Joined))


def test_at_the_end_all_get_the_exit_code_and_are_waited_for(make_assembly):
    assembly = make_assembly()
    launchers = [assembly.calls(rank, f"n{rank}") for rank in (1, 2)]
    assembly.joined_launchers.verdict = p.ExitLauncher(exit_code=7, text="why")
    received_types = []

    def leave(launcher) -> None:
        while not launcher.sent_to(p.ExitLauncher):
            pass
        received_types.append((launcher.rank, launcher.sent_to(p.ExitLauncher)))
        launcher.link.theirs.close()

    leaving = [threading.Thread(target=leave, args=(launcher,)) for launcher in launchers]
    for thread in leaving:
        thread.start()
    assembly.joined_launchers.close()
    for thread in leaving:
        thread.join(WITHIN_S)
    assert assembly.own.closed
    assert sorted(received_types, key=str) == [
        (rank, [p.ExitLauncher(exit_code=7, text="why")]) for rank in (1, 2)
    ]
    assert not assembly.joined_launchers._node_connections
    assembly.joined_launchers.close = lambda: None
