from __future__ import annotations

import threading

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.connections import START_S
from distlaunch.core.protocol import agent_messages as m
from distlaunch.transport.connect_errors import ConnectFailure
from distlaunch.transport.connection import ConnectionEnd, EndKind
from tests.facts import mentions
from tests.unit.coordinator.remote_agents import REMARK, WITHIN_S, exited


def test_a_node_has_joined_once_its_agent_has_sent_hello(nodes):
    agents = nodes(1)
    agents.agents.connect(0, 0.0)
    agents.pump(lambda: "n0" in agents.links)
    assert not agents.of(a.Joined)
    agents.say("n0", m.Hello(hostname="n0", python="3.11.4", pid=1, clock=7.0))
    agents.pump(lambda: agents.of(a.Joined))
    assert agents.of(a.Joined) == [a.Joined(node=0)]


def test_a_node_that_cannot_be_reached_is_reported_with_its_step(nodes):
    agents = nodes(2)
    why = ConnectFailure(host="n1", step="login", text="no key is accepted", passing=False)
    agents.refused["n1"] = why
    agents.join(0)
    agents.agents.connect(1, 0.0)
    agents.pump(lambda: agents.of(a.Unreachable))
    assert agents.of(a.Unreachable) == [a.Unreachable(node=1, failure=why)]


def test_a_fault_while_connecting_is_that_nodes_failure(nodes):
    agents = nodes(1)
    agents.refused = None  # whatever is wrong there
    agents.agents.connect(0, 0.0)
    agents.pump(lambda: agents.of(a.Unreachable))
    [event] = agents.of(a.Unreachable)
    assert "TypeError" in event.failure.text


def test_no_more_connections_are_set_up_at_once_than_asked_for(nodes):
    agents = nodes(12, fanout=3)
    for _ in range(1000):
        agents.opening.acquire(blocking=False)
    for node in range(12):
        agents.agents.connect(node, 0.0)
    for _ in range(12):
        agents.opening.release()
    agents.pump(lambda: len(agents.links) == 12)
    most = max(agents.at_once.get() for _ in range(12))
    assert most <= 3


def test_messages_go_both_ways_and_in_order(nodes):
    agents = nodes(2)
    agents.join(0)
    agents.join(1)
    for attempt in range(50):
        agents.agents.send(1, m.Prepare(attempt=attempt, port=None))
    agents.pump(lambda: len(agents.received("n1", m.Prepare)) == 50)
    assert [each.attempt for each in agents.received("n1", m.Prepare)] == list(range(50))
    assert not agents.received("n0", m.Prepare)
    remarks = [m.AgentNotice(text=str(number), warning=False) for number in range(50)]
    agents.say("n0", *remarks)
    agents.pump(lambda: len(agents.of(a.FromNode)) == 50)
    assert [event.message for event in agents.of(a.FromNode)] == remarks


def test_a_closed_channel_is_a_lost_node_at_once(nodes):
    agents = nodes(2)
    agents.join(0)
    agents.join(1)
    agents.links["n1"].theirs.close()
    agents.pump(lambda: agents.of(a.Lost))
    (lost,) = agents.of(a.Lost)
    assert (lost.node, lost.final, lost.kind) == (1, False, a.LossKind.GONE)
    assert agents.links["n1"].closed


def test_a_node_that_is_lost_with_all_others_is_reported_as_such(nodes):
    ended = []
    agents = nodes(2, cut_off=lambda: ended[0] if ended else None)
    for node in range(2):
        agents.join(node)
    agents.links["n1"].theirs.close()
    agents.pump(lambda: len(agents.of(a.Lost)) == 1)
    ended.append(ConnectionEnd(kind=EndKind.RAY_DRIVER, text="has ended"))
    agents.links["n0"].theirs.close()
    agents.pump(lambda: len(agents.of(a.Lost)) == 2)
    assert [(lost.node, lost.final, lost.kind) for lost in agents.of(a.Lost)] == [
        (1, False, a.LossKind.GONE),
        (0, True, a.LossKind.RAY_DRIVER),
    ]


def test_an_invalid_message_loses_its_node_and_no_other(nodes):
    agents = nodes(2)
    agents.join(0)
    agents.join(1)
    agents.links["n0"].theirs.sendall(b"\xff" * 100)
    agents.pump(lambda: agents.of(a.Lost))
    [lost] = agents.of(a.Lost)
    assert lost.node == 0
    assert "version" in lost.why
    agents.say("n1", REMARK)
    agents.pump(lambda: agents.of(a.FromNode))


def test_a_silent_node_is_lost_after_the_silence_and_no_sooner(nodes):
    agents = nodes(2)
    agents.join(0)
    agents.join(1)
    start = agents.now
    while agents.now < start + m.SILENCE_S - 0.5:
        agents.now += 0.5
        agents.say("n1", m.Pong(serial=1, clock=0.0))
        agents.pump(lambda: agents.agents._node_connections[1].received_at == agents.now)
    assert not agents.of(a.Lost)
    for _ in range(8):
        agents.now += 0.5
        agents.say("n1", m.Pong(serial=1, clock=0.0))
        agents.pump(lambda: agents.agents._node_connections[1].received_at == agents.now)
    assert [event.node for event in agents.of(a.Lost)] == [0]
    agents.pump(lambda: len(agents.received("n1", m.Ping)) >= 5)


def test_a_launcher_that_slept_does_not_lose_all_its_nodes(nodes):
    agents = nodes(1)
    agents.join(0)
    agents.agents.receive()
    agents.now += 3600.0
    agents.agents.receive()
    assert not agents.of(a.Lost)
    for _ in range(6):
        agents.now += 1.0
        agents.events += agents.agents.receive()
    assert [event.node for event in agents.of(a.Lost)] == [0]


def starting(nodes, *messages):
    """Return remote agents whose one node answers, starts two workers, and has sent these
    messages."""
    agents = nodes(1)
    agents.agents.silence_s = 1e9
    agents.join(0)
    agents.give(0, 0, 1)
    agents.say("n0", *messages)
    agents.pump(lambda: len(agents.of(a.FromNode)) == len(messages))
    return agents


def test_a_node_whose_workers_never_start_is_lost_though_it_answers(nodes):
    agents = starting(nodes, m.Started(attempt=0, pids={0: 5}))
    assert agents.agents.deadline() <= agents.now + START_S
    agents.now += START_S - 1.0
    agents.events += agents.agents.receive()
    assert not agents.of(a.Lost)
    agents.now += 1.0
    agents.events += agents.agents.receive()
    (lost,) = agents.of(a.Lost)
    assert lost.node == 0
    assert mentions(lost.why, "60 s")


@pytest.mark.parametrize(
    "last",
    [m.Started(attempt=0, pids={1: 6}), exited(8.0, rank=1), m.AttemptEnded(attempt=0, left=())],
    ids=["all have started", "one has ended", "all are gone"],
)
def test_a_node_whose_workers_have_started_or_ended_is_not_late(nodes, last):
    agents = starting(nodes, m.Started(attempt=0, pids={0: 5}), last)
    agents.now += 10 * START_S
    assert not any(isinstance(event, a.Lost) for event in agents.agents.receive())


def test_a_node_that_reports_a_slow_step_or_has_to_stop_workers_has_more_time(nodes):
    agents = starting(nodes)
    agents.now += 30.0
    agents.say("n0", m.AgentNotice(text="still importing torch", warning=True))
    agents.pump(lambda: agents.of(a.FromNode))
    agents.agents.send(0, m.Stop(attempt=0, signum=15, grace_s=500.0))
    agents.now += 30.0 + 500.0 + START_S - 1.0
    agents.events += agents.agents.receive()
    assert not agents.of(a.Lost)
    agents.now += 1.0
    agents.events += agents.agents.receive()
    assert [event.node for event in agents.of(a.Lost)] == [0]


def test_ends_of_workers_are_reported_on_our_clock(nodes):
    agents = nodes(1)
    agents.join(0, clock=5000.0)
    agents.give(0, 0)
    agents.say("n0", exited(ended=4999.0))
    agents.pump(lambda: agents.of(a.FromNode))
    assert agents.of(a.FromNode)[0].message.ended == pytest.approx(agents.now - 1.0)


def test_the_quickest_answer_gives_the_clock(nodes):
    agents = nodes(1)
    agents.join(0, clock=0.0)
    agents.pump(lambda: agents.received("n0", m.Ping))
    [ping] = agents.received("n0", m.Ping)
    sent = agents.now
    agents.now += 0.2
    agents.say("n0", m.Pong(serial=ping.serial, clock=50.0))
    connection = agents.agents._node_connections[0]
    agents.pump(lambda: connection.clock_offset_s == pytest.approx(sent + 0.1 - 50.0))
    agents.say("n0", m.Pong(serial=ping.serial, clock=99999.0), REMARK)  # twice the same: not ours
    agents.pump(lambda: agents.of(a.FromNode))
    assert connection.clock_offset_s == pytest.approx(sent + 0.1 - 50.0)


def test_output_is_taken_in_order_and_paid_back_in_credit(nodes):
    agents = nodes(1)
    agents.join(0)
    agents.pump(lambda: agents.received("n0", m.Credit))
    window = agents.received("n0", m.Credit)[0].size
    agents.agents.begin_attempt(0)
    agents.give(0, 1)
    chunk = b"x" * (window // 8)
    agents.say_much(
        "n0", *[m.Output(rank=1, stream=2, data=chunk) for _ in range(8)], m.RankEnded(rank=1)
    )
    agents.pump(
        lambda: (
            sum(each.size for each in agents.received("n0", m.Credit)) >= 2 * window - window // 4
        )
    )
    agents.pump(lambda: (1, "ended") in agents.kept.written)
    assert agents.kept.written == [("attempt", 0), *[(1, 2, chunk)] * 8, (1, "ended")]


def test_without_room_output_is_taken_and_nothing_is_paid_back(nodes):
    agents = nodes(1)
    agents.join(0)
    agents.pump(lambda: agents.received("n0", m.Credit))
    window = agents.received("n0", m.Credit)[0].size
    agents.give(0, 0)
    agents.kept.full = True
    agents.say_much("n0", m.Output(rank=0, stream=1, data=b"y" * (window // 2)), REMARK)
    agents.pump(lambda: agents.kept.written and agents.of(a.FromNode))
    assert len(agents.received("n0", m.Credit)) == 1
    agents.kept.full = False
    agents.kept.wake()
    agents.pump(lambda: len(agents.received("n0", m.Credit)) == 2)


def test_a_fault_of_the_output_thread_is_the_jobs(nodes):
    agents = nodes(1)
    agents.join(0)
    agents.give(0, 0)
    agents.kept.rank_ended = None
    agents.say("n0", m.RankEnded(rank=0))
    agents.pump(lambda: agents.of(a.LauncherFailed))
    [event] = agents.of(a.LauncherFailed)
    assert "TypeError" in event.text


def test_a_node_that_was_disconnected_sends_nothing_more_and_can_be_reached_again(nodes):
    agents = nodes(1)
    agents.join(0)
    first = agents.links.pop("n0")
    agents.agents.disconnect(0)
    assert first.closed
    agents.events.clear()
    agents.join(0)
    assert agents.of(a.Joined) == [a.Joined(node=0)]
    assert not agents.of(a.Lost)
    first.theirs.close()


def test_a_connection_that_comes_too_late_is_closed(nodes):
    agents = nodes(1)
    for _ in range(1000):
        agents.opening.acquire(blocking=False)
    agents.agents.connect(0, 0.0)
    assert agents.at_once.get(timeout=WITHIN_S) == 1
    agents.agents.disconnect(0)
    agents.opening.release()
    agents.pump(lambda: "n0" in agents.links and agents.links["n0"].closed)
    assert not agents.events


def test_the_end_ends_what_is_still_being_opened_and_closes_what_comes_of_it(nodes):
    ended = threading.Event()
    agents = nodes(2, end_opening=ended.set)
    for _ in range(1000):
        agents.opening.acquire(blocking=False)
    for node in range(2):
        agents.agents.connect(node, 0.0)
        agents.at_once.get(timeout=WITHIN_S)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("to n")]
    agents.agents.close()
    agents.agents.close = lambda: None
    assert ended.is_set()
    agents.opening.release(2)
    for thread in threads:
        thread.join(WITHIN_S)
    assert len(agents.links) == 2
    assert all(link.closed for link in agents.links.values())


def test_at_the_end_all_agents_are_asked_to_leave_and_waited_for(nodes):
    agents = nodes(2)
    agents.join(0)
    agents.join(1)
    done = threading.Thread(target=agents.agents.close)
    done.start()
    for host in ("n0", "n1"):
        link = agents.links[host]
        link.theirs.settimeout(WITHIN_S)
        decoder = agents._decoders[host]
        messages: list = []
        while not any(isinstance(each, m.ExitAgent) for each in messages):
            messages += decoder.feed(link.theirs.recv(1 << 16))
        assert done.is_alive()
        link.theirs.close()
    done.join(WITHIN_S)
    assert not done.is_alive()
    assert all(link.closed for link in agents.links.values())
    agents.agents.close = lambda: None
    left = [
        thread for thread in threading.enumerate() if thread.name.startswith(("to n", "output"))
    ]
    for thread in left:
        thread.join(WITHIN_S)
    assert not [thread for thread in left if thread.is_alive()]


def test_notices_of_threads_reach_the_user(nodes):
    agents = nodes(1)
    saying = threading.Thread(target=agents.agents.note, args=("keys unchecked",))
    saying.start()
    agents.pump(lambda: agents.of(a.LinePrinted))
    saying.join()
    assert agents.of(a.LinePrinted) == [a.LinePrinted(text="keys unchecked", warning=True)]
