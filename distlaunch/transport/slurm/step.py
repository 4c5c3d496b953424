"""One step of Slurm: the ``srun`` that starts an agent on each of its nodes, from a zip on stdin.

What was learnt on a real Slurm 22.05: in a job with several tasks a node ``--ntasks-per-node=1``
alone is ignored while SLURM_NTASKS says otherwise; an inherited --ntasks-per-gpu is fatal, and
--gpus-per-task leaves each agent one GPU. Without any word of GPUs the step has the job's, but for
a job by --gpus-per-task; without ``-c`` it has all its CPUs, and with one that a node does not have
it is refused.
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
from distlaunch.transport.open_files import as_found

_OF_THE_JOB = re.compile(
    r"SLURM_(NTASKS.*|NPROCS|CPUS_PER.*|MEM_PER.*|GPUS.*|GPU_BIND|CPU_BIND.*|TRES_PER.*|HINT|LABELIO|STD(IN|OUT|ERR)MODE)"
    r"|SRUN_.*"
)
"""What was asked for the job's own tasks, or for another srun: not what our step is to have."""

NO_PYTHON = "distlaunch-none"
# $1 count, $2 stub, $3 to $6 for the agent, then interpreters. The agent takes the shell's place:
# Slurm's signals reach only what it has started itself.
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
_OF_OUR_OWN = "configuration lacks support for cpu binding"
"""What srun says of --cpu-bind=none, where there is nothing to bind by."""
_SWITCH_IS_STDERR = "exec 3<&2 2>&1"
"""All output is one. Unlike in ``child``, stdin has to be a pipe: of a socket that nobody writes to
any more srun leaves what it has not read."""
_END_S, _LOST_END_S, _TERM_S = 3.0, 0.5, 2.0
"""How long srun may take to end after all agents have left, if it waits for one that is lost, and
after a signal. One whose agents have not called waits for resources, or for them: it is asked to
end at once."""
_CHUNK = 1 << 16
_MOST_READS = 16
"""Of an srun that has ended: what it has started may go on writing."""
_MOST_LINES = 50
_LONGEST_LINE = 300


class Wanted(Record):
    """What all steps of a job have in common. Times are seconds."""

    args: tuple[str, ...] = ()
    """The user's own options of srun, which come last."""
    gpus: int | None = None
    """Of all the job's nodes together; None: srun's own way."""
    nodes: int
    """Of the job."""
    all_or_none: bool
    """The loss of an agent ends the step: the job cannot go on without it."""
    grace_s: float
    components: Mapping[str, int] = {}
    """Of a heterogeneous job: the component that each node is of. Each needs an srun, as stdin
    reaches one only."""
    inside: bool
    """The launcher is in a step itself, whose resources ours has to share."""


def step_argv(wanted: Wanted, hosts: Sequence[str], *, again: bool) -> list[str]:
    """Write the command up to the program. ``again``: an earlier step on these nodes may still be
    there."""
    count = len(hosts)
    argv = [
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={node_list(hosts)}",
    ]
    if hosts[0] in wanted.components:
        argv.append(f"--het-group={wanted.components[hosts[0]]}")
    argv += [
        "--job-name=distlaunch",
        "--mpi=none",
        "--export=ALL",
        "--cpu-bind=none",
        "--input=all",
    ]
    if wanted.gpus is not None and count == wanted.nodes:
        argv.append(f"--gpus={wanted.gpus}")
    if wanted.inside or again:
        argv.append("--overlap")
    if wanted.all_or_none:
        argv += ["--kill-on-bad-exit=1", f"--wait={int(wanted.grace_s) + 30}"]
    else:
        argv += ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    return [*argv, *wanted.args]


def node_list(hosts: Sequence[str]) -> str:
    """Write nodes as Slurm reads them, short: an argument has at most 128 KiB. Only the last number
    is in brackets."""
    alike = groupby(hosts, key=lambda host: host.rstrip("0123456789"))
    return ",".join(fold_hosts(group) for _, group in alike)


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out of the environment what would change the step."""
    return {name: value for name, value in environ.items() if not _OF_THE_JOB.fullmatch(name)}


def agent_argv(
    words: tuple[str, str, str, str], *, count: int, pythons: Sequence[str]
) -> list[str]:
    """Write the program of a step: a shell that looks for a Python, and becomes the agent."""
    return ["/bin/sh", "-c", _SCRIPT, "distlaunch", str(count), _STUB, *words, *pythons]


class Step:
    """A running srun, which ends with us however we end. All but ``has_lost`` is one thread's; only
    ``wait`` waits."""

    def __init__(
        self,
        argv: Sequence[str],
        hosts: Sequence[str],
        code: bytes,
        environ: Mapping[str, str],
        *,
        kill_switch: KillSwitch,
    ) -> None:
        """Start it. Raises OSError."""
        self.hosts = tuple(hosts)
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        """The last that it has said, or the agents before they had called."""
        self.has_called = False
        """An agent of it has: it ends when they have left."""
        self.has_lost = False
        """An agent of it that had called is lost: srun may end the others, or wait for ever."""
        self._unsent = memoryview(code)
        self._half = b""
        self._kill_switch = kill_switch
        self._closed = False
        self._reading = self._writing = -1
        held = kill_switch.hold()
        theirs = [held]
        try:
            self._reading, its_output = os.pipe2(os.O_CLOEXEC)
            theirs.append(its_output)
            its_input, self._writing = os.pipe2(os.O_CLOEXEC)
            theirs.append(its_input)
            self._process = subprocess.Popen(
                guarded(
                    as_found(argv), _SWITCH_IS_STDERR
                ),  # srun has the tasks start with its own limits
                stdin=its_input,
                stdout=its_output,
                stderr=held,
                env=dict(environ),
                start_new_session=True,
            )
        except BaseException:
            kill_switch.let_go()
            self._close_pipes()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        for descriptor in (self._reading, self._writing):
            os.set_blocking(descriptor, False)

    def descriptors(self) -> dict[int, int]:
        """Return what to poll."""
        wanted = {self._reading: select.POLLIN, self._writing: select.POLLOUT}
        return {descriptor: mask for descriptor, mask in wanted.items() if descriptor >= 0}

    def send(self) -> None:
        """Give srun of the zip what it takes now; its stdin is closed after the last of it."""
        if self._writing < 0:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._writing, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            pass  # it has ended, or will tell
        os.close(self._writing)
        self._writing = -1

    def read(self) -> list[str]:
        """Return the lines that have come; printable, and cut off."""
        return self._read() or []

    def _read(self) -> list[str] | None:
        """Read once, and give the lines that has completed; None if there was nothing to read."""
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
        return self._keep(lines)

    def _keep(self, lines: list[bytes]) -> list[str]:
        shown = [printable(line[:_LONGEST_LINE].decode(errors="replace").strip()) for line in lines]
        new = [line for line in shown if line and not line.endswith(_OF_OUR_OWN)]
        self.lines.extend(new)
        return new

    def finish_reading(self) -> None:
        """Read what there is of an srun that has ended; somebody else may hold its output open
        still."""
        for _ in range(_MOST_READS):
            if self._read() is None:
                break
        half, self._half = self._half, b""
        self._keep([half])

    @property
    def returncode(self) -> int | None:
        """Return how it has ended; None if it has not."""
        return self._process.poll()

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, and all that it has said is read."""
        return self._reading < 0 and self.returncode is not None

    def how_ended(self) -> str:
        """Say how srun has ended, as a clause."""
        code = self.returncode
        if code is None:
            return "srun has not ended"
        return (
            f"srun was killed by signal {-code}" if code < 0 else f"srun ended with status {code}"
        )

    def wait(self, until: float) -> bool:
        """Wait for its end until this monotonic time; tell whether it has come."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        return self.returncode is not None

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def close(self) -> None:
        """Kill it if it runs, and have nothing to do any more with what it reads and says."""
        if self._closed:
            return
        self._closed = True
        self._kill_switch.kill(self._process.pid)
        self._kill_switch.let_go()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for descriptor in (self._reading, self._writing):
            if descriptor >= 0:
                os.close(descriptor)
        self._reading = self._writing = -1


def end_steps(steps: Sequence[Step]) -> None:
    """Wait for the end of all of them at once, and bring it about after that: by TERM, by KILL."""
    began = time.monotonic()
    left = [step for step in steps if not step.wait(began + _patience_s(step))]
    for step in left:
        step.terminate()
    until = time.monotonic() + _TERM_S
    left = [step for step in left if not step.wait(until)]
    for step in steps:
        step.close()
    until = time.monotonic() + _TERM_S
    for step in left:
        step.wait(until)


def _patience_s(step: Step) -> float:
    """Return how long the step may take to end unasked."""
    if not step.has_called:
        return 0.0
    return _LOST_END_S if step.has_lost else _END_S
