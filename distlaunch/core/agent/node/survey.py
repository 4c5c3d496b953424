"""Survey the node in a child process, which is killed or abandoned if a step hangs.

If a file server, driver or resolver does not answer, the agent must still answer pings and be able
to exit.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Literal, NoReturn, Protocol

from distlaunch.core.agent.workers.process_setup import close_all_but, die_with_parent
from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.fork import fork_helper
from distlaunch.core.model.record import Record
from distlaunch.core.model.topology import CpuInventory, GpuInventory
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.codec import Decoder, encode

FILES_S = 15.0
"""How long to wait for a directory or file. An automounter needs some seconds."""
GPUS_S = 8.0
_MORE_S = 3.0
"""Time for the rest of the survey."""
_READ_BYTES = 1 << 16


class SurveyStep(Record):
    """Message of the child: the step that begins, and its longest duration."""

    what: str
    bound_s: float
    part: Literal["agent", "directory", "python", "script", "devices"] = "agent"


class BeginStep(Protocol):
    """Function that a survey calls before each step."""

    def __call__(self, what: str, bound_s: float, part: m.SurveyPart = "agent") -> None:
        """Record the next step.

        ``what`` names it in errors, ``bound_s`` is its longest duration, ``part`` the part of the
        survey.
        """


SurveyFunction = Callable[[m.Survey, BeginStep], m.Surveyed]


class NodeSurvey:
    """Handles one ``Survey`` message at a time in a child process, and passes the answer to
    ``send``."""

    def __init__(
        self,
        send: Callable[[m.Surveyed | m.AgentFailed], None],
        keep: Collection[int],
        survey: SurveyFunction | None = None,
    ) -> None:
        """``keep`` lists descriptors that the child needs, ``survey`` is its function."""
        self._send = send
        self._survey = survey or survey_node
        self._keep = keep
        self._order: m.Survey | None = None
        self._pid = 0
        self._ended: list[int] = []
        self._pipe = -1
        self._step = SurveyStep(what="", bound_s=0.0)
        self._until = 0.0
        self._decoder: Decoder[SurveyStep | m.Surveyed | m.AgentFailed] = _new_decoder()
        self.shares_run_dir = False
        """Result of the last survey."""

    def begin(self, order: m.Survey) -> None:
        """Start a survey in a child process. A running one is aborted.

        If no process can be started, the answer says so.
        """
        self.close()
        self._order = order
        self._decoder = _new_decoder()
        self._set_step(SurveyStep(what="a new process", bound_s=_MORE_S))
        self._pipe, end = os.pipe()
        # The child must not run our signal handlers: they would write to the loop's pipe.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        parent = os.getpid()
        try:
            self._pid = fork_helper()
            if self._pid == 0:
                _run_child(self._survey, order, end, parent, self._keep)
        except OSError as exc:
            self._give_up(
                f"no process can be started: {os.strerror(exc.errno or 0)}", explain_refusal()
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(end)

    def _set_step(self, step: SurveyStep) -> None:
        self._step = step
        self._until = time.monotonic() + step.bound_s

    # --- for the loop

    def descriptors(self) -> dict[int, int]:
        """Return the poll events by descriptor."""
        return {} if self._pipe < 0 else {self._pipe: select.POLLIN}

    def deadline(self) -> float | None:
        """Return when the current step times out, in monotonic seconds; None if no survey runs."""
        return None if self._pipe < 0 else self._until

    def on_ready(self) -> None:
        """Process the child's messages. If its step has timed out, kill it and answer with the
        problem."""
        self.reap()
        while self._pipe >= 0 and select.select([self._pipe], [], [], 0)[0]:
            data = os.read(self._pipe, _READ_BYTES)
            if not data:
                self._give_up("the survey of the node failed: its process ended", None)
                return
            try:
                for message in self._decoder.feed(data):
                    self._on_message(message)
            except ProtocolError as exc:
                self._give_up(f"the survey of the node failed: {exc.message}", None)
        if self._pipe >= 0 and time.monotonic() >= self._until:
            hint = "a file server or a driver there does not answer"
            self._give_up(
                f"{self._step.what} does not answer within {self._step.bound_s:.0f} s",
                hint,
                self._step.part,
            )

    def _on_message(self, message: SurveyStep | m.Surveyed | m.AgentFailed) -> None:
        if isinstance(message, SurveyStep):
            self._set_step(message)
            return
        if isinstance(message, m.Surveyed):
            self.shares_run_dir = message.shares_run_dir
        self.close()
        self._send(message)

    def _give_up(self, problem: str, hint: str | None, part: m.SurveyPart = "agent") -> None:
        """Kill the child, and answer with the problem."""
        order = self._order
        self.close()
        self.shares_run_dir = False
        if order is not None:
            cpus = CpuInventory(
                allowed=tuple(sorted(os.sched_getaffinity(0))), online=os.cpu_count() or 1
            )
            self._send(make_answer(order, cpus, problem=problem, part=part, hint=hint))

    def close(self) -> None:
        """Kill the child and its process group. No answer is sent."""
        if self._pid:
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.killpg(self._pid, signal.SIGKILL)
            self._ended.append(self._pid)
            self._pid = 0
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        self._order = None
        self.reap()

    def reap(self) -> None:
        """Reap exited children. A child that is stuck in a driver or file system may never exit."""
        for pid in list(self._ended):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._ended.remove(pid)


def _new_decoder() -> Decoder[SurveyStep | m.Surveyed | m.AgentFailed]:
    return Decoder((SurveyStep, m.Surveyed, m.AgentFailed), m.REMOTE_NESTED_TYPES)


def make_answer(
    order: m.Survey,
    cpus: CpuInventory,
    *,
    interfaces: Sequence[m.Interface] = (),
    named: tuple[str, ...] = (),
    gpus: GpuInventory | None = None,
    python: str | None = None,
    script_sha256: str | None = None,
    problem: str | None = None,
    part: m.SurveyPart = "agent",
    hint: str | None = None,
    shares_run_dir: bool = False,
    environ: dict[str, str] | None = None,
) -> m.Surveyed:
    """Return the answer to a survey.

    ``named`` are the addresses of the node's own name. ``problem`` says why the node cannot take
    part, ``part`` which part of the survey found that, ``hint`` what to do. Defaults are for a node
    without the resource.
    """
    from distlaunch.core.probe import machine

    return m.Surveyed(
        serial=order.serial,
        hostname=socket.gethostname(),
        environ=environ or {},
        interfaces=tuple(interfaces),
        named=named,
        gpus=gpus or GpuInventory(),
        cpus=cpus,
        granted_cpus=None,
        python=python,
        script_sha256=script_sha256,
        problem=problem,
        problem_part=part,
        hint=hint,
        shares_run_dir=shares_run_dir,
        machine=machine.machine_id(),
    )


# --- the child


def _run_child(
    survey: SurveyFunction, order: m.Survey, end: int, parent: int, keep: Collection[int]
) -> NoReturn:
    """Run the survey in this forked child, and exit. Messages go to ``end``."""
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # other processes wait for the end of these connections
        close_all_but({0, 1, 2, end, *keep})

        def send(message: Record) -> None:
            data = encode(message)
            while data:
                data = data[os.write(end, data) :]

        def begin_step(what: str, bound_s: float, part: m.SurveyPart = "agent") -> None:
            send(SurveyStep(what=what, bound_s=bound_s, part=part))

        try:
            send(survey(order, begin_step))
        except Exception:  # noqa: BLE001 - the coordinator must learn of any error
            import traceback

            send(m.AgentFailed(text=f"the survey of the node failed\n{traceback.format_exc()}"))
    finally:
        os._exit(0)


def survey_node(order: m.Survey, begin_step: BeginStep) -> m.Surveyed:
    """Return the survey of this node. ``begin_step`` is called before each step."""
    from distlaunch.core.agent.workers.temporary_directory import has_run_dir
    from distlaunch.core.probe import machine
    from distlaunch.core.probe.cpus import probe_cpus
    from distlaunch.core.probe.gpus import probe_gpus
    from distlaunch.core.probe.network import probe_interfaces

    path = os.environ.get("PATH")
    part: m.SurveyPart = "directory"
    begin_step(f"the directory {order.workdir}", FILES_S, part)
    problem = machine.enter_directory(order.workdir)
    python = script_sha256 = None
    if problem is None and order.pythons:
        part = "python"
        begin_step(f"the workers' Python ({', '.join(order.pythons)})", FILES_S, part)
        python = machine.find_program(order.pythons, order.workdir, path)
        if (
            python is None and not order.program
        ):  # a program such as bash, with --setup, may provide it later
            problem = f"there is no Python for the workers: no {' and no '.join(order.pythons)}"
    if problem is None and order.program:
        part = "script"
        begin_step(f"the program {order.program}", FILES_S, part)
        if machine.find_program((order.program,), order.workdir, path) is None:
            problem = f"there is no program {order.program}"
    if problem is None and order.script:
        script = os.path.join(order.workdir, order.script)
        part = "script"
        begin_step(f"the script {script}", FILES_S, part)
        script_sha256, problem = machine.script_digest(
            script, lambda: begin_step(f"the script {script}", FILES_S, "script")
        )
    begin_step(f"the directory {order.run_dir}", FILES_S, "directory")
    shares_run_dir = has_run_dir(order.run_dir)
    begin_step("a driver of the GPUs", GPUS_S + machine.NAME_S + _MORE_S, "devices")
    gpus = probe_gpus(environ=os.environ, deadline_s=GPUS_S) if order.gpus else GpuInventory()
    return make_answer(
        order,
        probe_cpus(topology=order.topology),
        interfaces=[
            m.Interface(name=name, address=address, prefix=prefix)
            for name, address, prefix in probe_interfaces()
        ],
        named=machine.resolve_own_name(socket.gethostname()),
        gpus=gpus,
        python=python,
        script_sha256=script_sha256,
        problem=problem,
        part=part,
        shares_run_dir=shares_run_dir,
        environ=machine.device_environ(os.environ),
    )
