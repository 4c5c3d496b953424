"""Layer ui: what ``train`` and ``plan`` do, once their options are parsed."""

from __future__ import annotations

import os
import sys
from typing import Literal

from distlaunch.job.runner import Terminal
from distlaunch.job.sink import Sink
from distlaunch.resolve.options import TrainOptions


def train(options: TrainOptions) -> int:
    """Run a job (or, with --dry-run, print its plan); return the exit code."""
    if options.dry_run:
        return plan(options, "json" if options.format == "jsonl" else "table")
    from distlaunch.launch import run_job
    from distlaunch.ui.console import open_console, parse_output_ranks

    terminal: Terminal | None = None

    def open_terminal() -> Terminal | None:
        nonlocal terminal
        if options.format is None and options.output == "all":
            from distlaunch.ui.handover import user_terminal

            terminal = user_terminal()
        return terminal

    def open_sink(world_size: int) -> Sink:
        if terminal is not None:
            from distlaunch.ui.handover import Passthrough

            return Passthrough(quiet=options.quiet)
        return open_console(
            world_size=world_size,
            environ=os.environ,
            format=options.format,
            show=parse_output_ranks(options.output, world_size),
            quiet=options.quiet,
        )

    return run_job(options, os.environ, open_sink=open_sink, open_terminal=open_terminal)


def plan(options: TrainOptions, fmt: Literal["table", "json"]) -> int:
    """Print the plan that would be bound and run; nothing is started, nothing written."""
    from distlaunch.launch import make_plan

    record = make_plan(options, os.environ).record()
    if fmt == "json":
        import json

        json.dump(record, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        from distlaunch.ui.tables import plan_table

        plan_table(record)
    return 0
