"""A batch script for Slurm; pure.

Source: the manuals of sbatch and srun, and what a real Slurm 22.05 does (--signal without B:
reaches steps only; the signal may come a minute early; a log is truncated when a job is requeued,
unless it is appended to).
"""

from __future__ import annotations

import math
import shlex

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import quoted
from distlaunch.render import request as names
from distlaunch.render.request import Request, Words, duration_s, size_bytes
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import comment

_LEAST_WARNING_S = 60
_MOST_WARNING_S = 65535
"""More than that sbatch refuses."""
_LEAVING_S = 30
_DAY_S = 86400
_Line = tuple[str, str | None]
"""An option of sbatch, and why it is there if that does not go without saying."""


def render(request: Request, shape: Shape) -> str:
    """Write the script. Raises ConfigError."""
    lines = ["#!/bin/bash"]
    lines += comment(_head(shape))
    for option, why in (*_size(request, shape), *_limits(request), *_endings(request, shape)):
        if why is not None:
            lines += ["", *comment([why])]
        lines.append(f"#SBATCH {option}")
    lines += [
        "",
        *comment(["In this shell's place (exec), so that the signals above reach the launcher."]),
    ]
    lines.append(_command(request))
    return "".join(f"{line}\n" for line in lines)


def _head(shape: Shape) -> list[str]:
    size = f"{shape.least} to {shape.most}" if shape.elastic else str(shape.most)
    each = f"{shape.gpus} GPUs" if shape.gpus else f"{shape.workers} workers on CPUs"
    return [
        f"A job on {size} node{'' if size == '1' else 's'}, {each} each.",
        "Submit it: sbatch FILE. Options of sbatch before FILE override those below.",
        (
            "It runs in the folder and with the PATH of the shell that submits it: have "
            "distlaunch's "
            "environment active."
        ),
    ]


def _size(request: Request, shape: Shape) -> list[_Line]:
    more, spares = request.more, request.train.spares
    least, most = shape.least + spares, shape.most + spares
    found: list[_Line] = [
        (f"--job-name={names.job_name(request, longest=60)}", None),
        (
            f"--nodes={least}" if least == most else f"--nodes={least}-{most}",
            _about_nodes(shape, spares),
        ),
    ]
    if shape.gpus:
        found.append((f"--gpus-per-node={shape.gpus}", None))
    if more.exclusive or (more.exclusive is None and more.cpus is None):
        found.append(
            (
                "--exclusive",
                "All CPUs of each node. Without this line, or --cpus-per-task, Slurm grants one.",
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


def _about_nodes(shape: Shape, spares: int) -> str | None:
    said = [f"{spares} of these stand by (--spares)."] if spares else []
    if shape.elastic:
        # Tried on 22.05: --nodes=2-4 --ntasks-per-node=1 means two tasks, so two nodes, though four
        # are free.
        said.append(
            "As many as there are; given a number of tasks as well, Slurm would grant the least."
        )
    return " ".join(said) or None


def _limits(request: Request) -> list[_Line]:
    more = request.more
    found: list[_Line] = []
    if more.partition is not None:
        found.append((f"--partition={names.slurm_word(more.partition, '--partition')}", None))
    if more.account is not None:
        found.append((f"--account={names.slurm_word(more.account, '--account')}", None))
    if more.time is not None:
        found.append((f"--time={_clock(duration_s(more.time))}", None))
    return found


def _endings(request: Request, shape: Shape) -> list[_Line]:
    options = request.train
    warning_s = min(max(_LEAST_WARNING_S, math.ceil(options.grace) + _LEAVING_S), _MOST_WARNING_S)
    if request.more.time is not None:
        warning_s = min(warning_s, max(1, duration_s(request.more.time) // 2))
    found: list[_Line] = [
        ("--output=%x-%j.out", None),
        (
            "--open-mode=append",
            "If the job is requeued, its output goes on where it was; else it would begin anew.",
        ),
        (
            f"--signal=B:USR1@{warning_s}",
            (
                f"{warning_s} s before the time limit workers that handle USR1 get it, to save (B: "
                "by "
                "way of this script)."
            ),
        ),
    ]
    if _requeues(request):
        found.append(
            (
                "--requeue",
                "The job may have another turn: after its time limit, a preemption, a lost node.",
            )
        )
    if shape.elastic or options.spares:
        found.append(
            (
                "--no-kill",
                "Do not end the job when a node fails: distlaunch goes on with the others.",
            )
        )
    return found


def _clock(seconds: int) -> str:
    days, rest = divmod(seconds, _DAY_S)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def _requeues(request: Request) -> bool:
    """Return whether the job is to go on in another turn: unless ``--no-requeue`` says
    otherwise."""
    return request.train.requeue or "requeue" not in request.train.given


def _command(request: Request) -> str:
    added = ("--requeue",) if _requeues(request) and not request.has("requeue") else ()
    program, verb, *words = _fit(request.command(*added))
    options = len([word for _, given in request.words for word in given]) + len(added)
    lines = [f"exec {program} {verb}", *map(shlex.quote, words[:options])]
    lines.append(shlex.join(words[options:]))
    return " \\\n    ".join(lines)


def _fit(words: Words) -> Words:
    for word in words:
        if "\r\n" in word:
            raise ConfigError(
                f"{quoted(word)} has a line break of DOS, for which sbatch refuses a script",
                hint="leave the \\r out",
            )
    return words
