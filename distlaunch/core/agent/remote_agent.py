"""The agent as a separate process: its loop, the resources of its node, and its exit.

The coordinator is lost if the connection ends or no message arrives for ``SILENCE_S`` or the user's
value. The agent then sends TERM to the workers, kills them after their grace, and exits. A
termination signal to the agent has the same effect. If the agent is killed, the spawner stops the
workers.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from distlaunch.core.agent.agent import Agent
from distlaunch.core.agent.frames import FrameStream
from distlaunch.core.agent.liveness import SilenceMonitor
from distlaunch.core.agent.node.reachability import ReachabilityTest
from distlaunch.core.agent.node.survey import NodeSurvey
from distlaunch.core.agent.workers.channel import Channel
from distlaunch.core.agent.workers.deadline import FILES_S, run_with_timeout
from distlaunch.core.agent.workers.log_files import LogFiles
from distlaunch.core.agent.workers.output_sender import OutputSender
from distlaunch.core.agent.workers.process_setup import rename_process
from distlaunch.core.agent.workers.stdin import StdinPipe
from distlaunch.core.agent.workers.streams import NodeResources
from distlaunch.core.agent.workers.temporary_directory import TemporaryDirectory, adapt_start
from distlaunch.core.errors import EXIT_SOFTWARE, ConfigError, ProtocolError
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import TRAIN, Layout
from distlaunch.core.private_files import make_private_dirs
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import spawner_messages as w
from distlaunch.core.protocol.codec import Decoder, encode

NAME = "dl-agent"
_END_S = 10.0
"""How long the workers may take to end after their grace. Then the spawner kills them."""
_FLUSH_S = 2.0
_LAST_S = 0.2
HOLD_S = 0.1
"""Largest delay between spawner and agent for a signal to all processes of a node."""
_TO_WORKERS = (signal.SIGUSR1, signal.SIGUSR2)
_TO_END = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class RemoteAgent:
    """Runs the agent of one node, from its greeting to its exit."""

    def __init__(
        self,
        *,
        greeting: bytes,
        code_fd: int,
        reading: int,
        writing: int,
        nofile: int,
        silence_s: float,
        channel: Channel[w.FromSpawner],
        watcher: int,
        reports_signals: bool = False,
        orphan_grace_s: float,
        write_reason: Callable[[str], None],
    ) -> None:
        self._greeting = greeting
        self._write_reason = write_reason
        self._reports_signals = reports_signals
        self._silence = SilenceMonitor(silence_s)
        self._clock = PausableClock()
        self._wake, self._wake_end = os.pipe()
        for descriptor in (self._wake, self._wake_end):
            os.set_blocking(descriptor, False)
        decoder: Decoder[m.ToRemote] = Decoder(m.TO_REMOTE, m.REMOTE_NESTED_TYPES)
        self._stream = FrameStream(reading, writing, decoder, self._wake_loop)
        send = self._stream.send
        self._output = OutputSender(send)
        self._stdin = StdinPipe(send)
        self._resources = RemoteNodeResources(
            send=send, stdin_pipe=self._stdin, wake=self._wake_loop, keep=(code_fd,)
        )
        self._agent = Agent(
            job_id="",
            cookie=os.urandom(8).hex(),
            nofile=nofile,
            channel=channel,
            watcher=watcher,
            port=None,
            sink=self._output,
            send=self._on_agent_message,
            clock=self._clock,
            resources=self._resources,
        )
        self._is_started = False
        self._attempt: int | None = None  # the attempt that has workers
        self._latest_start: m.Start | None = None
        self._grace_s = orphan_grace_s
        self._end_reason = ""  # why the agent ends: the coordinator is lost, or a signal came
        self._is_coordinator_silent = False  # the coordinator is lost because it was silent
        self._is_dismissed = False
        self._held_signals: list[tuple[float, m.SpawnerSignalled]] = []
        """Signals that the spawner received, each with the time at which to report it. If the agent
        receives the same signal, the node shuts down, and the signal is not for the job."""

    # --- the loop

    def run(self) -> int:
        """Run until the coordinator ends the agent or is lost. Return the exit code.

        It is 0 if the coordinator has ended the agent, 1 if the coordinator was lost or a signal
        came, 70 after an error.
        """
        for signum in (*_TO_END, *(_TO_WORKERS if self._reports_signals else ()), signal.SIGCHLD):
            signal.signal(signum, _ignore_signal)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        hello = m.Hello(
            hostname=socket.gethostname(),
            python=".".join(map(str, sys.version_info[:3])),
            pid=os.getpid(),
            clock=self._clock(),
        )
        self._stream.put(self._greeting + encode(hello))
        with suppress(OSError):
            rename_process(NAME, f"{NAME}: of a job of distlaunch")
        code = EXIT_SOFTWARE
        try:
            while not (self._is_dismissed or self._end_reason):
                self._run_once()
            code = 0 if self._is_dismissed else 1
        except ProtocolError as exc:
            self._end_reason = f"the coordinator sent an invalid message: {exc.message}"
        except Exception:  # noqa: BLE001 - the coordinator must learn of any error
            import traceback

            self._end_reason = f"the agent failed\n{traceback.format_exc()}"
        if not self._is_dismissed:
            self._end_workers()
        self._finish()
        return code

    def _run_once(self) -> None:
        self._wait()
        self._receive()
        self._process_events()
        self._check_silence()

    def _wait(self) -> None:
        poll = select.poll()
        for descriptor, wanted in {
            **self._stream.descriptors(),
            **self._resources.descriptors(),
        }.items():
            poll.register(descriptor, wanted)
        for descriptor, wanted in self._agent.descriptors().items():
            poll.register(descriptor, wanted)
        poll.register(self._wake, select.POLLIN)
        due = self._resources.deadline()
        waits = [] if due is None else [due - time.monotonic()]
        waits += [until - time.monotonic() for until, _ in self._held_signals[:1]]
        if not self._clock.paused:
            waits.append(self._silence.left_s)
            if (deadline := self._agent.deadline()) is not None:
                waits.append(deadline - self._clock())
        ready = poll.poll(self._silence.poll_ms(waits))
        for descriptor, events in ready:
            if descriptor == self._wake:
                self._take_signals()
            elif events & (select.POLLERR | select.POLLHUP):
                self._resources.on_hangup(descriptor)

    def _process_events(self) -> None:
        self._stream.flush()
        while self._held_signals and self._held_signals[0][0] <= time.monotonic():
            self._stream.send(self._held_signals.pop(0)[1])
        self._resources.on_ready()
        self._agent.on_ready()
        if not self._clock.paused:
            self._agent.tick()

    def _wake_loop(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_end, b"\0")

    def _take_signals(self) -> None:
        """Read the received signals. A scheduler's signals are reported to the coordinator; without
        a scheduler, a signal to end ends the agent."""
        with suppress(BlockingIOError):
            for number in os.read(self._wake, 4096):
                if self._reports_signals and number in (*_TO_END, *_TO_WORKERS):
                    self._stream.send(m.AgentSignalled(signum=number))
                elif number in _TO_END:
                    self._end_reason = self._end_reason or f"the agent was ended by signal {number}"

    # --- the coordinator

    def _receive(self) -> None:
        messages = self._stream.receive()
        for message in messages or ():
            self._silence.reset()
            self._handle(message)
            if self._is_dismissed:
                return
        if not self._stream.is_open or self._stream.is_broken:
            self._end_reason = self._end_reason or "the connection to the coordinator was closed"

    def _check_silence(self) -> None:
        silent_s = self._silence.silent_s()
        if not self._clock.paused and silent_s is not None:
            self._is_coordinator_silent = not self._end_reason
            self._end_reason = (
                self._end_reason or f"no message came from the coordinator for {silent_s:.0f} s"
            )

    def _handle(self, message: m.ToRemote) -> None:
        match message:
            case m.Ping():
                self._silence.on_ping(message)
                self._stream.send(m.Pong(serial=message.serial, clock=self._clock()))
            case m.Credit():
                self._output.grant(message.size)
            case m.Survey():
                self._set_job_id(os.path.basename(message.run_dir.rstrip("/")))
                self._resources.survey.begin(message)
            case m.Reach():
                self._resources.reachability.begin(message)
            case m.StdinData():
                self._stdin.write(message.data)
            case m.ExitAgent():
                self._is_dismissed = True
            case m.Prepare():
                if self._start_output_thread(message):
                    self._agent.handle(message)
            case m.Start():
                self._start_workers(message)
            case m.Stop():
                self._clock.pause(
                    paused=False
                )  # Stop resumes paused workers, and its grace must pass
                self._agent.handle(message)
            case m.Pause():
                self._clock.pause(paused=message.paused)
                self._silence.reset()
                self._agent.handle(message)
            case _:
                self._agent.handle(message)

    def _set_job_id(self, job_id: str) -> None:
        if job_id and job_id != self._agent.job_id:
            self._agent.set_job_id(job_id)
            with suppress(OSError):
                rename_process(NAME, f"{NAME}: of job {job_id}")

    def _start_output_thread(self, prepare: m.Prepare) -> bool:
        """Start the output thread, unless it runs; return whether it runs.

        It starts late because the survey forks, which is safest without threads.
        """
        if not self._is_started:
            try:
                self._agent.start()
            except ConfigError as exc:
                answer = m.Prepared(
                    attempt=prepare.attempt,
                    port=None,
                    problem=exc.message,
                    hint=exc.hint,
                    warning=None,
                )
                self._stream.send(answer)
                return False
            self._is_started = True
        return True

    def _start_workers(self, start: m.Start) -> None:
        """Start the workers of an attempt, with logs and environment of this node."""
        if not self._is_started:
            self._agent.start()
            self._is_started = True
        self._set_job_id(start.env.get("DISTLAUNCH_JOB_ID", ""))
        if start.orphan_grace_s is not None:
            self._grace_s = start.orphan_grace_s
        self._attempt = start.attempt
        self._latest_start = start
        self._output.begin_attempt(self._resources.logs(start, self._agent.job_id))
        self._agent.handle(self._resources.adapt_start(start))

    def _on_agent_message(self, message: m.FromAgent) -> None:
        """Send a message of the agent to the coordinator.

        A signal to the spawner waits a moment: see ``_held_signals``.
        """
        if (
            isinstance(message, m.SpawnerSignalled)
            and message.signum in _TO_END
            and not self._reports_signals
        ):
            self._held_signals.append((time.monotonic() + HOLD_S, message))
            return
        if isinstance(message, m.AttemptEnded):
            self._attempt = None
            self._stdin.finish()
        self._stream.send(message)

    # --- end

    def _end_workers(self) -> None:
        """Stop the workers without the coordinator, and wait until they have ended or been
        killed."""
        self._write_reason(self._end_reason)
        self._stream.send(
            m.AgentEnding(why=self._end_reason, coordinator_silent=self._is_coordinator_silent)
        )  # if the coordinator is still connected, it should know at once
        self._stream.close(bound_s=_LAST_S)
        self._output.on_coordinator_lost(
            None if self._latest_start is None else self._resources.run_dir_logs(self._latest_start)
        )
        self._resources.close()
        attempt = self._attempt
        if attempt is None or self._agent.is_broken:
            return
        if self._clock.paused:
            self._clock.pause(paused=False)
            self._agent.handle(m.Pause(paused=False))
        bound_s = self._grace_s + _END_S
        self._agent.end_without_coordinator(attempt, grace_s=self._grace_s, bound_s=bound_s)
        until = time.monotonic() + bound_s
        while (left_s := until - time.monotonic()) > 0 and self._is_busy():
            poll = select.poll()
            for descriptor, wanted in self._agent.descriptors().items():
                poll.register(descriptor, wanted)
            deadline = self._agent.deadline()
            poll.poll(
                self._silence.poll_ms(
                    [left_s] if deadline is None else [left_s, deadline - self._clock()]
                )
            )
            self._agent.on_ready()
            self._agent.tick()

    def _is_busy(self) -> bool:
        return self._attempt is not None and not self._agent.is_broken

    def _finish(self) -> None:
        """End the agent's parts and the spawner, and close the connection."""
        self._resources.close()
        self._agent.close()
        self._resources.remove()
        self._stream.close(bound_s=_FLUSH_S)


class RemoteNodeResources(NodeResources):
    """Resources of the node for its workers, polled by the remote agent's loop. ``wake`` wakes it
    from other threads."""

    def __init__(
        self,
        *,
        send: Callable[[Any], None],
        stdin_pipe: StdinPipe,
        wake: Callable[[], None],
        keep: Collection[int],
    ) -> None:
        self._send = send
        self._stdin = stdin_pipe
        self._temporary_dir = TemporaryDirectory(os.environ)
        self.survey = NodeSurvey(send, keep)
        self.reachability = ReachabilityTest(send, wake)

    @property
    def temporary_dir(self) -> str:  # type: ignore[override]
        """Path of the agent's temporary directory; empty if there is none."""
        return self._temporary_dir.path

    def stdin(self, start: m.Start) -> int:
        """Return a descriptor for the rank that reads the launcher's stdin. Raises OSError."""
        return (
            self._stdin.open()
            if start.stdin_from_launcher
            else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        )

    # --- for an attempt

    def adapt_start(self, start: m.Start) -> m.Start:
        """Return the start with this node's environment and directories, which are created.

        Warns about a directory that cannot be created; the workers then run without its use.
        """
        if start.bootstrap:
            try:
                self.boot = self._temporary_dir.boot()
            except OSError as exc:
                if start.preload or start.preload_bound_s is not None:
                    self._warn(
                        "the interpreters of the workers cannot load the code that preloading and "
                        "reports of hangs need",
                        exc,
                    )
                start = replace(start, bootstrap="", preload=())
        if not start.is_remote:
            return start
        moved_to = None
        if not self.survey.shares_run_dir:
            try:
                moved_to = self._temporary_dir.run_dir()
            except OSError as exc:
                self._warn("there is no directory for the error files of the workers", exc)
        start = adapt_start(start, os.environ, moved_to=moved_to)
        with suppress(
            OSError
        ):  # continues in the background; without the directory, a worker's exception is only in its output
            run_with_timeout(FILES_S, lambda: _make_folders(start))
        return start

    def _warn(self, what: str, exc: OSError) -> None:
        self._send(m.AgentNotice(text=f"{what}: {exc.strerror or exc}", warning=True))

    def log_location(self, start: m.Start) -> tuple[str, Layout]:
        """Return directory and layout of the ranks' logs on this node.

        The directory is the job's run directory if this node has it, otherwise the directory of
        ``--node-logs``, otherwise empty.
        """
        if self._has_run_dir(start):
            return start.run_dir, start.layout
        folder = (
            _node_folder(start, start.env.get("DISTLAUNCH_JOB_ID", "")) if start.node_logs else ""
        )
        return folder, _node_layout(start)

    def logs_to_read(
        self, request: m.ListLogs | m.ReadLog, start: m.Start | None
    ) -> tuple[str, Layout] | None:
        """Return directory and layout of ``--node-logs``, of this agent or of an earlier one."""
        log_bytes = request.log_bytes if isinstance(request, m.ListLogs) else 0
        return (
            (request.directory, replace(TRAIN, log_bytes=log_bytes)) if request.directory else None
        )

    def run_dir_logs(self, start: m.Start) -> LogFiles | None:
        """Return the ranks' logs in the job's run directory, which the agent continues if the
        launcher vanishes; None if this node lacks it."""
        if not self._has_run_dir(start):
            return None
        return LogFiles(start.run_dir, start.attempt, _discard, layout=start.layout)

    def _has_run_dir(self, start: m.Start) -> bool:
        return bool(start.run_dir) and self.survey.shares_run_dir

    def logs(self, start: m.Start, job_id: str) -> LogFiles | None:
        """Return the ranks' log files for ``--node-logs``; None without the option."""
        if not start.node_logs:
            return None
        folder = _node_folder(start, job_id)

        def on_failure(why: str) -> None:
            self._send(
                m.AgentNotice(
                    text=f"the log files on this node are no longer written: {why} ({folder})",
                    warning=True,
                )
            )

        return LogFiles(
            folder, start.attempt, on_failure, layout=_node_layout(start), make_folders=True
        )

    # --- for the loop

    def descriptors(self) -> dict[int, int]:
        """Return the poll events by descriptor."""
        return {
            **self.survey.descriptors(),
            **self.reachability.descriptors(),
            **self._stdin.descriptors(),
        }

    def deadline(self) -> float | None:
        """Return when ``on_ready`` is due, in monotonic seconds; None if it is not."""
        dues = [
            due for due in (self.survey.deadline(), self.reachability.deadline()) if due is not None
        ]
        return min(dues, default=None)

    def on_ready(self) -> None:
        """Continue the survey, the reachability test and the writing to stdin."""
        self.survey.on_ready()
        self.reachability.on_ready()
        self._stdin.on_ready()

    def on_hangup(self, descriptor: int) -> None:
        """Close stdin's pipe if the worker has closed its end."""
        if descriptor in self._stdin.descriptors():
            self._stdin.on_hangup()

    def close(self) -> None:
        """Abort survey and reachability test, and close the worker's stdin."""
        self.survey.close()
        self.reachability.close()
        self._stdin.close()

    def remove(self) -> None:
        """Remove the temporary directory."""
        self._temporary_dir.remove()


class PausableClock:
    """Monotonic seconds that do not advance while the job is paused."""

    def __init__(self) -> None:
        self._paused_s = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        """Return the time in seconds."""
        return (time.monotonic() if self._since is None else self._since) - self._paused_s

    @property
    def paused(self) -> bool:
        """Whether the clock is stopped."""
        return self._since is not None

    def pause(self, *, paused: bool) -> None:
        """Stop the clock, or continue it. No effect if it is so already."""
        if paused and self._since is None:
            self._since = time.monotonic()
        elif not paused and self._since is not None:
            self._paused_s += time.monotonic() - self._since
            self._since = None


def _node_folder(start: m.Start, job_id: str) -> str:
    return os.path.join(start.cwd, start.node_logs, job_id or "job")


def _node_layout(start: m.Start) -> Layout:
    """Return the layout of ``--node-logs``."""
    return replace(TRAIN, log_bytes=start.layout.log_bytes)


def _make_folders(start: m.Start) -> None:
    paths = [spec.error_file for spec in start.workers if spec.error_file is not None]
    for folder in dict.fromkeys(
        os.path.dirname(path) for path in (*paths, start.preload_log) if path
    ):
        try:
            make_private_dirs(folder)
        except OSError:
            continue


def _discard(_: object) -> None:
    """Discard a report, because there is no coordinator to receive it."""


def _ignore_signal(*_: object) -> None:
    """Do nothing: the signal only wakes the loop."""
