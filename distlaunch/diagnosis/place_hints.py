"""The table of hints for hung workers, by the library call in the worker's stack.

The first row that matches gives the hint. The row of a library precedes those of the Python modules
that it calls: a data loader waits in multiprocessing, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlaunch.core.model.record import Record
from distlaunch.diagnosis.failure_kinds import FailureKind
from distlaunch.diagnosis.tracebacks import Frame

K = FailureKind


class PlaceRow(Record):
    """One row of the table. A call matches if the path of its file contains one of ``files`` and
    its function is one of ``functions`` (None: any)."""

    kind: FailureKind
    hint: str
    """``{Opt.ENV}`` in it becomes the name of an option."""
    files: tuple[str, ...]
    functions: frozenset[str] | None = None

    def matches(self, call: Frame) -> bool:
        """Return whether this row applies to a call."""
        return any(part in call.file for part in self.files) and (
            self.functions is None or call.function in self.functions
        )


PLACES: tuple[PlaceRow, ...] = (
    PlaceRow(
        kind=K.EXTENSION,
        hint=(
            "it builds an extension, which the first run does, and whoever else needs that waits "
            "for it: choose a longer {Opt.HANG_TIMEOUT}, or build it before the job"
        ),
        files=("/torch/utils/cpp_extension.py",),
        functions=frozenset({"_run_ninja_build", "_write_ninja_file_and_build_library"}),
    ),
    PlaceRow(
        kind=K.LOADER,
        hint=(
            "it waits for its DataLoader's workers; a full /dev/shm or a loader worker that hangs "
            "does this: `df -h /dev/shm`, and try num_workers=0"
        ),
        files=("/torch/utils/data/",),
    ),
    PlaceRow(
        kind=K.EXTENSION,
        hint=(
            "it waits for another process to build an extension; if none does, a killed build has "
            "left its file `lock` in the extension's folder (TORCH_EXTENSIONS_DIR, "
            "~/.cache/torch_extensions): remove that"
        ),
        files=("/torch/utils/file_baton.py",),
    ),
    PlaceRow(
        kind=K.RAY,
        hint=(
            "it waits for Ray: `ray status` shows whether the cluster has what its tasks, actors "
            "and placement groups ask for"
        ),
        files=("/ray/",),
    ),
    PlaceRow(
        kind=K.FILE_LOCK,
        hint=(
            "it waits for a file lock, which another process holds or a file system does not give "
            "out"
        ),
        files=("/filelock/",),
    ),
    PlaceRow(
        kind=K.THREAD,
        hint="it waits for an import that another of its threads is doing",
        files=("<frozen importlib._bootstrap>",),
        functions=frozenset({"acquire", "_lock_unlock_module", "_get_module_lock"}),
    ),
    PlaceRow(
        kind=K.QUESTION,
        hint=(
            "a debugger waits for its user: remove the breakpoint, or debug one worker alone "
            "(docs/debugging.md)"
        ),
        files=("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/remote_pdb", "/ipdb/"),
    ),
    PlaceRow(
        kind=K.QUESTION,
        hint="it waits for a password: set it with an option or a variable ({Opt.ENV})",
        files=("/getpass.py",),
    ),
    PlaceRow(
        kind=K.DOWNLOAD,
        hint=(
            "it is connecting: is that host's name known here, is the host reachable from this "
            "node?"
        ),
        files=("/socket.py",),
        functions=frozenset({"getaddrinfo", "create_connection", "connect"}),
    ),
    PlaceRow(
        kind=K.TRACKER,
        hint="it waits for Weights & Biases: WANDB_MODE=offline shows whether that is all",
        files=("/wandb/",),
    ),
    PlaceRow(
        kind=K.DOWNLOAD,
        hint=(
            "it waits for a server on the network: set a timeout there, or fetch the data before "
            "the job"
        ),
        files=(
            "/urllib/request.py",
            "/http/client.py",
            "/urllib3/",
            "/ssl.py",
            "/huggingface_hub/",
            "/aiohttp/",
            "/botocore/",
        ),
    ),
    PlaceRow(
        kind=K.CHILD,
        hint="it waits for a process that it has started: `ps --ppid` with its pid shows which",
        files=("/subprocess.py",),
    ),
    PlaceRow(
        kind=K.CHILD,
        hint=(
            "it waits for a process that it has started (`ps --ppid` with its pid shows them), or "
            "for a lock of theirs"
        ),
        files=("/multiprocessing/",),
    ),
    PlaceRow(
        kind=K.CHILD,
        hint="it waits for work that it has given to a pool of its own",
        files=("/concurrent/futures/", "/joblib/"),
    ),
    PlaceRow(
        kind=K.THREAD,
        hint="it waits for a queue that another of its threads has to fill or empty",
        files=("/queue.py",),
    ),
    PlaceRow(
        kind=K.THREAD,
        hint="it waits for another of its threads to end",
        files=("/threading.py",),
        functions=frozenset({"join", "_wait_for_tstate_lock"}),
    ),
    PlaceRow(
        kind=K.THREAD,
        hint="it waits for a lock or an event that another of its threads has to release",
        files=("/threading.py",),
    ),
    PlaceRow(
        kind=K.IMPORT,
        hint=(
            "it is importing a module: does that take longer than {Opt.HANG_TIMEOUT}, or is its "
            "file "
            "system slow or gone?"
        ),
        files=("<frozen importlib",),
    ),
)


def find_place(calls: Sequence[Frame]) -> PlaceRow | None:
    """Return the row for the calls of a worker's script, if any matches."""
    return next((row for row in PLACES if any(map(row.matches, calls))), None)
