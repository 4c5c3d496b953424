"""Layer job: a launcher that has joined a job: it does on its node what the coordinator says, by its own command line.

It shows and files the output of its own workers, tells what happens to them, and leaves with the coordinator's verdict.
If the coordinator is lost, the workers are stopped, and it is called again as long as there are restarts left.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from distlaunch.core.agent.remote_agent import Clock
from distlaunch.core.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, LaunchError, ProtocolError
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import Record
from distlaunch.core.wire import messages as m
from distlaunch.core.wire import peers as p
from distlaunch.core.wire import remote as r
from distlaunch.core.wire.codec import Decoder, encode
from distlaunch.job import signals
from distlaunch.job.own_node import OwnNode, Words
from distlaunch.job.peers import Peer, Writer
from distlaunch.job.records import EventLog, OutputFiles
from distlaunch.job.sink import Sink
from distlaunch.job.starting import Streams, start_of
from distlaunch.job.supervision import DOUBLE_S
from distlaunch.job.transport.link import Link

END_S = 10.0
"""How long workers may take to end beyond their grace."""
SIGNALS_LEAVE = 4
"""The first that ends a job has all asked, the next has all killed; after so many, and nothing of the coordinator, this
launcher leaves alone."""
_SLEPT_S = 1.0
_MOST_CHUNKS = 64
_LAST_S = 2.0
_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ASKING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL})
_PASSED_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})


class Planner(Protocol):
    """What this launcher plans of its own; see ``resolve.joining``."""

    def survey(self, serial: int) -> r.Survey:
        """Make the question about its own node."""

    def apply(self, *, clock: float, wall: float, attempt: int, restarts: int) -> p.Apply:
        """Say what it is to do."""

    def commenced(self, told: p.Commence, interfaces: list[str]) -> LaunchPlan:
        """Plan its own workers of an attempt. Raises LaunchError."""


class PeerSettings(Record):
    """What does not change."""

    coordinator: str
    """What it is called: ``node 0 at n1:29400``."""
    max_restarts: int
    failure_grace_s: float
    lost_after_s: float
    """How long the coordinator may be silent, until it says otherwise itself."""
    flexible: bool
    """The job goes on without a node that is lost, and takes it in again."""
    speaks: bool = True
    """The user hears from us what the coordinator says."""


Call = Callable[[], Link]
"""Call the coordinator (again), and wait until it lets us in. Raises LaunchError, and Stopped."""


class PeerRunner:
    """Serves one job to its exit code."""

    def __init__(
        self,
        *,
        settings: PeerSettings,
        planner: Planner,
        own: OwnNode,
        files: OutputFiles,
        sink: Sink,
        events: EventLog,
        signal_pipe: signals.SignalPipe,
        clock: Clock,
        call: Call,
        count_from: Callable[[int], None],
    ) -> None:
        """Be ready. ``count_from`` hears the lowest of our ranks, for a console that shows local ones."""
        self._settings = settings
        self._planner = planner
        self._own = own
        self._files = files
        self._sink = sink
        self._events = events
        self._signals = signal_pipe
        self._clock = clock
        self._call = call
        self._count_from = count_from
        self._peer: Peer[p.ToPeer] | None = None
        self._heard = 0.0
        self._silence_s = settings.lost_after_s
        self._due: float | None = None
        self._why = ""
        """Why the coordinator counts as lost; empty as long as it does not."""
        self._exit_code: int | None = None
        self._attempt, self._restarts = -1, 0
        self._running: int | None = None
        """The attempt that has workers here."""
        self._told_to_end = 0
        self._told_at = -DOUBLE_S
        self._noted: set[str] = set()

    def run(self, link: Link) -> int:
        """Serve until the verdict is there, or the coordinator is lost for good; give the exit code."""
        self._own.start()
        while True:
            self._join(link)
            while not self._is_over and not self._why:
                self._serve()
            if not self._is_over:
                self._wind_up()
            if self._exit_code is not None:
                return self._exit_code
            left = self._attempt < 0 or self._restarts < self._settings.max_restarts or self._settings.flexible
            if not left:
                self._sink.say("the job has failed: there is no restart left", level="error")
                return EXIT_UNAVAILABLE
            self._events.write("calling_again", {"attempt": self._attempt, "restarts": self._restarts})
            link = self._call()

    @property
    def _is_over(self) -> bool:
        return self._exit_code is not None

    @property
    def _has_workers(self) -> bool:
        return self._running is not None and not self._own.is_broken

    def close(self) -> None:
        """End what is left here; then the coordinator may know."""
        self._own.close()
        if self._peer is not None:
            self._peer.close()

    # --- the coordinator

    def _join(self, link: Link) -> None:
        self._why = ""
        self._heard = time.monotonic()
        self._told_to_end = 0
        peer: Peer[p.ToPeer] = Peer(0, Decoder(p.TO_PEER, r.REMOTE_PARTS))
        peer.open(link, now=0.0)
        peer.writer = Writer(peer, lambda: link, name="to the coordinator")
        peer.writer.start()
        self._peer = peer
        self._send(
            self._planner.apply(
                clock=self._clock(), wall=time.time(), attempt=self._attempt, restarts=self._restarts
            )
        )  # fmt: skip

    def _send(self, message: Record) -> None:
        if self._peer is not None:
            self._peer.write(encode(message))

    def _serve(self) -> None:
        """Wait, and do what there is to do, once."""
        self._wait(self._silent_at())
        self._hear()
        for message in self._own.receive():
            self._tell(message)
        self._listen_for_silence()

    def _silent_at(self) -> float | None:
        return None if self._clock.paused else self._heard + self._silence_s

    def _wait(self, until: float | None) -> None:
        poll = select.poll()
        for descriptor, wanted in self._own.descriptors().items():
            poll.register(descriptor, wanted)
        poll.register(self._signals.fileno(), select.POLLIN)
        if self._peer is not None and self._peer.link is not None:
            poll.register(self._peer.link.fileno(), select.POLLIN)
        now = time.monotonic()
        waits = [] if until is None else [until - now]
        if not self._clock.paused and (deadline := self._own.deadline()) is not None:
            waits.append(deadline - self._clock())
        timeout_s = max(0.0, min(waits)) if waits else None
        self._due = None if timeout_s is None else now + timeout_s
        for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000 + 1):
            if descriptor == self._signals.fileno():
                for signum in self._signals.read():
                    self._on_signal(signum)

    def _hear(self) -> None:
        peer = self._peer
        for _ in range(_MOST_CHUNKS):
            if peer is None or peer.link is None or self._is_over:
                return
            data = peer.link.receive()
            if data is None:
                self._why = self._why or peer.link.why_closed()
                return
            if not data:
                return
            self._heard = time.monotonic()
            try:
                for message in peer.decoder.feed(data):
                    self._handle(message)
            except ProtocolError as exc:
                self._why = self._why or f"it does not speak as it should: {exc.message}"
                return

    def _listen_for_silence(self) -> None:
        now = time.monotonic()
        if self._due is not None and now > self._due + _SLEPT_S:  # the coordinator's words may lie unread
            self._heard = max(self._heard, now - self._silence_s + m.LATE_S)
        silent_at = self._silent_at()
        if silent_at is not None and now >= silent_at:
            self._why = self._why or f"no word from it for {now - self._heard:.0f} s"

    def _handle(self, message: p.ToPeer) -> None:
        own = self._own
        match message:
            case r.Ping():
                self._silence_s = message.silence_s or self._silence_s
                self._send(r.Pong(serial=message.serial, clock=self._clock()))
            case p.Ask():
                own.handle(self._planner.survey(message.serial))
            case p.Commence():
                self._commence(message)
            case p.Verdict():
                self._conclude(message)
            case p.Notice() if self._settings.speaks:
                self._sink.say(message.text, level="warning" if message.level == "warning" else "info")
            case m.Pause():
                self._clock.pause(paused=message.paused)
                self._heard = time.monotonic()
                own.handle(message)
            case m.Stop():
                if message.signum in _ASKING:
                    self._clock.pause(paused=False)  # it continues the workers, and has a grace that must pass
                    own.handle(message)
            case m.Forward():
                if message.signum in _PASSED_ON:
                    own.handle(message)
            case m.Prepare() | m.CollectStacks() | r.Reach():
                own.handle(message)
            case _:
                pass

    def _commence(self, told: p.Commence) -> None:
        try:
            plan = self._planner.commenced(told, [name for _, name in socket.if_nameindex()])
        except LaunchError as exc:
            self._sink.say(f"error: {exc.message}", level="error")
            self._send(r.Ending(why=exc.message))
            self._exit_code = exc.exit_code
            self._flush()
            return
        self._attempt, self._restarts = told.attempt, max(0, told.restarts)
        for note in plan.notes:
            if note not in self._noted:
                self._noted.add(note)
                self._sink.say(note)
        with suppress(OSError):  # told when there is output to file
            os.makedirs(plan.layout.attempt_dir(plan.run_dir, plan.attempt), mode=0o700, exist_ok=True)
        ranks = [worker.rank for worker in plan.workers]
        self._files.ranks = ranks
        self._count_from(min(ranks))
        self._files.begin_attempt(plan.attempt)
        fields = {"attempt": plan.attempt, "ranks": ranks, "master_addr": told.master_addr}
        self._events.write("attempt_started", {**fields, "master_port": told.master_port})
        streams = Streams(terminal=None, stdin=False, travelled=False)
        self._running = plan.attempt
        self._own.handle(start_of(plan, told.node_rank, plan.workers, streams, plan.shared_env))

    def _conclude(self, verdict: p.Verdict) -> None:
        code = verdict.exit_code if 0 <= verdict.exit_code <= 255 else EXIT_SOFTWARE
        if verdict.text and self._settings.speaks:
            self._sink.say(verdict.text, level="error" if 0 < code < 128 or "\n" in verdict.text else "info")
        self._events.write("job_ended", {"exit_code": code})
        self._exit_code = code

    # --- our own node

    def _tell(self, message: Words) -> None:
        self._note(message)
        self._send(message)
        if isinstance(message, m.Fault):
            self._sink.say(f"internal error: {message.text}; all workers here have been killed", level="error")
            self._exit_code = EXIT_SOFTWARE
            self._flush()

    def _note(self, message: Words) -> None:
        if isinstance(message, m.Gone):
            self._running = None
        elif isinstance(message, m.WorkerExited):
            fields = {"attempt": message.attempt, "rank": message.rank, "pid": message.pid}
            self._events.write("worker_exited", {**fields, "returncode": message.returncode})

    def _flush(self) -> None:
        """Let what has been said leave, for a bounded time."""
        until = time.monotonic() + _LAST_S
        while self._peer is not None and self._peer.has_unsent and time.monotonic() < until:
            time.sleep(0.01)

    # --- signals

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGTSTP:
            self._sink.say(f"Ctrl-Z: only {self._settings.coordinator} can stop the job for a while", level="warning")
        elif signum in _PASSED_ON:
            self._send(p.Told(signum=signum))
        elif signum in _TO_END and time.monotonic() - self._told_at >= DOUBLE_S:
            self._told_at = time.monotonic()
            self._told_to_end += 1
            self._send(p.Told(signum=signum))
            if self._told_to_end >= SIGNALS_LEAVE:
                self._leave(signum)
                return
            again = "; once more kills all workers" if self._told_to_end == 1 and signum == signal.SIGINT else ""
            self._sink.say(f"{signal.Signals(signum).name}: telling {self._settings.coordinator}{again}")

    def _leave(self, signum: int) -> None:
        """End alone: somebody has asked for it again and again."""
        why = f"its launcher was told to end by {signal.Signals(signum).name} {SIGNALS_LEAVE} times"
        self._send(r.Ending(why=why))
        self._flush()
        self._sink.say("killing the workers of this node", level="warning")
        self._exit_code = 128 + signum

    # --- without the coordinator

    def _wind_up(self) -> None:
        """Stop our own workers, as nobody is there to do so."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        what = "; stopping the workers of this node" if self._running is not None else ""
        self._sink.say(f"{self._settings.coordinator} is lost: {self._why}{what}", level="warning")
        self._events.write("coordinator_lost", {"why": self._why})
        attempt = self._running
        if attempt is None or self._own.is_broken:
            return
        if self._clock.paused:
            self._clock.pause(paused=False)
            self._own.handle(m.Pause(paused=False))
        grace_s = self._settings.failure_grace_s
        self._own.handle(m.Stop(attempt=attempt, signum=signal.SIGTERM, grace_s=grace_s))
        until = time.monotonic() + grace_s + END_S
        self._told_to_end = 0
        while self._has_workers and time.monotonic() < until:
            self._wait(until)
            if self._told_to_end:
                self._exit_code = 128 + signal.SIGTERM
                return  # closing kills what is left
            for message in self._own.receive():
                self._note(message)
        if self._has_workers:
            self._exit_code = EXIT_SOFTWARE
            self._sink.say("not even KILL ended the workers of this node", level="error")
