"""Layer job: the words of the job policy: the events that it takes in and the actions that it gives. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from distlaunch.core.model.record import Record
from distlaunch.core.wire import messages as m
from distlaunch.job.diagnose.model import Diagnosis

if TYPE_CHECKING:
    from distlaunch.job.diagnose.hang import HangDiagnosis


class Begin(Record):
    """Start the job."""


class FromNode(Record):
    """A message came from the agent of a node."""

    node: int
    message: m.FromAgent


class Signalled(Record):
    """The launcher got a signal, or the user typed one into the worker's terminal (``kill``: more than once)."""

    signum: int
    kill: bool = False


class Tick(Record):
    """The deadline has come."""


# --- actions


class ToNode(Record):
    """Send a message to the agent of a node."""

    node: int
    message: m.ToAgent


class StartAttempt(Record):
    """Bind the plan for an attempt and start its workers on all nodes; ``port`` is held on the master's node."""

    attempt: int
    port: int | None


class Say(Record):
    """Tell the user."""

    text: str
    level: Literal["info", "warning", "error"] = "info"


class Entry(Record):
    """Add an event to the job's record."""

    type: str
    fields: Mapping[str, object]


class Failed(Record):
    """An attempt failed. ``final``: the job ends with it; else a restart follows."""

    diagnosis: Diagnosis
    attempt: int
    final: bool
    why_final: str | None = None


class Hung(Record):
    """An attempt hung and was ended. ``final``: the job ends with it; else a restart follows."""

    diagnosis: HangDiagnosis
    killed: tuple[int, ...]
    """Ranks that did not end when they were told to stop."""
    after_grace: str | None
    """Why they were killed then; None: the user wanted it."""
    attempt: int
    final: bool
    why_final: str | None = None


class KeepStacks(Record):
    """File where the workers stood."""

    attempt: int
    stacks: tuple[m.Stack, ...]


class Suspend(Record):
    """The worker stopped from its terminal (Ctrl-Z): stop the launcher as well."""


class End(Record):
    """The job is over."""

    exit_code: int


Event = Begin | FromNode | Signalled | Tick
Action = ToNode | StartAttempt | Say | Entry | Failed | Hung | KeepStacks | Suspend | End
