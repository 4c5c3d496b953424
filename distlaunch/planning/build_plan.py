"""Make the plan of an attempt from its topology. No I/O.

``build_plan`` makes the plan; ``bind`` adds the values of the attempt, such as the master port. The
plan includes the variables that every worker gets with any backend.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.plan import LaunchPlan, WorkerPlan
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.run_files import SETUP
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.model.topology import CpuInventory, Node, Topology
from distlaunch.core.model.variables import BACKEND_OPTIONS
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.cpu_binding import bind_cpus, pinned_note, threads_per_worker
from distlaunch.planning.environment import (
    base_environment,
    check_length,
    given_environment,
    option_of,
    unless_set,
)
from distlaunch.planning.facts import Facts
from distlaunch.planning.master_address import planned_master
from distlaunch.planning.train_options import LOCAL_RANK_TOO, TrainOptions, check_hang_action

if TYPE_CHECKING:
    from distlaunch.planning.master_address import MasterChoice

_SETUP = (
    'eval "$1" || { code=$?; echo "distlaunch: {SETUP} failed with exit code $code" >&2; exit '
    '"$code"; }; shift; '
    'if [ "${RANK:-0}" = 0 ] && [ -n "${VIRTUAL_ENV:-}" ]; then case "$1" in "$VIRTUAL_ENV"/*) ;; '
    "/*) "
    'echo "distlaunch: {SETUP} activates $VIRTUAL_ENV, but the workers run $1: {PYTHON3} '
    'takes its own" >&2;; '
    "esac; fi; "
    '[ -z "${DISTLAUNCH_BOOT:-}" ] || export '
    'PYTHONPATH="$DISTLAUNCH_BOOT${PYTHONPATH:+:$PYTHONPATH}"; '
    'exec "$@"'
)
"""The shell script that runs the setup command, then the worker. Options replace ``{SETUP}`` and
``{PYTHON3}``."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_LEAST_COLUMNS = 20
_DEFAULTS: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""Variables that are set only if neither environment, user nor backend sets them. Without
PYTHONUNBUFFERED the last lines before a crash are lost."""
_OF_A_PLAIN_WORKER: Mapping[str, str] = {"PYTHONFAULTHANDLER": "1"}
"""The same for a worker without bootstrap. The bootstrap turns faulthandler on itself, and only in
the worker."""


class CpuShare(Record):
    """The CPUs that all workers of a node have together."""

    cpus: CpuInventory
    granted: int | None
    """How many of these CPUs a scheduler grants, perhaps without enforcing it."""


def build_plan(
    options: TrainOptions,
    facts: Facts,
    topology: Topology,
    backend: PlannedBackend,
    *,
    job_id: str,
    run_dir: str,
    local: bool = True,
    base: Mapping[str, str] | None = None,
    shares: Sequence[CpuShare] | None = None,
    only: int | None = None,
) -> LaunchPlan:
    """Return the plan of a job, without the values that ``bind`` adds for each attempt.

    ``local``: this machine is one of the nodes; otherwise script, directory and interpreter need
    not exist here. ``base``: the environment that workers inherit, by default the launcher's.
    ``shares``: the CPUs of each node by rank, from a survey. ``only``: plan only the workers of the
    node with this rank. Raises ConfigError for everything that would keep workers from starting.
    """
    dialect = options.dialect
    if backend.ipv4_only and ":" in (options.master_addr or ""):
        raise UsageError(
            f"{Opt.MASTER_ADDR(printable(options.master_addr or ''))}: {backend.ipv4_only}"
        )
    backend.check(topology)
    check_hang_action(options)
    base = base_environment(facts) if base is None else base
    given = given_environment(options, facts)
    for name in sorted(given.keys() & _names_set_per_worker(topology, backend)) if given else ():
        raise ConfigError(
            f"{option_of(name, options)}: {Opt.BACKEND(backend.name)} sets {name} for each worker",
            hint="leave it out, or use another backend",
        )
    for name, value in given.items():
        check_length(name, value, option_of(name, options))
    workdir = working_directory(options, facts, local=local)
    job = job_variables(
        topology,
        job_id=job_id,
        run_id=dialect.run_id or job_id,
        role=dialect.role,
        max_restarts=options.max_restarts,
        run_dir=run_dir,
        backend=backend,
    )
    python = _checked_interpreter(options, facts) if local else options.python or facts.python
    target = command_target(options, facts, workdir, local=local)
    if facts.script_file is not None:
        target = os.path.join(run_dir, facts.script_file)
    argv = command_line(options, python, target, backend)
    preload = preloaded_modules(options)
    # With several workers, the notice says which one holds up the others.
    hang_notice_s = (
        options.hang_notice if options.hang_timeout is None and topology.world_size != 1 else None
    )
    watched = options.hang_timeout is not None or hang_notice_s is not None
    wanted = bool(preload or watched) and not options.no_python
    bootstrap: Literal["", "direct", "setup"] = (
        "" if not wanted else "setup" if options.setup else "direct"
    )
    columns = _terminal_variables(topology, facts.columns, in_front=dialect.prefix_columns)
    of_here = local and shares is None
    own_notes = (
        (pinned_note(facts.cpus), interpreter_note(options, facts.environ, facts.python))
        if of_here
        else ()
    )
    of_backend = backend.job_variables(topology)
    unwanted = [
        name
        for name in backend.unwanted()
        if name in base and name not in of_backend and name not in given
    ]
    base = (
        {name: value for name, value in base.items() if name not in unwanted} if unwanted else base
    )
    for name, value in {**job, **of_backend}.items():
        check_length(name, value, f"{name}, which {Opt.BACKEND(backend.name)} sets")
    left_out = (_left_out_note(unwanted, backend.name),) if unwanted else ()
    notes = [note.text for note in topology.notes]
    notes += [*backend.notes, *backend.notes_on(topology), *left_out, *own_notes]
    crashes = {} if wanted or options.no_python else _OF_A_PLAIN_WORKER
    defaults = unless_set(
        {**_DEFAULTS, **crashes, **columns, **backend.default_variables(topology)}, base, given
    )
    bars = (
        _bar_variables(topology, facts.columns, in_front=dialect.prefix_columns)
        if _shows_bars(options, facts)
        else {}
    )
    bars = unless_set(bars, base, given)
    env = {**defaults, **job, **of_backend}
    master = planned_master(options, topology)
    threads = not any("OMP_NUM_THREADS" in layer for layer in (base, given))
    plan = LaunchPlan(
        job_id=job_id,
        backend=backend.name,
        nodes=topology.nodes,
        workers=(),
        argv=argv,
        workdir=workdir,
        env=env,
        base_env=base,
        given_env=given,
        run_dir=run_dir,
        master_addr=master.address,
        wanted_port=master.port or 0,
        source=topology.source,
        device=topology.device,
        bounds=topology.bounds,
        spares=topology.spares,
        signal_group=options.no_python,
        preload=preload,
        hang_timeout_s=options.hang_timeout,
        hang_action=options.hang_action,
        hang_notice_s=hang_notice_s,
        max_restarts=options.max_restarts,
        restart_delay_s=options.restart_delay,
        bootstrap=bootstrap,
        layout=replace(dialect.layout, log_bytes=options.log_max_size or 0),
        repeated=unless_set(backend.repeated(), base, given),
        store=backend.store,
        worker_ports=backend.worker_ports,
        attempt_files=_unclaimed_files(backend.attempt_files(topology), base, given),
        shared_memory=backend.shared_memory,
        notes=tuple(filter(None, notes)),
        warnings=topology.warnings,
    )
    if plan.worker_ports and plan.world_size:
        from distlaunch.planning.worker_addresses import check_cluster

        check_cluster(plan, backend)
    # The error files of the first attempt are set at once: building 131,072 workers a second time
    # takes long.
    error_file = options.dialect.layout.error_files(run_dir, 0) if run_dir else None
    if shares is None:
        of_this = CpuShare(cpus=facts.cpus, granted=topology.cpus)
        of_node = {} if topology.here is None else {topology.here: of_this}
    else:
        of_node = dict(enumerate(shares))
    workers = tuple(
        _plan_workers(
            options,
            topology,
            backend,
            argv,
            of_node,
            threads=threads,
            error_file=error_file,
            only=only,
            first_local_rank=0 if facts.outer is None else facts.outer.local_rank,
        )
    )
    if bars and workers and workers[0].rank == 0 and facts.outer is None:
        workers = (replace(workers[0], env={**bars, **workers[0].env}), *workers[1:])
    plan = _with_attempt(plan, workers, attempt=0, master_port=master.port)
    if facts.outer is None:
        return plan
    from distlaunch.planning.outer_launcher import as_outer_worker

    return as_outer_worker(plan, options, facts, facts.outer)


def bind(
    plan: LaunchPlan, *, attempt: int, master_port: int | None, master: MasterChoice | None = None
) -> LaunchPlan:
    """Return the plan with the values of one attempt: its number, the master port, the error files.

    ``master`` has the master address and the variables that nodes need to use it; None if the job
    has one node.
    """
    if master is not None:
        nodes = tuple(
            replace(node, env={**node.env, **more, **_repeated_variables(plan, more)})
            if (more := master.env.get(rank))
            else node
            for rank, node in enumerate(plan.nodes)
        )
        plan = replace(plan, master_addr=master.address, nodes=nodes)
    error_file = plan.layout.error_files(plan.run_dir, attempt)
    workers = plan.workers
    if any(worker.env.get(_ERROR_FILE) != error_file(worker.rank) for worker in workers[:1]):
        workers = tuple(
            replace(worker, env={**worker.env, _ERROR_FILE: error_file(worker.rank)})
            for worker in workers
        )
    return _with_attempt(plan, workers, attempt=attempt, master_port=master_port)


def preloaded_modules(options: TrainOptions) -> tuple[str, ...]:
    """Return the modules of ``--preload``, perhaps none.

    Raises ConfigError for a name that no module can have, and if the workers cannot be forked.
    """
    if options.preload is None:
        return ()
    modules = tuple(name.strip() for name in options.preload.split(","))
    for name in modules:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"preload {quoted(options.preload)}: {quoted(name)} is not the name of a module"
            )
    if options.no_python:
        raise ConfigError(
            f"{Opt.PRELOAD} and {Opt.NO_PYTHON} exclude each other"
            if Opt.NO_PYTHON.exists
            else f"{Opt.PRELOAD}: the command is no Python with script or module",
            hint="only Python can be forked with modules",
        )
    if options.python is not None:
        raise ConfigError(
            f"{Opt.PRELOAD} and {options.named('python')} exclude each other",
            hint="run distlaunch itself with the interpreter of the workers",
        )
    return modules


def working_directory(options: TrainOptions, facts: Facts, *, local: bool) -> str:
    """Return the workers' directory. Raises ConfigError if ``local`` and it does not exist."""
    if options.workdir is None:
        return facts.cwd
    path = os.path.join(facts.cwd, options.workdir)
    kind = facts.paths[path] if local else "directory"
    if kind != "directory":
        raise ConfigError(
            f"{Opt.WORKDIR(printable(options.workdir))}: {_path_problem(kind, 'directory')}"
        )
    return path


def command_target(options: TrainOptions, facts: Facts, workdir: str, *, local: bool) -> str:
    """Return the path of a script, the name of a module, or a program.

    Raises UsageError if the options name none, and ConfigError if ``local`` and the file does not
    exist.
    """
    if options.script is None:
        raise UsageError(
            f"{Opt.SCRIPT} is missing", hint=f"distlaunch train [OPTIONS] {Opt.SCRIPT} [ARGS]..."
        )
    if options.no_python and not options.module:
        within = (
            os.path.join(workdir, options.script) if os.sep in options.script else options.script
        )
        return _program_path(options.script, facts, workdir) if local else within
    if options.module or not local or facts.script_file is not None:
        return options.script
    return _script_path(options.script, facts, workdir)


def command_line(
    options: TrainOptions, python: str, target: str, backend: PlannedBackend
) -> tuple[str, ...]:
    """Return the workers' command line, without arguments that differ by rank."""
    program = (
        (python, "-m", target)
        if options.module
        else (target,)
        if options.no_python
        else (python, target)
    )
    argv = (*program, *backend.script_words(), *options.script_args)
    if options.setup is not None:
        script = _SETUP.replace("{SETUP}", str(Opt.SETUP))
        script = script.replace("{PYTHON3}", Opt.PYTHON("python3"))
        argv = ("bash", "-l", "-c", script, SETUP, options.setup, *argv)
    return argv


def script_paths(script: str, facts_cwd: str, workdir: str) -> tuple[str, ...]:
    """Return the paths at which a script may be, the preferred one first: in the workers'
    directory, in the launcher's."""
    return tuple(dict.fromkeys(os.path.join(base, script) for base in (workdir, facts_cwd)))


def interpreter_note(options: TrainOptions, environ: Mapping[str, str], python: str) -> str | None:
    """Return a note if the workers do not run the interpreter of the active environment.

    ``python`` is the launcher's interpreter.
    """
    if options.python or options.no_python:
        return None
    prefix = other_environment(environ, python)
    if prefix is None:
        return None
    active = os.path.join(prefix, "bin", "python")
    return (
        f"workers run {python}, not that of the active environment; to use that: "
        f"{Opt.PYTHON}={active}"
    )


def other_environment(environ: Mapping[str, str], python: str) -> str | None:
    """Return the directory of the active environment (VIRTUAL_ENV, CONDA_PREFIX) if ``python`` is
    not in it; None if it is or there is none."""
    prefix = next(
        (environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)), None
    )
    return None if prefix is None or python.startswith(os.path.join(prefix, "")) else prefix


def job_variables(
    topology: Topology,
    *,
    job_id: str,
    run_id: str,
    role: str,
    max_restarts: int,
    run_dir: str,
    backend: PlannedBackend,
) -> dict[str, str]:
    """Return the variables that are the same for all workers and all attempts, with any backend.
    Empty values are left out."""
    world = topology.world_size
    sizes = {} if world is None else {"WORLD_SIZE": str(world), "ROLE_WORLD_SIZE": str(world)}
    ids = {
        "TORCHELASTIC_RUN_ID": run_id,
        "DISTLAUNCH_JOB_ID": job_id,
        "DISTLAUNCH_RUN_DIR": run_dir,
    }
    if backend.chosen:
        import json

        ids[BACKEND_OPTIONS] = json.dumps(dict(backend.chosen), separators=(",", ":"))
    return {
        **sizes,
        "GROUP_WORLD_SIZE": str(len(topology.nodes)),
        "ROLE_NAME": role,
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "DISTLAUNCH_BACKEND": backend.name,
        **{name: value for name, value in ids.items() if value},
    }


def _terminal_variables(
    topology: Topology, columns: int | None, *, in_front: int | None = None
) -> dict[str, str]:
    """Return COLUMNS for the workers: the terminal's width without the prefix of lines. Workers
    write to a pipe.

    ``in_front`` is the width of the prefix; None for a rank in brackets.
    """
    if columns is None:
        return {}
    return {"COLUMNS": str(_remaining_columns(topology, columns, in_front))}


def _bar_variables(
    topology: Topology, columns: int | None, *, in_front: int | None = None
) -> dict[str, str]:
    """Return the variables that make rank 0 draw progress bars as on a terminal.

    rich reads TTY_COMPATIBLE and TTY_INTERACTIVE, tqdm TQDM_NCOLS: one column less than the width,
    since tqdm leaves the last column free only if it measures the width itself.
    """
    if columns is None:
        return {}
    room = _remaining_columns(topology, columns, in_front)
    return {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "TQDM_NCOLS": str(room - 1)}


def _attempt_variables(
    *, attempt: int, master_addr: str | None, master_port: int | None
) -> dict[str, str]:
    """Return the variables of an attempt that are known already."""
    variables = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "DISTLAUNCH_ATTEMPT": str(attempt)}
    if master_addr is not None:
        variables["MASTER_ADDR"] = master_addr
    if master_port is not None:
        variables["MASTER_PORT"] = str(master_port)
    return variables


def node_variables(topology: Topology, node_rank: int) -> dict[str, str]:
    """Return the variables that are the same for all workers of a node, with any backend."""
    node = topology.nodes[node_rank]
    variables = {
        "LOCAL_WORLD_SIZE": str(node.slots),
        "NODE_RANK": str(node_rank),
        "GROUP_RANK": str(node_rank),
    }
    variables.update(dict.fromkeys(node.hidden, "-1"))  # an empty one counts as unset in ROCm
    return variables


def worker_variables(node: Node, local_rank: int, rank: int) -> dict[str, str]:
    """Return the variables of one worker that every backend needs, with its device mask."""
    number = str(rank)
    variables = {
        "RANK": number,
        "ROLE_RANK": number,
        "LOCAL_RANK": "0" if node.isolated else str(local_rank),
    }
    if node.mask_variable is not None:
        variables[node.mask_variable] = ",".join(node.masks[local_rank])
    return variables


def _names_set_per_worker(topology: Topology, backend: PlannedBackend) -> set[str]:
    """Return the names of the variables that the backend sets for each node or worker, if the
    number of workers is known."""
    if not topology.nodes or not topology.nodes[0].slots:
        return set()
    names = {*backend.node_variables(topology, 0), *backend.worker_variables(topology, 0, 0, 0)}
    if backend.worker_ports:
        from distlaunch.planning.worker_addresses import cluster_names

        names |= cluster_names(backend, topology.world_size or topology.nodes[0].slots)
    return names


def _checked_interpreter(options: TrainOptions, facts: Facts) -> str:
    if options.python is None:
        return facts.python
    if facts.programs.get(options.python) is None:
        raise ConfigError(f"{Opt.PYTHON(printable(options.python))}: no such executable")
    return options.python


def _left_out_note(names: Sequence[str], backend: str) -> str:
    several = len(names) > 1
    verb, them = (
        ("are set here and contradict", "them")
        if several
        else ("is set here and contradicts", "it")
    )
    note = f"{', '.join(names)} {verb} {Opt.BACKEND(backend)}: workers do not get {them}"
    return f"{note} ({Opt.ENV('NAME')} passes {'one' if several else 'it'} on)"


def _shows_bars(options: TrainOptions, facts: Facts) -> bool:
    """Return whether the console draws rank 0's progress bars in place on a terminal."""
    dumb = facts.environ.get("TERM") in ("dumb", "unknown")
    return (
        options.format != "jsonl"
        and options.dialect.shows_bars
        and not dumb
        and _output_shows_rank_0(options.output)
    )


def _output_shows_rank_0(output: str) -> bool:
    firsts = [part.partition("-")[0].strip() for part in output.split(",")]
    return output.strip() == "all" or any(first and not first.strip("0") for first in firsts)


def _unclaimed_files(files: Mapping[str, str], *layers: Mapping[str, str]) -> dict[str, str]:
    """Return the items of ``files`` (variable -> file) whose file no variable in ``layers`` names.

    A file may have an old and a new variable. If either is set in a layer, both are left out.
    """
    claimed = {file for name, file in files.items() if any(name in layer for layer in layers)}
    return {name: file for name, file in files.items() if file not in claimed}


def _plan_workers(
    options: TrainOptions,
    topology: Topology,
    backend: PlannedBackend,
    argv: tuple[str, ...],
    shares: Mapping[int, CpuShare],
    *,
    threads: bool,
    error_file: Callable[[int], str] | None,
    only: int | None,
    first_local_rank: int = 0,
) -> Iterator[WorkerPlan]:
    """Yield the workers in rank order, up to the first node of unknown size.

    ``shares`` has the CPUs of nodes by node rank. Workers of other nodes get neither CPUs nor
    threads.
    """
    rank = 0
    known: dict[object, list[tuple[tuple[int, ...] | None, dict[str, str]]]] = {}
    for node_rank, node in enumerate(topology.nodes):
        if node.slots is None:
            return
        if only is not None and node_rank != only:
            rank += node.slots
            continue
        shared = {
            **node_variables(topology, node_rank),
            **backend.node_variables(topology, node_rank),
        }
        share = shares.get(node_rank)
        key = share, node.slots, node.numa
        if key not in known:
            known[key] = _bind_workers(options, share, node, threads=threads)
        for local_rank, (cpus, more) in enumerate(known[key]):
            own = worker_variables(node, local_rank, rank)
            env = {
                **shared,
                **own,
                **backend.worker_variables(topology, node_rank, local_rank, rank),
                **more,
            }
            if error_file is not None:
                env[_ERROR_FILE] = error_file(rank)
            shown = first_local_rank + local_rank
            more_words = backend.worker_words(first_local_rank + int(own["LOCAL_RANK"]))
            words = _argv_of_worker(options, node.argv or argv, shown, more_words)
            yield WorkerPlan(
                rank=rank,
                local_rank=local_rank,
                node_rank=node_rank,
                env=env,
                cpus=cpus,
                argv=words,
            )
            rank += 1


def _bind_workers(
    options: TrainOptions, share: CpuShare | None, node: Node, *, threads: bool
) -> list[tuple[tuple[int, ...] | None, dict[str, str]]]:
    """Return the CPUs of each worker of a node, and the variables that follow from them."""
    slots = node.slots or 0
    if share is None:
        return [(None, {})] * slots
    near = [node.numa[index] if index < len(node.numa) else None for index in range(slots)]
    bound = bind_cpus(share.cpus, slots, mode=options.bind, gpu_numa=near)
    if not threads:
        return [(cpus, {}) for cpus in bound]
    counts = [
        threads_per_worker(share.cpus, slots, bound=cpus, granted=share.granted) for cpus in bound
    ]
    return [
        (cpus, {"OMP_NUM_THREADS": str(count)}) for cpus, count in zip(bound, counts, strict=True)
    ]


def _argv_of_worker(
    options: TrainOptions, argv: tuple[str, ...], local_rank: int, more: tuple[str, ...]
) -> tuple[str, ...] | None:
    """Return the command line of one worker; None if it is ``argv``.

    ``more`` are the backend's arguments for this worker. Raises ConfigError if the words differ
    between workers and modules are preloaded.
    """
    macro, first = options.dialect.rank_macro, len(argv) - len(options.script_args)
    replaced = macro is not None and any(macro in word for word in argv[first:])
    if not replaced and not more:
        return None
    if options.preload is not None:
        if replaced:
            why, hint = f"{macro} in the arguments of the script", LOCAL_RANK_TOO
        else:
            why = f"{more[0].partition('=')[0]} for each worker"
            hint = f"{Opt.OPT('local-rank=off')} leaves it out: {LOCAL_RANK_TOO}"
        raise ConfigError(f"{Opt.PRELOAD} and {why} exclude each other", hint=hint)
    words = (
        argv[first:]
        if macro is None
        else (word.replace(macro, str(local_rank)) for word in argv[first:])
    )
    return (*argv[:first], *more, *words)


def _with_attempt(
    plan: LaunchPlan, workers: tuple[WorkerPlan, ...], *, attempt: int, master_port: int | None
) -> LaunchPlan:
    """Return the plan with these workers and the variables of an attempt."""
    settled = _attempt_variables(
        attempt=attempt, master_addr=plan.master_addr, master_port=master_port
    )
    if plan.outer is not None:
        mine = () if "DISTLAUNCH_ATTEMPT" in plan.base_env else ("DISTLAUNCH_ATTEMPT",)
        settled = {name: settled[name] for name in mine}
    if plan.attempt_files and plan.run_dir:
        folder = plan.layout.attempt_dir(plan.run_dir, attempt)
        settled.update(
            {name: os.path.join(folder, file) for name, file in plan.attempt_files.items()}
        )
    settled.update(_repeated_variables(plan, settled))
    return replace(
        plan, attempt=attempt, master_port=master_port, env={**plan.env, **settled}, workers=workers
    )


def _repeated_variables(plan: LaunchPlan, settled: Mapping[str, str]) -> dict[str, str]:
    """Return the backend's variables that must equal one in ``settled``."""
    return {name: settled[of] for name, of in plan.repeated.items() if of in settled}


def _path_problem(kind: str, wanted: str) -> str:
    words = {"missing": "there is no such " + wanted, "unreadable": "not readable by this user"}
    return words.get(kind, f"is a {kind}, a {wanted} is needed")


def _program_path(name: str, facts: Facts, workdir: str) -> str:
    """Return the program as the workers execute it. Raise ConfigError if there is no such
    program."""
    found = facts.programs.get(name)
    if found is not None:
        return name if os.sep not in name else found
    if os.sep in name:
        kind = facts.paths.get(os.path.join(workdir, name), "missing")
        problem = "is not executable" if kind == "file" else _path_problem(kind, "file")
        raise ConfigError(
            f"{printable(name)}: {problem}",
            hint=f"chmod +x {printable(name)}" if kind == "file" else None,
        )
    raise ConfigError(f"{printable(name)}: no such command on PATH")


def _script_path(script: str, facts: Facts, workdir: str) -> str:
    """Return the path by which the workers open the script. Raise ConfigError if there is no such
    file."""
    paths = script_paths(script, facts.cwd, workdir)
    kinds = [facts.paths[path] for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind == "file":
            return (
                script
                if os.path.dirname(path) == os.path.dirname(os.path.join(workdir, script))
                else path
            )
    kind = next((kind for kind in kinds if kind != "missing"), "missing")
    if kind == "directory" and facts.paths.get(os.path.join(paths[0], "__main__.py")) == "file":
        return script
    hint = (
        f"looked in {' and '.join(os.path.dirname(path) for path in paths)}"
        if kind == "missing"
        else None
    )
    if kind == "missing" and os.path.basename(script).rstrip("0123456789.") == "python":
        hint = (
            f"leave it out: distlaunch runs {Opt.SCRIPT} with Python ({Opt.PYTHON} chooses which)"
        )
    raise ConfigError(f"{printable(script)}: {_path_problem(kind, 'file')}", hint=hint)


def _remaining_columns(topology: Topology, columns: int, in_front: int | None) -> int:
    if in_front is None:
        in_front = len(f"[{(topology.world_size or 1) - 1}] ")
    return max(_LEAST_COLUMNS, columns - in_front)
