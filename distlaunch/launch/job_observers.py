"""Start the observers of a running job: the command of --on-event, and the metrics server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from distlaunch.coordinator.policy.advisory import AdvisoryPart
from distlaunch.coordinator.runtime.records import EventLog
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.launcher_process import start_ticks
from distlaunch.planning.train_options import TrainOptions

if TYPE_CHECKING:
    import socket
    from concurrent.futures import Future

    from distlaunch.coordinator.runtime.event_command import EventCommand
    from distlaunch.coordinator.runtime.metrics import LauncherUsage
    from distlaunch.coordinator.runtime.metrics_server import MetricsServer
    from distlaunch.coordinator.runtime.node_questions import Answers
    from distlaunch.coordinator.runtime.runner import Runner
    from distlaunch.coordinator.runtime.snapshot import JobSnapshot

_READ_S = 2.0
"""How long the main loop may take to answer a request for metrics."""
_USAGE_S = 4.0
"""How long the nodes may take to say what they use."""


class JobObservers:
    """The observers of one job. The coordinator has them; a joined launcher has none."""

    def __init__(self, options: TrainOptions, environ: Mapping[str, str], sink: Sink) -> None:
        """Check the options, and open the port of --metrics. Raises ConfigError."""
        self._environ = environ
        self._say = sink.say
        self._words: tuple[str, ...] = ()
        self._command: EventCommand | None = None
        self._listener: socket.socket | None = None
        self._server: MetricsServer | None = None
        if options.on_event is not None:
            from distlaunch.coordinator.runtime.event_command import read_command

            self._words = read_command(options.on_event, environ, who=options.named("on_event"))
        if options.metrics is not None:
            from distlaunch.coordinator.runtime.metrics_server import open_listener

            self._listener = open_listener(options.metrics, who=options.named("metrics"))

    def observe(self, runner: Runner, events: EventLog, *, job_id: str, run_dir: str) -> None:
        """Run the command of --on-event, if there is one, for the events of the job. Call it before
        the first event."""
        if self._words:
            from distlaunch.coordinator.runtime.event_command import EventCommand

            self._command = EventCommand(
                self._words,
                job_id=job_id,
                run_dir=run_dir,
                environ=self._environ,
                say=partial(self._say, level="warning"),
            )
            observe, call = self._command.observe, runner.advisory.call
            events.add_observer(lambda record: call(AdvisoryPart.ON_EVENT, None, observe, record))

    def serve(self, runner: Runner, events: EventLog) -> None:
        """Serve the metrics of the job, if --metrics is set, and print their URL.

        Starts a thread, so the spawner must have been forked before.
        """
        if self._listener is None:
            return
        from distlaunch.coordinator.runtime.metrics import CONTENT_TYPE
        from distlaunch.coordinator.runtime.metrics_server import MetricsServer, url_of

        url = url_of(self._listener)
        self._server = MetricsServer(
            self._listener, partial(_read_metrics, runner), content_type=CONTENT_TYPE
        )
        self._server.start()

        def tell() -> None:
            self._say(f"metrics: {url}")
            events.write("metrics_served", {"url": url})

        runner.calls.call(tell)  # after the lines that name the job

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Close the port of the metrics, and wait within a limit for the command."""
        if self._server is not None:
            self._server.close()
        if self._command is not None:
            self._command.finish(hurried)


def _read_metrics(runner: Runner) -> str:
    """Return the metrics as text. Raises NoMetricsError if the main loop does not answer."""
    from concurrent.futures import CancelledError
    from concurrent.futures import TimeoutError as NoAnswerError

    from distlaunch import __version__
    from distlaunch.coordinator.runtime.main_loop_calls import MainLoopClosedError
    from distlaunch.coordinator.runtime.metrics import metrics_text
    from distlaunch.coordinator.runtime.metrics_server import NoMetricsError

    def ask() -> tuple[JobSnapshot, Future[Answers] | None]:
        try:
            return runner.snapshot(), runner.ask_usage()
        except LaunchError:  # no worker runs
            return runner.snapshot(), None

    try:
        snapshot, asked = runner.calls.call(ask).result(_READ_S)
    except MainLoopClosedError as exc:
        raise NoMetricsError("the job has ended") from exc
    except NoAnswerError as exc:
        raise NoMetricsError("the launcher is busy or suspended") from exc
    now = time.time()
    try:
        nodes = None if asked is None else asked.result(_USAGE_S)
    except (NoAnswerError, CancelledError):
        nodes = None
    except MainLoopClosedError as exc:
        raise NoMetricsError("the job has ended") from exc
    with runner.advisory.watch(AdvisoryPart.METRICS):
        return metrics_text(
            snapshot, version=__version__, launcher=_launcher_usage(), nodes=nodes, now=now
        )


def _launcher_usage() -> LauncherUsage | None:
    from distlaunch.coordinator.runtime.metrics import LauncherUsage

    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks(os.getpid()) / os.sysconf(
        "SC_CLK_TCK"
    )
    return LauncherUsage(
        cpu_s=time.process_time(),
        memory_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        started=round(time.time() - age_s, 2),
    )
