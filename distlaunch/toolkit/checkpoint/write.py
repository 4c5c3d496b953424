"""How all workers write a checkpoint in a thread: each its part, then rank 0 manifest and name."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.group import Group, text_of
from distlaunch.toolkit.checkpoint.reader import Reader
from distlaunch.toolkit.checkpoint.state import Nested
from distlaunch.toolkit.checkpoint.storage import FORMAT, CheckpointError, PlaceLostError, Store, steps_of


class Writing:
    """One checkpoint at a time. The thread has what it needs from ``begin``; what it gives is taken by ``wait``."""

    def __init__(
        self, group: Group, store: Store, names: list[str], *, keep: int, kinds: Sequence[str], trust: bool
    ) -> None:
        self.group = group
        self.names = names
        """What is there, the newest first."""
        self.saved_steps = -1
        """After how many steps the last one was made, or the one that was resumed."""
        self._store, self._keep, self._kinds, self._trust = store, keep, kinds, trust
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[list[str]] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether ``wait`` would raise at once."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def begin(self, name: str, folder: str, state: Nested) -> None:
        """Copy what is to be written, and have it written; wait for the one before by then."""
        writer = self._store.writer(folder)
        staged = writer.stage(state)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._thread.submit(self._write, staged, writer, folder, name, list(self.names))

    def wait(self) -> None:
        """Wait until what has been begun is whole. Raises CheckpointError if it could not be written."""
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

    def told(self, failure: Exception | str, names: Sequence[str]) -> str:
        """Say what went wrong, and what there is: nothing where the place is lost, which then is what went wrong."""
        with suppress(Exception):  # of a place that is there: the failure tells more
            try:
                if self.group.rank == 0:
                    self._store.check_claim()
            except PlaceLostError as lost:
                return lost.message
        if isinstance(failure, Exception):
            failure = failure.message if isinstance(failure, CheckpointError | ConfigError) else text_of(failure)
        return f"{failure}; {f'{names[0]} is whole and kept' if names else 'there is none before it'}"

    def not_written(self, name: str, told: str) -> CheckpointError:
        """Make the error of what ``told`` has said."""
        return CheckpointError(f"checkpoint {self._store.where(name)} not written: {told}")

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _write(self, state: Nested, writer: Any, folder: str, name: str, names: list[str]) -> list[str]:
        try:
            error = self._committed(self._saved(state, writer), writer, folder, name, names)
        except RuntimeError as failure:  # of gloo's: the last checkpoint is whole, and this one is nobody's
            error = self.told(f"another worker has ended ({str(failure)[:200]})", names)
        if error is not None:
            raise self.not_written(name, error)
        names = [name, *names]
        old, names = names[self._keep :], names[: self._keep]
        if self.group.rank == 0:
            with suppress(Exception):  # another job has come meanwhile: all that is there is its own now
                self._store.check_claim()
                for each in old:
                    self._store.remove(each)
        return names

    def _saved(self, state: Nested, writer: Any) -> str | None:
        """Write all files but the manifest; say what went wrong here."""
        try:
            save(
                state,
                storage_writer=writer,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),  # others' buffers differ under DDP
                process_group=self.group.handle,
                no_dist=self.group.handle is None,
            )
        except CheckpointException as failure:  # all workers get it, with the causes of all
            rank, (cause, _) = min(failure.failures.items())
            return f"rank {rank}: {text_of(cause)}"
        except Exception as failure:
            if isinstance(failure, RuntimeError) and self.group.handle is not None:
                raise  # from gloo
            return text_of(failure)
        return None

    def _committed(self, error: str | None, writer: Any, folder: str, name: str, names: Sequence[str]) -> str | None:
        """Have rank 0 complete it, or remove what was written; all get the same answer."""
        parts = self.group.all((error, writer.fs.sums))
        error = next((each for each, _ in parts if each is not None), None)
        if self.group.rank == 0:
            failed: Exception | str | None = error
            try:
                if error is None:
                    self._commit(folder, name, {file: sum_ for _, sums in parts for file, sum_ in sums.items()})
            except Exception as failure:  # noqa: BLE001 - the others wait for an answer
                failed = failure
            if failed is not None:
                error = self.told(failed, names)
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
