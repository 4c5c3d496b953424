"""What an agent on a machine of its own finds there, and brings: its folder, stdin, addresses."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from distlaunch.core.agent.node.reachability import Reaching
from distlaunch.core.agent.node.survey import Surveying
from distlaunch.core.agent.workers.deadline import FILES_S, within
from distlaunch.core.agent.workers.log_files import LogFiles
from distlaunch.core.agent.workers.stdin import Feed
from distlaunch.core.agent.workers.streams import Ground
from distlaunch.core.agent.workers.temporary_directory import Lodging, settled
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import TRAIN, Layout
from distlaunch.core.private_files import make_private_dirs
from distlaunch.core.protocol import agent_messages as m


class RemoteGround(Ground):
    """Polled by the remote agent's loop; ``nudge`` wakes that from another thread."""

    def __init__(
        self, *, send: Callable[[Any], None], feed: Feed, nudge: Callable[[], None], keep: Collection[int]
    ) -> None:
        self._send = send
        self._feed = feed
        self._lodging = Lodging(os.environ)
        self.surveying = Surveying(send, keep)
        self.reaching = Reaching(send, nudge)

    @property
    def lodging(self) -> str:  # type: ignore[override]
        """The folder of our own, if it was made."""
        return self._lodging.path

    def stdin(self, start: m.Start) -> int:
        """Open what the rank with the launcher's stdin reads: what the launcher feeds. Raises OSError."""
        return self._feed.open() if start.takes_feed else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    # --- an attempt

    def settled(self, start: m.Start) -> m.Start:
        """Fit a start to this node: its environment, its folders."""
        if start.bootstrap:
            try:
                self.boot = self._lodging.boot()
            except OSError as exc:
                if start.preload or start.preload_bound_s is not None:
                    self._miss(
                        "our code cannot be brought to the workers' interpreters (--preload, --hang-timeout)", exc
                    )
                start = replace(start, bootstrap="", preload=())
        if not start.travelled:
            return start
        moved_to = None
        if not self.surveying.shares_run_dir:
            try:
                moved_to = self._lodging.run_dir()
            except OSError as exc:
                self._miss("the files that workers leave for reports have no place", exc)
        start = settled(start, os.environ, moved_to=moved_to)
        with suppress(OSError):  # it goes on beside; until then a worker's exception is told by its output alone
            within(FILES_S, lambda: _make_folders(start))
        return start

    def _miss(self, what: str, exc: OSError) -> None:
        self._send(m.Remark(text=f"{what}: {exc.strerror or exc}", warning=True))

    def log_place(self, start: m.Start) -> tuple[str, Layout]:
        """Return the job's run directory if it is here as well, else the folder of ``--node-logs``, else nothing."""
        if self._has_run_dir(start):
            return start.run_dir, start.layout
        return _node_folder(start, start.env.get("DISTLAUNCH_JOB_ID", "")) if start.node_logs else "", TRAIN

    def run_dir_logs(self, start: m.Start) -> LogFiles | None:
        """Return the ranks' logs in the job's run directory, for when the launcher has vanished; None: not here."""
        if not self._has_run_dir(start):
            return None
        return LogFiles(start.run_dir, start.attempt, _ignore, layout=start.layout)

    def _has_run_dir(self, start: m.Start) -> bool:
        return bool(start.run_dir) and self.surveying.shares_run_dir

    def logs(self, start: m.Start, job_id: str) -> LogFiles | None:
        """Give the files for the workers' output on this node, if there are to be some."""
        if not start.node_logs:
            return None
        folder = _node_folder(start, job_id)

        def trouble(why: str) -> None:
            self._send(m.Remark(text=f"the node's log files have stopped: {why} ({folder})", warning=True))

        return LogFiles(folder, start.attempt, trouble, make_folders=True)

    # --- the loop's

    def descriptors(self) -> dict[int, int]:
        """Give what to poll, with the events."""
        return {**self.surveying.descriptors(), **self.reaching.descriptors(), **self._feed.descriptors()}

    def deadline(self) -> float | None:
        """Give when ``on_ready`` is due (monotonic seconds)."""
        dues = [due for due in (self.surveying.deadline(), self.reaching.deadline()) if due is not None]
        return min(dues, default=None)

    def on_ready(self) -> None:
        """Go on with all of it."""
        self.surveying.on_ready()
        self.reaching.on_ready()
        self._feed.on_ready()

    def on_hangup(self, descriptor: int) -> None:
        """Know that nobody is at a descriptor's other end."""
        if descriptor in self._feed.descriptors():
            self._feed.on_hangup()

    def close(self) -> None:
        """Give up what is under way."""
        self.surveying.close()
        self.reaching.close()
        self._feed.close()

    def remove(self) -> None:
        """Remove the folder of our own."""
        self._lodging.remove()


def _node_folder(start: m.Start, job_id: str) -> str:
    return os.path.join(start.cwd, start.node_logs, job_id or "job")


def _ignore(_: object) -> None:
    """Take what nobody is there to hear."""


def _make_folders(start: m.Start) -> None:
    paths = [spec.error_file for spec in start.workers if spec.error_file is not None]
    for folder in dict.fromkeys(os.path.dirname(path) for path in (*paths, start.preload_log) if path):
        try:
            make_private_dirs(folder)
        except OSError:
            continue
