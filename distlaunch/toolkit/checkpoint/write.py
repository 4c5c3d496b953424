"""Write a checkpoint with all workers, and let the workers agree.

A thread of each worker writes its share; then rank 0 writes the manifest and gives the final name.
Workers agree over groups of their own, apart from the script's collectives.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.reader import Reader
from distlaunch.toolkit.checkpoint.state import Nested
from distlaunch.toolkit.checkpoint.storage import (
    FORMAT,
    CheckpointError,
    PlaceLostError,
    Store,
    describe,
    one_line,
    some,
    steps_of,
)
from distlaunch.toolkit.progress import report_checkpoint
from distlaunch.toolkit.wait_at_end import END_S, wait_for_all_workers

log = logging.getLogger("distlaunch.checkpoint")
_MAX_RETRIES = 4
"""Checkpoints whose removal failed and is tried again after each save."""
T = TypeVar("T")
Call = tuple[str, int]
"""A method of a Checkpoint and its step, as ``("save", 5)``. -1 means no step."""
_METHODS = "", "step", "save", "resume", "close"


class Writing:
    """Writes one checkpoint at a time. ``begin`` gives the state to the thread; ``wait`` takes its
    result."""

    def __init__(
        self,
        group: Group,
        store: Store,
        names: list[str],
        *,
        keep: int,
        kinds: Sequence[str],
        trust: bool,
    ) -> None:
        self.group = group
        self.names = names
        """Names of the existing checkpoints, the newest first."""
        self.saved_steps = -1
        """Number of steps of the last checkpoint that was saved or resumed."""
        self._store, self._keep, self._kinds, self._trust = store, keep, kinds, trust
        self._unremoved: list[str] = []
        """Folders that could not be removed yet."""
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[list[str]] | None = None
        self._began = 0.0
        """When the last save began, on the monotonic clock."""

    @property
    def has_failed(self) -> bool:
        """Whether writing has failed, so that ``wait`` would raise at once."""
        return (
            self._pending is not None
            and self._pending.done()
            and self._pending.exception() is not None
        )

    def begin(self, name: str, folder: str, state: Nested) -> None:
        """Copy the state and begin to write it. The previous checkpoint must be complete."""
        began = time.monotonic()
        writer = self._store.writer(folder)
        staged = writer.stage(state)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._began = began
        self._pending = self._thread.submit(
            self._write, staged, writer, folder, name, list(self.names)
        )

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises CheckpointError."""
        if (pending := self._pending) is None:
            return
        self._pending = None
        self.names = pending.result()
        self.saved_steps = steps_of(self.names[0])

    def end(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def failure_text(self, failure: Exception | str, names: Sequence[str]) -> str:
        """Return the text of a failure, with the newest complete checkpoint, or that the location
        is gone."""
        with suppress(Exception):  # if the location exists, ``failure`` says more
            try:
                if self.group.rank == 0:
                    self._store.check_claim()
            except PlaceLostError as lost:
                return lost.message
        if isinstance(failure, Exception):
            failure = (
                failure.message
                if isinstance(failure, CheckpointError | ConfigError)
                else text_of(failure)
            )
        return (
            f"{failure}; {f'{names[0]} is whole and kept' if names else 'there is none before it'}"
        )

    def not_written(self, name: str, told: str) -> CheckpointError:
        """Return the error for a checkpoint that was not written."""
        return CheckpointError(f"checkpoint {self._store.where(name)} not written: {told}")

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _write(
        self, state: Nested, writer: Any, folder: str, name: str, names: list[str]
    ) -> list[str]:
        try:
            error = self._complete(self._write_files(state, writer), writer, folder, name, names)
        # gloo's error: another worker has ended, so this checkpoint stays incomplete.
        except RuntimeError as failure:
            error = self.failure_text(f"another worker has ended ({str(failure)[:200]})", names)
        if error is not None:
            raise self.not_written(name, error)
        names = [name, *names]
        old, names = names[self._keep :], names[: self._keep]
        if self.group.rank == 0:
            # If another job has claimed the location, its checkpoints must not be removed.
            with suppress(Exception):
                self._store.check_claim()
                retried = self._unremoved[:_MAX_RETRIES]
                kept = [name for name in (*old, *retried) if not self._store.remove(name)]
                self._unremoved = [*self._unremoved[_MAX_RETRIES:], *kept]
        return names

    def _write_files(self, state: Nested, writer: Any) -> str | None:
        """Write all files except the manifest. Return the text of an error."""
        try:
            save(
                state,
                storage_writer=writer,
                # With DDP the buffers of other ranks differ, so rank 0's are saved.
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=self.group.handle,
                no_dist=self.group.handle is None,
            )
        except CheckpointException as failure:  # raised on all workers, with the errors of all
            rank, (cause, _) = min(failure.failures.items())
            return f"rank {rank}: {text_of(cause)}"
        except Exception as failure:
            if isinstance(failure, RuntimeError) and self.group.handle is not None:
                raise  # from gloo
            return text_of(failure)
        return None

    def _complete(
        self, error: str | None, writer: Any, folder: str, name: str, names: Sequence[str]
    ) -> str | None:
        """Complete the checkpoint on rank 0, or remove it after a failure. Return the same error on
        all workers."""
        parts = self.group.all((error, writer.fs.sums))
        error = next((each for each, _ in parts if each is not None), None)
        if self.group.rank == 0:
            failed: Exception | str | None = error
            try:
                if error is None:
                    self._commit(
                        folder,
                        name,
                        {file: sum_ for _, sums in parts for file, sum_ in sums.items()},
                    )
            except Exception as failure:  # noqa: BLE001 - the others wait for an answer
                failed = failure
            if failed is not None:
                error = self.failure_text(failed, names)
                with suppress(Exception):
                    self._store.remove(folder)
        return self.group.first(error)

    def _commit(self, folder: str, name: str, files: dict[str, list[int]]) -> None:
        self._store.check_claim()
        there = Reader(self._store, folder, files, trust=self._trust).metadata.state_dict_metadata
        if missing := [rank for rank in range(self.group.size) if f"worker-{rank}" not in there]:
            raise CheckpointError(f"nothing came of rank {missing[0]}")
        manifest = {
            "format": FORMAT,
            "steps": steps_of(name),
            "world_size": self.group.size,
            "optimizers": self._kinds,
            "time": round(time.time(), 3),
            "job": os.environ.get("DISTLAUNCH_JOB_ID"),
            "torch": str(torch.__version__),
            "files": files,
        }
        self._store.commit(folder, name, json.dumps(manifest).encode())
        report_checkpoint(
            step=steps_of(name),
            seconds=time.monotonic() - self._began,
            size=sum(size for size, _ in files.values()),
        )


class LostError(RuntimeError):
    """A collective of gloo has failed: another worker has ended, is cut off, or does not answer."""


class Group:
    """A gloo process group of all workers, on CPUs, independent of the training's.

    There are two, so that a thread can write while the training continues: collectives of one group
    must have the same order on all workers.
    """

    warn_after_s = 60.0
    """Time after which a waiting call logs a warning."""

    def __init__(self, handle: dist.ProcessGroup | None) -> None:
        self.handle = handle
        """The process group; None if there is only one worker."""
        self.rank = 0 if handle is None else dist.get_rank(handle)
        self.size = 1 if handle is None else dist.get_world_size(handle)
        self._has_answer = False
        """Whether this worker knows that another one has called ``close``."""
        self.closing: dist.Work | None = None
        """The collective that ``close`` has begun."""

    def compare(self, call: Call, numbers: Sequence[int]) -> list[int]:
        """Check that all workers have made the same call. Return the maximum of each of four
        numbers.

        It is the first collective of every call. Raises ConfigError on all workers if the calls
        differ.
        """
        if self.handle is None:
            return list(numbers)
        tensor = self._request(call, numbers)
        with _raise_lost_error(), self._warning_of_a_wait(call):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)
        found = [int(number) for number in tensor.tolist()]
        calls = [(_METHODS[found[2 * n]], found[2 * n + 1] - 1) for n in range(self.size)]
        self._has_answer = any(method == "close" for method, _ in calls)
        if different := _describe_difference(calls):
            raise ConfigError(f"Checkpoint: {different}; all have to make the same ones")
        return found[2 * self.size :]

    @contextmanager
    def _warning_of_a_wait(self, call: Call) -> Iterator[None]:
        """Log a warning: the other workers may be in a collective of the training."""
        method, step = call
        text = (
            f"distlaunch: Checkpoint: rank {self.rank} has called "
            f"{method}({step if step >= 0 else ''}) and has waited "
            f"{self.warn_after_s:g} s for the other workers: each of them has to make this call, "
            "not rank 0 alone"
        )
        timer = threading.Timer(self.warn_after_s, log.warning, (text,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Join one more ``compare`` and return at once, so that a later call of another worker gets
        an error.

        Does nothing if a call has already met the ``close`` of another.
        """
        if self.handle is not None and not self._has_answer:
            tensor = self._request(("close", -1), (0, 0, 0, 0))
            with suppress(RuntimeError):
                self.closing = dist.all_reduce(
                    tensor, dist.ReduceOp.MAX, group=self.handle, async_op=True
                )

    def _request(self, call: Call, numbers: Sequence[int]) -> torch.Tensor:
        """Return two numbers per worker, of which only this worker's are set, then ``numbers``."""
        tensor = torch.zeros(2 * self.size + len(numbers), dtype=torch.int64)
        method, step = call
        mine = [_METHODS.index(method), step + 1]
        tensor[2 * self.rank : 2 * self.rank + 2] = torch.tensor(mine)
        tensor[2 * self.size :] = torch.tensor(numbers)
        return tensor

    def all(self, value: T) -> list[T]:
        """Return the value of each worker, by rank."""
        if self.handle is None:
            return [value]
        values: list[T | None] = [None] * self.size
        with _raise_lost_error():
            dist.all_gather_object(values, value, group=self.handle)
        return cast("list[T]", values)

    def first(self, value: T) -> T:
        """Return rank 0's value on all workers."""
        if self.handle is None:
            return value
        values = [value]
        with _raise_lost_error():
            dist.broadcast_object_list(values, src=0, group=self.handle)
        return values[0]

    def agree(self, where: str, work: Callable[[], T]) -> T:
        """Run ``work`` on each worker, and return its result. If it fails on one, raise an error on
        all.

        The error is a ConfigError if the cause is one, else a CheckpointError.
        """
        problem: tuple[type[ConfigError | CheckpointError], str] | None = None
        result: T | None = None
        try:
            result = work()
        # Raised by torch on all workers; no subclass of Exception.
        except CheckpointException as failure:
            rank, (cause, _) = min(failure.failures.items())
            why = cause.message if isinstance(cause, CheckpointError) else text_of(cause)
            problem = CheckpointError, f"{where}: rank {rank}: {why}"
        except ConfigError as failure:
            problem = ConfigError, f"{where} {failure.message}"
        except CheckpointError as failure:
            problem = CheckpointError, f"{where}: rank {self.rank}: {failure.message}"
        except Exception as failure:  # noqa: BLE001 - the others wait for an answer
            problem = CheckpointError, f"{where}: rank {self.rank}: {text_of(failure)}"
        problems = [problem] if self.handle is None else self.all(problem)
        if found := problem or next((each for each in problems if each is not None), None):
            raise found[0](one_line(found[1]))
        return cast("T", result)


@contextmanager
def _raise_lost_error() -> Iterator[None]:
    """Turn gloo's error into LostError."""
    try:
        yield
    except RuntimeError as error:
        raise LostError(str(error)[:200]) from error


def _describe_difference(calls: Sequence[Call]) -> str:
    """Return a text such as ``rank 0: save(5); rank 1: step(9)`` if calls differ, else an empty
    one."""
    ranks: dict[str, list[str]] = {}
    for rank, (method, step) in enumerate(calls):
        ranks.setdefault(f"{method}({step if step >= 0 else ''})", []).append(str(rank))
    if len(ranks) == 1:
        return ""
    told = [
        f"{'rank' if len(those) == 1 else 'ranks'} {some(those)}: {call}"
        for call, those in ranks.items()
    ]
    return "the workers have made different calls: " + "; ".join(told)


def text_of(error: BaseException) -> str:
    """Return the text of an error. torch keeps only the text of many."""
    return str(error) if isinstance(error, OSError) and str(error) else describe(error)


def end_groups(*groups: Group) -> None:
    """Destroy the groups once all workers have called this: gloo's threads can abort a Python that
    exits with live groups.

    Otherwise they are kept, because destroying a group waits for its collectives.
    """
    handles = [group.handle for group in groups if group.handle is not None]
    for group in groups:
        group.handle = None
    if handles and wait_for_all_workers("checkpoint"):
        with suppress(RuntimeError, ValueError):  # the default process group was destroyed
            for group in groups:
                if group.closing is not None:
                    group.closing.wait(timedelta(seconds=END_S))
            for handle in handles:
                dist.destroy_process_group(handle)


def new_groups() -> tuple[Group, Group]:
    """Return the two groups, on all workers. Raises ConfigError if there is no process group."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            # A single worker needs no process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
            return Group(None), Group(None)
        raise ConfigError(
            f"Checkpoint: WORLD_SIZE is {os.environ['WORLD_SIZE']}, and there is no process group "
            "yet: "
            "call distlaunch.toolkit.init(), or torch.distributed.init_process_group(), before"
        )
    return Group(_new_group()), Group(_new_group())


def _new_group() -> Any:
    """Return a group that ``distlaunch stack`` can name. torch before 2.4 has no descriptions."""
    try:
        return dist.new_group(backend="gloo", group_desc="distlaunch checkpoint")
    except TypeError:
        return dist.new_group(backend="gloo")
