"""The commands ``distlaunch torchrun`` and ``torch.distributed.launch``."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence

from distlaunch.cli.commands.train import Front
from distlaunch.cli.compat.torchrun.command_line import misspelt_variables, parse
from distlaunch.cli.compat.torchrun.options import OPTIONS
from distlaunch.cli.compat.torchrun.translate import (
    NODE_RANK_HINT,
    TorchrunTranslation,
    translate,
    unread_variables,
)
from distlaunch.cli.error_output import print_warnings
from distlaunch.cli.misplaced_options import misplaced_options
from distlaunch.cli.parser import unknown_variables
from distlaunch.coordinator.runtime.records import LineFilter
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt, use_names
from distlaunch.core.model.plan import OuterLauncher
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import STDERR, STDOUT
from distlaunch.core.model.text import printable
from distlaunch.core.probe.network import Address, resolve_in_thread
from distlaunch.launch.surroundings import read_surroundings
from distlaunch.planning.build_plan import interpreter_note
from distlaunch.planning.hosts.this_host import is_this_machine
from distlaunch.planning.master_address import rendezvous_endpoint
from distlaunch.planning.train_options import TrainOptions

_LOOKUP_S = 3.0


def torchrun(argv: Sequence[str], environ: Mapping[str, str], *, legacy: bool = False) -> int:
    """Run the command and return the exit code.

    ``legacy``: scripts get ``--local-rank=N`` unless ``--use-env`` is set. Raises HelpRequested,
    and LaunchError for an error before the job starts.
    """
    translation = translate(parse(argv, environ), environ, legacy=legacy)
    if not translation.silent:
        print_warnings(
            [*unknown_variables(environ), *misspelt_variables(environ), *unread_variables(environ)]
        )
        names = [option.name for option in OPTIONS]
        print_warnings(misplaced_options(replace(translation.options, quiet=False), names, environ))
    from distlaunch.launch.run import run_job

    front = TorchrunFront(translation)
    with use_names(translation.options.dialect.names):
        if translation.assumed:
            check_is_node_zero(translation.options, environ)
        return run_job(
            translation.options,
            environ,
            open_sink=front.open_sink,
            open_worker_sink=front.open_worker_sink,
            open_terminal=front.open_terminal,
            open_filters=front.open_filters,
            count_from=front.count_from,
        )


def check_is_node_zero(options: TrainOptions, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the rendezvous is another machine.

    For a launcher that is node 0 only by default: otherwise every launcher would be node 0, and all
    would wait for each other. A name that cannot be resolved within 3 s is accepted.
    """
    host = rendezvous_endpoint(options)[0]
    identity = read_surroundings(options, environ).identity
    if host is None or is_this_machine(host, identity):
        return
    found = _resolve_host(host)
    if found and not any(is_this_machine(address, identity) for address in found):
        raise ConfigError(
            f"{Opt.RENDEZVOUS}: {printable(host)} is another machine, but without {Opt.NODE_RANK} "
            "this "
            "launcher is node 0",
            hint=NODE_RANK_HINT,
        )


def _resolve_host(host: str) -> list[str]:
    answers: list[list[Address] | OSError | UnicodeError] = []
    answered = threading.Event()

    def done(found: list[Address] | OSError | UnicodeError) -> None:
        answers.append(found)
        answered.set()

    try:
        resolve_in_thread(host, 0, done)
    except RuntimeError:
        return []
    answered.wait(_LOOKUP_S)
    return [str(to[0]) for found in answers if isinstance(found, list) for _, to in found]


class TorchrunFront(Front):
    """Opens output that looks like torchrun's, or distlaunch's console if DISTLAUNCH_FORMAT is
    set."""

    def __init__(self, translation: TorchrunTranslation) -> None:
        super().__init__(translation.options)
        self._display = translation.display
        self._notices = () if translation.silent else translation.notices
        self._silent = translation.silent
        self._hostname = printable(socket.gethostname()) or "localhost"
        self._prefixes: dict[int, bytes] = {}
        """Prefixes by rank, as the console counts ranks. Filled by ``count_from``."""
        self._filtered: dict[int, dict[int, bytes]] = {}
        """Prefixes of the workers whose lines are copied, by stream and local index."""
        self._first_local_rank = 0
        self._first_rank = 0

    def wants_terminal(self) -> bool:
        """Return whether an only worker may have the terminal itself: no option changes its
        output."""
        return self._options.format is None and self._display.is_raw

    def open_sink(self, world_size: int) -> Sink:
        """Open the sink, and print the notices unless DISTLAUNCH_QUIET is set."""
        return self._with_notices(super().open_sink(world_size), world_size)

    def _with_notices(self, sink: Sink, workers: int) -> Sink:
        if self._silent:
            return sink
        interpreter = interpreter_note(self._options, os.environ, sys.executable)
        if interpreter is not None and self._options.quiet:  # otherwise the plan has this note
            sink.say(interpreter, level="warning")
        for notice in (*self._notices, *self._display.beyond(workers)):
            sink.say(notice, level="warning")
        return sink

    def open_console(self, world_size: int) -> Sink:
        """Open torchrun's console, or distlaunch's if DISTLAUNCH_FORMAT is set."""
        if self._options.format is not None:
            return super().open_console(world_size)
        return self._open_torchruns(range(world_size))

    def _open_torchruns(self, ranks: Sequence[int]) -> Sink:
        from distlaunch.console.torchrun_style import open_torchrun_console

        display = self._display
        self._prefixes.update(dict.fromkeys(ranks, b""))
        self.count_from(self._first_rank)
        first = self._first_local_rank - ranks[0]
        return open_torchrun_console(
            modes={
                (rank, stream): display.mode(first + rank, stream)
                for rank in ranks
                for stream in (STDOUT, STDERR)
            },
            prefixes=self._prefixes,
            environ=os.environ,
            quiet=self._options.quiet,
        )

    def open_worker_sink(self, outer: OuterLauncher) -> Sink:
        """Open the sink of a launcher that is a worker of another launcher. Only rank 0 prints the
        notices."""
        self._first_rank, self._first_local_rank = outer.rank, outer.local_rank
        own = self._options.format is not None
        sink = super().open_worker_sink(outer) if own else self._open_torchruns([outer.rank])
        return sink if outer.rank else self._with_notices(sink, outer.world_size)

    def count_from(self, first_rank: int) -> None:
        """Set the rank of this node's first worker, for prefixes."""
        self._first_rank = first_rank
        for prefixes in (self._prefixes, *self._filtered.values()):
            for place, rank in enumerate(sorted(prefixes)):
                prefixes[rank] = self._prefix_of_worker(
                    place if prefixes is self._prefixes else rank
                )

    def _prefix_of_worker(self, place: int) -> bytes:
        return self._display.prefix(
            self._first_local_rank + place, self._hostname, rank=self._first_rank + place
        )

    def open_filters(self, world_size: int) -> dict[int, LineFilter]:
        """Return for each stream a filter that copies lines of ``tee`` workers. A stream without
        filter words has none."""
        display, filters = self._display, {}
        for stream in (STDOUT, STDERR):
            if needles := display.filters(stream):
                places = range(world_size)
                tee_d = [
                    place
                    for place in places
                    if display.mode(self._first_local_rank + place, stream) == "tee"
                ]
                self._filtered[stream] = {place: self._prefix_of_worker(place) for place in tee_d}
                filters[stream] = LineFilter(needles, self._filtered[stream])
        return filters
