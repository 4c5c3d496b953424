"""The coordinator's transport where each node has a launcher: the others, and its own node.

A launcher may take a node rank if no live launcher holds it. The policy hears of a launcher once it
wants the node (``connect``).
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Literal, Protocol

from distlaunch.coordinator.joined.local_node import OwnNode
from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.policy.membership import shown
from distlaunch.coordinator.runtime.connections import Links, Peer, StartBound, Writer
from distlaunch.coordinator.runtime.message_budget import NodeBudget
from distlaunch.coordinator.runtime.message_checks import Part
from distlaunch.coordinator.runtime.signal_pipe import FOR_THE_JOB, LOOK_S
from distlaunch.core.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE, ProtocolError
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import printable
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.planning.joined_plan import LauncherRecord
from distlaunch.transport.connect_errors import ConnectFailure
from distlaunch.transport.connection import Connection, ConnectionEnd, describe_end
from distlaunch.transport.tcp_listener import RepeatedNotices

HURRIED_LEAVE_S = 0.5
"""How long the other launchers may take to hear how the job has ended once somebody wants the rest
cut short."""
LEAVE_S = 9.0
"""How long launchers may take to hear the verdict, and to end what is left on their nodes."""
PROBE_S = 3.0
"""If another launcher calls for a seat, the one that has it gets so long to answer a ping."""
_OLD_S = 15.0
"""Whoever called for a seat does so again sooner than this, or not at all."""
_LONGEST_WHY = 2000


class _NoteKind(Enum):
    """What the coordinator tells its user about other launchers, once a minute at most."""

    RANK_TAKEN = "two launchers have one rank"
    CONFLICT = "a launcher was told something else"
    CLOCK = "the clock of a node is far off"
    UNFIT = "a launcher cannot take part"


class Callers(Protocol):
    """The rendezvous port; see ``transport.listening``."""

    def descriptors(self) -> dict[int, int]:
        """Return what to poll."""

    def deadline(self) -> float | None:
        """Return when ``ready`` is due even if nothing is ready."""

    def ready(self) -> Sequence[tuple[p.Call, Connection]]:
        """Return those who have been let in."""

    def close(self) -> None:
        """Listen no more."""


class Rules(Protocol):
    """What launchers have to agree in; see ``resolve.joining``."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most members of an attempt."""

    @property
    def max_restarts(self) -> int:
        """How many restarts the job may have."""

    def conflict(self, number: int, host: str, told: p.LauncherInfo) -> str | None:
        """Say what a launcher was told otherwise than we were."""

    def clock_note(
        self, number: int, host: str, told: p.LauncherInfo, *, wall: float
    ) -> str | None:
        """Say that a node's clock is far off."""


class Seat:
    """What is known of one member. Times are on the job's clock."""

    __slots__ = (
        "_probed_at",
        "apply",
        "attempt",
        "host",
        "instance",
        "joined",
        "part",
        "peer",
        "refused",
        "start",
        "wanted_at",
    )

    def __init__(self) -> None:
        self.host = ""
        self.instance = ""
        self.wanted_at: float | None = None
        """From when on the policy wants to hear of it; None: it has not asked, or has heard."""
        self.joined = False
        self.start = StartBound()
        self.have(None)

    def have(self, peer: Peer[p.FromLauncher] | None) -> None:
        """Have the link of a launcher that has called, and has not said anything so far."""
        self.peer = peer
        self.apply: p.LauncherInfo | None = None
        self.refused = False
        """It cannot take part: nothing that it says matters."""
        self.part = Part(0)
        """What its launcher may say of attempts; output stays with it."""
        self.start.end()
        self.attempt = -1
        """The newest that it was told to start; -1: none."""
        self._probed_at: float | None = None

    def leave(self) -> None:
        """Have no launcher any more; what it has said of itself is kept until the next one
        comes."""
        self.peer = None
        self.start.end()

    def came_in_vain(self, number: int, what: str, why: str) -> a.Unreachable:
        """Return why a launcher that has called does not take part; ``what`` a number is called."""
        failure = ConnectFailure(
            host=f"{what} {number} ({self.host})", step="call", text=shown(why)
        )
        return a.Unreachable(node=number, failure=failure)

    def probe(
        self, peer: Peer[p.FromLauncher], now: float
    ) -> Literal["ask", "wait", "there", "gone"]:
        """Tell how it stands with its launcher, now that another has called for the seat: ``ask``
        it first."""
        asked = self._probed_at
        if asked is None or now - asked > _OLD_S:
            self._probed_at = now
            return "ask"
        if peer.heard > asked:
            self._probed_at = (
                None  # an answer tells nothing of later: who calls then is to find out anew
            )
            return "there"
        return "gone" if now - asked >= PROBE_S else "wait"

    def commence(self, attempt: int, workers: int, now: float) -> None:
        """Record that its launcher is told to start so many workers."""
        self.attempt = attempt
        self.start.begin(workers, now)


def number_of(call: p.Call, seats: Sequence[Seat], let_in: Mapping[str, int]) -> int | None:
    """Return the seat for a launcher without a rank: the one it had, a free one of its host, or the
    next; None if all are taken.

    ``let_in``: the seats of those whose links are yet to come, by instance.
    """
    others = list(enumerate(seats))[1:]
    known = [number for number, seat in others if seat.instance == call.instance]
    free = [number for number, seat in others if seat.peer is None and seat.instance not in let_in]
    same = [number for number in free if seats[number].host == call.host]
    fresh = [number for number in free if not seats[number].host]
    return next(iter((*known, *same, *fresh, *free)), None)


class Assembly(Links[p.FromLauncher]):
    """A ``Transport``. Member 0 is ``own``; the others are links that ``callers`` hand over."""

    def __init__(
        self,
        *,
        own: OwnNode,
        host: str,
        size: int,
        what: str,
        job_id: str,
        folder: str,
        rules: Rules,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Have a seat for each member. ``what`` a number is called: ``node rank``, ``rank``;
        ``say`` warns the user."""
        super().__init__(clock)
        self._own = own
        self._host = host
        self._what = what
        self._job_id, self._folder = job_id, folder
        self._rules = rules
        self._say = say
        self._troubles = RepeatedNotices(say, clock)
        self._seats = [Seat() for _ in range(size)]
        self._let_in: dict[str, int] = {}  # by instance, whose link is yet to come
        self._wanted: set[int] = set()  # seats of which the policy waits to hear
        self._starting: set[int] = set()  # seats whose workers are to start
        self._callers: Callers | None = None
        self._has_begun = False
        self.verdict = p.ExitLauncher(
            exit_code=EXIT_SOFTWARE,
            text="the coordinator has failed",
            summary="the coordinator has failed",
            is_error=True,
        )
        """What the others hear at the end."""

    def listen(self, callers: Callers) -> None:
        """Use the port on which the other launchers call."""
        self._callers = callers

    @property
    def members(self) -> dict[int, LauncherRecord]:
        """Return those that have come, by number."""
        return {
            number: LauncherRecord(host=seat.host, apply=seat.apply)
            for number, seat in enumerate(self._seats)
            if seat.apply is not None
        }

    # --- the runner's side

    def start(self) -> None:
        """Be ready for messages."""
        self._own.start()

    def connect(self, node: int, delay_s: float) -> None:
        """Want a member, after so long: it is there already, or will call."""
        if node == 0:
            self._events.append(a.Joined(node=0, host=self._host))
            return
        seat = self._seats[node]
        if seat.joined:
            self.disconnect(node)
        seat.wanted_at = self._clock() + delay_s
        self._wanted.add(node)
        self._offer(node)

    def disconnect(self, node: int) -> None:
        """Leave a member; it may call again."""
        seat = self._seats[node]
        seat.joined, seat.wanted_at = False, None
        seat.leave()
        self._wanted.discard(node)
        self._starting.discard(node)
        super().disconnect(node)

    def discover(self) -> None:
        """Do nothing: who wants to take part, calls."""

    def send(self, node: int, message: m.ToAgent | m.Survey | m.Reach | p.StartWorkers) -> None:
        """Send to a member; what cannot be sent any more is lost with it."""
        self._has_begun = self._has_begun or isinstance(message, m.Prepare)
        self._seats[node].part.told(message)
        if isinstance(message, p.StartWorkers):
            self._seats[node].commence(message.attempt, len(message.local_ranks), self._clock())
            self._starting.add(node)
        elif isinstance(message, m.Stop):
            self._seats[node].start.stop(message.grace_s)
        if isinstance(message, m.Survey) and node:
            self._tell(node, p.SurveyNode(serial=message.serial))
        elif isinstance(message, p.StartWorkers) or node:
            self._tell(node, message)
        else:
            self._own.handle(message)

    def broadcast(self, message: m.ToAgent) -> None:
        """Send to every member that there is."""
        self._own.handle(message)
        for node in list(self._peers):
            self._tell(node, message)

    def notice(self, text: str, level: str) -> None:
        """Show a line on all other nodes."""
        for node in list(self._peers):
            self._tell(node, p.Notice(text=text, level=level))

    @property
    def has_unsent(self) -> bool:
        """Return whether something is still on its way out."""
        return self._own.has_unsent or super().has_unsent

    def descriptors(self) -> dict[int, int]:
        """Return what to poll, with the poll events."""
        called = {} if self._callers is None else self._callers.descriptors()
        return {self._epoll.fileno(): select.POLLIN, **called, **self._own.descriptors()}

    def deadline(self) -> float | None:
        """Return when ``receive`` is due even if nothing is ready."""
        dues = [
            self._ping_at,
            self._read_at,
            self._own.deadline(),
            None if self._callers is None else self._callers.deadline(),
        ]
        wanted = [self._seats[node] for node in self._wanted]
        dues += [
            seat.wanted_at for seat in wanted if seat.apply is not None and seat.peer is not None
        ]
        dues += [self._seats[node].start.until for node in self._starting]
        dues.append(self._troubles.deadline())
        return min((due for due in dues if due is not None), default=None)

    def receive(self) -> list[a.Event]:
        """Return what has happened, without waiting."""
        for message in self._own.receive():
            # Without its workers' parent our own node can never start any again: that is no loss to
            # be made good.
            if isinstance(message, m.AgentFailed):
                self._events.append(a.Broken(text=message.text, without=0))
            else:
                self._events.append(a.FromNode(node=0, message=message))
        self._read_all()
        self._take_callers()
        for node in list(self._wanted):
            self._offer(node)
        self._end_late_starts()
        self._troubles.tick()
        self._tick()
        return self._taken_events()

    def close(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Tell all others how the job has ended, end our own node, and wait, bounded, until the
        others have heard."""
        for node in list(self._peers):
            self._tell(node, self.verdict)
        self._own.close(hurried)
        until = time.monotonic() + LEAVE_S
        while self._peers and (left_s := until - time.monotonic()) > 0:
            if left_s > HURRIED_LEAVE_S and hurried():
                until = time.monotonic() + HURRIED_LEAVE_S
            self._read_all(min(left_s, LOOK_S))
        for node in list(self._peers):
            self.disconnect(node)
        if self._callers is not None:
            self._callers.close()
        self._close()

    # --- callers

    def admit(self, call: p.Call) -> p.Welcome | p.Rejected:
        """Decide whether a launcher that has called gets a seat, and which."""
        number = call.rank if call.rank is not None else number_of(call, self._seats, self._let_in)
        if number is None:
            return _turned("all places of the job are taken", code=EXIT_UNAVAILABLE, again=True)
        who = printable(call.host[:80])
        if number >= len(self._seats):
            return _turned(
                f"{self._what} {number}: {self._what}s of this job go to {len(self._seats) - 1}"
            )
        if number == 0:
            return self._taken(0, self._host, who)
        seat = self._seats[number]
        if seat.peer is not None and seat.refused:
            self._lose(seat.peer, "it cannot take part")
        if seat.peer is not None and seat.instance != call.instance:
            if (turned := self._probe(number, seat, who)) is not None:
                return turned
            self._lose(seat.peer, f"a launcher on {who} has taken its place")
        elif seat.peer is not None:
            self._lose(seat.peer, "its launcher has called again")
        elif number in self._let_in.values():
            return _turned(
                f"another launcher has just called for {self._what} {number}", again=True
            )
        self._let_in[call.instance] = number
        seat.instance, seat.host = call.instance, who
        return p.Welcome(job_id=self._job_id, rank=number, folder=self._folder)

    def _probe(self, number: int, seat: Seat, who: str) -> p.Rejected | None:
        """Find out whether the launcher that has a seat is still there; None: it is not."""
        if seat.peer is None:
            return None
        match seat.probe(seat.peer, self._clock()):
            case "gone":
                return None
            case "there":
                return self._taken(number, seat.host, who)
            case "ask":
                self._ping(seat.peer)
        return _turned(
            f"{self._what} {number} belongs to the launcher on {seat.host}, which is asked",
            again=True,
        )

    def _taken(self, number: int, host: str, who: str) -> p.Rejected:
        text = f"two launchers have {self._what} {number}: on {host}, and on {who}"
        self._troubles.note(_NoteKind.RANK_TAKEN, f"{text}; the second is turned away")
        return _turned(text, hint=f"each launcher needs a {self._what} of its own")

    def _take_callers(self) -> None:
        for call, link in () if self._callers is None else self._callers.ready():
            number = self._let_in.pop(call.instance, None)
            if number is None or self._seats[number].instance != call.instance:
                link.close()
                continue
            seat = self._seats[number]
            peer: Peer[p.FromLauncher]
            peer = Peer(number, p.FROM_LAUNCHER, m.REMOTE_PARTS, NodeBudget(time.monotonic()))
            peer.writer = Writer(peer, lambda link=link: link, name=f"to {seat.host}")  # type: ignore[misc]
            seat.have(peer)
            self._peers[number] = peer
            try:
                peer.writer.start()
            except RuntimeError:
                peer.link = link
                self._lose(peer, f"no thread can be started for it: {explain_refusal()}")
                continue
            self._have(peer, link)

    def _offer(self, number: int) -> None:
        """Tell the policy of a member that it wants, once it is there."""
        seat = self._seats[number]
        wanted = seat.wanted_at is not None and self._clock() >= seat.wanted_at
        if wanted and seat.peer is not None and seat.apply is not None:
            seat.wanted_at, seat.joined = None, True
            self._wanted.discard(number)
            self._events.append(a.Joined(node=number, host=seat.host))

    # --- what members say

    def _take(self, peer: Peer[p.FromLauncher], message: p.FromLauncher) -> None:
        seat = self._seats[peer.node]
        if seat.refused:
            return
        if not peer.greeted:
            if isinstance(message, p.LauncherInfo):
                self._greet(peer, seat, message)
            elif isinstance(message, m.AgentEnding):
                self._cannot_take_part(peer, seat, message.why)
            return
        match message:
            case m.Pong():
                peer.pong(message, self._clock())
            case m.AgentEnding():
                self._lose(
                    peer,
                    message.why,
                    a.LossKind.UNHEARD if message.coordinator_silent else a.LossKind.GONE,
                )
            case p.LauncherSignalled():
                if message.signum in FOR_THE_JOB:
                    self._events.append(a.Signalled(signum=message.signum, node=peer.node))
            case p.LauncherInfo() | p.Call() | p.Proof():
                pass
            case _ if not seat.joined or not self._counts(peer, seat, message):
                pass
            case WorkerExit():
                ended = replace(message, ended=min(self._clock(), message.ended + peer.offset))
                self._events.append(a.FromNode(node=peer.node, message=ended))
            case _:
                self._events.append(a.FromNode(node=peer.node, message=message))

    def _counts(self, peer: Peer[p.FromLauncher], seat: Seat, message: p.FromLauncher) -> bool:
        """Return whether this counts; it may be of another coordinator's attempt, but not make
        nonsense of ours."""
        try:
            counts = seat.part.check(message)
        except ProtocolError as exc:
            if getattr(message, "attempt", seat.attempt) == seat.attempt:
                self._lose(peer, exc.message)
            return False
        seat.start.heard(message, self._clock())
        if seat.start.until is None:
            self._starting.discard(peer.node)
        return counts

    def _greet(self, peer: Peer[p.FromLauncher], seat: Seat, told: p.LauncherInfo) -> None:
        peer.greet(told.clock, self._clock())
        wall = time.time()
        conflict = self._rules.conflict(peer.node, seat.host, told)
        if conflict is not None:
            seat.refused = True
            hint = "all launchers of a job get the same command line"
            if not self._has_begun:
                self._events.append(a.Refused(text=conflict, hint=hint))
                return
            self._troubles.note(_NoteKind.CONFLICT, f"a launcher was turned away: {conflict}")
            self._tell(
                peer.node,
                p.ExitLauncher(
                    exit_code=EXIT_USAGE,
                    text=f"error: {conflict}\n  hint: {hint}",
                    summary=conflict,
                    is_error=True,
                ),
            )
            return
        if (note := self._rules.clock_note(peer.node, seat.host, told, wall=wall)) is not None:
            self._troubles.note(_NoteKind.CLOCK, note)
        seat.apply = told
        if told.attempt >= 0 and not self._has_begun:
            self._events.append(
                a.Known(attempt=told.attempt, restarts=min(told.restarts, self._rules.max_restarts))
            )
        self._ping(peer)
        self._offer(peer.node)

    def _cannot_take_part(self, peer: Peer[p.FromLauncher], seat: Seat, why: str) -> None:
        """Record that a launcher has failed before it had anything else to say."""
        text = (
            f"{self._what} {peer.node} ({seat.host}) cannot take part: "
            f"{printable(why[:_LONGEST_WHY])}"
        )
        fewest, most = self._rules.bounds
        if fewest == most and not self._has_begun:
            self._events.append(a.Refused(text=text))
        else:
            self._troubles.note(_NoteKind.UNFIT, text)
        self._lose(peer, why)

    def _end_late_starts(self) -> None:
        """Take launchers for lost whose workers do not come up."""
        now = self._clock()
        for node in list(self._starting):
            seat = self._seats[node]
            if seat.peer is not None and (why := seat.start.why_late(now)) is not None:
                self._lose(seat.peer, why)

    def _lose(
        self, peer: Peer[p.FromLauncher], why: str, kind: a.LossKind = a.LossKind.GONE
    ) -> None:
        self._peers.pop(peer.node, None)
        self._drop(peer)
        seat = self._seats[peer.node]
        if seat.peer is not peer:
            return
        seat.leave()
        self._starting.discard(peer.node)
        if seat.joined:
            seat.joined = False
            self._events.append(a.Lost(node=peer.node, why=why, kind=kind))
        elif peer.node in self._wanted and not peer.greeted:
            self._wanted.discard(peer.node)
            self._events.append(seat.came_in_vain(peer.node, self._what, why))

    def _describe_end(self, end: ConnectionEnd) -> str:
        return f"its launcher is gone: {describe_end(end)}"


def _turned(
    text: str, *, hint: str | None = None, code: int = EXIT_USAGE, again: bool = False
) -> p.Rejected:
    return p.Rejected(text=text, hint=hint, exit_code=code, again=again)
