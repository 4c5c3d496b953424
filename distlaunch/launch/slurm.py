"""The Slurm job of the launcher: settings of the site, options of srun for agents, addresses of
nodes, and requeueing.

Sources: scontrol of Slurm 22.05, and its manual. A job's processes get TERM when the job is
cancelled, reaches its time limit, or is preempted; the job is then COMPLETING, and the cases differ
in reason and times. If Slurm requeues a job itself, its restart counter is already increased.
During a partition's GraceTime a preempted job is RUNNING.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distlaunch import __version__
from distlaunch.coordinator.policy.job_settings import Scheduler
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.errors import EXIT_REQUEUE, ConfigError
from distlaunch.core.model.host_list import expand_nodelist
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable
from distlaunch.core.probe.network import probe_interfaces
from distlaunch.launch.process import run_alone_hint
from distlaunch.planning.allocation import Allocation
from distlaunch.planning.train_options import TrainOptions
from distlaunch.transport.child_process import BackgroundCommand

if TYPE_CHECKING:
    from distlaunch.coordinator.policy.job import JobPolicy
    from distlaunch.coordinator.runtime.slurm_agents import SlurmAgents
    from distlaunch.transport.slurm.nodes import SrunConnector

KILL_WAIT_S = 30.0
"""Slurm's default time from TERM to KILL."""
_ASK_S = 5.0
_SHOW_S, _REQUEUE_S = 4.0, 6.0
"""Time limits of scontrol show and scontrol requeue. Slurm's KILL may be 5 s away. An idle
controller answers in 20 ms."""
_SIGNAL_EFFECT_S = 1800.0
"""Workers that run for longer after USR1 or USR2 were not ended by the signal."""
_PORTS = 16
_MOST_COMPONENTS = 1000
_LONGEST = 200
_NO_KILL = re.compile(r"^#SBATCH\b.*\s(--no-kill\b(?!=off|=no)|-[HIOQsvW]*k\b)", re.MULTILINE)
"""--no-kill in a batch script, also as ``-k`` behind other short options."""
_NOT_CANCELLED = {
    "RUNNING",
    "TIMEOUT",
    "PREEMPTED",
    "PENDING",
    "REQUEUED",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
}
_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")


class SlurmJob:
    """The Slurm job of this launcher. Slurm's commands run in the background, each with a time
    limit.

    ``several``: there are other nodes, or this machine is not one of them. ``flexible``: the job
    can continue on other nodes. Raises ConfigError for srun options that cannot be used.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        options: TrainOptions,
        *,
        part: str,
        several: bool,
        flexible: bool,
        hosts: Sequence[str] = (),
    ) -> None:
        self._environ = environ
        self._options = options
        self._by_srun = part == "all" and several
        self._steps = self._by_srun or part != "all"

        self._job = environ.get("SLURM_JOB_ID", "")
        self._restart_count = _parse_number(environ.get("SLURM_RESTART_COUNT", "")) or 0
        asks = self._by_srun or (part == "all" and options.grace > KILL_WAIT_S)
        self._config = _SlurmCommand(("scontrol", "show", "config"), environ) if asks else None
        wanted = self._by_srun and flexible
        self._script = (
            _SlurmCommand(("scontrol", "write", "batch_script", self._job, "-"), environ)
            if wanted
            else None
        )
        self._flexible = flexible
        self.addresses = NodeAddresses(environ, hosts)

        self._config_values: dict[str, str] | None = None
        self._args = _srun_args(options) if self._by_srun else ()
        if self._by_srun and shutil.which("srun", path=environ.get("PATH")) is None:
            hint = (
                "inside a container it may be missing: start one launcher on each node with srun, "
                f"or use {Opt.HOSTS}"
            )
            if (alone := run_alone_hint(options)) is not None:
                hint += f"; {alone}"
            raise ConfigError(
                "slurm names the nodes of this job, and there is no srun here to start agents on "
                "them",
                hint=hint,
            )

    # --- the site's settings

    @property
    def config(self) -> Mapping[str, str]:
        """The settings in ``scontrol show config``; empty if the command was not started or
        fails."""
        if self._config_values is None:
            text = (self._config.answer() if self._config is not None else None) or ""
            pairs = (line.partition("=") for line in text.splitlines())
            self._config_values = {
                name.strip(): value.strip() for name, equals, value in pairs if equals
            }
        return self._config_values

    @property
    def signals_all(self) -> bool:
        """Whether signals to a step reach all of its processes, not only those that srun started.
        False if Slurm was not asked."""
        return self._steps and self.config.get("ProctrackType") == "proctrack/linuxproc"

    def scheduler(self) -> Scheduler:
        """Return Slurm's settings for the policy. Waits for scontrol, for up to 5 s. Only the
        coordinator calls this."""
        if self._config is None and self._steps:
            self._config = _SlurmCommand(("scontrol", "show", "config"), self._environ)
        wait = re.match(r"\d+", self.config.get("KillWait", ""))
        return Scheduler(
            kill_after_s=float(wait[0]) if wait else KILL_WAIT_S,
            signals_all=self.signals_all,
            attempt=self._restart_count,
        )

    def _ports(self) -> Sequence[int]:
        """Return ports for agents; (0,) stands for any free port.

        If Slurm has a port range for srun (SrunPortRange), a firewall may only allow these.
        """
        bounds = re.fullmatch(r"(\d+)-(\d+)", self.config.get("SrunPortRange", ""))
        low, high = (int(bounds[1]), int(bounds[2])) if bounds else (0, 0)
        if not 0 < low <= high < 1 << 16:
            return (0,)
        return random.sample(range(low, high + 1), min(_PORTS, high + 1 - low))

    # --- notes

    def notes(self) -> list[str]:
        """Return notes on what the user's batch script lacks for the requested options."""
        found: list[str] = []
        if self._script is not None:
            text = self._script.answer()
            if not _NO_KILL.search(text or "") and "SBATCH_NO_KILL" not in self._environ:
                found.append(
                    "Slurm ends the whole job when a node fails, unless it was submitted with "
                    "--no-kill"
                    " (in the batch script: #SBATCH --no-kill)"
                )
        if self._options.requeue and self._is_started_by_shell():
            found.append(
                "Slurm sends signals only to the batch script's own process (--signal=B:...), not "
                "to its children; start distlaunch with exec, as the script's last command"
            )
        return found

    def _is_started_by_shell(self) -> bool:
        if "SLURM_PROCID" not in self._environ or "SLURM_STEP_NODELIST" in self._environ:
            return False
        try:
            with open(f"/proc/{os.getppid()}/comm", encoding="utf-8", errors="replace") as file:
                return file.read().strip() != "slurmstepd"
        except OSError:
            return False

    # --- the agents

    def srun(self, hosts: Sequence[str], allocation: Allocation, *, job_id: str) -> SrunConnector:
        """Return the object that starts the agents. Raises ConfigError if no port is free for them."""
        from distlaunch.transport.bootstrap import agent_zip
        from distlaunch.transport.slurm.nodes import SrunConnector
        from distlaunch.transport.slurm.step import StepSettings

        options, environ = self._options, self._environ
        settings = StepSettings(
            args=self._args,
            gpus=_count_gpus(hosts, allocation, environ),
            nodes=len(hosts),
            all_or_none=not self._flexible,
            grace_s=options.grace,
            components=_het_components(environ),
            inside="SLURM_STEP_ID" in environ,
        )
        return SrunConnector(
            hosts,
            settings=settings,
            code=agent_zip(),
            pythons=[
                path for path in (sys.executable, options.python) if path and os.path.isabs(path)
            ],
            environ=environ,
            addresses=list(dict.fromkeys(address for _, address, _ in probe_interfaces()))
            or ["127.0.0.1"],
            ports=self._ports(),
            release=__version__,
            job_id=job_id,
        )

    def remote_agents(self, *args: Any, srun: SrunConnector, **kwargs: Any) -> SlurmAgents:
        """Return the connections to the agents."""
        from distlaunch.coordinator.runtime.slurm_agents import SlurmAgents

        return SlurmAgents(*args, srun=srun, signals_all=self.signals_all, **kwargs)

    # --- requeueing

    def requeue_if_interrupted(self, policy: JobPolicy, code: int, sink: Sink) -> int:
        """Requeue a job that ended with ``code`` after TERM, or with 0 after a warning signal, if
        --requeue is set.

        A job that was cancelled is not requeued. Return the exit code of the launcher: ``code``, or
        EXIT_REQUEUE if Slurm does not answer, so that the batch script can requeue the job.
        """
        warned = policy.stop_signal is None and policy.warned is not None and code == 0
        if not self._options.requeue or not (warned or policy.stop_signal == signal.SIGTERM):
            return code
        command = f"scontrol requeue {self._job}"
        if warned and policy.since_warned_s > _SIGNAL_EFFECT_S:
            sink.say(
                f"not requeued: the job went on for {policy.since_warned_s:.0f} s after its last "
                "warning"
            )
            return code
        if policy.stop_signal is not None:
            show = _SlurmCommand(
                ("scontrol", "--oneliner", "show", "job", self._job), self._environ
            )
            why_not = why_not_requeued(show.answer(_SHOW_S), restart_count=self._restart_count)
            if why_not is not None:
                more = f" ({show.problem}); to requeue it: {command}" if show.problem else ""
                sink.say(f"{why_not}{more}", level="warning" if show.problem else "info")
                return code
        # printed first, since Slurm may end this process before the answer comes
        sink.say(f"requeueing this Slurm job ({Opt.REQUEUE})")
        asked = _SlurmCommand(("scontrol", "requeue", self._job), self._environ)
        if asked.answer(_REQUEUE_S) is not None or asked.is_ended_too:
            return code
        sink.say(
            f"not requeued: {asked.problem}; exit code {EXIT_REQUEUE} lets the batch script do it "
            f"({command})",
            level="warning",
        )
        return EXIT_REQUEUE


class NodeAddresses:
    """Slurm's addresses of nodes (NodeAddr), which need no name service.

    scontrol runs once for all hosts.
    """

    def __init__(self, environ: Mapping[str, str], hosts: Sequence[str]) -> None:
        self._environ, self._hosts = environ, tuple(hosts)
        self._lock = threading.Lock()
        self._asked: _SlurmCommand | None = None
        self._known: dict[str, str] | None = None

    def ask(self) -> None:
        """Start scontrol without waiting for it."""
        from distlaunch.transport.slurm.step import node_list

        if self._asked is None:
            self._asked = _SlurmCommand(
                ("scontrol", "--oneliner", "show", "node", node_list(self._hosts)), self._environ
            )

    def of(self, host: str) -> tuple[str, ...]:
        """Return Slurm's address or name of a host, or () if it is the same as ``host`` or unknown.

        Waits for scontrol, for up to 5 s. May be called by any thread.
        """
        with self._lock:
            if self._known is None:
                self.ask()
                printed = None if self._asked is None else self._asked.answer()
                self._known = node_addresses(printed or "")
        address = self._known.get(host, host)
        return () if address == host else (address,)


def node_addresses(printed: str) -> dict[str, str]:
    """Return the address of each node in the output of ``scontrol --oneliner show node``."""
    rows = re.finditer(r"^NodeName=(\S+)(?:.*?\sNodeAddr=(\S+))?", printed, re.MULTILINE)
    return {row[1]: row[2] for row in rows if row[2] not in {None, "(null)"}}


def _srun_args(options: TrainOptions) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(options.srun_args or ""))
    except ValueError as exc:
        raise ConfigError(f"{options.named('srun_args')}: {str(exc).lower()}") from exc


class _SlurmCommand:
    """A command of Slurm that runs in the background."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self.problem = ""

        self.is_ended_too = False
        # TERM has ended the command. With linuxproc, Slurm requeues the job and ends this process,
        # too.
        self._name = argv[0]
        self._command: BackgroundCommand | None = None
        try:
            self._command = BackgroundCommand(argv, environ)
        except OSError as exc:
            self.problem = f"{self._name} cannot be run ({exc.strerror})"

    def answer(self, within_s: float = _ASK_S) -> str | None:
        """Return the output; None if the command fails or takes longer than ``within_s``."""
        if self._command is None:
            return None
        try:
            code, output, errors = self._command.result(within_s=within_s)
        except TimeoutError:
            self.problem = f"{self._name} did not answer within {within_s:g} s"
            return None
        if code:
            self.is_ended_too = code == -signal.SIGTERM
            lines = errors.decode(errors="replace").strip().splitlines()
            said = f": {printable(lines[-1][:_LONGEST])}" if lines else ""
            self.problem = f"{self._name} ended with {code}{said}"
            return None
        return output.decode(errors="replace")


def why_not_requeued(printed: str | None, *, restart_count: int) -> str | None:
    """Return why a job that got TERM is not requeued, from the output of ``scontrol show job``. No
    I/O.

    None if it was interrupted: at its time limit, by preemption, or by a TERM that was a warning.
    Without an answer the job may have been cancelled, and is not requeued. ``restart_count`` is
    Slurm's counter when the job started.
    """
    fields = dict(re.findall(r"(\w+)=(\S*)", printed or ""))
    state, restarts = fields.get("JobState", ""), fields.get("Restarts", "")
    if (_parse_number(restarts) or 0) > restart_count:
        return "Slurm itself has requeued this job"
    if state in _NOT_CANCELLED or fields.get("PreemptTime", "None") not in {
        "None",
        "N/A",
        "Unknown",
    }:
        return None
    if state not in {"COMPLETING", "CANCELLED"}:
        told_state = f" (its state is {printable(state[:_LONGEST])})" if state else ""
        return f"not requeued: Slurm does not say why the job was stopped{told_state}"
    if fields.get("Reason") == "TimeLimit":
        return None
    limit_s, run_s = (_parse_duration(fields.get(name, "")) for name in ("TimeLimit", "RunTime"))
    if limit_s is None or run_s is None or run_s < limit_s:
        return "not requeued: the job was cancelled"
    return None


def _parse_number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 6 else None


def _parse_duration(clock: str) -> int | None:
    """Return the seconds of ``[DAYS-]HOURS:MINUTES:SECONDS``; None for another text."""
    found = _DURATION.fullmatch(clock)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _het_components(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the component of a heterogeneous job to which each node belongs; empty for another
    job."""
    size = environ.get("SLURM_HET_SIZE", "")
    found: dict[str, int] = {}
    for group in range(min(_parse_number(size) or 0, _MOST_COMPONENTS)):
        name = f"SLURM_JOB_NODELIST_HET_GROUP_{group}"
        if name in environ:
            found |= {
                node: group
                for node in expand_nodelist(environ[name], where=name)
                if node not in found
            }
    return found


def _count_gpus(
    hosts: Sequence[str], allocation: Allocation, environ: Mapping[str, str]
) -> int | None:
    """Return how many GPUs these nodes have; None if the variables do not determine it."""
    counts = {host.name: host.slots for host in allocation.hosts if host.unit == "gpus"}
    mine = [counts.get(host) for host in hosts]
    if all(count is not None for count in mine):
        return sum(count for count in mine if count is not None) or None
    total = environ.get("SLURM_GPUS", "").rpartition(":")[2]
    whole = {host.name for host in allocation.hosts} == set(hosts)
    return _parse_number(total) if whole else None
