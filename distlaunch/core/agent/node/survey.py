"""Looks around on the node, in a child that is left behind, killed, if something there hangs.

A file server, driver or resolver that does not answer must hold up neither the agent's answers to
pings nor its end.
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
"""How long a folder or file may take: an automounter needs some seconds."""
GPUS_S = 8.0
_MORE_S = 3.0
"""What else the child needs, once GPUs and name have had their own bounds."""
_READ_BYTES = 1 << 16


class SurveyStep(Record):
    """A word of the child: what it turns to, and how long that may take."""

    what: str
    bound_s: float
    part: Literal["agent", "directory", "python", "script", "devices"] = "agent"


class TurnTo(Protocol):
    """Is called with what a survey does next, how many seconds that may take, and the part of the
    node that is looked at."""

    def __call__(self, what: str, bound_s: float, part: m.SurveyPart = "agent") -> None:
        """Take note of it."""


Look = Callable[[m.Survey, TurnTo], m.Surveyed]


class NodeSurvey:
    """Carries out one ``Survey`` at a time; ``send`` gets the answer."""

    def __init__(
        self,
        send: Callable[[m.Surveyed | m.AgentFailed], None],
        keep: Collection[int],
        look: Look | None = None,
    ) -> None:
        """``keep``: descriptors that the child needs, too; ``look``: what it does."""
        self._send = send
        self._look = look or look_around
        self._keep = keep
        self._order: m.Survey | None = None
        self._pid = 0
        self._ended: list[int] = []
        self._pipe = -1
        self._doing = SurveyStep(what="", bound_s=0.0)
        self._until = 0.0
        self._decoder: Decoder[SurveyStep | m.Surveyed | m.AgentFailed] = _decoder()
        self.shares_run_dir = False
        """As it was found last."""

    def begin(self, order: m.Survey) -> None:
        """Look around; an order that was under way is given up."""
        self.close()
        self._order = order
        self._decoder = _decoder()
        self._now(SurveyStep(what="a new process", bound_s=_MORE_S))
        self._pipe, end = os.pipe()
        # Our handlers must not run in the child: they would write to the loop's pipe.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        parent = os.getpid()
        try:
            self._pid = fork_helper()
            if self._pid == 0:
                _run(self._look, order, end, parent, self._keep)
        except OSError as exc:
            self._give_up(
                f"no process can be started: {os.strerror(exc.errno or 0)}", explain_refusal()
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(end)

    def _now(self, doing: SurveyStep) -> None:
        self._doing = doing
        self._until = time.monotonic() + doing.bound_s

    # --- the loop's

    def descriptors(self) -> dict[int, int]:
        """Return what to poll, with the events."""
        return {} if self._pipe < 0 else {self._pipe: select.POLLIN}

    def deadline(self) -> float | None:
        """Return when the child must have said something (monotonic seconds)."""
        return None if self._pipe < 0 else self._until

    def on_ready(self) -> None:
        """Take what the child says; give it up if it should have said something by now."""
        self.reap()
        while self._pipe >= 0 and select.select([self._pipe], [], [], 0)[0]:
            data = os.read(self._pipe, _READ_BYTES)
            if not data:
                self._give_up("looking around on the node has failed: its process ended", None)
                return
            try:
                for message in self._decoder.feed(data):
                    self._hear(message)
            except ProtocolError as exc:
                self._give_up(f"looking around on the node has failed: {exc.message}", None)
        if self._pipe >= 0 and time.monotonic() >= self._until:
            hint = "a file server or a driver there does not answer"
            self._give_up(
                f"{self._doing.what} does not answer within {self._doing.bound_s:.0f} s",
                hint,
                self._doing.part,
            )

    def _hear(self, message: SurveyStep | m.Surveyed | m.AgentFailed) -> None:
        if isinstance(message, SurveyStep):
            self._now(message)
            return
        if isinstance(message, m.Surveyed):
            self.shares_run_dir = message.shares_run_dir
        self.close()
        self._send(message)

    def _give_up(self, problem: str, hint: str | None, part: m.SurveyPart = "agent") -> None:
        order = self._order
        self.close()
        self.shares_run_dir = False
        if order is not None:
            cpus = CpuInventory(
                allowed=tuple(sorted(os.sched_getaffinity(0))), online=os.cpu_count() or 1
            )
            self._send(answer_to(order, cpus, problem=problem, part=part, hint=hint))

    def close(self) -> None:
        """Kill the child, if there is one, with all that it has started."""
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
        """Reap children that have ended by now: in a wedged driver or file system, that may take
        for ever."""
        for pid in list(self._ended):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._ended.remove(pid)


def _decoder() -> Decoder[SurveyStep | m.Surveyed | m.AgentFailed]:
    return Decoder((SurveyStep, m.Surveyed, m.AgentFailed), m.REMOTE_PARTS)


def answer_to(
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
    """Make the answer to a survey of what was found, the rest being as of a node with nothing."""
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


def _run(look: Look, order: m.Survey, end: int, parent: int, keep: Collection[int]) -> NoReturn:
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        close_all_but({0, 1, 2, end, *keep})  # others wait for the end of channel and spawner

        def tell(message: Record) -> None:
            data = encode(message)
            while data:
                data = data[os.write(end, data) :]

        def turn_to(what: str, bound_s: float, part: m.SurveyPart = "agent") -> None:
            tell(SurveyStep(what=what, bound_s=bound_s, part=part))

        try:
            tell(look(order, turn_to))
        except Exception:  # noqa: BLE001 - whatever it is, the coordinator has to know
            import traceback

            tell(
                m.AgentFailed(
                    text=f"looking around on the node has failed\n{traceback.format_exc()}"
                )
            )
    finally:
        os._exit(0)


def look_around(order: m.Survey, turn_to: TurnTo) -> m.Surveyed:
    """Return what can be found out about this node."""
    from distlaunch.core.agent.workers.temporary_directory import has_run_dir
    from distlaunch.core.probe import machine
    from distlaunch.core.probe.cpus import probe_cpus
    from distlaunch.core.probe.gpus import probe_gpus
    from distlaunch.core.probe.network import probe_interfaces

    path = os.environ.get("PATH")
    part: m.SurveyPart = "directory"
    turn_to(f"the directory {order.workdir}", FILES_S, part)
    problem = machine.directory_problem(order.workdir)
    hint = (
        None
        if problem is None
        else "the working directory must be there on every node: --workdir names another"
    )
    python = script_sha256 = None
    if problem is None and order.pythons:
        part = "python"
        turn_to(f"the workers' Python ({', '.join(order.pythons)})", FILES_S, part)
        python = machine.find_program(order.pythons, order.workdir, path)
        if (
            python is None and not order.program
        ):  # behind a program (bash, with --setup) it may yet appear
            problem = f"there is no Python for the workers: no {' and no '.join(order.pythons)}"
            hint = "--python names the workers' interpreter on the nodes"
    if problem is None and order.program:
        part = "script"
        turn_to(f"the program {order.program}", FILES_S, part)
        if machine.find_program((order.program,), order.workdir, path) is None:
            problem = f"there is no program {order.program}"
    if problem is None and order.script:
        script = os.path.join(order.workdir, order.script)
        part = "script"
        turn_to(f"the script {script}", FILES_S, part)
        script_sha256, problem = machine.script_digest(
            script, lambda: turn_to(f"the script {script}", FILES_S, "script")
        )
    turn_to(f"the directory {order.run_dir}", FILES_S, "directory")
    shares_run_dir = has_run_dir(order.run_dir)
    turn_to("a driver of the GPUs", GPUS_S + machine.NAME_S + _MORE_S, "devices")
    gpus = probe_gpus(environ=os.environ, deadline_s=GPUS_S) if order.gpus else GpuInventory()
    return answer_to(
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
        hint=hint,
        shares_run_dir=shares_run_dir,
        environ=machine.device_environ(os.environ),
    )
