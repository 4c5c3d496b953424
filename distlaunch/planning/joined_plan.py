"""Plan a job that has one launcher per node or per worker. No I/O.

Every launcher has its own command line and knows only the devices of its own node. The coordinator
assigns the ranks and learns how many workers each node runs. No launcher sends another one a
command line to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from distlaunch.core.errors import NodesError, ProtocolError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.topology import CpuInventory, GpuInventory, Node, NoteKind, Topology
from distlaunch.core.model.variables import GLOO_INTERFACE, NCCL_INTERFACE, TENSORPIPE_INTERFACE
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.agent_messages import Reached, Survey, Surveyed
from distlaunch.planning.agreement import (
    check_script,
    choices_digest,
    command_digest,
    difference,
)
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.build_plan import (
    CpuShare,
    bind,
    build_plan,
    command_target,
    working_directory,
)
from distlaunch.planning.clusters.select import SYSTEMS
from distlaunch.planning.cpu_binding import threads_per_worker
from distlaunch.planning.facts import Facts
from distlaunch.planning.joined_checks import MOST_SLOTS, check_start
from distlaunch.planning.master_address import (
    AddressChooser,
    AddressesOf,
    MasterChoice,
    no_addresses,
)
from distlaunch.planning.node_source import Location
from distlaunch.planning.rendezvous import Rendezvous, check_joinable, choose_rendezvous
from distlaunch.planning.train_options import TrainOptions, counts_processes
from distlaunch.planning.worker_addresses import with_cluster

_CLOCKS_S = 300.0
"""A larger difference between clocks causes a notice: certificates and file times depend on the
clock."""
_THREADS = "OMP_NUM_THREADS"
_TELL_ALL = ("mpi", "batch", "slurm")
"""Modules in ``SYSTEMS`` whose systems send a signal to all launchers of a job."""


class LauncherRecord(Record):
    """The coordinator's record of a launcher."""

    host: str
    info: p.LauncherInfo


class JoinedPlanner:
    """Plans a job with several launchers, for one of them.

    Launchers are numbered by rank; 0 is the coordinator.
    """

    def __init__(
        self,
        options: TrainOptions,
        facts: Facts,
        topology: Topology,
        location: Location,
        backend: PlannedBackend,
    ) -> None:
        """Raise ConfigError for options that need a single launcher for all nodes."""
        check_joinable(location, topology)
        self._options, self._facts, self._backend = options, facts, backend
        self._location = location
        self.rendezvous: Rendezvous = choose_rendezvous(options, location, topology)
        self._address_chooser = AddressChooser(
            options, backend, rendezvous_host=self.rendezvous.host
        )
        if self.rendezvous.of_source:
            topology = replace(topology, master_port=None)
        topology = replace(
            topology,
            notes=tuple(each for each in topology.notes if each.kind is not NoteKind.SETTLED_LATER),
        )
        self._by_worker = location.allocation.part == "worker"
        self._topology = topology
        self._node_rank = (location.here or 0) if topology.here is None else topology.here
        self._own = topology.nodes[self._node_rank]
        self._workdir = working_directory(options, facts, local=True)
        self._target = command_target(options, facts, self._workdir, local=True)
        self._job_id = self._run_dir = ""
        self._hosts_of_ranks: tuple[str, ...] = ()

    # --- the launchers of the job

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each launcher by number, or a label such as ``node 3`` or ``rank 3``."""
        nodes = self._topology.nodes
        if not self._by_worker:
            names = [node.host if node.known else f"node {rank}" for rank, node in enumerate(nodes)]
            return (
                (self._facts.hostname, *names[1:])
                if self.rendezvous.leads != "no"
                else tuple(names)
            )
        slots = [(node, local) for node in nodes for local in range(node.slots or 0)]
        return tuple(
            f"rank {rank} on {node.host}" if node.known else f"rank {rank}"
            for rank, (node, _) in enumerate(slots)
        )

    @property
    def hostname(self) -> str:
        """Name of this machine."""
        return self._facts.hostname

    @property
    def gpus(self) -> GpuInventory:
        """GPUs of this machine, as found once at the start."""
        return self._facts.gpus

    @property
    def cpus(self) -> CpuInventory:
        """CPUs of this machine, as found once at the start."""
        return self._facts.cpus

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of launchers in an attempt."""
        if self._by_worker:
            return len(self.hosts), len(self.hosts)
        return self._topology.bounds or (len(self._topology.nodes), len(self._topology.nodes))

    @property
    def is_elastic(self) -> bool:
        """Whether the job continues without a lost node, which may join again."""
        return self.bounds[0] < self.bounds[1]

    @property
    def stops_alone(self) -> bool:
        """Whether a SIGTERM to this launcher stops only this node, and not the job.

        That is expected in a pod of a drained node, and in a launcher that was started by hand.
        Slurm, other batch systems and mpirun signal all launchers when the job is to end.
        """
        environ = self._facts.environ
        tells_all = any(
            name in environ for _, module, names in SYSTEMS if module in _TELL_ALL for name in names
        )
        return self.is_elastic and not tells_all

    @property
    def max_restarts(self) -> int:
        """The value of ``--max-restarts``."""
        return self._options.max_restarts

    @property
    def by_worker(self) -> bool:
        """Whether each worker has its own launcher."""
        return self._by_worker

    @property
    def shows_notices(self) -> bool:
        """Whether this launcher shows the coordinator's notices: of several on a node, only the
        first does."""
        return not self._by_worker or not self._location.allocation.local_rank

    @property
    def own_workers(self) -> int:
        """How many workers this launcher starts."""
        return 1 if self._by_worker else self._own.slots or 0

    @property
    def most_workers(self) -> int:
        """Upper limit of the number of workers that the console may show. Other launchers send
        theirs later."""
        world = self._topology.world_size
        return max(2, len(self._topology.nodes) * 64 if world is None else world)

    def set_job(self, job_id: str, run_dir: str) -> None:
        """Set the job's id and the run directory of this launcher."""
        self._job_id, self._run_dir = job_id, run_dir

    def set_job_id(self, job_id: str) -> None:
        """Set the job id that a coordinator has assigned: all launchers export the same
        DISTLAUNCH_JOB_ID."""
        self._job_id = job_id

    # --- requests to take part

    def launcher_info(
        self, *, clock: float, wall: float, attempt: int, restarts: int
    ) -> p.LauncherInfo:
        """Return the message that describes this launcher's command line and state to the
        coordinator.

        ``clock`` and ``wall`` are seconds of the monotonic and of the wall clock.
        """
        return p.LauncherInfo(
            num_nodes=self.bounds,
            slots=self.own_workers,
            command=command_digest(self._options),
            backend=self._backend.name,
            choices=choices_digest(self._backend),
            clock=clock,
            wall=wall,
            attempt=attempt,
            restarts=restarts,
        )

    def conflict(self, number: int, host: str, info: p.LauncherInfo) -> str | None:
        """Return how the options of launcher ``number`` contradict the coordinator's, if they
        do."""
        me, who = (
            printable(self._facts.hostname),
            f"{self._launcher_label(number)} ({printable(host)})",
        )
        what = "launchers" if self._by_worker else "nodes"
        own = self.launcher_info(clock=0.0, wall=0.0, attempt=-1, restarts=0)
        if (differs := difference(info, own, who=who, me=f"{me} (rank 0)", what=what)) is not None:
            return differs
        slots = info.slots
        if slots is None or not 0 < slots <= MOST_SLOTS:
            return f"{who} reports {slots} workers"
        planned = self._topology.nodes[number].slots if number < len(self._topology.nodes) else None
        if not self._by_worker and self._is_total and planned is not None and slots != planned:
            return (
                f"{who} runs {counted(slots, 'worker')}, but the options of {me} (rank 0) give it "
                f"{planned}"
            )
        return None

    def clock_note(
        self, number: int, host: str, info: p.LauncherInfo, *, wall: float
    ) -> str | None:
        """Return a notice if the clock of launcher ``number`` differs by more than _CLOCKS_S.

        ``wall`` is the time of this machine in seconds.
        """
        apart = info.wall - wall
        if abs(apart) < _CLOCKS_S:
            return None
        off = f"{abs(apart) / 60:.0f} min" if abs(apart) < 99 * 3600 else "more than 99 h"
        off += " ahead of" if apart > 0 else " behind"
        return f"the clock of {self._launcher_label(number)} ({printable(host)}) is {off} this machine's"

    def _launcher_label(self, number: int) -> str:
        return f"rank {number}" if self._by_worker else f"node {number}"

    @property
    def _is_total(self) -> bool:
        """Whether the user asked for a total number of workers, which fixes the number on each
        node."""
        options = self._options
        total = options.num_procs if counts_processes(options) else options.num_gpus
        return isinstance(total, int)

    # --- the coordinator's plan

    def survey(self, serial: int) -> Survey:
        """Return the request for a survey of this launcher's own node."""
        options = self._options
        python = not options.no_python or options.module
        setup = options.setup is not None
        return Survey(
            serial=serial,
            workdir=self._workdir,
            pythons=(options.python or self._facts.python,) if python and not setup else (),
            script="" if options.module or options.no_python else self._target,
            program="bash" if setup else "" if python else self._target,
            run_dir=self._run_dir,
            gpus=False,
            topology=False,
        )

    def plan_attempt(
        self, surveys: Mapping[int, Surveyed], known: Mapping[int, LauncherRecord]
    ) -> tuple[tuple[int, ...], LaunchPlan]:
        """Plan an attempt with the connected launchers. Called in the coordinator.

        ``surveys`` and ``known`` are by the number of the launcher. Return the numbers of the
        chosen launchers in the order of their ranks, and the plan. Raises NodesError if there are
        too few launchers, NodesDifferError if their scripts differ, and ConfigError.
        """
        fewest, most = self.bounds
        mine = LauncherRecord(
            host=self.hostname, info=self.launcher_info(clock=0.0, wall=0.0, attempt=-1, restarts=0)
        )
        known = {**known, 0: mine}
        node_numbers = tuple(sorted(surveys))[:most]
        if len(node_numbers) < fewest or node_numbers[:1] != (0,):
            raise NodesError(
                f"{counted(len(node_numbers), 'node')} of the {fewest:,} that are needed"
            )
        hosts = [
            known[number].host if number in known else each
            for number, each in enumerate(self.hosts)
        ]
        if not self._options.module and not self._options.no_python:
            hashes = {number: surveys[number].script_sha256 for number in node_numbers}
            check_script(self._target, self._workdir, hashes, hosts, 0)
        topology = replace(
            self._topology, nodes=self._nodes_of_attempt(node_numbers, known), here=0
        )
        plan = build_plan(
            self._options,
            self._facts,
            replace(topology, bounds=self.bounds if self.is_elastic else None),
            self._backend,
            job_id=self._job_id,
            run_dir=self._run_dir,
            shares=self._cpu_shares(len(topology.nodes)),
        )
        self._hosts_of_ranks = tuple(hosts[number] for number in node_numbers)
        return node_numbers, self._without_cpu_binding(plan)

    def _nodes_of_attempt(
        self, node_numbers: Sequence[int], known: Mapping[int, LauncherRecord]
    ) -> tuple[Node, ...]:
        if self._by_worker:
            nodes = []
            first = 0
            for node in self._topology.nodes:
                nodes.append(replace(node, host=known[first].host, known=True))
                first += node.slots or 0
            return tuple(nodes)
        mine = replace(self._own, host=known[0].host, known=True)
        return tuple(
            mine if number == 0 else Node(host=known[number].host, slots=known[number].info.slots)
            for number in node_numbers
        )

    def _cpu_shares(self, nodes: int) -> list[CpuShare] | None:
        """Return this machine's CPUs as the share of every node, if each worker has its own
        launcher.

        Such a launcher only plans its own worker, so the shares of other nodes do not matter.
        """
        return (
            [CpuShare(cpus=self._facts.cpus, granted=self._topology.cpus)] * nodes
            if self._by_worker
            else None
        )

    def _without_cpu_binding(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan without CPU bindings, if each worker has its own launcher, and this
        launcher is bound to no more than its share of the CPUs.

        The worker then inherits the launcher's CPUs, and OMP_NUM_THREADS is set for these.
        """
        cpus, slots = self._facts.cpus, self._own.slots or 1
        if not self._by_worker or len(cpus.allowed) * slots > cpus.online:
            return plan
        own = str(threads_per_worker(cpus, 1))
        workers = tuple(
            replace(
                each,
                cpus=None,
                env={**each.env, **({_THREADS: own} if _THREADS in each.env else {})},
            )
            for each in plan.workers
        )
        return replace(plan, workers=workers)

    def hosts_and_first_ranks(self, plan: LaunchPlan) -> tuple[tuple[str, int], ...]:
        """Return the host and the lowest rank of each launcher in a plan."""
        if not self._by_worker:
            return tuple(zip((node.host for node in plan.nodes), plan.first_ranks, strict=True))
        return tuple((plan.nodes[worker.node_rank].host, worker.rank) for worker in plan.workers)

    def addresses(
        self, surveyed: Surveyed, host: str, *, of_scheduler: AddressesOf = no_addresses
    ) -> tuple[str, ...]:
        """Return the addresses at which other nodes try to reach rank 0's node, best first."""
        return self._address_chooser.candidates(surveyed, host, of_scheduler=of_scheduler)

    def choose_master(
        self,
        surveys: Sequence[Surveyed],
        reached: Mapping[int, Reached],
        *,
        of_scheduler: AddressesOf = no_addresses,
    ) -> MasterChoice:
        """Return the master address that all launchers of the attempt have reached.

        ``surveys`` and ``reached`` are by the number of the launcher within the attempt. Raises
        LaunchError if no address was reached by all.
        """
        hosts = (
            self._hosts_of_ranks
            if len(self._hosts_of_ranks) == len(surveys)
            else [each.hostname for each in surveys]
        )
        found = self._address_chooser.choose(surveys, reached, hosts, of_scheduler=of_scheduler)
        if not self._by_worker:
            return found
        of_node: dict[int, Mapping[str, str]] = {}
        firsts = []
        first = 0
        for node_rank, node in enumerate(self._topology.nodes):
            of_node[node_rank] = found.env.get(first, {})
            firsts.append(first)
            first += node.slots or 0
        return replace(
            found, env=of_node, addresses=tuple(found.addresses[first] for first in firsts)
        )

    # --- a joined launcher's plan

    def plan_start(self, start: p.StartWorkers, interfaces: Iterable[str]) -> LaunchPlan:
        """Plan this launcher's own workers of an attempt from its own command line.

        ``interfaces`` are the names of this node's network interfaces; others of the message are
        ignored. Raises ProtocolError if the coordinator's message does not fit this launcher.
        """
        self._check_start(start)
        nodes = [
            Node(host=host, slots=slots)
            for host, slots in zip(start.hosts, start.slots, strict=True)
        ]
        rank = start.node_rank
        nodes[rank] = replace(self._own, host=start.hosts[rank], known=True)
        topology = replace(
            self._topology,
            nodes=tuple(nodes),
            here=rank,
            bounds=self.bounds if self.is_elastic else None,
        )
        plan = build_plan(
            self._options,
            self._facts,
            topology,
            self._backend,
            job_id=self._job_id,
            run_dir=self._run_dir,
            shares=self._cpu_shares(len(nodes)),
            only=rank,
        )
        plan = self._without_cpu_binding(plan)
        mine = set(start.local_ranks)
        plan = replace(
            plan, workers=tuple(worker for worker in plan.workers if worker.local_rank in mine)
        )
        there = set(interfaces)
        wanted = {
            GLOO_INTERFACE: start.interface,
            TENSORPIPE_INTERFACE: start.interface,
            NCCL_INTERFACE: start.nccl_interface,
        }
        taken = {**plan.base_env, **plan.given_env}
        env = {
            name: f"={value}" if name == NCCL_INTERFACE else value
            for name, value in wanted.items()
            if value in there and name not in taken
        }
        where = MasterChoice(address=start.master_addr, env={rank: env} if env else {})
        plan = bind(plan, attempt=start.attempt, master_port=start.master_port, master=where)
        return with_cluster(plan, start.cluster, self._backend)

    def _check_start(self, start: p.StartWorkers) -> None:
        count = len(self._topology.nodes)
        check_start(start, nodes=(count, count) if self._by_worker else self.bounds)
        slots, own = start.slots[start.node_rank], self._own.slots
        if slots != own or not self._is_for_own_workers(start):
            raise ProtocolError(
                f"it asks for {counted(slots, 'worker')} here, but this launcher starts "
                f"{quoted(str(own))}"
            )
        if len(start.cluster) != self._backend.worker_ports * sum(start.slots):
            ports = counted(len(start.cluster), "port")
            raise ProtocolError(
                f"it sends {ports} of workers, which {Opt.BACKEND(self._backend.name)} does not use"
            )

    def _is_for_own_workers(self, start: p.StartWorkers) -> bool:
        if not self._by_worker:
            return set(start.local_ranks) == set(range(self._own.slots or 0))
        local_rank = self._location.allocation.local_rank
        one_of = range(self._own.slots or 0) if local_rank is None else (local_rank,)
        return len(start.local_ranks) == 1 and start.local_ranks[0] in one_of
