"""Read the nodes, workers and GPUs that Slurm granted a job or a step. No I/O.

In a batch script and in the shell of ``salloc``, the launcher starts the whole job (part ``all``).
In a step only ``SLURM_STEP_*``, ``PROCID``, ``NODEID`` and ``LOCALID`` describe it: the job's
variables are set, too, but are wrong if the step is smaller.

Sources: recorded environments of Slurm 22.05.8, and the manuals of sbatch, salloc and srun.
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import expand_nodelist, parse_counts
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import counted
from distlaunch.planning.allocation import Allocation, Host, Unit
from distlaunch.planning.clusters.environment_reader import (
    Environ,
    IncompleteError,
    Origins,
    Texts,
    contradiction_error,
    ignore_hint,
    is_several,
    job_id,
    needed,
    number,
    shown,
    text,
)
from distlaunch.planning.gpu_masks import HIDES_ALL

name = "slurm"
_FIRST_PSEUDO_STEP = 4294967290
"""Steps with this id or a higher one (``SLURM_INTERACTIVE_STEP``, batch, extern, ...) are shells of
the job."""
_SAME_IN_A_STEP = (
    ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
"""Variables that Slurm sets to equal values for the tasks of a step. In a batch script the second
of a pair describes the job."""
_MOST_TASKS = 1 << 22
_MOST_COMPONENTS = 1024
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_MOST_GPUS = 4096
_REQUESTS = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET"),
    "SLURM_NTASKS_PER_GPU",
)


def files(environ: Environ, system: str = name) -> tuple[str, ...]:  # noqa: ARG001 - all sources share the signature
    """Return no path: Slurm needs no files."""
    return ()


def find(environ: Environ, texts: Texts, system: str = name) -> Allocation | None:  # noqa: ARG001 - all sources share the signature
    """Return the nodes that Slurm granted and the rank of this node; None outside of Slurm.

    Raises IncompleteError if some variables are missing, and ConfigError if they are invalid or
    contradict each other.
    """
    if text(environ, "SLURM_JOB_ID") is None and text(environ, "SLURM_JOB_NODELIST") is None:
        return None
    step = number(environ, "SLURM_STEP_ID", most=1 << 32)
    if text(environ, "SLURM_STEP_NODELIST") is None or (
        step is not None and step >= _FIRST_PSEUDO_STEP
    ):
        return _job_allocation(environ)
    nodes = _nodes_of(environ, "SLURM_STEP_NODELIST")
    if text(environ, "SLURM_JOB_NODELIST") is not None and text(environ, "SLURM_HET_SIZE") is None:
        whole = set(_nodes_of(environ, "SLURM_JOB_NODELIST"))
        if not whole.issuperset(nodes):
            return _job_allocation(environ)
    for own, same in _SAME_IN_A_STEP:
        if (
            text(environ, own) is not None
            and (text(environ, same) or environ[own]).strip() != environ[own].strip()
        ):
            raise contradiction_error(
                environ,
                own,
                same,
                "in a step they are equal; in a batch script, unset SLURM_STEP_NODELIST",
            )
    return _step_allocation(environ, nodes)


class _Granted(Record):
    """This node's GPUs, as far as known."""

    count: int | None = None
    devices: tuple[str, ...] | None = None
    """The ids in the device mask; None if something other than Slurm set the mask."""

    def on(self, host: Host) -> Host:
        """Return ``host`` with the granted GPUs, if they are known."""
        if not self.count:
            return replace(host, devices=self.devices)
        return replace(host, slots=self.count, unit="gpus", devices=self.devices)


def _granted_here(environ: Environ, found: Origins, *, in_step: bool) -> _Granted:
    """Return this node's GPUs: from the device mask (set for this task, or by the user), a list, or
    a number.

    ``SLURM_JOB_GPUS`` counts only outside of a step, where it lists GPUs of the job, perhaps on
    another node.
    """
    own_list = "SLURM_STEP_GPUS" if in_step else "SLURM_JOB_GPUS"
    is_in_job = any(
        name in environ
        for name in (own_list, "SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
    )
    mask = next((name for name in _MASKS if name in environ), None) if is_in_job else None
    ids = _split_ids(environ[own_list]) if text(environ, own_list) is not None else ()
    count = number(environ, "SLURM_GPUS_ON_NODE", most=_MOST_GPUS)
    if mask is not None:
        value = environ[mask].strip()
        devices = () if value in HIDES_ALL else _split_ids(value)
        lost = tuple(_unused_list(environ, own_list, len(ids), len(devices)))
        if count is not None and count != len(devices):
            lost += found.lost("SLURM_GPUS_ON_NODE", "the mask decides")
        found.add("slots of this node", len(devices), mask, *lost)
        own_word = len(ids) or count
        return _Granted(
            count=len(devices), devices=devices if own_word in {None, len(devices)} else None
        )
    if ids:
        # Physical indices. With device cgroups a mask would have other ones.
        found.add("slots of this node", len(ids), own_list)
        return _Granted(count=len(ids))
    if count is not None:
        found.add("slots of this node", count, "SLURM_GPUS_ON_NODE")
        return _Granted(count=count)
    return _Granted()


def _asks_for_gpus(environ: Environ, suffix: str) -> bool:
    """Return whether a job or component has GPUs, so that its number of tasks is not the number of
    workers."""
    of_node = suffix in {"", "_HET_GROUP_0"} and (
        "SLURM_GPUS_ON_NODE" in environ or "SLURM_JOB_GPUS" in environ
    )
    return of_node or any(f"{request}{suffix}" in environ for request in _REQUESTS)


def _gpus_of_hosts(
    environ: Environ, suffix: str, tasks: list[int] | None, nodes: int, found: Origins
) -> list[int | None]:
    """Return the GPUs of each host of a job or component, as far as the request determines them.
    Raises ConfigError."""
    name = f"SLURM_GPUS_PER_NODE{suffix}"
    if (per_node := _typed_count(environ, name)) is not None:
        return _add_slots(found, name, [per_node] * nodes)
    name = f"SLURM_GPUS_PER_TASK{suffix}"
    per_task = _typed_count(environ, name)
    if per_task is None:
        name = f"SLURM_TRES_PER_TASK{suffix}"
        per_task = _gpus_of_tres(environ, name)
    if per_task is not None and tasks is not None:
        return _add_slots(found, name, [per_task * count for count in tasks])
    name = f"SLURM_NTASKS_PER_GPU{suffix}"
    tasks_per_gpu = number(environ, name, least=1, most=_MOST_GPUS)
    if (
        tasks_per_gpu is not None
        and tasks is not None
        and not any(count % tasks_per_gpu for count in tasks)
    ):
        return _add_slots(found, name, [count // tasks_per_gpu for count in tasks])
    name = f"SLURM_GPUS{suffix}"
    total = _typed_count(environ, name)
    if total is not None and nodes == 1:
        return _add_slots(found, name, [total])
    return [None] * nodes


def _job_allocation(environ: Environ) -> Allocation:
    """Return the nodes of the whole job, which this launcher starts."""
    found = Origins(environ)
    components = _read_components(environ)
    nodes = [each for component in components for each in component.nodes]
    lists = [f"SLURM_JOB_NODELIST{component.suffix}" for component in components]
    # The script of an sbatch within a step inherits that step's variables.
    lost = found.lost(
        "SLURM_STEP_NODELIST", "the shell's own, or left over from the step that submitted this job"
    )
    found.add("hosts", ",".join(environ[each].strip() for each in lists), ", ".join(lists), *lost)
    here = text(environ, "SLURMD_NODENAME")
    node = nodes.index(here) if here in nodes and nodes.count(here) == 1 else None
    if node is not None:
        found.add(
            "node rank",
            node,
            "SLURMD_NODENAME",
            *found.lost("SLURM_NODEID", "0 in every batch script"),
        )
    hosts: list[Host] = []
    notes: list[str] = []
    for component in components:
        gpus = _gpus_of_hosts(
            environ, component.suffix, component.tasks, len(component.nodes), found
        )
        slots, unit = _slots_of_hosts(environ, component, gpus, found, notes)
        tasks: list[int] | list[None] = [None] * len(component.nodes)
        if component.tasks is not None and _asked_for_tasks(environ, component):
            tasks = component.tasks
        hosts += [
            Host(name=n, slots=s, unit=unit, tasks=t)
            for n, s, t in zip(component.nodes, slots, tasks, strict=True)
        ]
    if node is not None:
        hosts[node] = _granted_here(environ, found, in_step=False).on(hosts[node])
    return Allocation(
        source=name,
        hosts=tuple(hosts),
        part="all",
        node_rank=node,
        cpus=number(environ, "SLURM_CPUS_ON_NODE", least=1),
        job_id=_job_name(environ),
        origins=found.all(),
        notes=tuple(notes),
    )


def _read_components(environ: Environ) -> list[_Component]:
    """Return the components of a heterogeneous job, or the job as a single one.

    Raises IncompleteError if a list of nodes is missing.
    """
    size = number(environ, "SLURM_HET_SIZE", least=1, most=_MOST_COMPONENTS)
    if size is None:
        if text(environ, "SLURM_JOB_NODELIST") is None:
            several = is_several(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
            why = f"{shown(environ, 'SLURM_JOB_ID')}, but SLURM_JOB_NODELIST is not set"
            raise IncompleteError(why, of_several=several)
        return [_read_component(environ, "", "SLURM_JOB_NUM_NODES")]
    suffixes = [f"_HET_GROUP_{group}" for group in range(size)]
    for suffix in suffixes:
        if text(environ, f"SLURM_JOB_NODELIST{suffix}") is None:
            why = f"{shown(environ, 'SLURM_HET_SIZE')}, but SLURM_JOB_NODELIST{suffix} is not set"
            raise IncompleteError(why, of_several=size > 1)
    return [_read_component(environ, suffix, f"SLURM_JOB_NUM_NODES{suffix}") for suffix in suffixes]


class _Component(Record):
    """A job, or one component of a heterogeneous job."""

    suffix: str
    nodes: list[str]
    tasks: list[int] | None


def _read_component(environ: Environ, suffix: str, size_name: str) -> _Component:
    list_name, tasks_name = f"SLURM_JOB_NODELIST{suffix}", f"SLURM_TASKS_PER_NODE{suffix}"
    nodes = _nodes_of(environ, list_name)
    declared = number(environ, size_name, least=1)
    if declared is not None and declared != len(nodes):
        raise contradiction_error(environ, list_name, size_name, f"the list has {len(nodes)}")
    tasks = _counts_of(environ, tasks_name)
    if tasks is not None and len(tasks) != len(nodes):
        raise contradiction_error(
            environ, tasks_name, list_name, f"{len(tasks)} counts for {counted(len(nodes), 'node')}"
        )
    return _Component(suffix=suffix, nodes=nodes, tasks=tasks)


def _nodes_of(environ: Environ, variable: str) -> list[str]:
    return expand_nodelist(environ[variable], where=variable)


def _counts_of(environ: Environ, variable: str) -> list[int] | None:
    """Return the numbers in ``2(x3),1`` as 2, 2, 2, 1; None if the variable is unset. Raises
    ConfigError for another form."""
    value = text(environ, variable)
    return None if value is None else list(parse_counts(value, where=variable))


def _slots_of_hosts(
    environ: Environ,
    component: _Component,
    gpus: list[int | None],
    found: Origins,
    notes: list[str],
) -> tuple[list[int | None], Unit]:
    """Return the slots of hosts: their GPUs, or the requested tasks if no GPUs are known. Adds a
    note if they differ."""
    by = _asked_for_tasks(environ, component)
    if by is None or component.tasks is None or max(component.tasks) == 1:
        return gpus, "gpus"
    if all(each is None for each in gpus):
        if _asks_for_gpus(environ, component.suffix):
            return gpus, "gpus"
        counts = f"SLURM_TASKS_PER_NODE{component.suffix}"
        found.add("slots", environ[counts].strip(), counts)
        return list(component.tasks), "workers"
    if gpus != component.tasks:
        notes.append(
            f"distlaunch starts a worker for each GPU, although {shown(environ, by)}; use "
            f"{Opt.PROCS_PER_NODE('N')} {Opt.DEVICE('cuda')} for N on each node"
        )
    return gpus, "gpus"


def _asked_for_tasks(environ: Environ, component: _Component) -> str | None:
    """Return the variable by which a number of tasks was requested; None without such a request.

    In that case SLURM_TASKS_PER_NODE is how many tasks would fit: 64 on an exclusive node of 64
    CPUs.
    """
    asked = [
        f"{each}{component.suffix}"
        for each in ("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS")
    ]
    return next((each for each in asked if text(environ, each) is not None), None)


def _job_name(environ: Environ, step: str | None = None) -> str | None:
    """Return the name of a job or step as in squeue: ``123``, ``123_4`` of an array, ``123.0``;
    None without an id.

    ``-r1`` is appended after the first requeue. All launchers of a step get the same name.
    Components of a heterogeneous job have job ids of their own.
    """
    name = text(environ, _shared_id_variable(environ))
    array, task = text(environ, "SLURM_ARRAY_JOB_ID"), text(environ, "SLURM_ARRAY_TASK_ID")
    if array is not None and task is not None:
        name = f"{array}_{task}"
    if name is None:
        return None
    if step is not None:
        name += f".{step}"
    turn = text(environ, "SLURM_RESTART_COUNT")
    if turn is not None and turn.isdecimal() and turn.strip("0"):
        name += f"-r{turn}"
    return job_id(name)


def _shared_id_variable(environ: Environ) -> str:
    """Return the variable whose value all components of a heterogeneous job share."""
    return (
        "SLURM_JOB_ID_HET_GROUP_0"
        if text(environ, "SLURM_JOB_ID_HET_GROUP_0") is not None
        else "SLURM_JOB_ID"
    )


def _step_allocation(environ: Environ, nodes: list[str]) -> Allocation:
    """Return the nodes of this step, in which srun has started several launchers.

    Raises IncompleteError or ConfigError if variables are missing or contradict each other.
    """
    found = Origins(environ)
    declared = number(environ, "SLURM_STEP_NUM_NODES", least=1)
    if declared is not None and declared != len(nodes):
        raise contradiction_error(
            environ, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", f"the list has {len(nodes)}"
        )
    nodes, tasks = _sort_by_component(environ, nodes, _read_step_tasks(environ, len(nodes)))
    several = sum(tasks) > 1
    node = needed(environ, "SLURM_NODEID", number, "SLURM_STEP_NODELIST", of_several=several)
    local = needed(environ, "SLURM_LOCALID", number, "SLURM_STEP_NODELIST", of_several=several)
    rank = needed(
        environ, "SLURM_PROCID", number, "SLURM_STEP_NODELIST", of_several=several, most=_MOST_TASKS
    )
    if node >= len(nodes):
        raise contradiction_error(
            environ,
            "SLURM_NODEID",
            "SLURM_STEP_NODELIST",
            f"nodes are numbered to {len(nodes) - 1}",
        )
    if local >= tasks[node]:
        why = f"{nodes[node]} has {counted(tasks[node], 'task')}"
        raise contradiction_error(environ, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", why)
    if rank >= sum(tasks):
        raise contradiction_error(
            environ,
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            f"there are {counted(sum(tasks), 'task')}",
        )
    here = text(environ, "SLURMD_NODENAME")
    if here is not None and here in nodes and nodes[node] != here and nodes.count(here) == 1:
        raise contradiction_error(
            environ, "SLURM_NODEID", "SLURMD_NODENAME", f"node {node} of the step is {nodes[node]}"
        )
    lost = (
        *found.lost("SLURM_JOB_NODELIST", "the whole job's"),
        *found.lost("SLURM_NODELIST", "the whole job's"),
    )
    found.add("hosts", environ["SLURM_STEP_NODELIST"].strip(), "SLURM_STEP_NODELIST", *lost)
    found.add("node rank", node, "SLURM_NODEID")
    a_task_each = max(tasks) == 1
    counts = (
        "SLURM_STEP_TASKS_PER_NODE"
        if "SLURM_STEP_TASKS_PER_NODE" in environ
        else "SLURM_STEP_NUM_TASKS"
    )
    job_tasks = found.lost("SLURM_NTASKS_PER_NODE", "the job's request, not the step's")
    if a_task_each:
        found.add("part", "one launcher a node: a task each", counts, *job_tasks)
        own = _granted_here(environ, found, in_step=True)
        hosts = tuple(
            own.on(Host(name=each)) if i == node else Host(name=each)
            for i, each in enumerate(nodes)
        )
    else:
        found.add("part", "one launcher a worker: several tasks a node", counts, *job_tasks)
        found.add("slots", environ[counts].strip(), counts)
        hosts = tuple(
            Host(name=each, slots=slots) for each, slots in zip(nodes, tasks, strict=True)
        )
    return Allocation(
        source=name,
        hosts=hosts,
        part="node" if a_task_each else "worker",
        node_rank=node,
        local_rank=None if a_task_each else local,
        cpus=number(environ, "SLURM_CPUS_ON_NODE", least=1),
        job_id=_job_name(environ, step=text(environ, "SLURM_STEP_ID")),
        number=_read_job_number(environ),
        origins=found.all(),
        notes=(
            *_smaller_step_note(environ, nodes),
            *_terminal_note(environ, sum(tasks)),
            *_renumbering_note(rank, tasks, node, local),
        ),
    )


def _sort_by_component(
    environ: Environ, nodes: list[str], tasks: list[int]
) -> tuple[list[str], list[int]]:
    """Return nodes and tasks of a heterogeneous step by component, the order of NODEID and PROCID.

    The step's own list is sorted by name over all components. Other steps, and odd lists, stay as
    they are.
    """
    size = number(environ, "SLURM_HET_SIZE", least=1, most=_MOST_COMPONENTS) or 0
    lists = [f"SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in range(size)]
    if not all(text(environ, each) is not None for each in lists):
        return nodes, tasks
    in_step = dict(zip(nodes, tasks, strict=True))
    ordered = [node for each in lists for node in _nodes_of(environ, each) if node in in_step]
    if len(in_step) != len(nodes) or sorted(ordered) != sorted(nodes):
        return nodes, tasks
    return ordered, [in_step[node] for node in ordered]


def _read_step_tasks(environ: Environ, nodes: int) -> list[int]:
    """Return the number of tasks on each node of the step. Raises IncompleteError if it is not
    known."""
    total = number(environ, "SLURM_STEP_NUM_TASKS", least=1, most=_MOST_TASKS)
    tasks = _counts_of(environ, "SLURM_STEP_TASKS_PER_NODE")
    if tasks is None:
        if total == nodes:
            return [1] * nodes
        if total is not None and nodes == 1:
            return [total]
        raise IncompleteError(
            f"{shown(environ, 'SLURM_STEP_NODELIST')}, but not SLURM_STEP_TASKS_PER_NODE: the node "
            "of each task is not known",
            of_several=nodes > 1 or (total or 1) > 1,
        )
    if len(tasks) != nodes:
        why = f"{len(tasks)} counts for {counted(nodes, 'node')}"
        raise contradiction_error(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", why)
    if total is not None and sum(tasks) != total:
        raise contradiction_error(
            environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", f"together {sum(tasks)}"
        )
    return tasks


def _read_job_number(environ: Environ) -> int | None:
    found = text(environ, _shared_id_variable(environ)) or ""
    return int(found) if found.isascii() and found.isdecimal() and len(found) < 19 else None


def _smaller_step_note(environ: Environ, nodes: list[str]) -> tuple[str, ...]:
    job = text(environ, "SLURM_JOB_NUM_NODES")
    if (
        job is None
        or not job.isdecimal()
        or not job.isascii()
        or len(job) > 9
        or int(job) <= len(nodes)
    ):
        return ()
    which = f" ({nodes[0]})" if len(nodes) == 1 else ""
    return (
        (
            f"this step has {len(nodes)} of the job's {int(job)} nodes{which}; srun -N {int(job)} "
            "uses all of them"
        ),
    )


def _terminal_note(environ: Environ, tasks: int) -> tuple[str, ...]:
    """Return a note if this may be a shell of ``srun --pty``, where srun starts no launcher for the
    step's other tasks.

    Steps in such a shell inherit SLURM_PTY_PORT, so the launcher may also be in such a step.
    """
    if "SLURM_PTY_PORT" not in environ or tasks == 1:
        return ()
    note = (
        "if this is a shell of srun --pty (SLURM_PTY_PORT is set), its launcher is the only "
        f"one of {tasks} tasks"
    )
    return (f"{note}: start it with srun, or ask for the shell with salloc",)


def _renumbering_note(rank: int, tasks: list[int], node: int, local: int) -> tuple[str, ...]:
    ours = sum(tasks[:node]) + local
    if max(tasks) == 1 or ours == rank:
        return ()
    return (
        (
            f"ranks are numbered node by node: SLURM_PROCID {rank} is rank {ours} (srun -m block "
            "numbers in the same way)"
        ),
    )


def _split_ids(value: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in value.split(",") if entry.strip())


def _unused_list(environ: Environ, name: str, number_of_ids: int, number_in_mask: int) -> list[str]:
    return (
        [f"{shown(environ, name)}: the mask decides"]
        if number_of_ids not in {0, number_in_mask}
        else []
    )


def _typed_count(environ: Environ, name: str) -> int | None:
    """Return the number in ``4``, ``a100:4``, ``volta:3,kepler:1`` (4); None if the variable is
    unset. Raises ConfigError."""
    value = text(environ, name)
    if value is None:
        return None
    total = 0
    for entry in value.split(","):
        count = entry.rpartition(":")[2].strip()
        if not (count.isascii() and count.isdecimal() and len(count) < 9):
            raise ConfigError(
                f"{shown(environ, name)}: expected a number of GPUs, as in 4, a100:4 or "
                "volta:3,kepler:1",
                hint=ignore_hint(),
            )
        total += int(count)
    if total > _MOST_GPUS:
        raise ConfigError(
            f"{shown(environ, name)}: no node has more than {_MOST_GPUS} GPUs", hint=ignore_hint()
        )
    return total


def _add_slots(found: Origins, name: str, counts: list[int]) -> list[int | None]:
    found.add("slots", ",".join(str(count) for count in dict.fromkeys(counts)), name)
    return [count or None for count in counts]


def _gpus_of_tres(environ: Environ, name: str) -> int | None:
    """Return the number of GPUs in ``cpu=4,gres/gpu:a100=2`` or ``gres/gpu:2``, if it has any.
    Raises ConfigError."""
    total = None
    for entry in (text(environ, name) or "").split(","):
        kind = entry.strip().replace("gres:", "gres/").removeprefix("gres/")
        if entry.strip().startswith("gres") and kind.startswith("gpu"):
            count = kind.replace("=", ":").rpartition(":")[2]
            if kind == "gpu":
                count = "1"
            if not (count.isascii() and count.isdecimal() and len(count) < 5):
                raise ConfigError(
                    f"{shown(environ, name)}: expected GPUs as in gres/gpu=2", hint=ignore_hint()
                )
            total = (total or 0) + int(count)
    return total
