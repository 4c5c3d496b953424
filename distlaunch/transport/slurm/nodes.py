"""Start agents on the nodes of a Slurm job by srun. The agents connect to the launcher by TCP.

One srun starts the agents of all nodes. After a loss, nodes that return get a separate step. One
thread reads srun's output and accepts the connections.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from distlaunch.core.model.option_names import Opt
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
    StepSettings,
    agent_argv,
    end_steps,
    step_argv,
    step_environ,
)
from distlaunch.transport.tcp_listener import Listener

_GATHER_S = 0.1
"""Nodes that return within this time get one common step."""
_LOOK_S = 0.5
_LONGEST_WAIT_S = 3600.0
"""Longest poll. ``poll`` takes milliseconds as a C int."""
_LAST_LINES = 3
_PASSING = re.compile(
    r"timed out|unable to contact|connect|busy|not "
    r"available|temporar|down|drain|unreachable|launch failed"
    r"|failed on node|not responding|killed|aborted|try again",
    re.IGNORECASE,
)
"""Words of srun for problems that may pass."""
_BUSY_HINT = "another step of this job may hold the CPUs or the memory: squeue --steps"
"""Hint for an srun that waits without a message, as Slurm 22.05's does."""
_WAITING = re.compile(r"retrying|waiting|queued|pending|busy", re.IGNORECASE)


class _PendingAgent:
    """A node whose agent has not connected yet."""

    def __init__(self, host: str, until: float) -> None:
        self.host = host
        self.until = until
        self.step: Step | None = None
        self.connection: Connection | None = None
        self.failure: ConnectFailure | None = None
        self.settled = threading.Event()


class SrunConnector:
    """Opens connections to the agents of a Slurm job. ``open`` may be called by several threads.

    ``hosts`` are all nodes, ``addresses`` those of this machine, best first. Raises ConfigError if
    no port is free.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        settings: StepSettings,
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
        self._settings, self._code, self._pythons = settings, code, tuple(pythons)
        self.say: Callable[[str], None] = _ignore_line

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
            expected_callers=len(self._hosts),
        )
        self._kill_switch = KillSwitch()
        self._lock = threading.Lock()
        self._pending: dict[str, _PendingAgent] = {}
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
        """Wait at most ``within_s`` seconds until the agent of a node, which srun starts, connects.
        Return the connection.

        Ends an earlier call for the same node. Raises ConnectError.
        """
        pending = _PendingAgent(target.host, time.monotonic() + within_s)
        with self._lock:
            if self._closing:
                raise ConnectError(
                    ConnectStepError("srun", "the job is over", passing=False).failure(target.host)
                )
            if not self._thread.ident:
                self._thread.start()
            before = self._pending.pop(target.host, None)
            self._pending[target.host] = pending
        if before is not None:
            self._fail(before, ConnectStepError("srun", "another start of this node has begun"))
        self._wake_thread()
        if not pending.settled.wait(within_s + _LOOK_S):
            self._fail(pending, ConnectStepError("srun", "the agent did not connect in time"))
        with self._lock:
            if self._pending.get(target.host) is pending:
                del self._pending[target.host]
        if pending.connection is None:
            raise ConnectError(
                pending.failure
                or ConnectStepError("srun", "the agent did not connect").failure(target.host)
            )
        return pending.connection

    def on_agent_lost(self, host: str) -> None:
        """Record that the agent of a host is lost: its step may end the others, or wait forever."""
        if (step := self._step_of.get(host)) is not None:
            step.has_lost = True

    def is_ending(self, host: str) -> bool:
        """Return whether Slurm ends the agent of a node because another one of its step is lost.

        Never true if the job can continue without the lost one.
        """
        step = self._step_of.get(host)
        return self._settings.all_or_none and step is not None and step.has_lost

    def cancel(self) -> None:
        """Fail all calls of ``open``, now and later."""
        with self._lock:
            self._closing = True
        for pending in self._unsettled_agents():
            self._fail(pending, ConnectStepError("srun", "the job is over", passing=False))
        self._wake_thread()

    def close(self) -> None:
        """End all steps. Must be called after all agents have exited."""
        self.cancel()
        if self._thread.ident:
            self._thread.join()
        end_steps(self._steps)
        self._kill_switch.close()
        self._listener.close()
        os.close(self._wake)
        os.close(self._wake_end)

    # --- the thread

    def _wake_thread(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_end, b"\0")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    return
            try:
                self._run_once()
            except Exception as exc:  # noqa: BLE001 - threads in ``open`` must get it, and the next turn may work
                for pending in self._unsettled_agents():
                    self._fail(
                        pending,
                        ConnectStepError("srun", f"{type(exc).__name__}: {exc}", passing=False),
                    )
                time.sleep(_LOOK_S)

    def _run_once(self) -> None:
        """Wait for the next event, then accept agents, read all steps, start due ones, and fail
        late nodes."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for descriptor, events in self._listener.descriptors().items():
            poll.register(descriptor, events)
        for step in self._steps:
            for descriptor, events in step.descriptors().items():
                poll.register(descriptor, events)
        now = time.monotonic()
        waiting = self._unsettled_agents()
        dues = [self._listener.deadline(), self._begin_at, *(pending.until for pending in waiting)]
        if any(pending.step is not None for pending in waiting):
            dues.append(now + _LOOK_S)  # nothing wakes us when srun has ended
        times = [due for due in dues if due is not None]
        poll.poll(min(max(0.0, min(times) - now), _LONGEST_WAIT_S) * 1000 + 1 if times else None)
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        for call, connection in self._listener.ready():
            self._on_connect(call, connection)
        for step in self._steps:
            self._read_step(step)
        self._start_steps()
        self._check_pending()

    def _log(self, line: str) -> None:
        self.say(line)

    def _unsettled_agents(self) -> list[_PendingAgent]:
        with self._lock:
            return [pending for pending in self._pending.values() if not pending.settled.is_set()]

    def _admit(self, call: Call) -> Welcome | Rejected:
        with self._lock:
            pending = self._pending.get(call.host)
        if pending is None or pending.settled.is_set() or pending.step is None:
            text = f"no agent is expected on {printable(call.host[:80])}"
            return Rejected(text=text, hint=None, exit_code=2, again=False)
        return Welcome(
            job_id=self._job_id,
            rank=self._hosts.index(call.host) if call.host in self._hosts else 0,
        )

    def _on_connect(self, call: Call, connection: Connection) -> None:
        with self._lock:
            pending = self._pending.get(call.host)
            if pending is None or pending.settled.is_set():
                pending = None
            else:
                pending.connection = connection
                pending.settled.set()
                if pending.step is not None:
                    pending.step.has_called = True
        if pending is None:
            connection.close()

    def _read_step(self, step: Step) -> None:
        """Send more of the zip to a step, and show lines that srun has printed."""
        step.send()
        lines = step.read()
        starting = any(pending.step is step for pending in self._unsettled_agents())
        for line in lines:
            if not starting or _WAITING.search(line):
                self.say(line)

    # --- steps

    def _start_steps(self) -> None:
        """Start steps for the waiting nodes, ``_GATHER_S`` after the first of them or when all
        nodes wait."""
        waiting = [pending for pending in self._unsettled_agents() if pending.step is None]
        if not waiting:
            self._begin_at = None
            return
        now = time.monotonic()
        if self._begin_at is None:
            self._begin_at = now + _GATHER_S
        if now < self._begin_at and len(waiting) < len(self._hosts):
            return
        self._begin_at = None
        order = {host: index for index, host in enumerate(self._hosts)}
        waiting.sort(key=lambda pending: order.get(pending.host, len(order)))
        again = self._has_begun
        self._has_begun = True
        groups: dict[object, list[_PendingAgent]] = {}
        for pending in waiting:
            component = self._settings.components.get(pending.host)
            groups.setdefault(component if self._together else pending.host, []).append(pending)
        for group in groups.values():
            self._start_group(group, again=again)

    def _start_group(self, group: Sequence[_PendingAgent], *, again: bool) -> None:
        hosts = [pending.host for pending in group]
        within_s = max(1.0, max(pending.until for pending in group) - time.monotonic())
        words = (self._addresses, str(self._listener.port), self._key, f"{within_s:.0f}")
        argv = step_argv(self._settings, hosts, again=again)
        argv += agent_argv(words, count=len(self._code), pythons=self._pythons)
        try:
            step = self._start_step(
                argv, hosts, self._code, self._environ, kill_switch=self._kill_switch
            )
        except OSError as exc:
            for pending in group:
                self._fail(
                    pending,
                    ConnectStepError("srun", f"srun cannot be run: {exc.strerror}", passing=False),
                )
            return
        self._steps.append(step)
        for pending in group:
            pending.step = step
            self._step_of[pending.host] = step

    def _check_pending(self) -> None:
        """Fail the waiting nodes whose srun has ended or whose time is over, and close ended
        steps."""
        now = time.monotonic()
        ended = [
            step for step in self._steps if step.returncode is not None
        ]  # a snapshot, so that all waiting nodes see the same
        for pending in self._unsettled_agents():
            step = pending.step
            if step is None:
                continue
            if step in ended:
                step.finish_reading()
                if not self._settings.all_or_none and len(step.hosts) > 1:
                    self._together = False  # one bad node fails its whole step
                self._fail(pending, _srun_failure(step, pending.host))
            elif now >= pending.until:
                last = _last_lines(step, pending.host)
                hint = None if last else _BUSY_HINT
                self._fail(
                    pending,
                    ConnectStepError("srun", f"the agent did not connect in time{last}", hint=hint),
                )
        for step in ended:
            if step.is_over:
                step.close()
                self._steps.remove(step)

    def _fail(self, pending: _PendingAgent, error: ConnectStepError) -> None:
        """Let a waiting ``open`` raise this error, unless its agent has connected."""
        with self._lock:
            if not pending.settled.is_set():
                pending.failure = error.failure(pending.host)
                pending.settled.set()


def _ignore_line(_: str) -> None: ...


def _srun_failure(step: Step, host: str) -> ConnectStepError:
    """Return the error for a node whose srun has ended before the agent connected."""
    if f"{NO_PYTHON} {host}" in step.lines:
        floor = ".".join(map(str, OLDEST))
        return ConnectStepError(
            "python",
            f"{host} has no Python of {floor} or newer on its PATH",
            hint=f"use {Opt.PYTHON} for one that all nodes have",
            passing=False,
        )
    text = "\n".join(step.lines)
    passing = step.returncode is not None and (step.returncode < 0 or bool(_PASSING.search(text)))
    return ConnectStepError("srun", f"{step.how_ended()}{_last_lines(step, host)}", passing=passing)


def _last_lines(step: Step, host: str) -> str:
    """Return srun's last lines after a colon, only the lines that name the node if there are
    any."""
    own = [line for line in step.lines if re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", line)]
    lines = (own or list(step.lines))[-_LAST_LINES:]
    return ": " + " / ".join(lines) if lines else ""
