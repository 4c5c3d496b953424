"""The fleet over made-up links."""

from __future__ import annotations

import threading

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.connections import START_S
from distlaunch.core.protocol import agent_messages as m
from distlaunch.transport.connect_errors import ConnectFailure
from distlaunch.transport.connection import ConnectionEnd, EndKind
from tests.unit.coordinator.fleets import REMARK, WITHIN_S, exited


def test_a_node_has_joined_when_its_agent_has_said_hello(nodes):
    fleet = nodes(1)
    fleet.fleet.connect(0, 0.0)
    fleet.pump(lambda: "n0" in fleet.links)
    assert not fleet.of(a.Joined)
    fleet.say("n0", m.Hello(hostname="n0", python="3.11.4", pid=1, clock=7.0))
    fleet.pump(lambda: fleet.of(a.Joined))
    assert fleet.of(a.Joined) == [a.Joined(node=0)]


def test_a_node_that_cannot_be_reached_is_told_with_its_step(nodes):
    fleet = nodes(2)
    why = ConnectFailure(host="n1", step="login", text="no key is accepted", passing=False)
    fleet.refused["n1"] = why
    fleet.join(0)
    fleet.fleet.connect(1, 0.0)
    fleet.pump(lambda: fleet.of(a.Unreachable))
    assert fleet.of(a.Unreachable) == [a.Unreachable(node=1, failure=why)]


def test_a_fault_while_connecting_is_that_nodes_failure(nodes):
    fleet = nodes(1)
    fleet.refused = None  # whatever is wrong there
    fleet.fleet.connect(0, 0.0)
    fleet.pump(lambda: fleet.of(a.Unreachable))
    [event] = fleet.of(a.Unreachable)
    assert "TypeError" in event.failure.text


def test_no_more_connections_are_set_up_at_once_than_asked_for(nodes):
    fleet = nodes(12, fanout=3)
    for _ in range(1000):
        fleet.opening.acquire(blocking=False)
    for node in range(12):
        fleet.fleet.connect(node, 0.0)
    for _ in range(12):
        fleet.opening.release()
    fleet.pump(lambda: len(fleet.links) == 12)
    most = max(fleet.at_once.get() for _ in range(12))
    assert most <= 3


def test_messages_go_both_ways_and_in_order(nodes):
    fleet = nodes(2)
    fleet.join(0)
    fleet.join(1)
    for attempt in range(50):
        fleet.fleet.send(1, m.Prepare(attempt=attempt, port=None))
    fleet.pump(lambda: len(fleet.heard("n1", m.Prepare)) == 50)
    assert [each.attempt for each in fleet.heard("n1", m.Prepare)] == list(range(50))
    assert not fleet.heard("n0", m.Prepare)
    remarks = [m.AgentNotice(text=str(number), warning=False) for number in range(50)]
    fleet.say("n0", *remarks)
    fleet.pump(lambda: len(fleet.of(a.FromNode)) == 50)
    assert [event.message for event in fleet.of(a.FromNode)] == remarks


def test_a_closed_channel_is_a_lost_node_at_once(nodes):
    fleet = nodes(2)
    fleet.join(0)
    fleet.join(1)
    fleet.links["n1"].theirs.close()
    fleet.pump(lambda: fleet.of(a.Lost))
    assert fleet.of(a.Lost) == [a.Lost(node=1, why="the connection was closed")]
    assert fleet.links["n1"].closed


def test_a_node_that_is_lost_with_the_way_to_all_says_so(nodes):
    ended = []
    fleet = nodes(2, cut_off=lambda: ended[0] if ended else None)
    for node in range(2):
        fleet.join(node)
    fleet.links["n1"].theirs.close()
    fleet.pump(lambda: len(fleet.of(a.Lost)) == 1)
    ended.append(ConnectionEnd(kind=EndKind.RAY_DRIVER, text="has ended"))
    fleet.links["n0"].theirs.close()
    fleet.pump(lambda: len(fleet.of(a.Lost)) == 2)
    assert fleet.of(a.Lost) == [
        a.Lost(node=1, why="the connection was closed"),
        a.Lost(node=0, why="Ray's driver has ended", final=True, kind=a.LossKind.RAY_DRIVER),
    ]


def test_what_is_no_message_loses_the_node_and_no_other(nodes):
    fleet = nodes(2)
    fleet.join(0)
    fleet.join(1)
    fleet.links["n0"].theirs.sendall(b"\xff" * 100)
    fleet.pump(lambda: fleet.of(a.Lost))
    [lost] = fleet.of(a.Lost)
    assert lost.node == 0
    assert "version" in lost.why
    fleet.say("n1", REMARK)
    fleet.pump(lambda: fleet.of(a.FromNode))


def test_a_silent_node_is_lost_after_the_silence_and_no_sooner(nodes):
    fleet = nodes(2)
    fleet.join(0)
    fleet.join(1)
    start = fleet.now
    while fleet.now < start + m.SILENCE_S - 0.5:
        fleet.now += 0.5
        fleet.say("n1", m.Pong(serial=1, clock=0.0))
        fleet.pump(lambda: fleet.fleet._peers[1].heard == fleet.now)
    assert not fleet.of(a.Lost)
    for _ in range(8):
        fleet.now += 0.5
        fleet.say("n1", m.Pong(serial=1, clock=0.0))
        fleet.pump(lambda: fleet.fleet._peers[1].heard == fleet.now)
    assert [event.node for event in fleet.of(a.Lost)] == [0]
    fleet.pump(lambda: len(fleet.heard("n1", m.Ping)) >= 5)


def test_a_launcher_that_slept_does_not_lose_all_its_nodes(nodes):
    fleet = nodes(1)
    fleet.join(0)
    fleet.fleet.receive()
    fleet.now += 3600.0
    fleet.fleet.receive()
    assert not fleet.of(a.Lost)
    for _ in range(6):
        fleet.now += 1.0
        fleet.events += fleet.fleet.receive()
    assert [event.node for event in fleet.of(a.Lost)] == [0]


def starting(nodes, *messages):
    """Give a fleet whose one node answers, is to start two workers, and has said this."""
    fleet = nodes(1)
    fleet.fleet.silence_s = 1e9
    fleet.join(0)
    fleet.give(0, 0, 1)
    fleet.say("n0", *messages)
    fleet.pump(lambda: len(fleet.of(a.FromNode)) == len(messages))
    return fleet


def test_a_node_whose_workers_never_start_is_lost_though_it_answers(nodes):
    fleet = starting(nodes, m.Started(attempt=0, pids={0: 5}))
    assert fleet.fleet.deadline() <= fleet.now + START_S
    fleet.now += START_S - 1.0
    fleet.events += fleet.fleet.receive()
    assert not fleet.of(a.Lost)
    fleet.now += 1.0
    fleet.events += fleet.fleet.receive()
    assert fleet.of(a.Lost) == [a.Lost(node=0, why="its workers have not started within 60 s")]


@pytest.mark.parametrize(
    "last",
    [m.Started(attempt=0, pids={1: 6}), exited(8.0, rank=1), m.AttemptEnded(attempt=0, left=())],
    ids=["all have started", "one has ended", "all are gone"],
)
def test_a_node_whose_workers_have_started_or_ended_is_not_late(nodes, last):
    fleet = starting(nodes, m.Started(attempt=0, pids={0: 5}), last)
    fleet.now += 10 * START_S
    assert not any(isinstance(event, a.Lost) for event in fleet.fleet.receive())


def test_a_node_that_says_what_takes_long_or_has_to_stop_what_it_started_has_more_time(nodes):
    fleet = starting(nodes)
    fleet.now += 30.0
    fleet.say("n0", m.AgentNotice(text="still importing torch", warning=True))
    fleet.pump(lambda: fleet.of(a.FromNode))
    fleet.fleet.send(0, m.Stop(attempt=0, signum=15, grace_s=500.0))
    fleet.now += 30.0 + 500.0 + START_S - 1.0
    fleet.events += fleet.fleet.receive()
    assert not fleet.of(a.Lost)
    fleet.now += 1.0
    fleet.events += fleet.fleet.receive()
    assert [event.node for event in fleet.of(a.Lost)] == [0]


def test_ends_of_workers_are_told_on_our_clock(nodes):
    fleet = nodes(1)
    fleet.join(0, clock=5000.0)
    fleet.give(0, 0)
    fleet.say("n0", exited(ended=4999.0))
    fleet.pump(lambda: fleet.of(a.FromNode))
    assert fleet.of(a.FromNode)[0].message.ended == pytest.approx(fleet.now - 1.0)


def test_the_quickest_answer_tells_the_clock(nodes):
    fleet = nodes(1)
    fleet.join(0, clock=0.0)
    fleet.pump(lambda: fleet.heard("n0", m.Ping))
    [ping] = fleet.heard("n0", m.Ping)
    sent = fleet.now
    fleet.now += 0.2
    fleet.say("n0", m.Pong(serial=ping.serial, clock=50.0))
    peer = fleet.fleet._peers[0]
    fleet.pump(lambda: peer.offset == pytest.approx(sent + 0.1 - 50.0))
    fleet.say("n0", m.Pong(serial=ping.serial, clock=99999.0), REMARK)  # twice the same: not ours
    fleet.pump(lambda: fleet.of(a.FromNode))
    assert peer.offset == pytest.approx(sent + 0.1 - 50.0)


def test_output_is_taken_in_order_and_paid_back_in_credit(nodes):
    fleet = nodes(1)
    fleet.join(0)
    fleet.pump(lambda: fleet.heard("n0", m.Credit))
    window = fleet.heard("n0", m.Credit)[0].size
    fleet.fleet.begin_attempt(0)
    fleet.give(0, 1)
    chunk = b"x" * (window // 8)
    fleet.say_much(
        "n0", *[m.Output(rank=1, stream=2, data=chunk) for _ in range(8)], m.RankEnded(rank=1)
    )
    fleet.pump(
        lambda: sum(each.size for each in fleet.heard("n0", m.Credit)) >= 2 * window - window // 4
    )
    fleet.pump(lambda: (1, "ended") in fleet.kept.said)
    assert fleet.kept.said == [("attempt", 0), *[(1, 2, chunk)] * 8, (1, "ended")]


def test_without_room_output_is_taken_and_nothing_is_paid_back(nodes):
    fleet = nodes(1)
    fleet.join(0)
    fleet.pump(lambda: fleet.heard("n0", m.Credit))
    window = fleet.heard("n0", m.Credit)[0].size
    fleet.give(0, 0)
    fleet.kept.full = True
    fleet.say_much("n0", m.Output(rank=0, stream=1, data=b"y" * (window // 2)), REMARK)
    fleet.pump(lambda: fleet.kept.said and fleet.of(a.FromNode))
    assert len(fleet.heard("n0", m.Credit)) == 1
    fleet.kept.full = False
    fleet.kept.wake()
    fleet.pump(lambda: len(fleet.heard("n0", m.Credit)) == 2)


def test_a_fault_of_the_output_thread_is_the_jobs(nodes):
    fleet = nodes(1)
    fleet.join(0)
    fleet.give(0, 0)
    fleet.kept.rank_ended = None
    fleet.say("n0", m.RankEnded(rank=0))
    fleet.pump(lambda: fleet.of(a.Broken))
    [event] = fleet.of(a.Broken)
    assert "TypeError" in event.text


def test_a_node_that_is_left_says_nothing_more_and_can_be_reached_again(nodes):
    fleet = nodes(1)
    fleet.join(0)
    first = fleet.links.pop("n0")
    fleet.fleet.disconnect(0)
    assert first.closed
    fleet.events.clear()
    fleet.join(0)
    assert fleet.of(a.Joined) == [a.Joined(node=0)]
    assert not fleet.of(a.Lost)
    first.theirs.close()


def test_a_connection_that_comes_too_late_is_closed(nodes):
    fleet = nodes(1)
    for _ in range(1000):
        fleet.opening.acquire(blocking=False)
    fleet.fleet.connect(0, 0.0)
    assert fleet.at_once.get(timeout=WITHIN_S) == 1
    fleet.fleet.disconnect(0)
    fleet.opening.release()
    fleet.pump(lambda: "n0" in fleet.links and fleet.links["n0"].closed)
    assert not fleet.events


def test_the_end_ends_what_is_still_being_opened_and_closes_what_comes_of_it(nodes):
    ended = threading.Event()
    fleet = nodes(2, end_opening=ended.set)
    for _ in range(1000):
        fleet.opening.acquire(blocking=False)
    for node in range(2):
        fleet.fleet.connect(node, 0.0)
        fleet.at_once.get(timeout=WITHIN_S)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("to n")]
    fleet.fleet.close()
    fleet.fleet.close = lambda: None
    assert ended.is_set()
    fleet.opening.release(2)
    for thread in threads:
        thread.join(WITHIN_S)
    assert len(fleet.links) == 2
    assert all(link.closed for link in fleet.links.values())


def test_at_the_end_all_agents_are_told_to_leave_and_waited_for(nodes):
    fleet = nodes(2)
    fleet.join(0)
    fleet.join(1)
    done = threading.Thread(target=fleet.fleet.close)
    done.start()
    for host in ("n0", "n1"):
        link = fleet.links[host]
        link.theirs.settimeout(WITHIN_S)
        decoder = fleet._decoders[host]
        messages: list = []
        while not any(isinstance(each, m.ExitAgent) for each in messages):
            messages += decoder.feed(link.theirs.recv(1 << 16))
        assert done.is_alive()
        link.theirs.close()
    done.join(WITHIN_S)
    assert not done.is_alive()
    assert all(link.closed for link in fleet.links.values())
    fleet.fleet.close = lambda: None
    left = [
        thread for thread in threading.enumerate() if thread.name.startswith(("to n", "output"))
    ]
    for thread in left:
        thread.join(WITHIN_S)
    assert not [thread for thread in left if thread.is_alive()]


def test_what_threads_have_to_say_reaches_the_user(nodes):
    fleet = nodes(1)
    saying = threading.Thread(target=fleet.fleet.note, args=("host keys are not checked",))
    saying.start()
    fleet.pump(lambda: fleet.of(a.Noted))
    saying.join()
    assert fleet.of(a.Noted) == [a.Noted(text="host keys are not checked", warning=True)]
