"""Layer job.transport: one step of Slurm: the ``srun`` that starts an agent on each of its nodes, from a zip on stdin.

What was learnt on a real Slurm 22.05: in a job with several tasks a node ``--ntasks-per-node=1`` alone is ignored while
SLURM_NTASKS says otherwise; an inherited --ntasks-per-gpu is fatal, and --gpus-per-task leaves each agent one GPU.
Without any word of GPUs the step has the job's, but for a job by --gpus-per-task; without ``-c`` it has all its CPUs,
and with one that a node does not have it is refused.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence

from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable
from distlaunch.job.transport.bootstrap import FLAGS, OLDEST, PYTHONS, stub
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
    """A running srun. All of it is one thread's; nothing waits but ``end``."""

    def __init__(self, argv: Sequence[str], hosts: Sequence[str], code: bytes, environ: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        self.hosts = tuple(hosts)
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        """The last that it has said, or the agents before they had called."""
        self._unsent = memoryview(code)
        self._half = b""
        self.reading, its_output = os.pipe2(os.O_CLOEXEC)
        its_input, self.writing = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                as_found(argv),  # srun has the tasks start with its own limits
                stdin=its_input, stdout=its_output, stderr=its_output, env=dict(environ),
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        finally:
            os.close(its_input)
            os.close(its_output)
        for descriptor in (self.reading, self.writing):
            os.set_blocking(descriptor, False)

    def send(self) -> None:
        """Give srun of the zip what it takes now; its stdin is closed after the last of it."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.writing, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            pass  # it has ended, or will tell
        os.close(self.writing)
        self.writing = -1

    def read(self) -> list[str]:
        """Give the lines that have come; printable, and cut off."""
        try:
            data = os.read(self.reading, _CHUNK)
        except BlockingIOError:
            return []
        if not data:
            os.close(self.reading)
            self.reading = -1
        *lines, self._half = (self._half + data).split(b"\n")
        if not data or len(self._half) > _CHUNK:
            lines, self._half = [*lines, self._half], b""
        shown = [printable(line[:_LONGEST_LINE].decode(errors="replace").strip()) for line in lines]
        new = [line for line in shown if line and not line.endswith(_OF_OUR_OWN)]
        self.lines.extend(new)
        return new

    @property
    def returncode(self) -> int | None:
        """Give how it has ended; None if it has not."""
        return self._process.poll()

    def how_ended(self) -> str:
        """Say how srun has ended, as a clause."""
        code = self.returncode
        if code is None:
            return "srun has not ended"
        return f"srun was killed by signal {-code}" if code < 0 else f"srun ended with status {code}"

    def end(self, patience_s: float) -> None:
        """Wait for its end, and bring it about after that: by TERM, by KILL."""
        for signum, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 2.0), (signal.SIGKILL, 2.0)):
            try:
                self._process.wait(wait_s)
                break
            except subprocess.TimeoutExpired:
                self._process.send_signal(signum)
        self.close()

    def close(self) -> None:
        """Have nothing to do any more with what it reads and says."""
        for descriptor in (self.reading, self.writing):
            if descriptor >= 0:
                os.close(descriptor)
        self.reading = self.writing = -1
