"""The files of a run directory, by name. Pure.

How the files of an attempt are called is a value, ``Layout``: ``train``'s, or torchrun's for those
whose tools look for it. All else in a run directory has the same name everywhere.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable

from distlaunch.core.model.record import Record, replace

EVENTS = "events.jsonl"
REPORT = "report.txt"
EVENTS_OF_NODE = "events-{node}.jsonl"
"""What another launcher of the job tells, which may share the folder."""
PRELOAD = "preload.log"
MARKER = ".distlaunch-run"
"""Says that a folder is a run directory: without it none is ever removed."""
STDOUT, STDERR = 1, 2


class Layout(Record):
    """The names of an attempt's files. ``{attempt}`` and ``{rank}`` stand for the numbers.

    ``stdout`` and ``stderr`` may be one file: it then has both, in the order of their coming.
    """

    attempt: str
    folder: str
    """The folder of a rank's files in the attempt's; empty if they have none of their own."""
    stdout: str
    stderr: str
    error: str
    """What torch's ``@record`` writes a worker's exception to."""
    stacks: str

    @property
    def separate(self) -> bool:
        """Return whether stdout and stderr have a file each."""
        return self.stdout != self.stderr

    def attempt_dir(self, run_dir: str, attempt: int) -> str:
        """Name the folder of one attempt's files."""
        return os.path.join(run_dir, self.attempt.format(attempt=attempt))

    def rank_dir(self, run_dir: str, attempt: int, rank: int) -> str:
        """Name the folder of a rank's files, which may be the attempt's."""
        return os.path.join(self.attempt_dir(run_dir, attempt), self.folder.format(rank=rank))

    def log_path(self, run_dir: str, attempt: int, rank: int, stream: int = STDERR) -> str:
        """Name the file of a rank's output."""
        name = self.stdout if stream == STDOUT else self.stderr
        return os.path.join(self.rank_dir(run_dir, attempt, rank), name.format(rank=rank))

    def error_files(self, run_dir: str, attempt: int) -> Callable[[int], str]:
        """Say by rank to what file torch's ``@record`` writes a worker's exception."""
        folder = self.attempt_dir(run_dir, attempt).replace("{", "{{").replace("}", "}}")
        path = os.path.join(folder, self.folder, self.error)
        return lambda rank: path.format(rank=rank)

    def stacks_path(self, run_dir: str, attempt: int, rank: int) -> str:
        """Name the file of a rank's stacks, taken when the job hung."""
        return os.path.join(self.rank_dir(run_dir, attempt, rank), self.stacks.format(rank=rank))

    def preload_path(self, run_dir: str, attempt: int) -> str:
        """Name the file of what preloaded modules print as they are imported."""
        return os.path.join(self.attempt_dir(run_dir, attempt), PRELOAD)

    def filtered_path(self, run_dir: str, attempt: int, stream: int) -> str:
        """Name the file of the lines of all ranks that a filter picked."""
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
"""As torchrun 2.13 has them, whose folders are named by local rank: on one machine that is the
rank."""
_HOROVODRUN = Layout(
    attempt="attempt-{attempt}",
    folder="rank.{rank}",
    stdout="stdout",
    stderr="stderr",
    error="error.json",
    stacks="stacks.txt",
)


def horovodruns(workers: int) -> Layout:
    """Name a rank's files as ``horovodrun --output-filename`` does: numbers have as many digits as
    the last rank's."""
    return replace(_HOROVODRUN, folder=f"rank.{{rank:0{len(str(max(workers - 1, 0)))}}}")


_OURS = {
    EVENTS,
    REPORT,
    PRELOAD,
    MARKER,
    TORCHRUN.stdout,
    TORCHRUN.stderr,
    TORCHRUN.error,
    TORCHRUN.stacks,
    _HOROVODRUN.stdout,
    _HOROVODRUN.stderr,
    *FILTERED.values(),
}


def plan_path(run_dir: str, attempt: int) -> str:
    """Name the file of an attempt's plan."""
    return os.path.join(run_dir, f"plan-{attempt}.json")


def is_ours(name: str) -> bool:
    """Return whether a file of a run directory, or of a folder in it, was made by distlaunch, by its
    name."""
    of_node = name.startswith(("events-", "filtered_")) and name.endswith((".jsonl", ".log"))
    return (
        name in _OURS
        or of_node
        or (name.startswith(("plan-", "rank-")) and name.endswith((".json", ".log", ".stacks.txt")))
    )


def is_our_folder(name: str) -> bool:
    """Tell the same of a folder: an attempt's, or one that torchrun's or horovodrun's layout has
    for a rank."""
    return name.startswith(("attempt-", "attempt_", "rank.")) or (name.isascii() and name.isdigit())
