"""Choose the system whose environment variables describe the job, by precedence. No I/O.

The user's lists (--hosts, --hostfile, --discover) come before all systems; ``hosts.from_options``
reads them. Among systems (MPI launchers, cloud platforms, schedulers), the one whose launcher is
closest to this process wins: first a system that started this very process (mpirun), then those
that start one launcher per node or task, then schedulers that only run a script for the whole job.

In a plain shell only the variables in ``SYSTEMS`` are looked up, and no module of a system is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import near_choices, quoted

if TYPE_CHECKING:
    from distlaunch.planning.allocation import Allocation
    from distlaunch.planning.clusters.environment_reader import IncompleteError

SYSTEMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # name for --source, module, variables of which each shows that the system may be there
    (
        "openmpi",
        "mpi",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    ("mvapich", "mpi", ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")),
    ("jsm", "mpi", ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")),
    ("pals", "mpi", ("PALS_RANKID",)),
    ("mpich", "mpi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")),
    ("sagemaker", "clouds", ("SM_HOSTS", "SM_CURRENT_HOST")),
    ("azureml", "clouds", ("AZUREML_NODE_COUNT",)),
    ("vertex", "clouds", ("CLUSTER_SPEC",)),
    ("skypilot", "clouds", ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")),
    ("dstack", "clouds", ("DSTACK_NODE_RANK", "DSTACK_NODES_IPS")),
    ("determined", "clouds", ("DET_ALLOCATION_ID",)),
    ("aws-batch", "batch", ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES")),
    ("flux", "batch", ("FLUX_TASK_RANK", "FLUX_JOB_SIZE")),
    ("slurm", "slurm", ("SLURM_JOB_ID", "SLURM_JOB_NODELIST")),
    (
        "kubernetes",
        "kubernetes",
        (
            *(
                "PET_NNODES",
                "PET_NODE_RANK",
                "PET_RDZV_ENDPOINT",
                "JOB_COMPLETION_INDEX",
                "LWS_GROUP_SIZE",
            ),
            *(
                "LWS_WORKER_INDEX",
                "VC_TASK_INDEX",
                "VK_TASK_INDEX",
                "K_MPI_JOB_ROLE",
                "KUBERNETES_SERVICE_HOST",
            ),
        ),
    ),
    ("baidu-aihc", "clouds", ("AIHC_JOB_NAME",)),
    ("pai-dlc", "clouds", ("NPROC_PER_NODE",)),
    ("pbs", "batch", ("PBS_JOBID", "PBS_NODEFILE")),
    ("lsf", "batch", ("LSB_JOBID",)),
    ("sge", "batch", ("PE_HOSTFILE",)),
)
NAMES = ("auto", "flags", *(name for name, _, _ in SYSTEMS))
"""Values of ``--source``. ``flags`` reads nothing from the environment."""

_AMBIGUOUS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TF_CONFIG",
)
"""Variables of many programs, with different meanings, that are left over in shells."""


class _Source(Protocol):
    """The functions of each module of systems."""

    def files(self, environ: Mapping[str, str], system: str) -> tuple[str, ...]:
        """Return the paths of the files that the system ``system`` needs."""

    def find(
        self, environ: Mapping[str, str], texts: Mapping[str, str | None], system: str
    ) -> Allocation | None:
        """Return the allocation of the system's variables; None if they are not set."""


def files(environ: Mapping[str, str], *, wanted: str = "auto") -> tuple[str, ...]:
    """Return the paths of the files whose texts ``select`` needs.

    ``wanted`` is the value of --source. Raises ConfigError if it is not one of ``NAMES``.
    """
    paths: dict[str, None] = {}
    for name, module in _systems_with_markers(environ, wanted):
        paths.update(dict.fromkeys(_import_system(module).files(environ, name)))
    return tuple(paths)


def select(
    environ: Mapping[str, str],
    texts: Mapping[str, str | None],
    *,
    wanted: str = "auto",
    num_nodes: str | None = None,
    node_rank: int | None = None,
) -> tuple[Allocation | None, tuple[str, ...], tuple[str, ...]]:
    """Return the allocation of the system that started this launcher; None in a plain shell.

    The second value, for ``--explain``, lists the other variables with the reason why they are not
    used. The third has notes about systems with incomplete variables, if no other system determines
    the nodes.

    ``texts``: the contents of ``files()``. ``wanted``: the value of --source. ``num_nodes`` and
    ``node_rank``: the options, for systems whose variables lack them (an Indexed Job). Raises
    ConfigError if variables contradict each other, if the system ``wanted`` has no variables here,
    and if this launcher is one of several of unknown rank.
    """
    environ = _with_options(environ, num_nodes, node_rank)
    lost: list[str] = []
    incomplete: list[tuple[str, IncompleteError]] = []
    winner: Allocation | None = None
    for name, module in _systems_with_markers(environ, wanted):
        if winner is not None and module != "mpi":
            lost.append(f"{_marker_of(environ, name)}: {name} comes after {winner.source}")
            continue
        found = _read_system(environ, texts, name, module, lost, incomplete, forced=wanted == name)
        if winner is None:
            winner = found
        elif found is not None:
            lost.append(_check_same_process(environ, winner, found))
    if winner is None and wanted not in {"auto", "flags"}:
        raise ConfigError(
            f"{Opt.SOURCE(wanted)} does not apply: {_why_no_system(environ, wanted)}",
            hint=_variables_hint(environ),
        )
    lost += _unused_variables(environ, winner)
    if winner is not None and winner.part != "all":
        return winner, tuple(lost), ()
    alone = num_nodes == "1" or node_rank is not None  # the user says which one this is
    if not alone and (certain := [each for each in incomplete if each[1].of_several]):
        name, error = certain[0]
        why = (
            f"{name} has started several launchers, but the rank of this one is not known: "
            f"{error.message}"
        )
        raise type(error)(why, hint=error.hint, of_several=True)
    return (
        winner,
        tuple(lost),
        tuple(f"{name} is not used: {error.message}" for name, error in incomplete),
    )


def has_markers(environ: Mapping[str, str]) -> bool:
    """Return whether a variable of any system is set. Fast, and imports nothing."""
    return any(marker in environ for _, _, markers in SYSTEMS for marker in markers)


def unused_systems(environ: Mapping[str, str], why: str) -> tuple[str, ...]:
    """Return the variables that are not used because the user named the hosts, each with
    ``why``."""
    there = [
        f"{_marker_of(environ, name)}: {why}" for name, _ in _systems_with_markers(environ, "auto")
    ]
    return (*there, *_unused_variables(environ, None))


def _with_options(
    environ: Mapping[str, str], num_nodes: str | None, node_rank: int | None
) -> Mapping[str, str]:
    given = {
        str(Opt.NUM_NODES): num_nodes,
        str(Opt.NODE_RANK): None if node_rank is None else str(node_rank),
    }
    given = {name: value for name, value in given.items() if value is not None}
    return {**environ, **cast("dict[str, str]", given)} if given else environ


def _systems_with_markers(environ: Mapping[str, str], wanted: str) -> list[tuple[str, str]]:
    if wanted not in NAMES:
        near = near_choices(wanted, NAMES)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{Opt.SOURCE(quoted(wanted))}: no such source",
            hint=f"{meant}there is: {', '.join(NAMES)}",
        )
    return [
        (name, module)
        for name, module, markers in SYSTEMS
        if wanted in {"auto", name} and any(marker in environ for marker in markers)
    ]


def _import_system(module: str) -> _Source:
    import importlib

    return cast("_Source", importlib.import_module(f"distlaunch.planning.clusters.{module}"))


def _read_system(
    environ: Mapping[str, str],
    texts: Mapping[str, str | None],
    name: str,
    module: str,
    lost: list[str],
    incomplete: list[tuple[str, IncompleteError]],
    *,
    forced: bool,
) -> Allocation | None:
    from distlaunch.planning.clusters.environment_reader import IncompleteError

    try:
        found = _import_system(module).find(environ, texts, name)
    except IncompleteError as error:
        if forced:
            raise ConfigError(
                f"{Opt.SOURCE(name)} does not apply: {error.message}", hint=error.hint
            ) from error
        lost.append(f"{name}: {error.message}")
        incomplete.append((name, error))
        return None
    if found is None and not forced:
        lost.append(f"{_marker_of(environ, name)}: no job of several nodes or processes")
    return found


def _marker_variables(name: str) -> tuple[str, ...]:
    return next(markers for each, _, markers in SYSTEMS if each == name)


def _marker_of(environ: Mapping[str, str], name: str) -> str:
    marker = next(each for each in _marker_variables(name) if each in environ)
    return f"{marker}={quoted(environ[marker])}"


def _check_same_process(environ: Mapping[str, str], winner: Allocation, other: Allocation) -> str:
    """Return why the variables of ``other`` are not used. Raises ConfigError if both systems number
    this process differently."""
    mine, its = _marker_of(environ, winner.source), _marker_of(environ, other.source)
    numbers = (winner.node_rank, winner.local_rank, len(winner.hosts))
    if numbers != (other.node_rank, other.local_rank, len(other.hosts)):
        raise ConfigError(
            f"{mine} and {its} contradict each other: both numbered this process, but differently",
            hint=f"unset those that are left over, or use {Opt.SOURCE(winner.source)} or "
            f"{Opt.SOURCE(other.source)}",
        )
    return f"{its}: says the same as {winner.source}"


def _why_no_system(environ: Mapping[str, str], wanted: str) -> str:
    markers = _marker_variables(wanted)
    there = [each for each in markers if each in environ]
    if there:
        return f"{_marker_of(environ, wanted)}, but no job of several nodes or processes"
    return (
        f"none of {', '.join(markers)} is set" if len(markers) > 1 else f"{markers[0]} is not set"
    )


def _variables_hint(environ: Mapping[str, str]) -> str:
    present = [name for name, _ in _systems_with_markers(environ, "auto")]
    return (
        f"the environment has variables of {', '.join(present)}"
        if present
        else "no system's variables are set here"
    )


def _unused_variables(environ: Mapping[str, str], winner: Allocation | None) -> list[str]:
    used = (
        " ".join(origin.source for origin in winner.origins).split() if winner is not None else []
    )
    why = (
        "has a different meaning for each launcher, so it is not read"
        if winner is None
        else f"{winner.source} decides"
    )
    return [
        f"{name}={quoted(environ[name])}: {why}"
        for name in _AMBIGUOUS
        if name in environ and name not in used
    ]
