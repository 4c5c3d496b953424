"""Agents on the nodes of a Slurm job. srun starts them, and they connect to the launcher by TCP.

One srun starts the agents of all nodes. Nodes that come back after a loss get steps of their own.
One thread reads srun's output and accepts the connections.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from distlaunch.core.model.text import printable
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.core.protocol.launcher_messages import Call, Rejected, Welcome
from distlaunch.core.protocol.token_keys import TOKEN
from distlaunch.transport.bootstrap import OLDEST
from distlaunch.transport.child_process import KillSwitch
from distlaunch.transport.connect_errors import ConnectFailure, ConnectStepError
from distlaunch.transport.connection import ConnectError, Connection, Target
from distlaunch.transport.slurm.step import (
    NO_PYTHON,
    Step,
    Wanted,
    agent_argv,
    end_steps,
    step_argv,
    step_environ,
)
from distlaunch.transport.tcp_listener import Listener

_GATHER_S = 0.1
"""Nodes that come back within this time get one step together."""
_LOOK_S = 0.5
_LONGEST_WAIT_S = 3600.0
"""poll takes milliseconds as a C int."""
_LAST_LINES = 3
_PASSING = re.compile(
    r"timed out|unable to contact|connect|busy|not "
    r"available|temporar|down|drain|unreachable|launch failed"
    r"|failed on node|not responding|killed|aborted|try again",
    re.IGNORECASE,
)
"""Words of srun for problems that may pass."""
_BUSY_HINT = "another step of this job may hold the CPUs or the memory: squeue --steps"
"""For an srun that waits without a message, as that of Slurm 22.05 does."""
_WAITING = re.compile(r"retrying|waiting|queued|pending|busy", re.IGNORECASE)


class _Awaited:
    """A node whose agent has not connected yet."""

    def __init__(self, host: str, until: float) -> None:
        self.host = host
        self.until = until
        self.step: Step | None = None
        self.link: Connection | None = None
        self.failure: ConnectFailure | None = None
        self.settled = threading.Event()


class Srun:
    """Opens connections to the agents of a Slurm job. ``open`` may be called by several threads.

    ``hosts`` are all nodes, ``addresses`` those of this machine, best first. Raises ConfigError if
    there is no port to listen on.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        wanted: Wanted,
        code: bytes,
        pythons: Sequence[str],
        environ: Mapping[str, str],
        addresses: Sequence[str],
        ports: Sequence[int],
        release: str,
        job_id: str,
        start_step: Callable[..., Step] = Step,
    ) -> None:
        self._hosts = tuple(hosts)
        self._start_step = start_step
        self._wanted, self._code, self._pythons = wanted, code, tuple(pythons)
        self.say: Callable[[str], None] = _nothing
        """Gets what srun says while the job runs, and what goes on on the port; called in the
        thread."""
        self._key = environ.get("SLURM_JOB_ID", "")
        token = os.urandom(16).hex()  # not the user's, which is for launchers started by hand
        self._environ = {**step_environ(environ), TOKEN: token}
        self._addresses = ",".join(addresses)
        self._job_id = job_id
        job_identity = JobIdentity(release=release, job_key=self._key, token=token.encode())
        self._listener = Listener(
            "*",
            ports,
            job_identity=job_identity,
            owner=job_id,
            admit=self._admit,
            log=self._log,
            members=len(self._hosts),
        )
        self._kill_switch = KillSwitch()
        self._lock = threading.Lock()
        self._awaited: dict[str, _Awaited] = {}
        self._steps: list[Step] = []
        self._step_of: dict[str, Step] = {}
        self._has_begun = False
        self._together = True
        self._begin_at: float | None = None
        self._closing = False
        self._wake, self._wake_end = os.pipe()
        for descriptor in (self._wake, self._wake_end):
            os.set_blocking(descriptor, False)
        self._thread = threading.Thread(target=self._run, name="srun", daemon=True)

    # --- called by other threads

    def open(self, target: Target, within_s: float) -> Connection:
        """Wait until the agent of a node connects; srun starts it. See ``Open``."""
        awaited = _Awaited(target.host, time.monotonic() + within_s)
        with self._lock:
            if self._closing:
                raise ConnectError(
                    ConnectStepError("srun", "the job is over", passing=False).failure(target.host)
                )
            if not self._thread.ident:
                self._thread.start()
            before = self._awaited.pop(target.host, None)
            self._awaited[target.host] = awaited
        if before is not None:
            self._fail(before, ConnectStepError("srun", "it is started anew"))
        self._nudge()
        if not awaited.settled.wait(within_s + _LOOK_S):
            self._fail(awaited, ConnectStepError("srun", "it has not called in time"))
        with self._lock:
            if self._awaited.get(target.host) is awaited:
                del self._awaited[target.host]
        if awaited.link is None:
            raise ConnectError(
                awaited.failure
                or ConnectStepError("srun", "it has not called").failure(target.host)
            )
        return awaited.link

    def lost(self, host: str) -> None:
        """Remember that the agent's step may end the others, or wait for ever."""
        if (step := self._step_of.get(host)) is not None:
            step.has_lost = True

    def is_ending(self, host: str) -> bool:
        """Return whether Slurm ends the agent of a node because another one of its step is lost."""
        step = self._step_of.get(host)
        return self._wanted.all_or_none and step is not None and step.has_lost

    def give_up(self) -> None:
        """Fail all calls of ``open``, now and later."""
        with self._lock:
            self._closing = True
        for awaited in self._waiting():
            self._fail(awaited, ConnectStepError("srun", "the job is over", passing=False))
        self._nudge()

    def close(self) -> None:
        """End all steps. Call it after all agents have exited."""
        self.give_up()
        if self._thread.ident:
            self._thread.join()
        end_steps(self._steps)
        self._kill_switch.close()
        self._listener.close()
        os.close(self._wake)
        os.close(self._wake_end)

    # --- the thread

    def _nudge(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_end, b"\0")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    return
            try:
                self._turn()
            except Exception as exc:  # noqa: BLE001 - threads in ``open`` must get it, and the next turn may work
                for awaited in self._waiting():
                    self._fail(
                        awaited,
                        ConnectStepError("srun", f"{type(exc).__name__}: {exc}", passing=False),
                    )
                time.sleep(_LOOK_S)

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for descriptor, wanted in self._listener.descriptors().items():
            poll.register(descriptor, wanted)
        for step in self._steps:
            for descriptor, wanted in step.descriptors().items():
                poll.register(descriptor, wanted)
        now = time.monotonic()
        waiting = self._waiting()
        dues = [self._listener.deadline(), self._begin_at, *(awaited.until for awaited in waiting)]
        if any(awaited.step is not None for awaited in waiting):
            dues.append(now + _LOOK_S)  # nothing wakes us when srun has ended
        times = [due for due in dues if due is not None]
        poll.poll(min(max(0.0, min(times) - now), _LONGEST_WAIT_S) * 1000 + 1 if times else None)
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        for call, link in self._listener.ready():
            self._take(call, link)
        for step in self._steps:
            self._hear(step)
        self._begin()
        self._look()

    def _log(self, line: str) -> None:
        self.say(line)

    def _waiting(self) -> list[_Awaited]:
        with self._lock:
            return [awaited for awaited in self._awaited.values() if not awaited.settled.is_set()]

    def _admit(self, call: Call) -> Welcome | Rejected:
        with self._lock:
            awaited = self._awaited.get(call.host)
        if awaited is None or awaited.settled.is_set() or awaited.step is None:
            text = f"no agent is awaited on {printable(call.host[:80])}"
            return Rejected(text=text, hint=None, exit_code=2, again=False)
        return Welcome(
            job_id=self._job_id,
            rank=self._hosts.index(call.host) if call.host in self._hosts else 0,
        )

    def _take(self, call: Call, link: Connection) -> None:
        with self._lock:
            awaited = self._awaited.get(call.host)
            if awaited is None or awaited.settled.is_set():
                awaited = None
            else:
                awaited.link = link
                awaited.settled.set()
                if awaited.step is not None:
                    awaited.step.has_called = True
        if awaited is None:
            link.close()

    def _hear(self, step: Step) -> None:
        step.send()
        lines = step.read()
        starting = any(awaited.step is step for awaited in self._waiting())
        for line in lines:
            if not starting or _WAITING.search(line):
                self.say(line)

    # --- steps

    def _begin(self) -> None:
        waiting = [awaited for awaited in self._waiting() if awaited.step is None]
        if not waiting:
            self._begin_at = None
            return
        now = time.monotonic()
        if self._begin_at is None:
            self._begin_at = now + _GATHER_S
        if now < self._begin_at and len(waiting) < len(self._hosts):
            return
        self._begin_at = None
        order = {host: place for place, host in enumerate(self._hosts)}
        waiting.sort(key=lambda awaited: order.get(awaited.host, len(order)))
        again = self._has_begun
        self._has_begun = True
        groups: dict[object, list[_Awaited]] = {}
        for awaited in waiting:
            component = self._wanted.components.get(awaited.host)
            groups.setdefault(component if self._together else awaited.host, []).append(awaited)
        for group in groups.values():
            self._start(group, again=again)

    def _start(self, group: Sequence[_Awaited], *, again: bool) -> None:
        hosts = [awaited.host for awaited in group]
        within_s = max(1.0, max(awaited.until for awaited in group) - time.monotonic())
        words = (self._addresses, str(self._listener.port), self._key, f"{within_s:.0f}")
        argv = step_argv(self._wanted, hosts, again=again)
        argv += agent_argv(words, count=len(self._code), pythons=self._pythons)
        try:
            step = self._start_step(
                argv, hosts, self._code, self._environ, kill_switch=self._kill_switch
            )
        except OSError as exc:
            for awaited in group:
                self._fail(
                    awaited,
                    ConnectStepError("srun", f"srun cannot be run: {exc.strerror}", passing=False),
                )
            return
        self._steps.append(step)
        for awaited in group:
            awaited.step = step
            self._step_of[awaited.host] = step

    def _look(self) -> None:
        """Fail the nodes whose srun has ended or whose time is over."""
        now = time.monotonic()
        ended = [
            step for step in self._steps if step.returncode is not None
        ]  # a snapshot, so that all waiting nodes see the same
        for awaited in self._waiting():
            step = awaited.step
            if step is None:
                continue
            if step in ended:
                step.finish_reading()
                if not self._wanted.all_or_none and len(step.hosts) > 1:
                    self._together = False  # one bad node fails its whole step
                self._fail(awaited, _why(step, awaited.host))
            elif now >= awaited.until:
                last = _last(step, awaited.host)
                hint = None if last else _BUSY_HINT
                self._fail(
                    awaited,
                    ConnectStepError("srun", f"the agent has not called in time{last}", hint=hint),
                )
        for step in ended:
            if step.is_over:
                step.close()
                self._steps.remove(step)

    def _fail(self, awaited: _Awaited, trouble: ConnectStepError) -> None:
        with self._lock:
            if not awaited.settled.is_set():
                awaited.failure = trouble.failure(awaited.host)
                awaited.settled.set()


def _nothing(_: str) -> None: ...


def _why(step: Step, host: str) -> ConnectStepError:
    if f"{NO_PYTHON} {host}" in step.lines:
        floor = ".".join(map(str, OLDEST))
        return ConnectStepError(
            "python",
            f"{host} has no Python of {floor} or newer on its PATH",
            hint="--python names one that all nodes have",
            passing=False,
        )
    text = "\n".join(step.lines)
    passing = step.returncode is not None and (step.returncode < 0 or bool(_PASSING.search(text)))
    return ConnectStepError("srun", f"{step.how_ended()}{_last(step, host)}", passing=passing)


def _last(step: Step, host: str) -> str:
    """Return srun's last lines after a colon; those that name the node if there are any."""
    own = [line for line in step.lines if re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", line)]
    lines = (own or list(step.lines))[-_LAST_LINES:]
    return ": " + " / ".join(lines) if lines else ""
