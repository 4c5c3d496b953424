"""How many nodes a job has and what each gets; pure."""

from __future__ import annotations

from distlaunch.backends.backend_options import chosen_options, given_words
from distlaunch.backends.base import Backend
from distlaunch.backends.registry import backend_names, find_backend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, quoted
from distlaunch.planning.train_options import (
    TrainOptions,
    check_kind,
    counts_processes,
    shares_gpus,
)
from distlaunch.render.request import Request

_USUAL_GPUS = 16
"""No common machine has more GPUs; a total above it probably stands for several nodes."""


class Shape(Record):
    """The nodes of a job: how many at least and at most, and what each gets."""

    least: int
    most: int
    workers: int
    """On each node."""
    gpus: int
    """On each node."""

    @property
    def elastic(self) -> bool:
        """Return whether nodes may come and go."""
        return self.least < self.most


def shape_of(request: Request) -> Shape:
    """Settle the job's shape. Raises ConfigError for what is missing, contradicts itself or cannot
    be had there."""
    options = request.train
    _refuse(request)
    _check_backend(options)
    check_kind(options)
    total = None if options.num_gpus == "auto" else options.num_gpus
    total = options.num_procs if total is None else total
    each = options.gpus_per_node if options.gpus_per_node is not None else options.procs_per_node
    if total is None and each is None:
        raise ConfigError(
            "how many GPUs each node has is not said, and it cannot be seen from here",
            hint="--gpus-per-node N, or --procs-per-node N for workers on CPUs",
        )
    if shares_gpus(options):
        raise ConfigError(
            "--device cuda lets workers share GPUs, and how many to ask for is not said",
            hint="--gpus-per-node N asks for N and starts a worker on each",
        )
    least, most = _nodes(options, total, each)
    workers = each if each is not None else (total or 0) // most
    return Shape(
        least=least, most=most, workers=workers, gpus=0 if counts_processes(options) else workers
    )


def _nodes(options: TrainOptions, total: int | None, each: int | None) -> tuple[int, int]:
    wanted = options.num_nodes
    least, most = wanted if isinstance(wanted, tuple) else (wanted or 1, wanted or 1)
    if total is None:
        return least, most
    if each is None and wanted is None and options.num_gpus is not None and total > _USUAL_GPUS:
        raise ConfigError(
            f"--num-gpus {total} is for the whole job, and without --num-nodes that is one node: "
            "is one node with"
            f" {total} GPUs meant?",
            hint="if so, add --num-nodes 1; if not, say what each node has: --num-nodes K "
            "--gpus-per-node N",
        )
    kind = "procs" if counts_processes(options) else "gpus"
    name, each_name = f"--num-{kind}", f"--{kind}-per-node"
    if each is not None:
        nodes, rest = divmod(total, each)
        if rest:
            raise ConfigError(
                f"{name} {total} and {each_name} {each}: {total} is no multiple of {each}",
                hint="give one of the two",
            )
        if wanted is not None and (least, most) != (nodes, nodes):
            raise ConfigError(
                f"{name} {total} and {each_name} {each} make {counted(nodes, 'node')}, but "
                "--num-nodes says otherwise",
                hint="give two of the three",
            )
        return nodes, nodes
    if least != most:
        raise ConfigError(
            f"{name} {total} is a total, but there may be {least} to {most} nodes",
            hint=f"say how many each node has: {each_name} N",
        )
    if total % most:
        raise ConfigError(
            f"{name} {total} cannot be divided evenly among {counted(most, 'node')}",
            hint=f"give a multiple of {most}",
        )
    return least, most


def _refuse(request: Request) -> None:
    """Raise for a value that would mean nothing, or something else, where the job is to run."""
    options, pods = request.train, request.target != "slurm"
    system = "kubernetes" if pods else "slurm"
    if options.source not in {"auto", system}:
        raise ConfigError(
            f"{options.named('source')} {quoted(options.source)} cannot be rendered: {system} "
            "names the nodes",
            hint="leave it out",
        )
    passed_on = next((each for each in options.env if "=" not in each), None)
    if pods and passed_on is not None:
        raise ConfigError(
            f"--env {passed_on} passes a variable on, but a pod has no variables but those of its "
            "manifest",
            hint=f"--env {passed_on}=VALUE; or add it to env in the manifest, whose variables "
            "reach the workers",
        )


def _check_backend(options: TrainOptions) -> None:
    """Raise for what the launchers would refuse of a backend of ours; another package's may be
    there alone."""
    if options.backend not in backend_names():
        return
    kind = find_backend(options.backend)
    if kind.location is not Backend.location:
        raise ConfigError(
            f"--backend {kind.name} cannot be rendered: its own cluster says which nodes there are",
            hint=f"distlaunch train --backend {kind.name} in a shell, or as a job, of that cluster",
        )
    known = kind.options()
    chosen = chosen_options(given_words(options, known, kind.name), known, kind.name)
    if not any(
        option.kind == "file" and option.name in chosen for option in known
    ):  # which may be there alone
        kind(chosen, {}).sized(options)
