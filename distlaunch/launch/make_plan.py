"""Read the facts of this machine once and make the plan."""

from __future__ import annotations

import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.backends.base import Backend, Requirement
from distlaunch.backends.option_files import check_files, configured_backend, read_named_file
from distlaunch.backends.registry import find_backend
from distlaunch.coordinator.runtime.run_directory import (
    LATEST,
    folder_name,
    free_path,
    log_base,
    new_job_id,
)
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.plan import LaunchPlan, OuterLauncher
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.run_files import STDOUT
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.topology import GpuInventory, Note, NoteKind, Topology
from distlaunch.core.model.variables import RANKS
from distlaunch.core.probe.cpus import probe_cpus
from distlaunch.planning.build_plan import build_plan, script_paths
from distlaunch.planning.clusters import select as systems
from distlaunch.planning.devices import NotTheseGpusError
from distlaunch.planning.environment import check_total
from distlaunch.planning.facts import Facts, PathKind, Surroundings
from distlaunch.planning.local_topology import local_topology, torchrun_topology
from distlaunch.planning.train_options import TorchrunOptions, TrainOptions

if TYPE_CHECKING:
    from distlaunch.launch.script_source import ScriptSource
    from distlaunch.planning.explain import Explanation
    from distlaunch.planning.joined_plan import JoinedPlanner
    from distlaunch.planning.node_source import Location
    from distlaunch.planning.surveyed_nodes import SurveyedPlanner

_DESCRIPTORS_PER_WORKER = (
    9  # at most, while it is being started; then 4, or 5 while stacks are taken
)
_DESCRIPTORS_OF_OUR_OWN = 64
_JOB_ID_BYTES = 100
_DATA = (".json", ".yaml", ".yml")
"""Python would run some data files without effect: JSON is an expression."""


def read_facts(
    options: TrainOptions, environ: Mapping[str, str], *, of_backend: Sequence[str] = ()
) -> Facts:
    """Read the facts that planning may need.

    ``of_backend`` are the paths of ``env_file`` that the backend added. Raises ConfigError, for
    example for an unreadable file.
    """
    cwd = _current_directory()
    outer = find_outer_launcher(options, environ)
    workdir = cwd if options.workdir is None else os.path.join(cwd, options.workdir)
    wanted = {workdir}
    programs: dict[str, str | None] = {}
    source = None
    if options.script is not None and not options.module:
        script_candidates = script_paths(options.script, cwd, workdir)
        source = _script_source(options.script, script_candidates)
        if source is not None and options.no_python:
            raise ConfigError(
                f"{printable(options.script)}: a program that is to be executed must be a file"
            )
        wanted |= {*script_candidates, os.path.join(script_candidates[0], "__main__.py")}
        if options.no_python:
            programs[options.script] = _find_program(options.script, workdir, environ)
    if options.python is not None:
        programs[options.python] = _find_program(options.python, workdir, environ)
    return Facts(
        environ=dict(environ),
        cwd=cwd,
        hostname=printable(socket.gethostname()) or "localhost",
        python=sys.executable,
        cpus=probe_cpus(topology=options.bind != "none"),
        gpus=_probe_needed_gpus(options, environ),
        columns=_terminal_width(),
        script_file=None if source is None else source.name,
        paths={path: _kind_of(path) for path in wanted},
        texts={
            path: read_named_file(
                path, printable(path) if path in of_backend else Opt.ENV_FILE(printable(path))
            )
            for path in options.env_file
        },
        programs=programs,
        surroundings=None if outer is not None else _surroundings(options, environ),
        outer=outer,
    )


def find_outer_launcher(options: TrainOptions, environ: Mapping[str, str]) -> OuterLauncher | None:
    """Return the launcher that started this process as one of its workers.

    Return None if there is none, or if --source is set, which names the source of the nodes.
    """
    if options.who_set("source") is not None and (
        "source" in options.given or not options.dialect.is_drop_in
    ):
        return None
    if not any(name in environ for name in RANKS):
        return None
    from distlaunch.core.probe.ancestors import ancestors
    from distlaunch.planning.outer_launcher import outer_launcher

    return outer_launcher(environ, ancestors())


def _script_source(script: str, script_candidates: Sequence[str]) -> ScriptSource | None:
    """Return the source of a SCRIPT that only the launcher can read (a pipe, stdin); None for a
    plain file."""
    special = any(
        path.startswith(("/dev/", "/proc/")) or not os.path.isfile(path)
        for path in script_candidates
    )
    if script != "-" and not special:
        return None
    from distlaunch.launch.script_source import find_source

    return find_source(script, script_candidates)


def is_started_by_script(options: TrainOptions, environ: Mapping[str, str]) -> bool:
    """Return whether the script of a worker has started this launcher.

    The inherited error file then belongs to that worker.
    """
    if (
        not any(name in environ for name in RANKS)
        or find_outer_launcher(options, environ) is not None
    ):
        return False
    from distlaunch.core.probe.ancestors import ancestors
    from distlaunch.planning.outer_launcher import is_below_a_worker

    return is_below_a_worker(ancestors())


def _surroundings(options: TrainOptions, environ: Mapping[str, str]) -> Surroundings | None:
    """Read what may name other nodes; None if nothing suggests other nodes.

    For ``distlaunch torchrun`` only its own options suggest them.
    """
    if isinstance(options, TorchrunOptions) and options.rendezvous is None:
        return None
    lists = (options.hosts, options.hostfile, options.discover, options.include, options.exclude)
    named = (*lists, options.node_rank, options.rendezvous)
    asked = options.explain or any(each is not None for each in named)
    if not asked and (
        options.source == "flags" or (options.source == "auto" and not systems.has_markers(environ))
    ):
        return None
    from distlaunch.launch.surroundings import read_surroundings

    return read_surroundings(options, environ)


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as exc:
        raise ConfigError(
            "the current directory no longer exists", hint="cd to one that does"
        ) from exc


def _terminal_width() -> int | None:
    try:
        return os.get_terminal_size(STDOUT).columns or None
    except OSError:
        return None


def _probe_needed_gpus(options: TrainOptions, environ: Mapping[str, str]) -> GpuInventory:
    """Return the GPUs of this machine; none if the options do not need them."""
    if not options.needs_gpus:
        return GpuInventory()
    from distlaunch.core.probe.gpus import probe_gpus

    return probe_gpus(environ=environ)


def _kind_of(path: str) -> PathKind:
    try:
        if os.path.isdir(path):
            return "directory"
        if not os.path.exists(path):
            return "missing"
    except ValueError:  # a NUL in the name
        return "missing"
    return "file" if os.access(path, os.R_OK) else "unreadable"


def _find_program(name: str, workdir: str, environ: Mapping[str, str]) -> str | None:
    if os.sep in name:
        path = os.path.join(workdir, name)
        return path if os.path.isfile(path) and os.access(path, os.X_OK) else None
    import shutil

    return shutil.which(name, path=environ.get("PATH"))


def _choose_job_id(options: TrainOptions, location: Location | None, topology: Topology) -> str:
    """Choose the job id, which names the run directory: the user's, the scheduler's, or a new one.

    Return "" if the coordinator of several launchers assigns it later. Raises ConfigError for an
    unusable --job-id.
    """
    if isinstance(options, TorchrunOptions):
        run_id = options.dialect.run_id or new_job_id(time.time(), os.urandom(3))
        return folder_name(run_id, os.urandom(4))
    if options.job_id is None:
        if location is not None and location.allocation.part != "all" and len(topology.nodes) > 1:
            shared = (
                location.allocation.job_id or ""
            )  # the coordinator assigns the job id at the start
            return f"job-{shared}" if shared == LATEST else shared
        if (
            _has_id_of_scheduler(options, location)
            and location is not None
            and location.allocation.job_id
        ):
            return location.allocation.job_id
        return new_job_id(time.time(), os.urandom(3))
    bad = next(
        (letter for letter in options.job_id if not (letter.isalnum() or letter in "._-:+@=,")),
        None,
    )
    unusable = (
        not options.job_id.strip(".")
        or options.job_id == LATEST
        or options.job_id.startswith(("-", "."))
    )
    if bad is not None or unusable or len(os.fsencode(options.job_id)) > _JOB_ID_BYTES:
        why = f"{bad!r} is not allowed" if bad else "not usable as a folder's name"
        raise ConfigError(
            f"{Opt.JOB_ID(repr(options.job_id))}: {why}",
            hint="letters, digits and ._-:+@=, (at most 100 bytes)",
        )
    return options.job_id


def _has_id_of_scheduler(options: TrainOptions, location: Location | None) -> bool:
    """Return whether the job is named after its Slurm job."""
    if options.job_id is not None or isinstance(options, TorchrunOptions) or location is None:
        return False
    return location.allocation.source == "slurm"


class Planned(Record):
    """A plan, what it was made from, and the planners for later attempts."""

    plan: LaunchPlan
    backend: Backend
    topology: Topology
    location: Location | None
    """The nodes; None if only this machine is known."""
    planner: SurveyedPlanner | None = None
    """Plans each attempt from surveys. None for a local job, or with a launcher on each node."""
    join: Callable[[], JoinedPlanner] | None = None
    """Returns the planner of a job with several launchers. Raises ConfigError."""
    id_of_scheduler: bool = False
    """A second job of the same batch script needs another name than the scheduler's job id."""
    explanation: Explanation | None
    source: ScriptSource | None = None
    """The SCRIPT that workers cannot open themselves."""


def make_plan(
    options: TrainOptions,
    environ: Mapping[str, str],
    *,
    location: Location | None = None,
    elsewhere: bool = False,
) -> Planned:
    """Return the plan of a job, and the objects that starting it needs. Nothing is started.

    ``location``: the nodes that the backend's own cluster (Ray) has assigned. ``elsewhere``: if
    this machine lacks the GPUs, plan for another one. Raises ConfigError for everything that can be
    known before the start and would prevent it.
    """
    if options.master_addr is not None:
        from distlaunch.planning.clusters.environment_reader import host_or_address

        host_or_address(
            options.master_addr,
            options.named("master_addr"),
            hint="use the name or address by which the other nodes reach node 0",
        )
    if options.interface is not None:
        from distlaunch.planning.interfaces import check_interface

        check_interface(options.interface, options.named("interface"))
    cwd = _current_directory()
    kind = find_backend(options.backend)
    _check_script(options, kind)
    found = kind.env_files(environ, cwd)
    options = replace(options, env_file=(*found, *options.env_file)) if found else options
    backend, told = configured_backend(kind, options, environ, cwd)
    typed = options
    options = backend.sized(options)
    facts = read_facts(options, environ, of_backend=found)
    lost: tuple[str, ...] = ()
    if facts.outer is not None:
        from distlaunch.planning.outer_launcher import check_options

        check_options(typed, backend, environ, facts.outer)
    else:
        location = location or backend.location(options, facts.hostname)
    if location is None:
        location, lost = _locate(options, facts)
    if facts.outer is not None:
        from distlaunch.planning.outer_launcher import single_worker_topology

        topology = single_worker_topology(options, facts, facts.outer)
    elif isinstance(options, TorchrunOptions):
        topology = torchrun_topology(options, facts)
        if location is not None:
            from distlaunch.planning.local_topology import add_other_nodes

            topology = add_other_nodes(topology, location.allocation, here=location.here or 0)
    else:
        facts, topology = _make_topology(location, options, facts, elsewhere=elsewhere)
    needed_descriptors(0 if topology.here is None else topology.nodes[topology.here].slots or 0)
    known = location if facts.outer is None else None
    job_id = _choose_job_id(options, known, topology)
    base = log_base(options.log_dir, environ) or "a temporary directory"
    run_dir = job_id and free_path(base, job_id)
    local = location is None or location.allocation.part != "all" or topology.here is not None
    plan = build_plan(
        options, facts, topology, backend, job_id=job_id, run_dir=run_dir, local=local
    )
    if local:
        check_total(plan.shared_env, plan.argv, os.sysconf("SC_ARG_MAX"))
    if local and (notes := _notes_on_script(backend, options, facts)):
        plan = replace(plan, notes=(*plan.notes, *notes))
    check_files(backend, plan.shared_env, plan.workdir, local=local, read_by_default=told)
    told += tuple(f"the workers get the variables of {printable(path)}" for path in found)
    if told:
        plan = replace(plan, notes=(*plan.notes, *told))
    if options.setup is None and local:  # --setup may change the interpreter
        if plan.preload:
            _check_preload_modules(plan, options)
        if options.module and plan.argv[0] == sys.executable:
            _check_script_module(plan, options)
    needed = backend.needed(plan.shared_env)
    if (
        local
        and options.setup is None
        and not options.no_python
        and any(each.demanded for each in needed)
    ):
        _check_requirements(backend.name, needed, plan, options)
    planner = explanation = None
    if (
        location is not None
        and location.allocation.part == "all"
        and not _is_all_here(options, topology)
    ):
        from distlaunch.planning.surveyed_nodes import SurveyedPlanner

        planner = SurveyedPlanner(
            options, facts, topology, location, backend, job_id=job_id, run_dir=run_dir
        )
        plan = replace(plan, notes=(*plan.notes, *_notes_on_open_values(options, topology)))
    join = None
    if (
        location is not None
        and location.allocation.part != "all"
        and not starts_all_workers(location, topology)
    ):

        def join() -> JoinedPlanner:
            from distlaunch.planning.joined_plan import JoinedPlanner

            return JoinedPlanner(options, facts, topology, location, backend)

    _check_command(options, plan)
    source = None
    if facts.script_file is not None and options.script is not None:
        source = _script_source(options.script, script_paths(options.script, cwd, plan.workdir))
        if planner is not None or join is not None:
            raise ConfigError(
                f"{printable(options.script)}: only this launcher can read it, and the job has "
                "other nodes",
                hint="write the script to a file that all nodes have",
            )
    if options.explain:
        from distlaunch.planning.explain import explain

        explanation = explain(options, facts, topology, plan, location=location, lost=lost)
    return Planned(
        plan=plan,
        backend=backend,
        topology=topology,
        location=location,
        planner=planner,
        join=join,
        id_of_scheduler=_has_id_of_scheduler(options, known),
        explanation=explanation,
        source=source,
    )


def _notes_on_script(backend: Backend, options: TrainOptions, facts: Facts) -> Sequence[str]:
    name = options.script
    if (
        name is None
        or options.module
        or options.no_python
        or type(backend).notes_on_script is Backend.notes_on_script
    ):
        return ()
    from distlaunch.launch.script_source import script_text

    text = script_text(options, facts.cwd)
    if text is None:
        return ()
    return backend.notes_on_script(printable(name), text.decode(errors="replace"))


def _check_script(options: TrainOptions, kind: type[Backend]) -> None:
    """Raise ConfigError if the SCRIPT is a data file by its name (``.json``, ``.yaml``)."""
    name = options.script
    if name is None or options.module or options.no_python or not name.lower().endswith(_DATA):
        return
    own = any(option.name == "config" for option in kind.options()) and not isinstance(
        options, TorchrunOptions
    )
    where = f"{Opt.OPT} config={printable(name)} has {kind.name} read it; " if own else ""
    raise ConfigError(
        f"{printable(name)} is not a Python script",
        hint=f"{where}the script's own files go after {Opt.SCRIPT}",
    )


def _check_command(options: TrainOptions, plan: LaunchPlan) -> None:
    """Raise ConfigError if the Python of several workers would read a script that can be read once."""
    program = os.path.basename(options.script or "")
    if not options.no_python or not program.startswith("python") or plan.world_size == 1:
        return
    from distlaunch.planning.outer_launcher import PYTHON_OPTIONS_WITH_VALUE

    words = iter(options.script_args)
    for word in words:
        if word in PYTHON_OPTIONS_WITH_VALUE:
            next(words, None)
        elif word == "-" or not word.startswith("-"):
            if _script_source(word, (os.path.join(plan.workdir, word),)) is not None:
                raise ConfigError(
                    f"{program} {printable(word)}: only one of the workers could read the script",
                    hint="write the script to a file",
                )
            return
        elif word[:2] in ("-c", "-m"):
            return


def starts_all_workers(location: Location, topology: Topology) -> bool:
    """Return whether this launcher starts all workers of the job.

    The job then has one node, which is this machine. If each worker has its own launcher, the job
    then has one worker.
    """
    if len(topology.nodes) != 1:
        return False
    return topology.world_size == 1 if location.allocation.part == "worker" else topology.here == 0


def _notes_on_open_values(options: TrainOptions, topology: Topology) -> Iterator[str]:
    """Yield a note for each value that is only settled at the start."""
    open_slots = [node.host for node in topology.nodes if node.slots is None]
    if len(topology.nodes) > 1 and options.master_addr is None:
        first = printable(topology.nodes[0].host)
        yield (
            f"settled at the start: the address of {first} that all nodes can reach "
            "(MASTER_ADDR), and its port"
        )
    if open_slots:
        from distlaunch.core.model.host_list import name_hosts

        yield f"settled at the start: how many workers run on {name_hosts(open_slots)}"


def _is_all_here(options: TrainOptions, topology: Topology) -> bool:
    """Return whether the job runs on this machine alone and cannot get other nodes."""
    may_grow = bool(topology.spares) or (
        topology.bounds is not None and options.discover is not None
    )
    return len(topology.nodes) == 1 and topology.here == 0 and not may_grow


def _check_requirements(
    name: str, needed: Sequence[Requirement], plan: LaunchPlan, options: TrainOptions
) -> None:
    """Raise ConfigError if the workers' Python lacks modules of the backend.

    Does nothing if another interpreter than this one cannot be asked.
    """
    from distlaunch.backends.requirements import check_installed

    path, python, installed = _first_sys_path_entries(plan, options), plan.argv[0], None
    if options.python is not None and python != sys.executable:
        from distlaunch.backends.requirements import installed_for

        environ = {**plan.base_env, **plan.given_env}
        installed = installed_for(python, needed, path, environ=environ, cwd=plan.workdir)
        if installed is None:
            return
    check_installed(name, needed, python, path, installed=installed)


def _check_script_module(plan: LaunchPlan, options: TrainOptions) -> None:
    """Raise ConfigError if the module of ``-m`` cannot be found.

    Checks the first part of a dotted name only: a package may find its modules in its own way.
    """
    from distlaunch.core.probe.python_modules import is_importable, nearest_module

    name = options.script or ""
    top = name.partition(".")[0]
    path = _first_sys_path_entries(plan, options)
    if not top or is_importable(top, path):
        return
    near = nearest_module(top, path)
    raise ConfigError(
        f"-m {quoted(name)}: {plan.argv[0]} has no such module",
        hint=f"did you mean {near}{name[len(top) :]}?"
        if near
        else f"the module must be in {printable(plan.workdir)}, in PYTHONPATH or installed",
    )


def _check_preload_modules(plan: LaunchPlan, options: TrainOptions) -> None:
    """Raise ConfigError if a module of --preload is not found by the workers' interpreter."""
    from distlaunch.core.probe.python_modules import is_importable, nearest_module

    path = _first_sys_path_entries(plan, options)
    for name in plan.preload:
        top = name.partition(".")[0]
        if not is_importable(top, path):
            near = nearest_module(top, path)
            hint = (
                f"did you mean {near}?" if near else f"{plan.argv[0]} -m pip install {quoted(top)}"
            )
            raise ConfigError(
                f"preload {quoted(name)}: {plan.argv[0]} has no such module", hint=hint
            )


def _first_sys_path_entries(plan: LaunchPlan, options: TrainOptions) -> list[str]:
    """Return the entries that come first in a worker's ``sys.path``: its script's directory, then
    PYTHONPATH."""
    script = os.path.join(plan.workdir, plan.argv[1])
    first = (
        plan.workdir
        if options.module
        else script
        if os.path.isdir(script)
        else os.path.dirname(script)
    )
    return [
        first,
        *filter(None, {**plan.base_env, **plan.given_env}.get("PYTHONPATH", "").split(os.pathsep)),
    ]


def _locate(options: TrainOptions, facts: Facts) -> tuple[Location | None, tuple[str, ...]]:
    """Return the nodes that options or the surroundings name, and the systems that lost against
    them."""
    if facts.surroundings is None:
        return None, ()
    from distlaunch.planning.node_source import locate

    return locate(options, facts)


def _make_topology(
    location: Location | None, options: TrainOptions, facts: Facts, *, elsewhere: bool
) -> tuple[Facts, Topology]:
    """Return the topology, and the facts, in which a mask of GPUs may be corrected.

    ``elsewhere``: if this machine lacks the GPUs, plan for an unknown machine. Raises ConfigError
    for sizes or devices that are not available.
    """
    try:
        if location is None:
            return facts, local_topology(options, facts)
        return _topology_of_location(location, options, facts)
    except NotTheseGpusError as exc:
        if not elsewhere:
            raise
        from distlaunch.planning.allocation import Allocation, Host
        from distlaunch.planning.build_topology import build_topology

        allocation = None if location is None else location.allocation
        if allocation is None:
            allocation = Allocation(
                source="local", by_user=True, hosts=(Host(name=facts.hostname),)
            )
        try:
            topology = build_topology(allocation, options, facts, here=None)
        except ConfigError:
            raise exc from None
        note = Note(text=f"this plan is for another machine: {exc.message}")
        return facts, replace(topology, notes=(note, *topology.notes))


def _topology_of_location(
    location: Location, options: TrainOptions, facts: Facts
) -> tuple[Facts, Topology]:
    """Return the topology of named nodes, with notes on this machine's place among them."""
    from distlaunch.planning.build_topology import build_topology
    from distlaunch.planning.gpu_masks import accept_mask

    allocation = location.allocation
    facts, text = accept_mask(facts, allocation, here=location.here, who=location.who)
    topology = replace(
        build_topology(allocation, options, facts, here=location.here), cpus=allocation.cpus
    )
    if text is not None and topology.here is not None and topology.device != "cpu":
        note = Note(text=text, kind=NoteKind.KNOWN_NODES)
        topology = replace(topology, notes=(note, *topology.notes))
    if location.here is not None and topology.here is None and allocation.part != "worker":
        name = printable(allocation.hosts[location.here].name)
        note = Note(text=f"this machine, {name}, is not in the plan")
        topology = replace(topology, notes=(*topology.notes, note))
    elif not location.ranked and len(topology.nodes) > 1:
        text = "settled at the start: which of the nodes this machine is"
        note = Note(text=text, kind=NoteKind.SETTLED_LATER)
        topology = replace(topology, notes=(*topology.notes, note))
    return facts, topology


def needed_descriptors(workers: int) -> int:
    """Return how many files the launcher opens for this many workers. Raises ConfigError above the
    hard limit."""
    needed = workers * _DESCRIPTORS_PER_WORKER + _DESCRIPTORS_OF_OUR_OWN
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{counted(workers, 'worker')} would need {needed} open files, the limit is {hard}",
            hint="see ulimit -Hn",
        )
    return needed
