"""Whoever watches a job from outside while it runs: the command of --on-event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from distlaunch.coordinator.runtime.records import EventLog
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.planning.train_options import TrainOptions

if TYPE_CHECKING:
    from distlaunch.coordinator.runtime.event_command import EventCommand


class JobObservers:
    """The observers of one job. The coordinator has them; a joined launcher has none."""

    def __init__(self, options: TrainOptions, environ: Mapping[str, str], sink: Sink) -> None:
        """Check the options. Nothing is started. Raises ConfigError."""
        self._environ = environ
        self._say = partial(sink.say, level="warning")
        self._words: tuple[str, ...] = ()
        self._command: EventCommand | None = None
        if options.on_event is not None:
            from distlaunch.coordinator.runtime.event_command import read_command

            self._words = read_command(options.on_event, environ, who=options.named("on_event"))

    def start(self, events: EventLog, *, job_id: str, run_dir: str) -> None:
        """Observe the events of the job."""
        if self._words:
            from distlaunch.coordinator.runtime.event_command import EventCommand

            self._command = EventCommand(
                self._words, job_id=job_id, run_dir=run_dir, environ=self._environ, say=self._say
            )
            events.add_observer(self._command.observe)

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait for observers that have not got all events, within a limit."""
        if self._command is not None:
            self._command.finish(hurried)
