"""The number of nodes that a job requests, and the resources of each node. No I/O."""

from __future__ import annotations

from distlaunch.backends.backend_options import chosen_options, given_options
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
from distlaunch.render.request import RenderRequest

_MAX_USUAL_GPUS = 16
"""A total number of GPUs above this is probably intended for several nodes."""


class Shape(Record):
    """The number of nodes, and what each has."""

    min_nodes: int
    max_nodes: int
    workers: int
    """Per node."""
    gpus: int
    """Per node."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.min_nodes < self.max_nodes


def job_shape(request: RenderRequest) -> Shape:
    """Return the shape of a job. Raises ConfigError for missing, contradicting or unsupported
    sizes."""
    options = request.train
    _check_options(request)
    _check_backend(options)
    check_kind(options)
    total = None if options.num_gpus == "auto" else options.num_gpus
    total = options.num_procs if total is None else total
    each = options.gpus_per_node if options.gpus_per_node is not None else options.procs_per_node
    if total is None and each is None:
        raise ConfigError(
            "the number of GPUs of each node is not given, and it cannot be detected here",
            hint="--gpus-per-node N, or --procs-per-node N for workers on CPUs",
        )
    if shares_gpus(options):
        raise ConfigError(
            "--device cuda lets workers share GPUs, so the number of GPUs to request is not known",
            hint="--gpus-per-node N requests N GPUs and starts one worker on each",
        )
    min_nodes, max_nodes = _node_range(options, total, each)
    workers = each if each is not None else (total or 0) // max_nodes
    return Shape(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        workers=workers,
        gpus=0 if counts_processes(options) else workers,
    )


def _node_range(options: TrainOptions, total: int | None, each: int | None) -> tuple[int, int]:
    wanted = options.num_nodes
    min_nodes, max_nodes = wanted if isinstance(wanted, tuple) else (wanted or 1, wanted or 1)
    if total is None:
        return min_nodes, max_nodes
    if each is None and wanted is None and options.num_gpus is not None and total > _MAX_USUAL_GPUS:
        raise ConfigError(
            f"--num-gpus {total} is the total of the job, and without --num-nodes the "
            f"job has one node with {total} GPUs",
            hint="if that is right, add --num-nodes 1; if not, use --num-nodes K --gpus-per-node N",
        )
    kind = "procs" if counts_processes(options) else "gpus"
    name, each_name = f"--num-{kind}", f"--{kind}-per-node"
    if each is not None:
        nodes, rest = divmod(total, each)
        if rest:
            raise ConfigError(
                f"{name} {total} and {each_name} {each}: {total} is not a multiple of {each}",
                hint="drop one of the two",
            )
        if wanted is not None and (min_nodes, max_nodes) != (nodes, nodes):
            raise ConfigError(
                f"{name} {total} and {each_name} {each} make "
                f"{counted(nodes, 'node')}, but --num-nodes is different",
                hint="drop one of the three",
            )
        return nodes, nodes
    if min_nodes != max_nodes:
        raise ConfigError(
            f"{name} {total} is a total, but there may be {min_nodes} to {max_nodes} nodes",
            hint=f"give the number per node: {each_name} N",
        )
    if total % max_nodes:
        raise ConfigError(
            f"{name} {total} cannot be divided evenly among {counted(max_nodes, 'node')}",
            hint=f"give a multiple of {max_nodes}",
        )
    return min_nodes, max_nodes


def _check_options(request: RenderRequest) -> None:
    """Raise ConfigError for options with no or another meaning in this file format."""
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
            f"--env {passed_on} passes a variable on, but a pod has only the "
            "variables of its manifest",
            hint=f"--env {passed_on}=VALUE; or add it to env in the manifest, whose variables "
            "reach the workers",
        )


def _check_backend(options: TrainOptions) -> None:
    """Raise ConfigError if a backend of distlaunch's own cannot be rendered or has invalid options.

    Other backends may be installed on the cluster alone.
    """
    if options.backend not in backend_names():
        return
    kind = find_backend(options.backend)
    if kind.location is not Backend.location:
        raise ConfigError(
            f"--backend {kind.name} cannot be rendered: its own cluster chooses the nodes",
            hint=(
                f"run distlaunch train --backend {kind.name} in a shell or a job of that cluster"
            ),
        )
    known = kind.options()
    chosen = chosen_options(given_options(options, known, kind.name), known, kind.name)
    # A file that an option names may exist on the cluster only.
    if not any(option.kind == "file" and option.name in chosen for option in known):
        kind(chosen, {}).sized(options)
