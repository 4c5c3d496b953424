"""Layer job.transport: one step of Slurm: the ``srun`` that starts an agent on each of its nodes, from a zip on stdin.

What was learnt on a real Slurm 22.05: in a job with several tasks a node ``--ntasks-per-node=1`` alone is ignored while
SLURM_NTASKS says otherwise; an inherited --ntasks-per-gpu is fatal, and --gpus-per-task leaves each agent one GPU.
Without any word of GPUs the step has the job's, but for a job by --gpus-per-task; without ``-c`` it has all its CPUs,
and with one that a node does not have it is refused.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence

from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable
from distlaunch.job.transport.bootstrap import FLAGS, OLDEST, PYTHONS, stub
from distlaunch.job.transport.child import Child, Leash
from distlaunch.job.transport.limits import as_found

_OF_THE_JOB = re.compile(
    r"SLURM_(NTASKS.*|NPROCS|CPUS_PER.*|MEM_PER.*|GPUS.*|GPU_BIND|CPU_BIND.*|TRES_PER.*|HINT|LABELIO|STD(IN|OUT|ERR)MODE)"
    r"|SRUN_.*"
)
"""What was asked for the job's own tasks, or for another srun: not what our step is to have."""

NO_PYTHON = "distlaunch-none"
# $1 count, $2 stub, $3 to $6 for the agent, then interpreters. The agent takes the shell's place: Slurm's signals reach
# only what it has started itself.
_SCRIPT = (
    'c=$1 s=$2 a=$3 o=$4 k=$5 t=$6; shift 6; for p in "$@" ' + " ".join(PYTHONS) + "; do "
    'q=$(command -v "$p") || continue; case $q in /*) ;; *) continue;; esac; test -f "$q" && test -x "$q" || continue; '
    f'"$q" -I -S -c "import sys; sys.exit(sys.version_info < {OLDEST})" </dev/null >/dev/null 2>&1 || continue; '
    f'exec "$q" {" ".join(FLAGS)} -c "$s" "$c" "$a" "$o" "$k" "$t"; '
    f'done; echo "{NO_PYTHON} $SLURMD_NODENAME"; exit 97'
)
_STUB = stub("called", "sys.argv[2:]")
_OF_OUR_OWN = "configuration lacks support for cpu binding"
"""What srun says of --cpu-bind=none, where there is nothing to bind by."""
_TOGETHER = 'exec "$@" 2>&1'
_END_S, _LOST_END_S, _TERM_S = 3.0, 0.5, 2.0
"""How long srun may take to end after all agents have left, if it waits for an agent that is lost, and after TERM."""
_CHUNK = 1 << 16
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
    """Of a heterogeneous job: the component that each node is of. Each needs an srun, as stdin reaches one only."""
    inside: bool
    """The launcher is in a step itself, whose resources ours has to share."""


def step_argv(wanted: Wanted, hosts: Sequence[str], *, again: bool) -> list[str]:
    """Write the command up to the program. ``again``: an earlier step on these nodes may still be there."""
    count = len(hosts)
    argv = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"]
    if hosts[0] in wanted.components:
        argv.append(f"--het-group={wanted.components[hosts[0]]}")
    argv += ["--job-name=distlaunch", "--mpi=none", "--export=ALL", "--cpu-bind=none", "--input=all"]
    if wanted.gpus is not None and count == wanted.nodes:
        argv.append(f"--gpus={wanted.gpus}")
    if wanted.inside or again:
        argv.append("--overlap")
    if wanted.all_or_none:
        argv += ["--kill-on-bad-exit=1", f"--wait={int(wanted.grace_s) + 30}"]
    else:
        argv += ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    return [*argv, *wanted.args]


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out of the environment what would change the step."""
    return {name: value for name, value in environ.items() if not _OF_THE_JOB.fullmatch(name)}


def agent_argv(words: tuple[str, str, str, str], *, count: int, pythons: Sequence[str]) -> list[str]:
    """Write the program of a step: a shell that looks for a Python, and becomes the agent."""
    return ["/bin/sh", "-c", _SCRIPT, "distlaunch", str(count), _STUB, *words, *pythons]


class Step:
    """A running srun, which ends with us however we end. All but ``has_lost`` is one thread's; only ``wait`` waits."""

    def __init__(
        self, argv: Sequence[str], hosts: Sequence[str], code: bytes, environ: Mapping[str, str], *, leash: Leash
    ) -> None:
        """Start it. Raises OSError."""
        self.hosts = tuple(hosts)
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        """The last that it has said, or the agents before they had called."""
        self.has_lost = False
        """An agent of it that had called is lost: srun may end the others, or wait for ever."""
        self._unsent = memoryview(code)
        self._half = b""
        self._speaks = True
        words = as_found(argv)  # srun has the tasks start with its own limits
        self._child = Child(["/bin/sh", "-c", _TOGETHER, "srun", *words], environ=environ, leash=leash)
        self._child.stream.settimeout(0.0)

    def descriptors(self) -> dict[int, int]:
        """Give what to poll; nothing after the end of its output."""
        if not self._speaks:
            return {}
        return {self._child.stream.fileno(): select.POLLIN | (select.POLLOUT if self._unsent else 0)}

    def send(self) -> None:
        """Give srun of the zip what it takes now; its stdin is closed after the last of it."""
        if not self._unsent or not self._speaks:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[self._child.stream.send(self._unsent[:_CHUNK]) :]
            self._child.stream.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = self._unsent[:0]  # it has ended, or will tell

    def read(self) -> list[str]:
        """Give the lines that have come; printable, and cut off."""
        if not self._speaks:
            return []
        try:
            data = self._child.stream.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:  # it has ended without reading all
            data = b""
        self._speaks = bool(data)
        *lines, self._half = (self._half + data).split(b"\n")
        if not data or len(self._half) > _CHUNK:
            lines, self._half = [*lines, self._half], b""
        shown = [printable(line[:_LONGEST_LINE].decode(errors="replace").strip()) for line in lines]
        new = [line for line in shown if line and not line.endswith(_OF_OUR_OWN)]
        self.lines.extend(new)
        return new

    def finish_reading(self) -> None:
        """Read what there is of an srun that has ended."""
        while self._speaks and self.read():
            pass

    @property
    def returncode(self) -> int | None:
        """Give how it has ended; None if it has not."""
        return self._child.returncode()

    @property
    def is_over(self) -> bool:
        """Tell whether it has ended, and all that it has said is read."""
        return not self._speaks and self.returncode is not None

    def how_ended(self) -> str:
        """Say how srun has ended, as a clause."""
        code = self.returncode
        if code is None:
            return "srun has not ended"
        return f"srun was killed by signal {-code}" if code < 0 else f"srun ended with status {code}"

    def wait(self, until: float) -> bool:
        """Wait for its end until this monotonic time; tell whether it has come."""
        return self._child.returncode(max(0.0, until - time.monotonic())) is not None

    def terminate(self) -> None:
        """Ask it to end."""
        self._child.terminate()

    def close(self) -> None:
        """Kill it if it runs, and have nothing to do any more with what it reads and says."""
        self._speaks = False
        self._child.close()
        self._child.stream.close()


def end_steps(steps: Sequence[Step]) -> None:
    """Wait for the end of all of them at once, and bring it about after that: by TERM, by KILL."""
    began = time.monotonic()
    left = [step for step in steps if not step.wait(began + (_LOST_END_S if step.has_lost else _END_S))]
    for step in left:
        step.terminate()
    until = time.monotonic() + _TERM_S
    for step in left:
        step.wait(until)
    for step in steps:
        step.close()
