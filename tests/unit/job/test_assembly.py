"""Who gets which seat among the launchers of a job, and what the policy hears of them."""

from __future__ import annotations

import select
import signal
import threading
import time

import pytest

from distlaunch.core.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from distlaunch.core.model.record import replace
from distlaunch.core.wire import messages as m
from distlaunch.core.wire import peers as p
from distlaunch.core.wire import remote as r
from distlaunch.core.wire.codec import Decoder, encode
from distlaunch.job import actions as a
from distlaunch.job.assembly import Assembly
from distlaunch.job.seats import PROBE_S, START_S
from tests.unit.job.fleets import WITHIN_S, PairLink, exited

GONE = m.Gone(attempt=0, left=())
APPLY = {"num_nodes": (3, 3), "slots": 1, "command": "", "clock": 7.0, "wall": 0.0, "attempt": -1, "restarts": 0}


class Own:
    """This machine's own node."""

    has_unsent = False

    def __init__(self) -> None:
        self.handled, self.says, self.closed = [], [], False

    def start(self):
        pass

    def handle(self, message):
        self.handled.append(message)

    def descriptors(self):
        return {}

    def deadline(self):
        return None

    def receive(self):
        says, self.says = self.says, []
        return says

    def close(self):
        self.closed = True


class Port:
    """The rendezvous port: whoever was let in comes at the next look."""

    def __init__(self) -> None:
        self.waiting = []

    def descriptors(self):
        return {}

    def deadline(self):
        return None

    def ready(self):
        waiting, self.waiting = self.waiting, []
        return waiting

    def close(self):
        for _, link in self.waiting:
            link.close()


class Rules:
    """Launchers whose command is ``other`` contradict us."""

    bounds = (3, 3)

    def conflict(self, number, host, told):
        return f"{host} differs" if told.command == "other" else None

    def clock_note(self, number, host, told, *, wall):
        return f"the clock of {host} is off" if told.wall < 0 else None


class Peer:
    """A launcher's end."""

    def __init__(self, link: PairLink) -> None:
        self.link = link
        self._decoder = Decoder(p.TO_PEER, r.REMOTE_PARTS)
        self.heard = []

    def say(self, *messages):
        for message in messages:
            self.link.theirs.sendall(encode(message))

    def hears(self, kind):
        """Read what has come, and give the messages of this kind."""
        while select.select([self.link.theirs], [], [], 0.02)[0]:
            data = self.link.theirs.recv(1 << 16)
            if not data:
                break
            self.heard += self._decoder.feed(data)
        return [message for message in self.heard if isinstance(message, kind)]


class Meeting:
    """A coordinator, and whoever calls it."""

    def __init__(self, size: int) -> None:
        self.now = 100.0
        self.own, self.port, self.said, self.events, self.links = Own(), Port(), [], [], []
        self.assembly = Assembly(
            own=self.own, host="n0", size=size, what="node rank", job_id="j", folder="j-2", rules=Rules(),
            say=self.said.append, clock=lambda: self.now,
        )  # fmt: skip
        self.assembly.listen(self.port)
        self.assembly.start()

    def calls(self, rank, host, *, instance=None, ending=None, **told):
        """Call; give the launcher's end if it is let in, else the answer."""
        call = p.Call(
            version=1, release="1", job_key="", rank=rank, host=host, instance=instance or host, nonce="ab" * 16
        )  # fmt: skip
        answer = self.assembly.admit(call)
        if isinstance(answer, p.Turned):
            return answer
        assert (answer.job_id, answer.folder) == ("j", "j-2")
        link = PairLink()
        self.links.append(link)
        self.port.waiting.append((call, link))
        peer = Peer(link)
        peer.rank = answer.rank
        if ending is not None:
            peer.say(r.Ending(why=ending))
            self.pump(lambda: self.assembly._seats[answer.rank].instance and not self.port.waiting)
            return peer
        peer.say(p.Apply(**{**APPLY, **told}))
        self.pump(lambda: answer.rank in self.assembly._peers and self.assembly._peers[answer.rank].greeted)
        return peer

    def pump(self, condition) -> None:
        end = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < end, (self.events, self.said)
            poll = select.poll()
            for descriptor, wanted in self.assembly.descriptors().items():
                poll.register(descriptor, wanted)
            poll.poll(10)
            self.events += self.assembly.receive()

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def hears(self, peer, kind):
        """Wait until a launcher hears a message of this kind."""
        self.pump(lambda: peer.hears(kind))
        return peer.hears(kind)[-1]

    def close(self) -> None:
        for node in list(self.assembly._peers):
            self.assembly.disconnect(node)
        self.assembly.close()
        for link in self.links:
            link.close()
            link.theirs.close()


@pytest.fixture
def meeting():
    made = []

    def make(size: int = 3) -> Meeting:
        made.append(Meeting(size))
        return made[-1]

    yield make
    for each in made:
        each.close()


# --- seats


def test_the_policy_hears_of_whom_it_wants_and_of_itself_at_once(meeting):
    meet = meeting()
    meet.assembly.connect(0, 0.0)
    meet.assembly.connect(1, 0.0)
    meet.calls(1, "n1")
    meet.calls(2, "n2")
    meet.pump(lambda: len(meet.of(a.Joined)) == 2)
    assert meet.of(a.Joined) == [a.Joined(node=0, host="n0"), a.Joined(node=1, host="n1")]
    meet.assembly.connect(2, 5.0)
    meet.pump(lambda: True)
    assert meet.assembly.deadline() <= meet.now + 5.0
    meet.now += 5.0
    meet.pump(lambda: len(meet.of(a.Joined)) == 3)


def test_a_rank_that_there_is_not_and_the_coordinators_own_are_turned_away(meeting):
    meet = meeting()
    beyond, own = meet.calls(3, "n3"), meet.calls(0, "other")
    assert (beyond.exit_code, beyond.again, beyond.text) == (
        EXIT_USAGE,
        False,
        "node rank 3: node ranks of this job go to 2",
    )
    assert (own.exit_code, own.again, own.text) == (
        EXIT_USAGE,
        False,
        "two launchers have node rank 0: on n0, and on other",
    )
    assert meet.said == [f"{own.text}; the second is turned away"]


def test_the_second_with_a_rank_is_turned_away_once_the_first_has_answered(meeting):
    meet = meeting()
    first = meet.calls(1, "n1")
    assert meet.calls(1, "n9").again
    for ping in (meet.hears(first, r.Ping), first.hears(r.Ping)[-1]):
        first.say(r.Pong(serial=ping.serial, clock=7.0))
    meet.now += 0.5
    first.say(r.Pong(serial=99, clock=7.0))
    meet.pump(lambda: meet.assembly._peers[1].heard == meet.now)
    answer = meet.calls(1, "n9")
    assert (answer.again, answer.exit_code) == (False, EXIT_USAGE)
    assert answer.text == "two launchers have node rank 1: on n1, and on n9"
    assert not meet.of(a.Lost)


def answers(meet, peer, rank) -> None:
    """Have a launcher say something, a little later than all that was before."""
    meet.now += 0.5
    peer.say(r.Pong(serial=99, clock=7.0))
    meet.pump(lambda: meet.assembly._peers[rank].heard == meet.now)


def test_an_answer_does_not_count_for_whoever_calls_later(meeting):
    """A pod is replaced some seconds after its launcher was asked, and had answered, for another's sake."""
    meet = meeting()
    meet.assembly.connect(1, 0.0)
    first = meet.calls(1, "n1")
    meet.pump(lambda: meet.of(a.Joined))
    assert meet.calls(1, "n9").again
    answers(meet, first, 1)
    assert not meet.calls(1, "n9").again
    meet.now += PROBE_S
    assert meet.calls(1, "n1", instance="a new pod").again
    meet.now += PROBE_S
    meet.calls(1, "n1", instance="a new pod")
    assert [event.node for event in meet.of(a.Lost)] == [1]


def test_of_launchers_that_are_turned_away_again_and_again_one_line_is_said(meeting):
    meet = meeting(10)
    for number in range(50):
        assert not meet.calls(0, f"x{number}").again
    meet.assembly.send(0, m.Prepare(attempt=0, port=0))
    for number in range(1, 10):
        meet.calls(number, f"n{number}", command="other", wall=-1.0)
    assert meet.said == [
        "two launchers have node rank 0: on n0, and on x0; the second is turned away",
        "a launcher was turned away: n1 differs",
    ]
    assert meet.assembly.deadline() <= meet.now + 60.0
    meet.now += 60.0
    meet.pump(lambda: len(meet.said) > 2)
    assert meet.said[2:] == [
        "49 more like it, the last: two launchers have node rank 0: on n0, and on x49; the second is turned away",
        "8 more like it, the last: a launcher was turned away: n9 differs",
    ]


def test_the_second_with_a_rank_takes_the_place_of_one_that_does_not_answer(meeting):
    meet = meeting()
    meet.assembly.connect(1, 0.0)
    meet.calls(1, "n1")
    meet.pump(lambda: meet.of(a.Joined))
    assert meet.calls(1, "n1", instance="a new pod").again
    meet.now += PROBE_S / 2
    assert meet.calls(1, "n1", instance="a new pod").again
    meet.now += PROBE_S / 2
    second = meet.calls(1, "n1", instance="a new pod")
    assert [(event.node, event.why) for event in meet.of(a.Lost)] == [(1, "a launcher on n1 has taken its place")]
    meet.assembly.connect(1, 0.0)
    meet.pump(lambda: len(meet.of(a.Joined)) == 2)
    assert second.rank == 1


def test_a_launcher_that_calls_again_has_its_place_at_once(meeting):
    meet = meeting()
    meet.assembly.connect(1, 0.0)
    meet.calls(1, "n1")
    meet.pump(lambda: meet.of(a.Joined))
    again = meet.calls(1, "n1")
    assert again.rank == 1
    assert [event.node for event in meet.of(a.Lost)] == [1]


def test_launchers_without_a_rank_get_the_next_and_keep_it(meeting):
    meet = meeting(4)
    assert [meet.calls(None, host).rank for host in ("x", "y")] == [1, 2]
    meet.links[0].theirs.close()
    meet.pump(lambda: 1 not in meet.assembly._peers)
    assert meet.calls(None, "z").rank == 3  # one that is new, before the place of one that may come back
    assert meet.calls(None, "x", instance="a new one").rank == 1
    full = meet.calls(None, "w")
    assert (full.again, full.exit_code) == (True, EXIT_UNAVAILABLE)


# --- what they say


def test_what_launchers_were_told_otherwise_ends_the_job_before_it_has_begun_and_later_only_theirs(meeting):
    meet = meeting()
    meet.calls(1, "n1", command="other")
    assert meet.of(a.Refused)[0].text == "n1 differs"
    meet.assembly.send(0, m.Prepare(attempt=0, port=0))
    late = meet.calls(2, "n2", command="other")
    verdict = meet.hears(late, p.Verdict)
    assert (verdict.exit_code, "n2 differs" in verdict.text) == (EXIT_USAGE, True)
    assert len(meet.of(a.Refused)) == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_launcher_that_was_refused_has_nothing_more_to_say_and_leaves_its_place(meeting, has_begun):
    meet = meeting()
    if has_begun:
        meet.assembly.send(0, m.Prepare(attempt=0, port=0))
    meet.assembly.connect(1, 0.0)
    refused, other = meet.calls(1, "n1", command="other"), meet.calls(2, "n2")
    refused.say(p.Told(signum=signal.SIGTERM), p.Apply(**APPLY), GONE)
    answers(meet, refused, 1)
    other.say(p.Told(signum=signal.SIGUSR1))
    meet.pump(lambda: meet.of(a.Signalled))
    assert meet.of(a.Signalled) == [a.Signalled(signum=signal.SIGUSR1, node=2)]
    assert not meet.of(a.Joined)
    assert meet.calls(1, "n1", instance="with the right command").rank == 1
    meet.pump(lambda: meet.of(a.Joined))


def test_a_launcher_that_cannot_take_part_ends_the_job_before_it_has_begun_and_later_is_told_of(meeting):
    meet = meeting()
    meet.calls(1, "n1", ending="script train.py\n not found")
    text = r"node rank 1 (n1) cannot take part: script train.py\n not found"
    meet.pump(lambda: meet.of(a.Refused))
    assert meet.of(a.Refused) == [a.Refused(text=text)]
    meet.assembly.send(0, m.Prepare(attempt=0, port=0))
    meet.calls(1, "n1", ending="script train.py\n not found")
    meet.pump(lambda: meet.said)
    assert meet.said == [text]
    assert len(meet.of(a.Refused)) == 1
    assert not meet.of(a.Lost)
    assert meet.calls(1, "n1").rank == 1


def test_an_elastic_job_does_without_a_launcher_that_cannot_take_part(meeting):
    meet = meeting()
    meet.assembly._rules.bounds = (1, 3)
    meet.calls(1, "n1", ending="no script")
    meet.pump(lambda: meet.said)
    assert meet.said == ["node rank 1 (n1) cannot take part: no script"]
    assert not meet.of(a.Refused)


# --- starting


def commenced(meet, workers: int = 2) -> Peer:
    """Have a member that is told to start so many workers."""
    meet.assembly.connect(1, 0.0)
    peer = meet.calls(1, "n1")
    meet.pump(lambda: meet.of(a.Joined))
    start = p.Commence(
        attempt=0, restarts=0, node_rank=0, local_ranks=tuple(range(workers)), hosts=("n1",), slots=(workers,),
        master_addr="n0", master_port=5, interface="",
    )  # fmt: skip
    meet.assembly.send(1, start)
    meet.hears(peer, p.Commence)
    return peer


def says(meet, peer, *messages) -> None:
    """Have a launcher say this, and the policy hear it."""
    before = len(meet.of(a.FromNode))
    peer.say(*messages)
    meet.pump(lambda: len(meet.of(a.FromNode)) == before + len(messages))


def test_a_launcher_whose_workers_never_start_is_lost_though_it_answers(meeting):
    meet = meeting()
    meet.assembly.silence_s = 1e9
    peer = commenced(meet)
    says(meet, peer, m.Started(attempt=0, pids={0: 5}))
    assert meet.assembly.deadline() <= meet.now + START_S
    meet.now += START_S - 1.0
    answers(meet, peer, 1)
    assert not meet.of(a.Lost)
    meet.now += 0.5
    meet.pump(lambda: meet.of(a.Lost))
    assert meet.of(a.Lost) == [a.Lost(node=1, why="its workers have not started within 60 s")]


@pytest.mark.parametrize(
    "last",
    [[m.Started(attempt=0, pids={0: 5}), m.Started(attempt=0, pids={1: 6})], [exited(6.0, rank=1)], [GONE]],
    ids=["all have started", "one has ended", "all are gone"],
)
def test_a_launcher_whose_workers_have_started_or_ended_is_not_late(meeting, last):
    meet = meeting()
    meet.assembly.silence_s = 1e9
    peer = commenced(meet)
    says(meet, peer, *last)
    meet.now += 10 * START_S
    answers(meet, peer, 1)
    assert not meet.of(a.Lost)


def test_a_launcher_that_says_what_takes_long_has_more_time(meeting):
    meet = meeting()
    meet.assembly.silence_s = 1e9
    peer = commenced(meet)
    began = meet.now
    for elapsed_s in (15.0, 30.0, 60.0, 120.0, 240.0):
        meet.now = began + elapsed_s
        says(meet, peer, m.Remark(text="still importing torch", warning=True))
    meet.now = began + 240.0 + 240.0 + START_S - 1.0
    answers(meet, peer, 1)
    assert not meet.of(a.Lost)
    meet.now += 1.0
    meet.pump(lambda: meet.of(a.Lost))


def test_attempts_that_a_launcher_knows_of_are_told_before_it_has_joined(meeting):
    meet = meeting()
    meet.assembly.connect(1, 0.0)
    meet.calls(1, "n1", attempt=4, restarts=2, wall=-1.0)
    meet.pump(lambda: meet.of(a.Joined))
    assert [type(event) for event in meet.events if isinstance(event, (a.Known, a.Joined))] == [a.Known, a.Joined]
    assert meet.of(a.Known) == [a.Known(attempt=4, restarts=2)]
    assert meet.said == ["the clock of n1 is off"]


def test_only_those_that_take_part_are_heard_and_times_are_in_our_clock(meeting):
    meet = meeting()
    meet.assembly.connect(1, 0.0)
    first, second = meet.calls(1, "n1"), meet.calls(2, "n2")
    start = p.Commence(
        attempt=0, restarts=0, node_rank=1, local_ranks=(0,), hosts=("n0", "n1"), slots=(1, 1), master_addr="n0",
        master_port=5, interface="",
    )  # fmt: skip
    meet.assembly.send(1, start)
    second.say(GONE, p.Told(signum=signal.SIGTERM), p.Told(signum=signal.SIGKILL))
    first.say(exited(6.0, rank=1))
    meet.pump(lambda: meet.of(a.FromNode) and meet.of(a.Signalled))
    [event] = meet.of(a.FromNode)
    assert (event.node, event.message) == (1, replace(exited(6.0, rank=1), ended=99.0))
    assert meet.of(a.Signalled) == [a.Signalled(signum=signal.SIGTERM, node=2)]


def test_commands_never_leave_the_coordinator(meeting):
    meet = meeting()
    meet.assembly.connect(1, 0.0)
    peer = meet.calls(1, "n1")
    survey = r.Survey(
        serial=5, workdir="/", pythons=("p",), script="s", program="", run_dir="/r", gpus=False, topology=False
    )  # fmt: skip
    for node in (0, 1):
        meet.assembly.send(node, survey)
    assert meet.own.handled == [survey]
    assert meet.hears(peer, p.Ask) == p.Ask(serial=5)


def test_a_launcher_that_is_gone_is_lost_and_one_that_talks_nonsense_too(meeting):
    meet = meeting()
    for node in (1, 2):
        meet.assembly.connect(node, 0.0)
    first, second = meet.calls(1, "n1"), meet.calls(2, "n2")
    meet.pump(lambda: len(meet.of(a.Joined)) == 2)
    first.link.theirs.close()
    second.link.theirs.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    meet.pump(lambda: len(meet.of(a.Lost)) == 2)
    assert {event.node for event in meet.of(a.Lost)} == {1, 2}


def test_at_the_end_all_hear_the_verdict_and_are_waited_for(meeting):
    meet = meeting()
    peers = [meet.calls(rank, f"n{rank}") for rank in (1, 2)]
    meet.assembly.verdict = p.Verdict(exit_code=7, text="why")
    heard = []

    def leave(peer) -> None:
        while not peer.hears(p.Verdict):
            pass
        heard.append((peer.rank, peer.hears(p.Verdict)))
        peer.link.theirs.close()

    leaving = [threading.Thread(target=leave, args=(peer,)) for peer in peers]
    for thread in leaving:
        thread.start()
    meet.assembly.close()
    for thread in leaving:
        thread.join(WITHIN_S)
    assert meet.own.closed
    assert sorted(heard, key=str) == [(rank, [p.Verdict(exit_code=7, text="why")]) for rank in (1, 2)]
    assert not meet.assembly._peers
    meet.assembly.close = lambda: None
