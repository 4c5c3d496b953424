"""Render a batch script for Slurm. No I/O.

Source: the manuals of sbatch and srun, and tests with Slurm 22.05: ``--signal`` reaches only the
steps unless its value begins with ``B:``, and may arrive a minute early. The log of a requeued job
is truncated unless it is opened for appending.
"""

from __future__ import annotations

import math
import shlex

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import quoted
from distlaunch.render import request as names
from distlaunch.render.request import RenderRequest, Words, duration_s, size_bytes
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import comment

_LEAST_WARNING_S = 60
_MOST_WARNING_S = 65535
"""Largest warning time that sbatch accepts."""
_EXIT_MARGIN_S = 30
_DAY_S = 86400
_Line = tuple[str, str | None]
"""An option of sbatch, and a comment above it."""


def render(request: RenderRequest, shape: Shape) -> str:
    """Return the script. Raises ConfigError if an option cannot be expressed."""
    lines = ["#!/bin/bash"]
    lines += comment(_head_comment(shape))
    for option, why in (
        *_size_options(request, shape),
        *_queue_options(request),
        *_signal_and_requeue_options(request, shape),
    ):
        if why is not None:
            lines += ["", *comment([why])]
        lines.append(f"#SBATCH {option}")
    lines += [
        "",
        *comment(["exec replaces this shell, so that the signals above reach the launcher."]),
    ]
    lines.append(_launch_command(request))
    return "".join(f"{line}\n" for line in lines)


def _head_comment(shape: Shape) -> list[str]:
    size = f"{shape.min_nodes} to {shape.max_nodes}" if shape.is_elastic else str(shape.max_nodes)
    each = f"{shape.gpus} GPUs" if shape.gpus else f"{shape.workers} workers on CPUs"
    return [
        f"A job on {size} node{'' if size == '1' else 's'}, {each} each.",
        "Submit: sbatch FILE. Options before FILE override those below.",
        (
            "It runs in the folder and with the PATH of the shell that submits it, "
            "so activate distlaunch's environment first."
        ),
    ]


def _size_options(request: RenderRequest, shape: Shape) -> list[_Line]:
    more, spares = request.more, request.train.spares
    min_nodes, max_nodes = shape.min_nodes + spares, shape.max_nodes + spares
    found: list[_Line] = [
        (f"--job-name={names.job_name(request, longest=60)}", None),
        (
            f"--nodes={min_nodes}"
            if min_nodes == max_nodes
            else f"--nodes={min_nodes}-{max_nodes}",
            _nodes_comment(shape, spares),
        ),
    ]
    if shape.gpus:
        found.append((f"--gpus-per-node={shape.gpus}", None))
    if more.exclusive or (more.exclusive is None and more.cpus is None):
        found.append(
            (
                "--exclusive",
                (
                    "All CPUs of each node. Without this line or --cpus-per-task, Slurm "
                    "grants one CPU."
                ),
            )
        )
    if more.cpus is not None:
        found.append((f"--cpus-per-task={more.cpus}", "CPUs of each node, shared by its workers."))
    if more.memory is not None:
        size_bytes(more.memory, "--memory")
        found.append(
            (
                f"--mem={more.memory.removesuffix('i')}",
                "Memory of each node; Slurm's units are powers of 1024.",
            )
        )
    return found


def _nodes_comment(shape: Shape, spares: int) -> str | None:
    parts = [f"{spares} of these are spare nodes (--spares)."] if spares else []
    if shape.is_elastic:
        # Slurm 22.05 grants two nodes for --nodes=2-4 --ntasks-per-node=1 even if four are free.
        parts.append(
            "As many nodes as are free. With a number of tasks, Slurm would grant the minimum."
        )
    return " ".join(parts) or None


def _queue_options(request: RenderRequest) -> list[_Line]:
    more = request.more
    found: list[_Line] = []
    if more.partition is not None:
        found.append((f"--partition={names.slurm_name(more.partition, '--partition')}", None))
    if more.account is not None:
        found.append((f"--account={names.slurm_name(more.account, '--account')}", None))
    if more.time is not None:
        found.append((f"--time={_clock_text(duration_s(more.time))}", None))
    return found


def _signal_and_requeue_options(request: RenderRequest, shape: Shape) -> list[_Line]:
    options = request.train
    warning_s = _usr1_before_s(request)
    found: list[_Line] = [
        ("--output=%x-%j.out", None),
        (
            "--open-mode=append",
            "Keeps the output of earlier runs if the job is requeued.",
        ),
        (
            f"--signal=B:USR1@{warning_s}",
            (
                f"{warning_s} s before the time limit, workers that handle USR1 get "
                "it, so that they can save (B: sends it to this script)."
            ),
        ),
    ]
    if _wants_requeue(request):
        found.append(
            (
                "--requeue",
                "The job may run again after its time limit, a preemption or a lost node.",
            )
        )
    if shape.is_elastic or options.spares:
        found.append(
            (
                "--no-kill",
                "Keeps the job when a node fails: distlaunch goes on with the others.",
            )
        )
    return found


def _usr1_before_s(request: RenderRequest) -> int:
    """Return when USR1 is sent, in seconds before the end: --usr1-before, or the grace period and a
    margin, but at most half of --time. Raises ConfigError if --usr1-before is out of range."""
    limit = request.more.time
    limit_s = None if limit is None else duration_s(limit)
    given_s = request.more.usr1_before
    if given_s is not None:
        before_s = math.ceil(given_s)
        if not 1 <= before_s <= _MOST_WARNING_S:
            raise ConfigError(
                f"--usr1-before takes 1 to {_MOST_WARNING_S} seconds, not {given_s:g}"
            )
        if limit is not None and limit_s is not None and before_s >= limit_s:
            raise ConfigError(f"--usr1-before {given_s:g} is not less than --time {quoted(limit)}")
        return before_s
    before_s = max(_LEAST_WARNING_S, math.ceil(request.train.grace) + _EXIT_MARGIN_S)
    before_s = min(before_s, _MOST_WARNING_S)
    return before_s if limit_s is None else min(before_s, max(1, limit_s // 2))


def _clock_text(seconds: int) -> str:
    days, rest = divmod(seconds, _DAY_S)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def _wants_requeue(request: RenderRequest) -> bool:
    return request.train.requeue or "requeue" not in request.train.given


def _launch_command(request: RenderRequest) -> str:
    added = ("--requeue",) if _wants_requeue(request) and not request.has("requeue") else ()
    program, verb, *words = _check_arguments(request.command(*added))
    options = len([argument for _, given in request.words for argument in given]) + len(added)
    lines = [f"exec {program} {verb}", *map(shlex.quote, words[:options])]
    lines.append(shlex.join(words[options:]))
    return " \\\n    ".join(lines)


def _check_arguments(words: Words) -> Words:
    for argument in words:
        if "\r\n" in argument:
            raise ConfigError(
                f"{quoted(argument)} has a DOS line break, and sbatch refuses scripts with those",
                hint="remove the \\r",
            )
    return words
