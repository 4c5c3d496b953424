"""A coordinator of joined launchers. Tests play the launchers."""

from __future__ import annotations

import select
import time

import pytest

from distlaunch.coordinator.joined.launchers import JoinedLaunchers
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import Decoder, encode
from tests.unit.coordinator.remote_agents import WITHIN_S, PairLink

APPLY = {
    "num_nodes": (3, 3),
    "slots": 1,
    "command": "",
    "backend": "",
    "choices": "",
    "clock": 7.0,
    "wall": 0.0,
    "attempt": -1,
    "restarts": 0,
}


class OwnNode:
    """This machine's own node."""

    has_unsent = False

    def __init__(self) -> None:
        self.handled, self.sending, self.closed = [], [], False

    def start(self):
        pass

    def handle(self, message):
        self.handled.append(message)

    def descriptors(self):
        return {}

    def deadline(self):
        return None

    def receive(self):
        sending, self.sending = self.sending, []
        return sending

    def close(self, hurried):
        self.closed = True


class Port:
    """The rendezvous port: admitted launchers appear at the next look."""

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
    """Launchers whose command is ``other`` contradict the coordinator."""

    bounds = (3, 3)
    max_restarts = 3

    def conflict(self, number, host, reported):
        return f"{host} differs" if reported.command == "other" else None

    def clock_note(self, number, host, reported, *, wall):
        return f"the clock of {host} is off" if reported.wall < 0 else None


class FakeLauncher:
    """The launcher's end of a connection."""

    def __init__(self, link: PairLink) -> None:
        self.link = link
        self._decoder = Decoder(p.TO_LAUNCHER, m.REMOTE_NESTED_TYPES)
        self.received = []

    def say(self, *messages):
        for message in messages:
            self.link.theirs.sendall(encode(message))

    def sent_to(self, kind):
        """Read and return the messages of this kind."""
        while select.select([self.link.theirs], [], [], 0.02)[0]:
            data = self.link.theirs.recv(1 << 16)
            if not data:
                break
            self.received += self._decoder.feed(data)
        return [message for message in self.received if isinstance(message, kind)]


class AssemblyBed:
    """A coordinator, and the launchers that connect to it."""

    def __init__(self, size: int) -> None:
        self.now = 100.0
        self.own, self.port, self.notices, self.events, self.links = OwnNode(), Port(), [], [], []
        self.joined_launchers = JoinedLaunchers(
            own=self.own,
            host="n0",
            size=size,
            rank_name="node rank",
            job_id="j",
            folder="j-2",
            rules=Rules(),
            say=self.notices.append,
            clock=lambda: self.now,
        )
        self.joined_launchers.listen(self.port)
        self.joined_launchers.start()

    def calls(self, rank, host, *, instance=None, ending=None, first=b"", **reported):
        """Connect and send these messages, or the bytes of ``first``. Return the launcher's end if
        it is admitted, else the answer."""
        call = p.Call(
            version=1,
            release="1",
            job_key="",
            rank=rank,
            host=host,
            instance=instance or host,
            nonce="ab" * 16,
        )
        answer = self.joined_launchers.admit(call)
        if isinstance(answer, p.Rejected):
            return answer
        assert (answer.job_id, answer.folder) == ("j", "j-2")
        link = PairLink()
        self.links.append(link)
        self.port.waiting.append((call, link))
        launcher = FakeLauncher(link)
        launcher.rank = answer.rank
        if ending is not None:
            launcher.say(m.AgentEnding(why=ending))
            self.pump(
                lambda: (
                    self.joined_launchers._launchers[answer.rank].instance and not self.port.waiting
                )
            )
            return launcher
        if first:
            link.theirs.sendall(first)
            return launcher
        launcher.say(p.LauncherInfo(**{**APPLY, **reported}))
        self.pump(
            lambda: (
                answer.rank in self.joined_launchers._node_connections
                and self.joined_launchers._node_connections[answer.rank].greeted
            )
        )
        return launcher

    def pump(self, condition) -> None:
        end = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < end, (self.events, self.notices)
            poll = select.poll()
            for descriptor, wanted in self.joined_launchers.descriptors().items():
                poll.register(descriptor, wanted)
            poll.poll(10)
            self.events += self.joined_launchers.receive()

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def sent_to(self, launcher, kind):
        """Wait until a launcher gets a message of this kind."""
        self.pump(lambda: launcher.sent_to(kind))
        return launcher.sent_to(kind)[-1]

    def close(self) -> None:
        for node in list(self.joined_launchers._node_connections):
            self.joined_launchers.disconnect(node)
        self.joined_launchers.close()
        for link in self.links:
            link.close()
            link.theirs.close()


def answers(meet, launcher, rank) -> None:
    """Send messages of a launcher, a little later than all earlier ones."""
    meet.now += 0.5
    launcher.say(m.Pong(serial=99, clock=7.0))
    meet.pump(lambda: meet.joined_launchers._node_connections[rank].received_at == meet.now)


@pytest.fixture
def make_assembly():
    made = []

    def make(size: int = 3) -> AssemblyBed:
        made.append(AssemblyBed(size))
        return made[-1]

    yield make
    for each in made:
        each.close()
