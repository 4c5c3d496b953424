"""Run ``train`` and ``plan``."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Literal

from distlaunch.core.model.record import replace
from distlaunch.planning.train_options import TrainOptions

if TYPE_CHECKING:
    from distlaunch.coordinator.runtime.keyboard import Terminal
    from distlaunch.coordinator.runtime.sink import Sink
    from distlaunch.core.model.plan import OuterLauncher
    from distlaunch.launch.detach import DetachedLauncher


def train(options: TrainOptions) -> int:
    """Run a job and return the exit code. With --dry-run, print the plan of the job instead."""
    if options.dry_run:
        return plan(options, "json" if options.format == "jsonl" else "table")
    if options.detach:
        from distlaunch.cli.error_output import print_notice, print_warnings
        from distlaunch.launch.detach import start_detached

        return start_detached(
            lambda detached: _run_with_console(options, detached),
            os.environ,
            say=lambda text: None if options.quiet else print_notice(text),
            warn=lambda text: print_warnings([text]),
        )
    return _run_with_console(options, None)


def _run_with_console(options: TrainOptions, detached: DetachedLauncher | None) -> int:
    from distlaunch.launch.run import run_job

    front = Front(options)
    try:
        return run_job(
            options,
            os.environ,
            open_sink=front.open_sink,
            open_worker_sink=front.open_worker_sink,
            open_terminal=front.open_terminal,
            detached=detached,
        )
    # Not a broken stdout, for which the command would exit with 0.
    except BrokenPipeError as exc:
        raise RuntimeError("a channel of the job broke") from exc


class Front:
    """Opens the output of a job: a console, or the terminal itself for the only worker.

    ``open_terminal`` and ``open_sink`` may be called in any order and agree on the choice.
    """

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._terminal: Terminal | None = None

    def wants_terminal(self) -> bool:
        """Return whether the user has set neither --format nor --output."""
        return self._options.format is None and self._options.output == "all"

    def open_terminal(self) -> Terminal | None:
        """Return the terminal if the only worker may have it, else None."""
        if self._terminal is None and self.wants_terminal():
            from distlaunch.console.passthrough import user_terminal

            self._terminal = user_terminal()
        return self._terminal

    def open_sink(self, world_size: int) -> Sink:
        """Open a console; if the only worker has the terminal, a sink that passes its output on."""
        if world_size == 1 and self.open_terminal() is not None:
            from distlaunch.console.passthrough import Passthrough

            return Passthrough(quiet=self._options.quiet)
        return self.open_console(world_size)

    def open_worker_sink(self, outer: OuterLauncher) -> Sink:
        """Open the sink of a launcher that is a worker of another launcher (``outer``).

        Lines have no rank prefix, because the outer launcher adds one, unless the user has set
        --format or --output.
        """
        if self._options.format is not None or self._options.output != "all":
            return self.open_console(outer.world_size)
        from distlaunch.console.torchrun_style import open_torchrun_console

        return open_torchrun_console(
            modes={}, prefixes={}, environ=os.environ, quiet=self._options.quiet
        )

    def open_console(self, world_size: int) -> Sink:
        """Open the console."""
        from distlaunch.console.console import open_console
        from distlaunch.console.prefixes import parse_output_ranks

        return open_console(
            world_size=world_size,
            environ=os.environ,
            format=self._options.format,
            show=parse_output_ranks(self._options.output, world_size),
            quiet=self._options.quiet,
        )


def plan(options: TrainOptions, fmt: Literal["table", "json"], *, expand: bool = False) -> int:
    """Print the plan of a job. Start nothing and write no file.

    With ``expand``, JSON repeats the variables that all workers share in each worker's ``env``.
    Unless the plan is the dry run of a job, it may be for another machine: if this machine lacks
    the GPUs, the plan assumes a machine that has them.
    """
    from distlaunch.launch.make_plan import make_plan

    planned = make_plan(options, os.environ, elsewhere=not options.dry_run)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    explanation, shown = planned.explanation, planned.plan
    if shown.worker_ports:
        from distlaunch.planning.worker_addresses import cluster_names

        names = ", ".join(sorted(cluster_names(planned.backend, planned.topology.world_size or 2)))
        note = f"settled at the start: the ports that workers listen on, and so {names}"
        shown = replace(shown, notes=(*shown.notes, note))
    if planned.planner is not None and planned.topology.here is None:
        from distlaunch.launch.script_source import missing_script

        if missing := missing_script(options, os.getcwd()):
            note = f"{missing}; the nodes have to have it"
            shown = replace(shown, notes=(*shown.notes, note))
    if fmt == "json":
        more = {} if explanation is None else {"explain": explanation.record()}
        sys.stdout.writelines(shown.json_chunks(expand=expand, more=more))
        return 0
    from distlaunch.cli.commands.plan_tables import plan_table

    plan_table(shown.record(expand=expand), argv=shown.argv)
    if explanation is not None:
        sys.stdout.write(
            "\nWhere this comes from\n" + "".join(f"  {line}\n" for line in explanation.lines())
        )
    return 0
