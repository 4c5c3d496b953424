"""Names and paths of the files in a run directory.

The names of an attempt's files depend on a ``Layout``. ``train`` has one; torchrun and horovodrun
have others, for tools that expect their names.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable

from distlaunch.core.model.record import Record, replace

EVENTS = "events.jsonl"
REPORT = "report.txt"
REPORT_DATA = "report.json"
"""The same as data."""
SERIES = "steps.bin"
"""The steps that workers have reported; see ``step_series``."""
EVENTS_OF_NODE = "events-{node}.jsonl"
"""Events of a joined launcher, which may write to the same run directory."""
PRELOAD = "preload.log"
ON_EVENT_LOG = "on-event.log"
"""Output of the command of --on-event."""
MARKER = ".distlaunch-run"
"""Marks a run directory. distlaunch removes no directory without this file."""
SETUP = "distlaunch-setup"
"""$0 of the shell that runs --setup. The command and its interpreter follow the text of --setup."""
BEFORE = ".1"
"""Suffix of the previous part of ``ON_EVENT_LOG`` and ``CONSOLE``. A file that has reached its limit
gets it, and a new file is begun."""
CONSOLE = "console.log"
"""Console of a launcher that --detach has started."""
FAULTS = "faults.log"
"""Tracebacks of faults of distlaunch that did not end the job."""
PID = "launcher.pid"
"""Process id of the coordinator's launcher while the job runs."""
STDOUT, STDERR = 1, 2


class Layout(Record):
    """The names of an attempt's files, with ``{attempt}`` and ``{rank}``, and their largest size.

    If ``stdout`` and ``stderr`` are equal, the file has both streams in order.
    """

    attempt: str
    folder: str
    """Directory for a rank's files, within the attempt's directory. Empty: that directory
    itself."""
    stdout: str
    stderr: str
    error: str
    """File to which torch's ``@record`` writes a worker's exception."""
    stacks: str
    log_bytes: int = 0
    """Size of a file of a rank's output from which its middle is left out; 0: there is no limit."""

    @property
    def separate(self) -> bool:
        """Whether stdout and stderr have different files."""
        return self.stdout != self.stderr

    def attempt_dir(self, run_dir: str, attempt: int) -> str:
        """Return the directory of an attempt."""
        return os.path.join(run_dir, self.attempt.format(attempt=attempt))

    def rank_dir(self, run_dir: str, attempt: int, rank: int) -> str:
        """Return the directory of a rank's files."""
        return os.path.join(self.attempt_dir(run_dir, attempt), self.folder.format(rank=rank))

    def log_path(self, run_dir: str, attempt: int, rank: int, stream: int = STDERR) -> str:
        """Return the file of a rank's output."""
        name = self.stdout if stream == STDOUT else self.stderr
        return os.path.join(self.rank_dir(run_dir, attempt, rank), name.format(rank=rank))

    def error_files(self, run_dir: str, attempt: int) -> Callable[[int], str]:
        """Return a function that returns the path of a rank's file for its exception
        (``error``)."""
        folder = self.attempt_dir(run_dir, attempt).replace("{", "{{").replace("}", "}}")
        path = os.path.join(folder, self.folder, self.error)
        return lambda rank: path.format(rank=rank)

    def stacks_path(self, run_dir: str, attempt: int, rank: int) -> str:
        """Return the file for a rank's stacks in a hung job."""
        return os.path.join(self.rank_dir(run_dir, attempt, rank), self.stacks.format(rank=rank))

    def preload_path(self, run_dir: str, attempt: int) -> str:
        """Return the file for the output of preloaded modules' imports."""
        return os.path.join(self.attempt_dir(run_dir, attempt), PRELOAD)

    def filtered_path(self, run_dir: str, attempt: int, stream: int) -> str:
        """Return the file for the lines of all ranks that a filter selects."""
        return os.path.join(self.attempt_dir(run_dir, attempt), FILTERED[stream])


FILTERED = {STDOUT: "filtered_stdout.log", STDERR: "filtered_stderr.log"}
TRAIN = Layout(
    attempt="attempt-{attempt}",
    folder="",
    stdout="rank-{rank}.log",
    stderr="rank-{rank}.log",
    error="rank-{rank}.error.json",
    stacks="rank-{rank}.stacks.txt",
)
TORCHRUN = Layout(
    attempt="attempt_{attempt}",
    folder="{rank}",
    stdout="stdout.log",
    stderr="stderr.log",
    error="error.json",
    stacks="stacks.txt",
)
"""The names of torchrun 2.13, whose directories have local ranks. A job on one machine has equal
ranks and local ranks."""
_HOROVODRUN = Layout(
    attempt="attempt-{attempt}",
    folder="rank.{rank}",
    stdout="stdout",
    stderr="stderr",
    error="error.json",
    stacks="stacks.txt",
)


def horovodrun_layout(workers: int) -> Layout:
    """Return the layout of ``horovodrun --output-filename``: ranks are padded to the width of the
    last."""
    return replace(_HOROVODRUN, folder=f"rank.{{rank:0{len(str(max(workers - 1, 0)))}}}")


_OURS = {
    EVENTS,
    REPORT,
    REPORT_DATA,
    SERIES,
    f"{SERIES}.new",
    PRELOAD,
    ON_EVENT_LOG,
    MARKER,
    CONSOLE,
    f"{CONSOLE}{BEFORE}",
    f"{CONSOLE}.new",
    f"{ON_EVENT_LOG}{BEFORE}",
    FAULTS,
    PID,
    TORCHRUN.stdout,
    TORCHRUN.stderr,
    TORCHRUN.error,
    TORCHRUN.stacks,
    _HOROVODRUN.stdout,
    _HOROVODRUN.stderr,
    *FILTERED.values(),
}


def plan_path(run_dir: str, attempt: int) -> str:
    """Return the file of an attempt's plan."""
    return os.path.join(run_dir, f"plan-{attempt}.json")


def times_path(run_dir: str, attempt: int) -> str:
    """Return the index of the times of an attempt's output; see ``log_times``."""
    return os.path.join(run_dir, f"times-{attempt}.index")


def is_output_of_distlaunch(name: str) -> bool:
    """Return whether a file in a run directory has a name that distlaunch uses."""
    of_node = name.startswith(("events-", "filtered_")) and name.endswith((".jsonl", ".log"))
    return (
        name in _OURS
        or of_node
        or (name.startswith("times-") and name.endswith(".index"))
        or (name.startswith(("plan-", "rank-")) and name.endswith((".json", ".log", ".stacks.txt")))
    )


def is_output_folder(name: str) -> bool:
    """Return whether a directory in a run directory has a name that a layout uses."""
    return name.startswith(("attempt-", "attempt_", "rank.")) or (name.isascii() and name.isdigit())
