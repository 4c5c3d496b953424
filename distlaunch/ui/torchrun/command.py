"""Layer ui: the command ``distlaunch torchrun``: parse, understand, run."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from distlaunch.core.model.layout import STDERR, STDOUT
from distlaunch.core.model.text import printable
from distlaunch.job.filters import LineFilter
from distlaunch.job.sink import Sink
from distlaunch.resolve.plan import interpreter_note
from distlaunch.ui.drop_in import in_words_of
from distlaunch.ui.errors import print_warnings
from distlaunch.ui.quick import HelpRequested, unknown_variables
from distlaunch.ui.run import Front
from distlaunch.ui.torchrun.meaning import Meaning, understand, unread_variables
from distlaunch.ui.torchrun.parser import misspelt_variables, parse


def torchrun(argv: Sequence[str], environ: Mapping[str, str], *, legacy: bool = False) -> int:
    """Run what follows ``torchrun`` on the command line; return the exit code. Raises LaunchError before the start.

    ``legacy``: the command is ``torch.distributed.launch``, whose scripts get ``--local-rank=N`` without ``--use-env``.
    """
    try:
        meaning = understand(parse(argv, environ), environ, legacy=legacy)
    except HelpRequested:
        from distlaunch.ui.torchrun.help import print_help

        print_help(legacy=legacy)
        return 0
    if not meaning.silent:
        print_warnings([*unknown_variables(environ), *misspelt_variables(environ), *unread_variables(environ)])
    from distlaunch.launch import run_job

    front = TorchrunFront(meaning)
    with in_words_of(meaning.options.dialect):
        if meaning.assumed:
            from distlaunch.ui.torchrun.node_zero import check_is_node_zero

            check_is_node_zero(meaning.options, environ)
        return run_job(
            meaning.options,
            environ,
            open_sink=front.open_sink,
            open_worker_sink=front.open_worker_sink,
            open_terminal=front.open_terminal,
            open_filters=front.open_filters,
        )


class TorchrunFront(Front):
    """What the user has before them: output as torchrun shows it, unless DISTLAUNCH_FORMAT asks for our console."""

    def __init__(self, meaning: Meaning) -> None:
        super().__init__(meaning.options)
        self._display = meaning.display
        self._remarks = () if meaning.silent else meaning.remarks
        self._silent = meaning.silent
        self._hostname = printable(socket.gethostname()) or "localhost"

    def wants_terminal(self) -> bool:
        """Tell whether one worker may have the terminal: nothing was asked that changes its output."""
        return self._options.format is None and self._display.is_raw

    def open_sink(self, world_size: int) -> Sink:
        """Open the sink that suits, and say what has to be said first."""
        sink = super().open_sink(world_size)
        if self._silent:
            return sink
        interpreter = interpreter_note(self._options, os.environ, sys.executable)
        if interpreter is not None and self._options.quiet:  # else it is said as a note of the plan
            sink.say(self._options.dialect.spelt(interpreter), level="warning")
        for remark in (*self._remarks, *self._display.beyond(world_size)):
            sink.say(remark, level="warning")
        return sink

    def open_console(self, world_size: int) -> Sink:
        """Open torchrun's console, or ours if a format was asked for."""
        if self._options.format is not None:
            return super().open_console(world_size)
        from distlaunch.ui.console.torchrun import open_torchrun_console

        ranks, display = range(world_size), self._display
        return open_torchrun_console(
            modes={(rank, stream): display.mode(rank, stream) for rank in ranks for stream in (STDOUT, STDERR)},
            prefixes={rank: display.prefix(rank, self._hostname) for rank in ranks},
            environ=os.environ,
            quiet=self._options.quiet,
        )

    def open_filters(self, world_size: int) -> dict[int, LineFilter]:
        """Make what copies the tee'd lines that match, by stream."""
        display, filters = self._display, {}
        for stream in (STDOUT, STDERR):
            if needles := display.filters(stream):
                tee_d = [rank for rank in range(world_size) if display.mode(rank, stream) == "tee"]
                prefixes = {rank: display.prefix(rank, self._hostname) for rank in tee_d}
                filters[stream] = LineFilter(needles, prefixes)
        return filters
