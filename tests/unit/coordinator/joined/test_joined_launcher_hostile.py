"""A joined launcher with arbitrary coordinators ends with an exit code, and runs its own command or
nothing."""

from __future__ import annotations

import struct
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import VERSION, encode
from tests.examples import examples
from tests.facts import mentions
from tests.unit.coordinator.joined.joined_launcher import (
    CLOSED,
    FORGED,
    VERDICT,
    JoinedLauncherBed,
    commence,
    planner,
    prepare,
    reach,
    stop,
)
from tests.unit.core.protocol.test_codec import NUMBERS, TEXTS, messages_of

GONE = "gone"
ATTEMPTS = st.integers(-1, 3) | NUMBERS
GRACES = st.floats(0, 30) | st.floats(allow_nan=False, allow_infinity=False)
LIKELY = st.one_of(
    st.builds(prepare, ATTEMPTS, port=st.none() | NUMBERS, token=TEXTS),
    st.builds(prepare, st.integers(0, 3), ports=st.integers(0, 9) | NUMBERS),
    st.builds(
        reach,
        ATTEMPTS,
        port=st.integers(1, 9) | NUMBERS,
        token=st.just("ab") | TEXTS,
        bound_s=GRACES,
    ),
    st.builds(commence, ATTEMPTS, restarts=st.integers(0, 3) | NUMBERS),
    st.builds(commence, st.integers(0, 3)),
    st.builds(
        commence,
        st.integers(0, 3),
        node_rank=NUMBERS,
        master_addr=TEXTS,
        master_port=NUMBERS,
        interface=TEXTS,
    ),
    st.builds(
        commence,
        hosts=st.lists(TEXTS, max_size=4).map(tuple),
        slots=st.lists(NUMBERS, max_size=4).map(tuple),
    ),
    st.builds(stop, ATTEMPTS, signum=st.sampled_from([2, 9, 15]) | NUMBERS, grace_s=GRACES),
    st.builds(m.WaitForLeftovers, attempt=ATTEMPTS, linger_s=GRACES, grace_s=GRACES),
    st.builds(m.Ping, serial=NUMBERS, silence_s=st.none() | GRACES),
    st.builds(p.SurveyNode, serial=NUMBERS),
    st.builds(m.Pause, paused=st.booleans()),
    st.builds(m.ForwardSignal, signum=st.sampled_from([10, 12]) | NUMBERS),
    st.builds(m.CollectStacks, attempt=ATTEMPTS, serial=NUMBERS),
    st.builds(m.ReadUsage, attempt=ATTEMPTS, serial=NUMBERS),
    st.builds(m.ListLogs, serial=NUMBERS, attempt=ATTEMPTS, ranks=st.just((0, 1))),
    st.builds(
        m.ReadLog,
        serial=NUMBERS,
        attempt=ATTEMPTS,
        rank=st.none() | NUMBERS,
        stream=NUMBERS,
        offset=NUMBERS,
        size=NUMBERS,
    ),
    st.builds(p.Notice, text=TEXTS, level=TEXTS),
)
ANYTHING = st.sampled_from(p.TO_LAUNCHER).flatmap(messages_of)
COMMANDS = st.sampled_from([cls for cls in m.TO_REMOTE if cls not in p.TO_LAUNCHER]).flatmap(
    messages_of
)
RIGHT = st.one_of(
    st.builds(commence, st.integers(0, 4)),
    st.just(GONE),
    st.builds(stop, st.integers(0, 4)),
    st.builds(m.Pause, paused=st.booleans()),
)
"""What may well come, if not in this order."""
STEPS = st.lists(
    st.sampled_from(
        [RIGHT] * 9 + [LIKELY, ANYTHING, COMMANDS.map(encode), st.binary(max_size=40)]
    ).flatmap(lambda s: s),
    max_size=12,
)
HARMLESS = (
    m.Prepare,
    m.Stop,
    m.WaitForLeftovers,
    m.ForwardSignal,
    m.Pause,
    m.CollectStacks,
    m.ReadUsage,
    m.ListLogs,
    m.ReadLog,
    m.Reach,
    m.Survey,
)


@pytest.fixture(scope="module")
def joiner(tmp_path_factory):
    return planner(tmp_path_factory.mktemp("runs"))


def check(launcher: JoinedLauncherBed) -> None:
    """Check that only the launcher's own command was started, and one attempt at a time, once
    each."""
    code = launcher.run()
    assert 0 <= code <= 255
    runs: int | None = None
    newest = -1
    for message in launcher.own.handled:
        if isinstance(message, m.Start):
            assert message.argv == (sys.executable, "-m", "timeit")
            assert [(spec.local_rank, spec.argv) for spec in message.workers] == [
                (0, None),
                (1, None),
            ]
            assert (message.stdin_rank, message.terminal, message.node_logs) == (None, False, "")
            assert runs is None
            assert message.attempt > newest
            runs = newest = message.attempt
        elif message == GONE:
            runs = None
        else:
            assert isinstance(message, HARMLESS)
            if isinstance(message, m.Survey):
                assert (message.program, message.script) == ("", "")
                assert message.pythons == (sys.executable,)


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS, end=st.sampled_from([VERDICT, VERDICT, CLOSED]))
def test_a_joined_launcher_runs_only_its_own_command_and_ends_for_any_messages(joiner, steps, end):
    def gone() -> None:
        started = launcher.handled(m.Start)
        if started:
            launcher.own.handled.append(GONE)
            launcher.own.say(m.AttemptEnded(attempt=started[-1].attempt, left=()))

    # What starts nothing first would be called again after the end, as long as that is to be hoped
    # for.
    begun = [] if end is VERDICT else [commence(), gone]
    launcher = JoinedLauncherBed(
        joiner, *begun, *(gone if step == GONE else step for step in steps), end
    )
    try:
        check(launcher)
    finally:
        launcher.free()


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(message=LIKELY, at=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_message_with_a_byte_changed_does_no_harm(joiner, message, at, byte):
    data = bytearray(encode(message))
    data[at % len(data)] = byte
    launcher = JoinedLauncherBed(
        joiner, prepare(), bytes(data), CLOSED, lost_after_s=0.05, again=[[VERDICT]]
    )
    try:
        check(launcher)
    finally:
        launcher.free()


def test_a_coordinator_that_never_stops_sending_is_left(joined_launcher):
    launcher = joined_launcher(*[encode(m.Ping(serial=1)) * 1000] * 100, VERDICT)
    assert launcher.run() == 69
    (lost,) = launcher.records.of("coordinator_lost")
    assert lost["kind"] == "odd"
    assert mentions(lost["why"], "Ping")


def test_a_frame_of_many_megabytes_is_refused_by_its_beginning(joined_launcher):
    launcher = joined_launcher(
        struct.pack(">BII", VERSION, 32 << 20, 0) + b'{"t":"Ping","serial":1'.ljust(200), VERDICT
    )
    assert launcher.run() == 69
    (lost,) = launcher.records.of("coordinator_lost")
    assert lost["kind"] == "odd"
    assert mentions(lost["why"], "Ping", "33554432+0 bytes")


def test_a_message_that_carries_a_command_is_none(joined_launcher):
    launcher = joined_launcher(struct.pack(">BII", VERSION, len(FORGED), 0) + FORGED, VERDICT)
    assert launcher.run() == 69
    assert not launcher.own.handled
    (lost,) = launcher.records.of("coordinator_lost")
    assert lost["kind"] == "odd"
    assert mentions(lost["why"], "unknown", "'Start'")
