"""Create the descriptors of a worker, and this process's ends of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from distlaunch.core.agent.workers.orphan_output import PROGRESS
from distlaunch.core.agent.workers.pseudo_terminal import PseudoTerminal
from distlaunch.core.model.run_files import Layout
from distlaunch.core.model.variables import PROGRESS_FD, STACKS_FD
from distlaunch.core.protocol import agent_messages as m

_HIGH = 100
"""Lowest number of distlaunch's own descriptors in a worker, above those of shell redirections and
of a program's first files."""
BOOT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "boot")
_FEWEST = 8
"""Limit of open files below which Python hardly starts. Then numbers above the limit are used."""


def extra_numbers(nofile: int) -> tuple[int, int, int]:
    """Return the numbers of distlaunch's own descriptors in a worker: progress pipe, stack file,
    preload server's socket.

    ``nofile`` is the worker's limit of open files.
    """
    progress = min(_HIGH, nofile - 3) if nofile >= _FEWEST else _HIGH
    return progress, progress + 1, progress + 2


class NodeResources:
    """Resources of a node for its workers, for an agent in the launcher's own process."""

    boot: str = BOOT
    """Directory of distlaunch's code for the workers' interpreters."""
    temporary_dir: str = ""
    """Temporary directory of the agent, removed when it exits; empty if there is none."""

    def stdin(self, start: m.Start) -> int:
        """Return a descriptor for the rank that reads the launcher's stdin. Raises OSError."""
        return os.dup(0)

    def log_location(self, start: m.Start) -> tuple[str, Layout]:
        """Return directory and layout of the logs that the spawner continues if the agent vanishes;
        an empty directory for none."""
        return start.run_dir, start.layout

    def logs_to_read(
        self, request: m.ListLogs | m.ReadLog, start: m.Start | None
    ) -> tuple[str, Layout] | None:
        """Return directory and layout of the logs that a user in another shell asks for; None if
        there are none. ``start`` is that of the last attempt."""
        return None if start is None else (start.run_dir, start.layout)


def bootstrap_environment(start: m.Start, nofile: int, folder: str = BOOT) -> dict[str, str]:
    """Return variables that name a worker's descriptors and load our code into its interpreter."""
    progress, stacks, _ = extra_numbers(nofile)
    env = {PROGRESS_FD: str(progress)}
    if start.watch and start.bootstrap:
        env[STACKS_FD] = str(stacks)
    if start.bootstrap:
        env["DISTLAUNCH_BOOT"] = folder
        if start.bootstrap == "direct":
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, start.env.get("PYTHONPATH"))))
    return env


class WorkerStreams:
    """The streams of one worker, created just before it starts.

    ``theirs`` are sent to the worker, where they get ``numbers``. ``read_ends`` are sent to the
    spawner, by stream number (0: progress). The caller closes both after sending. This process
    reads ``outputs`` (by stream number), ``progress``, and ``stacks`` (a memory file; -1 if not
    requested). Raises OSError if no descriptor is left.
    """

    def __init__(
        self,
        start: m.Start,
        *,
        stdin: Callable[[m.Start], int] | None,
        terminal: PseudoTerminal | None,
        nofile: int,
    ) -> None:
        opened: list[int] = []
        self.outputs: dict[int, int] = {}
        self.stacks = -1
        progress, stacks, _ = extra_numbers(nofile)
        self.numbers: tuple[int, ...] = (0, 1, 2, progress)
        try:
            if terminal is not None:
                opened += terminal.worker_ends
                self.outputs[1] = terminal.output
                opened.append(terminal.output)
                ends = list(terminal.worker_ends)
            else:
                ends = [stdin(start) if stdin else os.open(os.devnull, os.O_RDONLY)]
                opened += ends
                for number in (1, 2):
                    self.outputs[number], end = os.pipe()
                    opened += (self.outputs[number], end)
                    ends.append(end)
            self.progress, end = os.pipe()
            opened += (self.progress, end)
            os.set_blocking(end, False)  # a worker never waits for the agent to read its progress
            ends.append(end)
            if start.watch and start.bootstrap:
                self.stacks = os.memfd_create("stacks")
                opened.append(self.stacks)
                ends.append(os.dup(self.stacks))
                self.numbers += (stacks,)
            self.read_ends: dict[int, int] = {}
            for number, descriptor in (*self.outputs.items(), (PROGRESS, self.progress)):
                self.read_ends[number] = os.dup(descriptor)
                opened.append(self.read_ends[number])
        except OSError:
            for descriptor in opened:
                with suppress(OSError):
                    os.close(descriptor)
            raise
        self.theirs = tuple(ends)
