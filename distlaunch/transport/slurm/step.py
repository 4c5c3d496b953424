"""One Slurm step: the ``srun`` that starts an agent on each of its nodes, from a zip on stdin.

Behaviour of srun in Slurm 22.05 that the command line accounts for:

* In a job with several tasks per node, srun ignores ``--ntasks-per-node=1`` while SLURM_NTASKS is
  set. An inherited --ntasks-per-gpu is an error. To avoid both, the variables that hold the job's
  own options (``_OF_THE_JOB``) are removed from srun's environment.
* --gpus-per-task would give each agent a single GPU. A step without GPU options gets all GPUs of
  the job, except in a job that uses --gpus-per-task.
* A step without ``-c`` gets all CPUs of the job. A step with a larger ``-c`` than a node can
  provide is refused.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby

from distlaunch.core.model.host_list import fold_hosts
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable
from distlaunch.transport.bootstrap import FLAGS, OLDEST, PYTHONS, stub
from distlaunch.transport.child_process import KillSwitch, guarded
from distlaunch.transport.open_files import with_original_limit

_OF_THE_JOB = re.compile(
    r"SLURM_(NTASKS.*|NPROCS|CPUS_PER.*|MEM_PER.*|GPUS.*|GPU_BIND|CPU_BIND.*|TRES_PER.*|HINT|LABELIO|STD(IN|OUT|ERR)MODE)"
    r"|SRUN_.*"
)
"""Variables with options for the job's own tasks or for another srun, which must not affect our
step."""

NO_PYTHON = "distlaunch-none"
# $1 count, $2 stub, $3 to $6 for the agent, then interpreters. The agent replaces the shell with
# exec, because Slurm sends signals only to the process that it started.
_SCRIPT = (
    'c=$1 s=$2 a=$3 o=$4 k=$5 t=$6; shift 6; for p in "$@" ' + " ".join(PYTHONS) + "; do "
    'q=$(command -v "$p") || continue; case $q in /*) ;; *) continue;; esac; test -f "$q" && test '
    '-x "$q" || continue; '
    f'"$q" -I -S -c "import sys; sys.exit(sys.version_info < {OLDEST})" </dev/null >/dev/null 2>&1 '
    "|| continue; "
    f'exec "$q" {" ".join(FLAGS)} -c "$s" "$c" "$a" "$o" "$k" "$t"; '
    f'done; echo "{NO_PYTHON} $SLURMD_NODENAME"; exit 97'
)
_STUB = stub("main_srun", "sys.argv[2:]")
_CPU_BIND_COMPLAINT = "configuration lacks support for cpu binding"
"""srun's complaint about --cpu-bind=none on systems without CPU binding."""
_SWITCH_IS_STDERR = "exec 3<&2 2>&1"
"""Merges stderr into stdout. Unlike in ``child_process``, stdin must be a pipe: srun does not read
the rest of a socket whose other end was closed."""
_END_S, _LOST_END_S, _TERM_S = 3.0, 0.5, 2.0
"""How long srun may take to exit: after all agents; if it waits for a lost agent; after a signal.
If no agent has connected, srun is terminated at once."""
_CHUNK = 1 << 16
_MOST_READS = 16
"""Largest number of reads from an ended srun, whose children may go on writing."""
_MOST_LINES = 50
_LONGEST_LINE = 300


class StepSettings(Record):
    """Settings of all steps of a job. Times are in seconds."""

    args: tuple[str, ...] = ()
    """The user's own options of srun, after distlaunch's."""
    gpus: int | None = None
    """Number of GPUs of all nodes of the job together. None: srun's default."""
    nodes: int
    """Number of nodes of the job."""
    all_or_none: bool
    """Whether the loss of an agent ends the step, because the job cannot continue without it."""
    grace_s: float
    components: Mapping[str, int] = {}
    """The component of each node of a heterogeneous job. Each needs its own srun, because stdin
    reaches only one component."""
    inside: bool
    """Whether the launcher itself runs in a step, whose resources our steps must share."""


def step_argv(settings: StepSettings, hosts: Sequence[str], *, again: bool) -> list[str]:
    """Return srun and its options, without the program that srun starts.

    ``again``: an earlier step on these nodes may still exist, so the new one may overlap with it.
    """
    count = len(hosts)
    argv = [
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={node_list(hosts)}",
    ]
    if hosts[0] in settings.components:
        argv.append(f"--het-group={settings.components[hosts[0]]}")
    argv += [
        "--job-name=distlaunch",
        "--mpi=none",
        "--export=ALL",
        "--cpu-bind=none",
        "--input=all",
    ]
    if settings.gpus is not None and count == settings.nodes:
        argv.append(f"--gpus={settings.gpus}")
    if settings.inside or again:
        argv.append("--overlap")
    if settings.all_or_none:
        argv += ["--kill-on-bad-exit=1", f"--wait={int(settings.grace_s) + 30}"]
    else:
        argv += ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    return [*argv, *settings.args]


def node_list(hosts: Sequence[str]) -> str:
    """Return the hosts as one short list in Slurm's form, because an argument is limited to 128
    KiB. The order of the hosts is kept."""
    alike = groupby(hosts, key=lambda host: host.rstrip("0123456789"))
    return ",".join(fold_hosts(group) for _, group in alike)


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that would change the step."""
    return {name: value for name, value in environ.items() if not _OF_THE_JOB.fullmatch(name)}


def agent_argv(
    words: tuple[str, str, str, str], *, count: int, pythons: Sequence[str]
) -> list[str]:
    """Return the program of a step: a shell that finds a Python and executes the agent."""
    return ["/bin/sh", "-c", _SCRIPT, "distlaunch", str(count), _STUB, *words, *pythons]


class Step:
    """A running srun, which is killed if the launcher ends in any way.

    ``has_lost`` may be set by any thread; the rest is for one thread. Only ``wait`` blocks.
    """

    def __init__(
        self,
        argv: Sequence[str],
        hosts: Sequence[str],
        code: bytes,
        environ: Mapping[str, str],
        *,
        kill_switch: KillSwitch,
    ) -> None:
        """Start srun. Raises OSError."""
        self.hosts = tuple(hosts)
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)

        self.has_called = False
        # An agent has connected, so srun exits when the agents have.
        self.has_lost = False
        # A connected agent is lost, so srun may end the others or wait for ever.
        self._unsent = memoryview(code)
        self._half = b""
        self._kill_switch = kill_switch
        self._closed = False
        self._reading = self._writing = -1
        held = kill_switch.attach()
        theirs = [held]
        try:
            self._reading, its_output = os.pipe2(os.O_CLOEXEC)
            theirs.append(its_output)
            its_input, self._writing = os.pipe2(os.O_CLOEXEC)
            theirs.append(its_input)
            self._process = subprocess.Popen(
                guarded(
                    with_original_limit(argv), _SWITCH_IS_STDERR
                ),  # srun passes its own limits on to the tasks
                stdin=its_input,
                stdout=its_output,
                stderr=held,
                env=dict(environ),
                start_new_session=True,
            )
        except BaseException:
            kill_switch.detach()
            self._close_pipes()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        for descriptor in (self._reading, self._writing):
            os.set_blocking(descriptor, False)

    def descriptors(self) -> dict[int, int]:
        """Return the descriptors to poll, each with the events to wait for."""
        events = {self._reading: select.POLLIN, self._writing: select.POLLOUT}
        return {descriptor: mask for descriptor, mask in events.items() if descriptor >= 0}

    def send(self) -> None:
        """Write as much of the zip to srun as possible. Close srun's stdin after the last byte."""
        if self._writing < 0:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._writing, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            pass  # srun has ended or will report it
        os.close(self._writing)
        self._writing = -1

    def read(self) -> list[str]:
        """Read once, without waiting. Return the completed lines, printable and of limited
        length."""
        return self._read() or []

    def _read(self) -> list[str] | None:
        """Read once and return the completed lines; None if no data was available."""
        if self._reading < 0:
            return None
        try:
            data = os.read(self._reading, _CHUNK)
        except BlockingIOError:
            return None
        if not data:
            os.close(self._reading)
            self._reading = -1
        *lines, self._half = (self._half + data).split(b"\n")
        if not data or len(self._half) > _CHUNK:
            lines, self._half = [*lines, self._half], b""
        return self._store_lines(lines)

    def _store_lines(self, lines: list[bytes]) -> list[str]:
        shown = [printable(line[:_LONGEST_LINE].decode(errors="replace").strip()) for line in lines]
        new = [line for line in shown if line and not line.endswith(_CPU_BIND_COMPLAINT)]
        self.lines.extend(new)
        return new

    def finish_reading(self) -> None:
        """Store the remaining output of an ended srun in ``lines``, even if another process still
        has the pipe open."""
        for _ in range(_MOST_READS):
            if self._read() is None:
                break
        half, self._half = self._half, b""
        self._store_lines([half])

    @property
    def returncode(self) -> int | None:
        """Exit code of srun; None while srun runs."""
        return self._process.poll()

    @property
    def is_over(self) -> bool:
        """Whether srun has ended and all its output has been read."""
        return self._reading < 0 and self.returncode is not None

    def how_ended(self) -> str:
        """Return how srun ended, as a clause."""
        code = self.returncode
        if code is None:
            return "srun has not ended"
        return (
            f"srun was killed by signal {-code}" if code < 0 else f"srun ended with status {code}"
        )

    def wait(self, until: float) -> bool:
        """Wait for srun's end until the monotonic time ``until``. Return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        return self.returncode is not None

    def terminate(self) -> None:
        """Send TERM to srun."""
        self._process.terminate()

    def close(self) -> None:
        """Kill srun if it still runs, and close its pipes. Can be called again."""
        if self._closed:
            return
        self._closed = True
        self._kill_switch.kill(self._process.pid)
        self._kill_switch.detach()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for descriptor in (self._reading, self._writing):
            if descriptor >= 0:
                os.close(descriptor)
        self._reading = self._writing = -1


def end_steps(steps: Sequence[Step]) -> None:
    """Wait until all steps have ended, and close them. Slow ones get TERM, then KILL."""
    began = time.monotonic()
    left = [step for step in steps if not step.wait(began + _end_timeout_s(step))]
    for step in left:
        step.terminate()
    until = time.monotonic() + _TERM_S
    left = [step for step in left if not step.wait(until)]
    for step in steps:
        step.close()
    until = time.monotonic() + _TERM_S
    for step in left:
        step.wait(until)


def _end_timeout_s(step: Step) -> float:
    """Return how long the step may take to end by itself."""
    if not step.has_called:
        return 0.0
    return _LOST_END_S if step.has_lost else _END_S
