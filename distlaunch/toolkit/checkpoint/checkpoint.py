"""Checkpoints that are complete after a kill at any instant, and resuming from the newest one."""

from __future__ import annotations

import atexit
import logging
import math
import operator
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import counted
from distlaunch.toolkit.checkpoint.choose_storage import store_for
from distlaunch.toolkit.checkpoint.entries import entries_of, worker_key
from distlaunch.toolkit.checkpoint.reader import CheckpointLoadPlanner, Reader
from distlaunch.toolkit.checkpoint.save_requests import SaveRequests
from distlaunch.toolkit.checkpoint.state import (
    Nested,
    Stateful,
    TrainingState,
    check_names,
    is_part,
    stateful_part,
)
from distlaunch.toolkit.checkpoint.storage import (
    MANIFEST,
    MOST_STEPS,
    AllDamagedError,
    CheckpointError,
    Store,
    describe,
    one_line,
    some,
    steps_of,
)
from distlaunch.toolkit.checkpoint.write import (
    Call,
    LostError,
    Writing,
    end_groups,
    new_groups,
    text_of,
)
from distlaunch.toolkit.wait_at_end import (
    call_before_end,
    cancel_call_before_end,
    end_process_group,
)

log = logging.getLogger("distlaunch.checkpoint")
_NOTHING_ASKED = 0, 0, 0, 0
_BY_SIGNAL = 2
"""Larger than the value of ``every_s``, because the largest value of all workers counts."""
_TOO_LATE = "it came after the last step, and nothing has been saved for it"


class Stopped(SystemExit):
    """The job was told to stop (SIGTERM), and all workers have saved.

    If it is not caught, Python exits with code 143 and prints no traceback.
    """


class Checkpoint:
    """Checkpoints of a training, in a directory that all nodes share or at a URL (``s3://…``).

    ::

        checkpoint = Checkpoint("runs/a", model=model, optimizer=optimizer, scheduler=scheduler, every=500)
        for step in range(checkpoint.resume(), steps):
            train(step)
            checkpoint.step(step)
        checkpoint.save()  # after the last step, if that is not saved yet
        checkpoint.close()

    ``step`` is the index of a step, counted from 0 over all epochs. A checkpoint is named by the
    number of completed steps. After ``step(299)`` it is ``step-000000300``, and ``resume`` returns
    300, the index of the next step.

    All workers must create a Checkpoint and make the same calls. A checkpoint is saved every
    ``every`` steps, and every ``every_s`` seconds. ``keep`` is the number of checkpoints that are
    kept. ``sampler`` and further keyword arguments are objects with state_dict and load_state_dict.
    After SIGTERM all workers save at the next step and end (``Stopped``). After SIGUSR1 they save
    and continue.

    Raises ConfigError if the location cannot be used, differs between workers, or is used by
    another job.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        sampler: Any = None,
        every: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        background: bool = True,
        trust: bool = False,
        **parts: Stateful,
    ) -> None:
        """``background``: write in a thread, from a copy on the CPU, while the training continues.

        ``trust``: save and load objects of any class. Loading them can execute code, so use it only
        for checkpoints that you have written yourself. Without it, a checkpoint holds tensors,
        numbers, texts, numpy arrays, and Python's containers; a save refuses anything else, and a
        resume executes no code that a checkpoint names.
        """
        above_0("keep", keep, whole=True)
        if every is not None:
            above_0("every", every, whole=True)
        if every_s is not None:
            above_0("every_s", every_s, whole=False)
        named = {"scheduler": scheduler, "scaler": scaler, "sampler": sampler, **parts}
        for name, part in parts.items():
            refuse_misspelt(name, part)
        stateful = {
            name: stateful_part(name, part) for name, part in named.items() if part is not None
        }
        self._training_state = TrainingState(model, several(optimizer), stateful, trust=trust)
        self._trust = trust
        self._sampler = sampler
        self._every, self._every_s, self._background = every, every_s, background
        self._group, writing = new_groups()
        self._store = store_for(where)
        self._writing = Writing(
            writing,
            self._store,
            self._claim(),
            keep=keep,
            kinds=self._training_state.kinds,
            trust=trust,
        )
        self._requests = SaveRequests()
        self._request_schedule = RequestSchedule(time.monotonic())
        self._resumed = self._closed = False
        self._parts_checked = False
        self._only_resumed = False
        """Whether a checkpoint was loaded and no step has followed."""
        self._reached = 0
        """Completed steps at the last call, or the result of ``resume``."""
        self._saved_at = time.monotonic()
        self._owner = os.getpid()
        atexit.register(self._finish)
        call_before_end(self._finish_or_stop)

    # --- going on --------------------------------------------------------------------------------------------------

    def resume(self, steps: int | None = None) -> int:
        """Load the newest complete checkpoint, or the one after ``steps`` steps.

        Return the index of the next step; 0 if there is no checkpoint. The name of the loaded
        checkpoint is logged. If the script runs no further step, ``close`` logs that the training
        had already ended.

        A damaged checkpoint is skipped, with a warning. It is damaged if a file is missing or has
        other content than was written, but not if a file cannot be read. Checkpoints newer than the
        loaded one are renamed (``aside-…``) and never touched again.

        Raises ConfigError if the checkpoint is of another model or optimizer. Raises
        CheckpointError if a checkpoint cannot be read, or if all checkpoints are damaged.
        """
        self._check_open("resume")
        with self._lost_worker_errors(call := ("resume", -1 if steps is None else steps)):
            self.wait()
            self._group.compare(call, _NOTHING_ASKED)
            return self._resume(steps)

    def _resume(self, steps: int | None) -> int:
        all_names = self._writing.names
        names = [name for name in all_names if steps is None or steps_of(name) == steps]
        if steps is not None and not names:
            there = ", ".join(str(steps_of(name)) for name in all_names) or "none"
            raise ConfigError(
                f"checkpoints in {self._store.root}: none after {steps} steps; there are: {there}"
            )
        self._request_schedule.restart(time.monotonic())
        damaged: list[str] = []
        for name in names:
            manifest, damage = self._verify(name)
            if damage is not None:
                damaged.append(one_line(f"{self._store.where(name)} is damaged: {damage}"))
                if steps is None:
                    self._say(f"{damaged[-1]}; it is skipped")
                continue
            self._load(name, manifest)
            self._set_aside([newer for newer in all_names if steps_of(newer) > steps_of(name)])
            self._resumed, self._reached = True, steps_of(name)
            self._writing.saved_steps = self._reached
            self._only_resumed = True
            done = f"after {counted(self._reached, 'step')}"
            self._say(
                f"resumed from {self._store.where(name)}, {done}{_age_text(manifest.get('time'))}"
            )
            return self._reached
        if damaged and steps is not None:
            others = (
                ", ".join(str(steps_of(name)) for name in all_names if name not in names) or "none"
            )
            raise CheckpointError(f"{'; '.join(damaged)}; others that are there: {others}")
        if damaged:
            raise AllDamagedError(
                "no checkpoint is whole; choose another directory to begin anew. "
                + "; ".join(damaged)
            )
        self._resumed, self._reached = True, 0
        return 0

    def _verify(self, name: str) -> tuple[Nested, str | None]:
        """Verify a checkpoint, of which each worker reads a share. Return the manifest and the
        damage, equal on all workers.

        Raises CheckpointError on all workers if one of them cannot read its share.
        """
        manifest, damage, unread = self._group.first(
            self._read_manifest(name) if self._group.rank == 0 else ({}, None, None)
        )
        if damage is None and unread is None:
            files = sorted(manifest["files"].items())
            found = self._group.all(
                self._find_damage(name, dict(files[self._group.rank :: self._group.size]))
            )
            damage = next((text for text, _ in found if text is not None), None)
            unread = next(
                (
                    f"rank {rank}: {text}"
                    for rank, (_, text) in enumerate(found)
                    if text is not None
                ),
                None,
            )
        if unread is not None:
            others = ", ".join(str(steps_of(each)) for each in self._writing.names if each != name)
            hint = f"; resume(steps=N) takes an older one: N is one of {others}" if others else ""
            raise CheckpointError(
                f"{self._store.where(name)}: {one_line(unread)}; nothing has been set aside or removed{hint}"
            )
        return manifest, damage

    def _read_manifest(self, name: str) -> tuple[Nested, str | None, str | None]:
        """Return the manifest, its damage, or why it cannot be read."""
        try:
            return self._store.manifest(name), None, None
        except FileNotFoundError:
            return {}, f"{MANIFEST} is missing", None
        except (OSError, ValueError) as error:
            why = str(error) if type(error) is ValueError else describe(error)
            return {}, f"its manifest is not what was written: {why}", None
        except Exception as error:  # noqa: BLE001 - the others wait for an answer
            return (
                {},
                None,
                f"rank 0: {error.message if isinstance(error, CheckpointError) else describe(error)}",
            )

    def _find_damage(self, name: str, files: Nested) -> tuple[str | None, str | None]:
        """Return the damage of some files, or why a file cannot be read."""
        try:
            return self._store.damage(name, files), None
        except Exception as error:  # noqa: BLE001 - the others wait for an answer
            return None, error.message if isinstance(error, CheckpointError) else describe(error)

    def _load(self, name: str, manifest: Nested) -> None:
        """Load first the entries that may be refused, so that a refusal changes neither model nor
        optimizer."""
        where, training_state, rank, world_size = (
            self._store.where(name),
            self._training_state,
            self._group.rank,
            self._group.size,
        )
        was = int(manifest["world_size"])
        reader = self._group.agree(
            where, lambda: Reader(self._store, name, manifest["files"], trust=self._trust)
        )
        metadata = reader.metadata
        groups = self._group.agree(where, lambda: training_state.groups_template(metadata))
        if groups:
            self._group.agree(where, lambda: self._read(reader, groups))
        entries = entries_of(metadata)
        self._group.agree(
            where,
            lambda: reader.check(groups, lambda key, value: check_names(entries[key], value)),
        )
        said = self._group.agree(where, lambda: training_state.check_model(groups, metadata))
        said += self._group.agree(
            where, lambda: training_state.match_groups(groups, metadata, manifest.get("optimizers"))
        )
        state = self._group.agree(where, lambda: training_state.template(metadata))
        tensors = {key: value for key, value in state.items() if value is not None}
        values: Nested = {key: None for key in state if key not in tensors}
        if values:
            self._group.agree(where, lambda: self._read(reader, values))
        self._group.agree(where, lambda: training_state.check_sizes(values, metadata))
        own_key = worker_key(rank, was)
        own = self._group.agree(where, lambda: training_state.own_template(metadata, rank, was))
        self._group.agree(where, lambda: self._read(reader, own))
        self._group.agree(
            where, lambda: training_state.unpickle_own(own, own_key, reader.unpickled)
        )
        said += self._group.agree(
            where, lambda: training_state.load_own(own, rank, was, world_size)
        )
        self._group.agree(where, lambda: self._read(reader, tensors))
        # In the order in which the entries were saved.
        read = {key: tensors[key] if key in tensors else values[key] for key in state}
        self._group.agree(where, lambda: training_state.load(read, metadata))
        if was != world_size:
            said.append(f"was made by {counted(was, 'worker')}, and is read by {world_size:,}")
        if (converted := training_state.converted(metadata)) is not None:
            said.append(f"has other types of numbers: {converted}")
        for text in said:
            self._say(f"{where} {text}")
        self._group.agree(where, training_state.restore_random)
        # A DataLoader draws a random number when an iteration begins.
        if hasattr(self._sampler, "before_first"):
            self._sampler.before_first = training_state.restore_random

    def _read(self, reader: Reader, state: Nested) -> None:
        """Read the checkpoint into ``state`` on all workers together.

        All workers must have agreed before on every step that can fail on one worker alone.
        """
        load(
            state,
            storage_reader=reader,
            planner=CheckpointLoadPlanner(),
            process_group=self._group.handle,
            no_dist=self._group.handle is None,
        )

    def _set_aside(self, names: Sequence[str]) -> None:
        """Rename checkpoints on rank 0. Raises CheckpointError on all workers if that fails."""
        for name in names:
            where = (
                f"{self._store.where(name)} is newer than what was resumed, and cannot be set aside"
            )
            self._group.agree(
                where,
                partial(self._store.set_aside, name) if self._group.rank == 0 else _do_nothing,
            )
        self._writing.names = [name for name in self._writing.names if name not in names]

    # --- saving ----------------------------------------------------------------------------------------------------

    def step(self, step: int, *, batches: int = 1) -> bool:
        """Report that a step is done, on all workers. Save a checkpoint if one is due or a signal
        has asked for one.

        ``step``: the index of the step, from 0. ``batches``: how many batches of the sampler the
        step used. Return whether a checkpoint was begun. Raises Stopped after SIGTERM. Raises
        CheckpointError if a checkpoint could not be written, also if it was begun by an earlier
        call.
        """
        self._check_open("step")
        steps, before = steps_after(step, self._reached), self._reached
        self._reached, self._only_resumed = steps, False
        self._requests.stepped = True
        if hasattr(self._sampler, "advance"):
            self._sampler.advance(batches)
        due = self._every is not None and steps // self._every > before // self._every
        signalled = stop = False
        with self._lost_worker_errors(("step", steps - 1)):
            if due or self._group.size == 1 or self._request_schedule.is_due(steps):
                asked, signalled, stop = self._agree_on_requests(steps)
                due = due or asked or stop
                self._check_parts()
            if due:
                self._save(steps, background=self._background, stop=stop)
            if signalled:
                where = self._store.where(self._store.name(steps))
                text = f"saving {where} in the background" if self._background else f"saved {where}"
                self._say(f"told to save by SIGUSR1: {text}")
        return due

    def _check_parts(self) -> None:
        """Raise at the first step, on all workers together, what the first save would raise."""
        if not self._parts_checked:
            self._parts_checked = True
            self._group.agree("Checkpoint: the part", self._training_state.check_parts)

    def save(self, step: int | None = None, *, background: bool = False) -> None:
        """Save the state after a step, on all workers. A state that is saved already is not saved
        again.

        ``step``: the index of the step that is done, from 0. The default is the last step given to
        ``step`` or ``save``; without a step since ``resume``, nothing is saved. ``background``:
        return at once; a later call raises the errors. Raises Stopped after SIGTERM, and
        CheckpointError if the checkpoint cannot be written.
        """
        self._check_open("save")
        if step is not None:
            self._reached, self._only_resumed = steps_after(step, self._reached), False
        with self._lost_worker_errors(call := ("save", self._reached - 1)):
            self._group.compare(call, _NOTHING_ASKED)
            if step is None and (self._only_resumed or self._reached == 0):
                return
            if step is not None and self._reached == self._writing.saved_steps and self._resumed:
                self._say(
                    f"step {self._reached - 1} is saved already, in "
                    f"{self._store.where(self._writing.names[0])}"
                )
            self._save(self._reached, background=background, stop=False)

    def wait(self) -> None:
        """Wait until the checkpoint being written is complete. Raises CheckpointError if writing
        failed."""
        self._writing.wait()

    def _agree_on_requests(self, steps: int) -> tuple[bool, bool, bool]:
        """Agree with all workers. Return whether to save, whether SIGUSR1 asked for it, and whether
        to stop."""
        now = time.monotonic()
        due = (
            self._every_s is not None
            and self._group.rank == 0
            and now - self._saved_at >= self._every_s
        )
        mine = [
            _BY_SIGNAL if self._requests.save else int(due),
            int(self._requests.stop),
            int(self._writing.has_failed),
            self._request_schedule.step_us(steps, now),
        ]
        try:
            asked, stop, failing, step_us = self._group.compare(("step", steps - 1), mine)
        except LostError as error:
            if not self._requests.stop:
                raise
            self._raise_stopped(
                f"not saved, as this worker cannot agree with the others any more: {error}"
            )
        self._request_schedule.answered(steps, now, step_us)
        if failing:
            self.wait()
        if asked:
            self._requests.saved()
        return bool(asked), asked == _BY_SIGNAL, bool(stop)

    @contextmanager
    def _lost_worker_errors(self, call: Call) -> Iterator[None]:
        """Raise CheckpointError, with the newest complete checkpoint, if another worker is lost."""
        try:
            yield
        except LostError as error:
            method, step = call
            told = (
                f"{method}({step if step >= 0 else ''}): another worker has ended, or does not "
                f"answer ({error})"
            )
            kept = self._writing.failure_text(told, self._writing.names)
            raise CheckpointError(
                f"checkpoints in {self._store.root}: rank {self._group.rank}: {kept}"
            ) from error

    def _save(self, steps: int, *, background: bool, stop: bool) -> None:
        names = self._writing.names
        if not self._resumed and names:
            raise ConfigError(
                f"checkpoints in {self._store.root}: there are some already, up to {names[0]}: "
                "call resume() before the first step, or choose another directory"
            )
        self._resumed = True
        self.wait()
        if steps != self._writing.saved_steps:
            stop = self._begin_save(steps) or stop
            self._saved_at = time.monotonic()
        if stop or not background:
            self.wait()
        if stop and self._requests.may_stop():
            self._raise_stopped(f"saved {self._store.where(self._writing.names[0])}")

    def _begin_save(self, steps: int) -> bool:
        """Begin the next checkpoint on all workers, or on none. Return whether a worker is to stop."""
        names, name = self._writing.names, self._store.name(steps)
        folder, error, snapshot, state = "", None, None, {}
        try:
            if self._group.rank == 0:
                self._store.check_claim()
                folder = self._store.folder(name)
            snapshot = self._training_state.snapshot(alone=self._group.size == 1)
        except Exception as failure:  # noqa: BLE001 - the others wait for an answer
            error = self._writing.failure_text(failure, names)
        rank_0s = self._group.first({} if snapshot is None else snapshot.digests)
        try:
            state = {} if snapshot is None else snapshot.state(self._group.rank, rank_0s)
        except Exception as failure:  # noqa: BLE001 - as above
            error = self._writing.failure_text(failure, names)
        answers = self._group.all((name, folder, error, self._requests.stop))
        name, folder, _, _ = answers[0]
        if errors := [
            f"rank {rank}: {error}"
            for rank, (_, _, error, _) in enumerate(answers)
            if error is not None
        ]:
            raise self._writing.not_written(name, errors[0])
        self._writing.begin(name, folder, state)
        return any(stop for _, _, _, stop in answers)

    # --- the place, and the end ------------------------------------------------------------------------------------

    def _claim(self) -> list[str]:
        """Claim the location on rank 0, and check that all workers see it. Return its checkpoints.

        Raises ConfigError on all workers if one of both fails.
        """
        refused, names, mark = None, [], ""
        if self._group.rank == 0:
            try:
                self._store.claim()
                names, mark = self._store.names(), self._store.mark()
                if foreign := self._store.foreign():
                    self._say(
                        f"checkpoints in {self._store.root}: left alone, as they are none of ours: "
                        f"{some(foreign)}"
                    )
            except (ConfigError, CheckpointError) as error:
                refused = error.message
            except Exception as error:  # noqa: BLE001 - the others wait for an answer
                refused = f"checkpoints in {self._store.root}: {text_of(error)}"
        refused, names, mark = self._group.first((refused, names, mark))
        if refused is not None:
            self._store.release()
            raise ConfigError(refused)
        places = self._group.all(
            (os.uname().nodename, self._store.root, _sees_mark(self._store, mark))
        )
        if not all(seen is True for _, _, seen in places):
            self._store.release()
            raise ConfigError(not_shared(places))
        return names

    def close(self) -> None:
        """Wait for the checkpoint being written, then release the location, the signals and the
        process groups.

        All workers must call it. Raises CheckpointError if the last checkpoint could not be
        written. Raises Stopped if SIGTERM came after the last step; if another exception is being
        handled, SIGTERM is only logged.
        """
        if self._closed:
            return
        self._closed, stop = True, False
        if self._only_resumed and sys.exc_info()[0] is None:
            self._say(
                "no step came after that: the training had already ended after "
                f"{counted(self._reached, 'step')}"
            )
        atexit.unregister(self._finish)
        cancel_call_before_end(self._finish_or_stop)
        try:
            self.wait()
            self._warn_of_unsaved_steps()
        finally:
            stop = self._release_all()
            if sys.exc_info()[0] is None:  # after an exception others may wait for this worker
                self._group.close()
            end_groups(self._group, self._writing.group)
        if stop:
            self._raise_stopped(_TOO_LATE)

    def _finish_or_stop(self) -> None:
        if self._finish():
            self._raise_stopped(_TOO_LATE)

    def _finish(self) -> bool:
        """Complete the checkpoint if Python exits without ``close``. Return whether a SIGTERM was
        not handled."""
        # A forked child does not have the writing thread.
        if self._closed or os.getpid() != self._owner:
            return False
        self._closed = True
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - Python is ending, maybe since another worker has
            log.warning("distlaunch: warning: %s", error)
        else:
            if getattr(sys, "last_type", None) is None:  # no exception has ended the script
                self._warn_of_unsaved_steps()
        stop = self._release_all()
        # A process group lives as long as there are references to it.
        self._group.handle = self._writing.group.handle = None
        return stop

    def _release_all(self) -> bool:
        """Release everything. Return whether SIGTERM was not handled.

        If an exception is being handled, SIGTERM is only logged.
        """
        stop = self._requests.end()
        self._store.release()
        self._writing.end()
        if stop and (kind := sys.exc_info()[0]) is not None:
            self._say(f"told to stop by SIGTERM: {_TOO_LATE}; {kind.__name__} goes before it")
            return False
        return stop

    def _raise_stopped(self, why: str) -> NoReturn:
        self._requests.answered()
        self._say(f"told to stop by SIGTERM: {why}")
        with suppress(CheckpointError):
            self.close()
        atexit.register(end_process_group)
        raise Stopped(128 + signal.SIGTERM)

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise ConfigError(f"Checkpoint: {method}() after close(): make another one")
        if os.getpid() != self._owner:
            raise ConfigError(
                f"Checkpoint: {method}() in a forked process: it is of the process that has made it"
            )

    def _warn_of_unsaved_steps(self) -> None:
        """Warn only if the training has ended without an error."""
        saved = max(0, self._writing.saved_steps)
        lost = self._reached - saved
        if lost <= 0 or self._requests.stop or sys.exc_info()[0] is not None:
            return
        steps = counted(lost, "step")
        if saved:
            steps = f"the last {steps} of {self._reached:,}"
        are = "is" if lost == 1 else "are"
        change = (
            "choose a smaller every"
            if self._every is not None
            else "choose a smaller every_s"
            if self._every_s is not None
            else "give every"
        )
        self._say(
            f"warning: {steps} {are} not saved: call checkpoint.save() after the loop, or {change}"
        )

    def _say(self, text: str) -> None:
        if self._group.rank == 0:
            log.warning("distlaunch: %s", one_line(text))


def _age_text(saved_s: object) -> str:
    """Return a text as ``, saved 5 min ago``, empty for an unknown time."""
    if not isinstance(saved_s, int | float) or not 0 <= saved_s < 1 << 40:
        return ""
    ago_s = max(0, int(time.time() - saved_s))
    for size_s, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if ago_s >= 2 * size_s:
            return f", saved {ago_s // size_s:,} {unit} ago"
    return f", saved {ago_s} s ago"


def _do_nothing() -> None: ...


def _sees_mark(store: Store, mark: str) -> bool | str:
    """Return whether this worker sees the mark of rank 0, or why it cannot be read."""
    try:
        return store.sees(mark)
    except Exception as error:  # noqa: BLE001 - the others wait for an answer
        return error.message if isinstance(error, CheckpointError) else describe(error)


def above_0(name: str, number: Any, *, whole: bool) -> None:
    """Raise ConfigError unless ``number`` is above 0, and an integer if ``whole``. True is no
    number."""
    is_one = isinstance(number, Integral if whole else Real) and not isinstance(number, bool)
    if not (is_one and 0 < float(number) < math.inf):
        expected = "a whole number above 0" if whole else "a number of seconds above 0"
        raise ConfigError(f"Checkpoint: {name} is {number!r}, and has to be {expected}")


_PARAMETERS = (
    *("where", "model", "optimizer", "scheduler", "scaler", "sampler"),
    *("every", "every_s", "keep", "background", "trust"),
)


def refuse_misspelt(name: str, part: object) -> None:
    """Raise ConfigError if the name of an additional keyword looks like a misspelt parameter.

    An object with a state, or None, may extend the name of a parameter: ``lr_scheduler``.
    """
    if not (near := get_close_matches(name, _PARAMETERS, n=1, cutoff=0.8)):
        return
    extended = name.startswith(near[0]) or name.endswith(near[0])
    if not (extended and (part is None or is_part(part))):
        raise ConfigError(f"Checkpoint: {name}: did you mean {near[0]}?")


def several(optimizer: Any) -> Sequence[Optimizer]:
    """Return the optimizers as a sequence. Raises ConfigError for an unordered collection or a
    repeated optimizer."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return () if optimizer is None else (optimizer,)
    if isinstance(optimizer, str) or not isinstance(optimizer, Sequence):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"Checkpoint: optimizer is a {kind}, and has to be torch's, or a list of several"
        )
    if len({id(each) for each in optimizer}) < len(optimizer):
        raise ConfigError("Checkpoint: optimizer has one of them twice: give each once")
    return optimizer


def steps_after(step: Any, reached: int) -> int:
    """Return the completed steps after the step with this index.

    Raises ConfigError if ``step`` is no integer, or lower than before: the newest checkpoint must
    be the one after the most steps.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < MOST_STEPS:
        raise ConfigError(
            f"Checkpoint: the step is {step!r}; a whole number is expected, from 0 to 10**18 - 2"
        )
    if number + 1 < reached:
        raise ConfigError(
            f"Checkpoint: step {number} after step {reached - 1}: only steps that follow can be "
            "saved: count them over "
            "all epochs, from what resume() gives; resume(steps=...) goes back"
        )
    return number + 1


def not_shared(places: Sequence[tuple[str, str, bool | str]]) -> str:
    """Return a message that lists the workers that do not see rank 0's files.

    ``places`` has host, location and the result of ``_sees_mark`` for each rank.
    """
    host, root, _ = places[0]
    blind = [(rank, *place) for rank, place in enumerate(places) if place[2] is not True]
    if unread := [
        (rank, why) for rank, _, other, why in blind if other == root and isinstance(why, str)
    ]:
        rank, why = unread[0]
        return f"checkpoints in {root}: rank {rank}: {why}"
    if others := [(rank, other) for rank, _, other, _ in blind if other != root]:
        rank, other = others[0]
        return (
            f"checkpoints in {root}: rank {rank} was given another place, {other}: all workers "
            "have to give the same"
        )
    hosts = ", ".join(sorted({each for _, each, _, _ in blind}))
    seen = f"{hosts} and {host} do not see the same directory"
    return f"checkpoints in {root}: {seen}: it has to be one that all nodes share"


ASK_S = 0.5
"""Time between two agreements. Each costs a small all-reduce."""
MOST_STEPS_BETWEEN = 1000
"""Largest number of steps between two agreements."""


class RequestSchedule:
    """Decides after which steps the workers agree on whether to save.

    All workers give the same values, so that all choose the same steps.
    """

    def __init__(self, now_s: float) -> None:
        self.restart(now_s)

    def restart(self, now_s: float) -> None:
        """Agree after the next step, because training has begun or resumed at another step."""
        self._asked: int | None = None
        self._at_s = now_s
        self._next = 0

    def is_due(self, steps: int) -> bool:
        """Return whether the workers agree after this step, as also if the steps have gone back."""
        return steps >= self._next or (self._asked is not None and steps < self._asked)

    def step_us(self, steps: int, now_s: float) -> int:
        """Return this worker's duration of a step in microseconds. The agreement finds the slowest."""
        return int((now_s - self._at_s) / self._since(steps) * 1e6)

    def answered(self, steps: int, now_s: float, step_us: int) -> None:
        """Choose the step of the next agreement from the slowest duration. The distance at most
        doubles."""
        self._next = steps + max(
            1, min(MOST_STEPS_BETWEEN, 2 * self._since(steps), int(ASK_S * 1e6 / max(1, step_us)))
        )
        self._asked, self._at_s = steps, now_s

    def _since(self, steps: int) -> int:
        """Return 1 before the first agreement: start-up time says nothing about steps."""
        return steps - self._asked if self._asked is not None and self._asked < steps else 1
