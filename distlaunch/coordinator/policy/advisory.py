"""Guard the code that only observes a job, so that a fault of ours there does not end the job. No I/O.

Code that decides what happens to the job (attempts, restarts, signals) is not guarded. It also works
without the parts that are: without hang detection no hang ends the job, and without a first cause the
exit codes of the workers decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import ParamSpec, TypeVar

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable

P = ParamSpec("P")
T = TypeVar("T")
_TEXT_CHARS = 300


class AdvisoryPart(Enum):
    """A part of the launcher that only observes the job. The values are in ``fault`` events."""

    HANG_DETECTION = "hang_detection"
    PROGRESS = "progress"
    FIRST_CAUSE = "first_cause"
    REPORT = "report"
    EVENTS = "events"
    FILES = "files"
    SERIES = "series"
    SNAPSHOT = "snapshot"
    CONTROL = "control"
    METRICS = "metrics"
    ON_EVENT = "on_event"


_ENDS_WITH_FAULT = frozenset(
    (
        AdvisoryPart.HANG_DETECTION,
        AdvisoryPart.PROGRESS,
        AdvisoryPart.SERIES,
        AdvisoryPart.ON_EVENT,
    )
)
"""Parts whose state may be wrong after a fault. They are not used again."""


class AdvisoryFault(Record):
    """An unexpected exception in a part of the launcher. The job goes on."""

    part: AdvisoryPart
    text: str
    """``TypeError: ...``, as one line."""
    traceback: str


class Advisory:
    """Calls code of the parts that only observe the job.

    The first fault of each part is passed to ``on_fault``, in the thread of the fault.
    """

    def __init__(self, on_fault: Callable[[AdvisoryFault], None]) -> None:
        self._on_fault = on_fault
        self._faulty: set[AdvisoryPart] = set()

    def call(
        self,
        part: AdvisoryPart,
        instead: T,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return the result of ``function``; ``instead`` if it raises, or if the part is off."""
        if self.is_off(part):
            return instead
        try:
            return function(*args, **kwargs)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the job does not depend on it
            self.on_exception(part, exc)
            return instead

    @contextmanager
    def watch(
        self, part: AdvisoryPart, *, expected: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Report an exception that is not of the types ``expected``. It reaches the caller, too."""
        try:
            yield
        except expected:
            raise
        except Exception as exc:
            self.on_exception(part, exc)
            raise

    def on_exception(self, part: AdvisoryPart, exc: Exception) -> None:
        """Pass an exception to ``on_fault`` if it is the first one of the part. Later ones are
        ignored."""
        if part in self._faulty:
            return
        self._faulty.add(part)
        import traceback

        text = " ".join(traceback.format_exception_only(exc)[-1].split())
        fault = AdvisoryFault(
            part=part,
            text=printable(text)[:_TEXT_CHARS],
            traceback="".join(traceback.format_exception(exc)),
        )
        with suppress(Exception):  # a fault that cannot be reported does not end the job, either
            self._on_fault(fault)

    def is_off(self, part: AdvisoryPart) -> bool:
        """Return whether a part is not used any longer, because of a fault."""
        return part in self._faulty and part in _ENDS_WITH_FAULT


def loss_of(part: AdvisoryPart) -> str:
    """Return what the user loses by a fault in a part, as a clause: ``the metrics could not be
    given``."""
    return {
        AdvisoryPart.HANG_DETECTION: "hang detection is off for the rest of the job",
        AdvisoryPart.PROGRESS: "the progress of the workers is not shown for the rest of the job",
        AdvisoryPart.FIRST_CAUSE: "the first cause of the failure was not looked for",
        AdvisoryPart.REPORT: "the report of the failure is not complete",
        AdvisoryPart.EVENTS: "an event is missing in events.jsonl",
        AdvisoryPart.FILES: "a file of the log directory is not complete",
        AdvisoryPart.SERIES: "the steps of the ranks are not recorded for the rest of the job",
        AdvisoryPart.SNAPSHOT: "the state of the job could not be given to another command",
        AdvisoryPart.CONTROL: "a request of another command was not answered",
        AdvisoryPart.METRICS: "the metrics could not be given",
        AdvisoryPart.ON_EVENT: f"the command of {Opt.ON_EVENT} gets no further events",
    }[part]
