"""Layer toolkit: checkpoints that a kill at any instant leaves whole, and a training that goes on from the newest."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint_group import end_process_group, new_groups
from distlaunch.toolkit.checkpoint_signals import Requests
from distlaunch.toolkit.checkpoint_state import Nested, Stateful, Trained
from distlaunch.toolkit.checkpoint_store import FORMAT, CheckpointError, steps_of, store_for

log = logging.getLogger("distlaunch.checkpoint")

ASK_S = 0.5
"""How often workers ask each other whether one has been told to save; each time costs one tiny all-reduce."""
MOST_STEPS = 1000
"""The most steps between two such questions."""


class Stopped(SystemExit):
    """The job was told to stop (TERM), and all workers have saved. Uncaught, Python ends with 143, and no traceback."""


class Checkpoint:
    """Checkpoints of a training, in a directory that all nodes share or at a URL of fsspec's (``s3://…``).

    ::

        checkpoint = Checkpoint("runs/a", model=model, optimizer=optimizer, scheduler=scheduler, every=500)
        for step in range(checkpoint.resume(), steps):
            train(step)
            checkpoint.step(step)
        checkpoint.close()

    All workers make one and call its methods alike. ``every`` and ``every_s`` say after how many steps, or seconds, one
    is saved; ``keep`` how many stay. ``sampler`` and further keywords are whatever has state_dict and load_state_dict.
    TERM has all save at the next step and end (``Stopped``); USR1 has them save and go on.
    Raises ConfigError for a place that cannot be used, is not the same for all workers, or is another job's.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        sampler: Any = None,
        every: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        background: bool = True,
        **parts: Stateful,
    ) -> None:
        """``background``: write in a thread, from a copy on the CPU, while the training goes on."""
        for name, number in (("keep", keep), ("every", every), ("every_s", every_s)):
            if number is not None and number <= 0:
                raise ConfigError(f"Checkpoint: {name} is {number}, and has to be above 0")
        named = {"scheduler": scheduler, "scaler": scaler, "sampler": sampler, **parts}
        stateful = {name: _stateful(name, part) for name, part in named.items() if part is not None}
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._trained = Trained(model, optimizers, stateful)
        self._sampler = sampler
        self._every, self._every_s, self._keep, self._background = every, every_s, keep, background
        self._group, self._writing = new_groups()
        self._store = store_for(where)
        self._names = self._claim()
        self._requests = Requests()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._pending_steps = 0
        self._saved_steps = -1
        self._resumed = False
        self._asked, self._asked_at, self._ask_at = -1, time.monotonic(), 0
        self._saved_at = time.monotonic()
        atexit.register(self._finish)

    # --- going on --------------------------------------------------------------------------------------------------

    def resume(self, steps: int | None = None) -> int:
        """Load the newest whole checkpoint, or the one after so many steps; return the next step, 0 if there is none.

        A damaged one is skipped, and that is logged. What is newer than the one loaded is set aside: renamed, and not
        touched again. Raises ConfigError if the checkpoint is of another model or optimizer, and CheckpointError if
        there are some and none is whole.
        """
        self.wait()
        names = [name for name in self._names if steps is None or steps_of(name) == steps]
        if steps is not None and not names:
            there = ", ".join(str(steps_of(name)) for name in self._names) or "none"
            raise ConfigError(f"checkpoints in {self._store.root}: none after {steps} steps; there are: {there}")
        self._resumed = True
        damaged: list[str] = []
        for name in names:
            manifest, damage = self._verified(name)
            if damage is not None:
                damaged.append(f"{self._store.where(name)} is damaged: {damage}")
                self._say(f"{damaged[-1]}; it is skipped")
                continue
            self._load(name, int(manifest["world_size"]))
            self._set_aside([newer for newer in self._names if steps_of(newer) > steps_of(name)])
            self._saved_steps = steps_of(name)
            return self._saved_steps
        if damaged:
            raise CheckpointError(
                "no checkpoint is whole; choose another directory to begin anew. " + "; ".join(damaged)
            )
        return 0

    def _verified(self, name: str) -> tuple[Nested, str | None]:
        """Have each worker read a share of the files; all get the same answer."""
        manifest, damage = self._group.first(self._read_manifest(name) if self._group.rank == 0 else ({}, None))
        if damage is None:
            files = sorted(manifest["files"].items())
            found = self._group.all(self._store.damage(name, dict(files[self._group.rank :: self._group.size])))
            damage = next((text for text in found if text is not None), None)
        return manifest, damage

    def _read_manifest(self, name: str) -> tuple[Nested, str | None]:
        try:
            return self._store.manifest(name), None
        except (OSError, ValueError) as error:
            return {}, f"its manifest cannot be read: {error}"

    def _load(self, name: str, world_size: int) -> None:
        reader, problem, state = self._store.reader(name), None, {}
        try:
            state = self._trained.template(reader.read_metadata(), self._group.rank, world_size)
        except ConfigError as error:
            problem = f"{self._store.where(name)} {error.message}"
        problems = [found for found in self._group.all(problem) if found is not None]
        if problems:
            raise ConfigError(problem or problems[0])
        load(
            state,
            storage_reader=reader,
            planner=DefaultLoadPlanner(),
            process_group=self._group.handle,
            no_dist=self._group.handle is None,
        )
        missing = self._trained.take(state, self._group.rank, world_size)
        if missing:
            self._say(f"{self._store.where(name)} has nothing for {', '.join(missing)}")
        if world_size != self._group.size:
            self._say(f"{self._store.where(name)} was made by {world_size} workers, and is read by {self._group.size}")
        self._trained.restore_random()
        if hasattr(self._sampler, "before_first"):  # a DataLoader draws a number when an iteration begins
            self._sampler.before_first = self._trained.restore_random

    def _set_aside(self, names: Sequence[str]) -> None:
        if self._group.rank == 0:
            for name in names:
                self._store.set_aside(name)
        self._names = [name for name in self._names if name not in names]

    # --- saving ----------------------------------------------------------------------------------------------------

    def step(self, step: int, *, batches: int = 1) -> bool:
        """Tell that a step is done, on all workers; save if it is time, or a signal has asked for it.

        ``batches``: how many of the sampler's this step took. Returns whether a checkpoint has been begun. Raises
        Stopped after a TERM, and CheckpointError if one could not be written: at once, or when it is noticed.
        """
        steps = step + 1
        if hasattr(self._sampler, "advance"):
            self._sampler.advance(batches)
        due = self._every is not None and steps % self._every == 0
        stop = False
        if due or self._group.size == 1 or steps >= self._ask_at:
            asked, stop = self._ask(steps)
            due = due or asked or stop
        if due:
            self.save(step, background=self._background and not stop)
        if stop:
            self._stop(f"saved {self._store.where(self._names[0])}")
        return due

    def _ask(self, steps: int) -> tuple[bool, bool]:
        """Agree with all workers on whether to save now, and whether to stop then."""
        now = time.monotonic()
        since = steps - self._asked if 0 <= self._asked < steps else 1  # before the first question lies a start
        step_us = int((now - self._asked_at) / since * 1e6)
        due = self._every_s is not None and self._group.rank == 0 and now - self._saved_at >= self._every_s
        failed = self._pending is not None and self._pending.done() and self._pending.exception() is not None
        try:
            asked, stop, failing, step_us = self._group.largest(
                [int(self._requests.save or due), int(self._requests.stop), int(failed), step_us]
            )
        except RuntimeError:
            if not self._requests.stop:
                raise
            self._stop("another worker has ended: not saved")
        self._ask_at = steps + max(1, min(MOST_STEPS, 2 * since, int(ASK_S * 1e6 / max(1, step_us))))
        self._asked, self._asked_at = steps, now
        if failing:
            self.wait()
        if asked:
            self._requests.save = False
        return bool(asked), bool(stop)

    def save(self, step: int, *, background: bool = False) -> None:
        """Save the state after this step, on all workers, once. In the background: what goes wrong is raised later."""
        if not self._resumed and self._names:
            raise ConfigError(
                f"checkpoints in {self._store.root}: there are some already, up to {self._names[0]}: "
                "call resume() before the first step, or choose another directory"
            )
        self._resumed = True
        self.wait()
        steps = step + 1
        if steps == self._saved_steps:
            return
        if there := [name for name in self._names if steps_of(name) == steps]:
            raise ConfigError(f"{self._store.where(there[0])} is there already: only steps that follow can be saved")
        name, folder, error = self._group.first(self._begin(steps))
        if error is not None:
            raise CheckpointError(self._not_written(name, error))
        writer = self._store.writer(folder)
        staged = writer.stage(self._trained.state(self._group.rank))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending_steps = steps
        self._pending = self._thread.submit(self._write, staged, writer, folder, name)
        self._saved_at = time.monotonic()
        if not background:
            self.wait()

    def _begin(self, steps: int) -> tuple[str, str, str | None]:
        """Name the next one on rank 0, if this job has the place yet."""
        name = self._store.name(steps)
        try:
            self._store.check_claim()
        except CheckpointError as error:
            return name, "", str(error)
        return name, self._store.folder(name), None

    def _not_written(self, name: str, error: object) -> str:
        kept = f"{self._names[0]} is whole and kept" if self._names else "there is none before it"
        return f"checkpoint {self._store.where(name)} not written: {error}; {kept}"

    def wait(self) -> None:
        """Wait until what has been begun is whole. Raises CheckpointError if it could not be written."""
        if (pending := self._pending) is None:
            return
        self._pending = None
        pending.result()
        self._saved_steps = self._pending_steps

    def _write(self, state: Nested, writer: Any, folder: str, name: str) -> None:
        """Write, in a thread and with all workers: each its part, then rank 0 the manifest and the name."""
        try:
            error = self._written(state, writer, folder, name)
        except RuntimeError as failure:  # of gloo's: the last checkpoint is whole, and this one is nobody's
            error = f"another worker has ended ({str(failure)[:200]})"
        if error is not None:
            raise CheckpointError(self._not_written(name, error))

    def _written(self, state: Nested, writer: Any, folder: str, name: str) -> str | None:
        group, error = self._writing, None
        try:
            save(
                state,
                storage_writer=writer,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),  # others' buffers differ under DDP
                process_group=group.handle,
                no_dist=group.handle is None,
            )
        except CheckpointException as failure:  # all workers get it, with the causes of all
            rank, (cause, _) = min(failure.failures.items())
            error = f"rank {rank}: {cause}"
        except OSError as failure:  # alone
            error = str(failure)
        sums = group.all(writer.fs.sums)
        if group.rank == 0:
            try:
                if error is None:
                    self._commit(folder, name, {file: sum_ for part in sums for file, sum_ in part.items()})
            except (OSError, CheckpointError) as failure:
                error = str(failure)
            if error is not None:
                self._store.remove(folder)
        error = group.first(error)
        if error is not None:
            return str(error)
        self._names = [name, *self._names]
        old, self._names = self._names[self._keep :], self._names[: self._keep]
        if group.rank == 0:
            with suppress(CheckpointError):  # another job has come meanwhile: all there is now is its own
                self._store.check_claim()
                for each in old:
                    self._store.remove(each)
        return None

    def _commit(self, folder: str, name: str, files: dict[str, list[int]]) -> None:
        self._store.check_claim()
        manifest = {
            "format": FORMAT,
            "steps": steps_of(name),
            "world_size": self._writing.size,
            "time": round(time.time(), 3),
            "job": os.environ.get("DISTLAUNCH_JOB_ID"),
            "torch": str(torch.__version__),
            "files": files,
        }
        self._store.commit(folder, name, json.dumps(manifest).encode())

    # --- the place, and the end ------------------------------------------------------------------------------------

    def _claim(self) -> list[str]:
        """Have rank 0 take the place, and see that it is the same for all; return what is there."""
        refused, names, mark = None, [], ""
        if self._group.rank == 0:
            try:
                self._store.claim()
                names, mark = self._store.names(), self._store.mark()
            except ConfigError as error:
                refused = error.message
        refused, names, mark = self._group.first((refused, names, mark))
        if refused is not None:
            raise ConfigError(refused)
        host = os.uname().nodename
        hosts = self._group.all((host, self._store.sees(mark)))
        blind = sorted({host for host, seen in hosts if not seen})
        if blind:
            self._store.release()
            raise ConfigError(
                f"checkpoints in {self._store.root}: {', '.join(blind)} and {hosts[0][0]} do not see the same "
                "directory: it has to be one that all nodes share"
            )
        return names

    def close(self) -> None:
        """Wait for what is being written, and give up the place, the signals and the groups. Call it on all workers.

        Raises CheckpointError if the last checkpoint could not be written.
        """
        atexit.unregister(self._finish)
        try:
            self.wait()
        finally:
            self._release()
            self._group.end()
            self._writing.end()

    def _finish(self) -> None:
        """Let a checkpoint that is being written become whole when Python ends without ``close``."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - Python is ending, maybe since another worker has
            log.warning("distlaunch: warning: %s", error)
        self._release()

    def _release(self) -> None:
        self._requests.end()
        self._store.release()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _stop(self, why: str) -> NoReturn:
        self._say(f"told to stop by SIGTERM: {why}")
        with suppress(CheckpointError):
            self.close()
        atexit.register(end_process_group)
        raise Stopped(128 + signal.SIGTERM)

    def _say(self, text: str) -> None:
        if self._group.rank == 0:
            log.warning("distlaunch: %s", text)


def _stateful(name: str, part: Any) -> Stateful:
    if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)):
        stateful: Stateful = part
        return stateful
    if callable(getattr(part, "set_epoch", None)) and hasattr(part, "epoch"):
        return _Epoch(part)
    raise ConfigError(f"Checkpoint: {name} ({type(part).__name__}) has no state_dict() and load_state_dict()")


class _Epoch:
    """All that torch's DistributedSampler knows of where it is."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def state_dict(self) -> Nested:
        return {"epoch": self._sampler.epoch}

    def load_state_dict(self, state: Nested) -> None:
        self._sampler.set_epoch(state["epoch"])
