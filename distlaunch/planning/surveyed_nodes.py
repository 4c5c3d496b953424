"""Plan each attempt of a job on several nodes, from the surveys of its hosts. No I/O.

Hosts are numbered for good: first those planned as nodes, then the spares, then those that
--discover has found later. Node ranks are assigned anew for each attempt, in the order of the
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted, printable
from distlaunch.core.model.topology import Node, NoteKind, Topology, plain_notes
from distlaunch.core.protocol.agent_messages import Reached, Survey, Surveyed
from distlaunch.planning import interfaces
from distlaunch.planning.agreement import (
    ELSEWHERE,
    Interpreter,
    NodesDifferError,
    check_script,
    interpreter_of,
)
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.build_plan import (
    CpuShare,
    build_plan,
    command_line,
    command_target,
    interpreter_note,
    working_directory,
)
from distlaunch.planning.build_topology import (
    bounds_of,
    build_topology,
    filtered_hosts,
    spare_node,
    surveyed_topology,
)
from distlaunch.planning.cpu_binding import pinned_note
from distlaunch.planning.environment import base_environment, given_environment
from distlaunch.planning.facts import Facts
from distlaunch.planning.gpu_masks import accept_mask
from distlaunch.planning.hosts.this_host import is_this_machine
from distlaunch.planning.master_address import (
    AddressChooser,
    AddressesOf,
    MasterChoice,
    no_addresses,
)
from distlaunch.planning.node_source import Location
from distlaunch.planning.remote_environment import split_environment
from distlaunch.planning.train_options import TrainOptions

__all__ = ["NodesDifferError", "SurveyedPlanner"]


class SurveyedPlanner:
    """Plans each attempt from the surveys of the reachable hosts."""

    def __init__(
        self,
        options: TrainOptions,
        facts: Facts,
        topology: Topology,
        location: Location,
        backend: PlannedBackend,
        *,
        job_id: str,
        run_dir: str,
    ) -> None:
        self._options, self._facts, self._backend = options, facts, backend
        self._allocation, self._who = location.allocation, location.who
        self._job_id, self._run_dir = job_id, run_dir
        self._address_chooser = AddressChooser(options, backend)
        self._local = topology.here is not None
        here = location.here
        self._here_name = None if here is None else self._allocation.hosts[here].name
        self._hosts: tuple[Node, ...] = (*topology.nodes, *topology.spares)
        self._listed = {node.host for node in self._hosts}
        self._here = self._find_here()
        self._training, self._spares = len(topology.nodes), len(topology.spares)
        self._hosts_of_ranks: tuple[str, ...] = ()
        self._shown_notes: dict[str, set[str]] = {}
        self._base = base_environment(facts) if options.forward_env else {}
        self._given = given_environment(options, facts)
        self._notes = tuple(
            note for note in topology.notes if note.kind is not NoteKind.KNOWN_NODES
        )
        self._warnings = topology.warnings
        self._everywhere, with_ours = split_environment(self._base)
        self._with_ours = {
            name: value for name, value in with_ours.items() if name not in self._given
        }
        self._workdir = working_directory(options, facts, local=self._local)
        self._target = command_target(options, facts, self._workdir, local=self._local)

    # --- hosts

    @property
    def hosts(self) -> tuple[Node, ...]:
        """The hosts that may become nodes, by number."""
        return self._hosts

    @property
    def here(self) -> int | None:
        """The number of this machine among the hosts, if it is one of them."""
        return self._here

    def is_here(self, host: str) -> bool:
        """Return whether a host, perhaps discovered later, is this machine."""
        if self._here_name is not None or self._facts.surroundings is None:
            return host == self._here_name
        return is_this_machine(host, self._facts.surroundings.identity)

    @property
    def spares(self) -> int:
        """How many hosts remain unused while all hosts are reachable."""
        return self._spares

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of nodes of an attempt."""
        bounds = bounds_of(self._allocation, self._options)
        if bounds is None or bounds[0] == bounds[1]:
            return self._training, self._training
        return bounds

    def set_job(self, job_id: str, run_dir: str) -> SurveyedPlanner:
        """Set the job's id and its run directory. Return the planner itself."""
        self._run_dir, self._job_id = run_dir, job_id
        return self

    def update_hosts(self, output: str) -> tuple[Node, ...]:
        """Update the hosts from the output of the --discover command, and return those that are
        available now.

        Known hosts keep their numbers. Raises ConfigError if the output is not a list of hosts, or
        the options do not fit the hosts.
        """
        from distlaunch.planning.hosts.from_options import discovered_hosts

        options = self._options
        found = discovered_hosts(output, options.discover or "", options.named("discover"))
        by_name = {host.name: host for host in found}
        numbers = {node.host: number for number, node in enumerate(self._hosts)}
        present = sorted(
            found, key=lambda host: numbers.get(host.name, len(numbers))
        )  # stable: new hosts stay in the order of the output
        if not present:
            self._listed = set()
            return ()
        gone = [host for host in self._allocation.hosts if host.name not in by_name]
        allocation = replace(self._allocation, hosts=(*present, *gone))
        here = next((index for index, host in enumerate(present) if self.is_here(host.name)), None)
        left = [
            index
            for index in filtered_hosts(allocation, options, self._facts, here=here)
            if index < len(present)
        ]
        if (
            len(left) < self.bounds[0] + options.spares
        ):  # too few to train, but the launcher connects to them already
            nodes = tuple(spare_node(present[index]) for index in left)
        else:
            topology = build_topology(
                allocation, options, self._facts, here=here, present=len(present)
            )
            nodes = (*topology.nodes, *topology.spares)
        self._allocation = allocation
        self._hosts = (*self._hosts, *(node for node in nodes if node.host not in numbers))
        self._here = self._find_here()
        self._listed = {node.host for node in nodes}
        return nodes

    # --- surveys and plans

    def survey(self, serial: int) -> Survey:
        """Return the request for a survey with this serial number. It is otherwise the same for all
        hosts."""
        options = self._options
        python = not options.no_python or options.module
        setup = options.setup is not None  # it may provide the interpreter or the program
        ours = self._facts.python  # also with --no-python: our PATH is sent where this exists
        return Survey(
            serial=serial,
            workdir=self._workdir,
            pythons=(options.python,)
            if options.python
            else (ours, ELSEWHERE)
            if python
            else (ours,),
            script="" if options.module or options.no_python else self._target,
            program="bash" if setup else "" if python else self._target,
            run_dir=self._run_dir,
            gpus=options.needs_gpus,
            topology=options.bind != "none",
        )

    def plan_attempt(self, surveys: Mapping[int, Surveyed]) -> tuple[tuple[int, ...], LaunchPlan]:
        """Plan an attempt with the surveyed hosts.

        ``surveys`` are by the number of the host. Return the numbers of the chosen hosts in the
        order of their ranks, and the plan. Raises NodesError if there are too few hosts,
        NodesDifferError if their scripts differ, ConfigError if the options cannot be satisfied.
        """
        node_numbers = self._choose_nodes(surveys)
        options, chosen = self._options, {number: surveys[number] for number in node_numbers}
        indices = {host.name: index for index, host in enumerate(self._allocation.hosts)}
        index_of = {number: indices[self._hosts[number].host] for number in node_numbers}
        here = None if self._here is None else indices.get(self._hosts[self._here].host)
        known: dict[int, Facts] = {}
        notes: dict[str, list[str]] = {}
        for number, surveyed in chosen.items():
            index, host = index_of[number], self._hosts[number].host
            facts, note = accept_mask(
                _facts_of(surveyed, host), self._allocation, here=index, who=self._who
            )
            known[index] = facts
            for each in (note, pinned_note(surveyed.cpus, "the agent")):
                if each is not None:
                    notes.setdefault(each, []).append(host)
        try:
            topology = surveyed_topology(
                self._allocation, options, known, [index_of[n] for n in node_numbers], here=here
            )
        except ConfigError as exc:
            if node_numbers == tuple(range(self._training)):
                raise
            # With all the planned hosts there would be enough.
            raise NodesError(exc.message, hint=exc.hint) from exc
        numbers = {self._hosts[number].host: number for number in node_numbers}
        node_numbers = tuple(numbers[node.host] for node in topology.nodes)
        if not options.module and not options.no_python:
            hashes = {number: surveys[number].script_sha256 for number in node_numbers}
            check_script(
                self._target, self._workdir, hashes, [node.host for node in self._hosts], self._here
            )
        if len(node_numbers) > 1 and options.interface is not None:
            for number in node_numbers:
                interfaces.addresses(
                    surveys[number], self._hosts[number].host, interface=options.interface
                )
        interpreters = [
            interpreter_of(options, self._facts.python, surveys[number]) for number in node_numbers
        ]
        python = interpreters[0].python
        news = [
            f"{name_hosts(new)}: {note}"
            for note, hosts in notes.items()
            if (new := self._mark_shown(note, hosts))
        ]
        spare = [self._hosts[number] for number in sorted(surveys.keys() - set(node_numbers))]
        more = [*news, *self._interpreter_notes(node_numbers, interpreters)]
        notes_of_plan = (*self._notes, *topology.notes, *plain_notes(more))
        topology = replace(
            topology,
            nodes=tuple(
                self._complete_node(*each, python)
                for each in zip(topology.nodes, interpreters, strict=True)
            ),
            bounds=self.bounds if self.bounds[0] < self.bounds[1] else None,
            spares=tuple(spare),
            notes=notes_of_plan,
            warnings=(*self._warnings, *topology.warnings),
        )
        self._hosts_of_ranks = tuple(node.host for node in topology.nodes)
        plan = build_plan(
            options,
            replace(self._facts, python=python),
            topology,
            self._backend,
            job_id=self._job_id,
            run_dir=self._run_dir,
            local=self._local,
            base=self._everywhere,
            shares=[
                CpuShare(cpus=surveys[n].cpus, granted=self._granted_cpus(n, surveys[n]))
                for n in node_numbers
            ],
        )
        return node_numbers, plan

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
        """Return the master address that all nodes of the attempt have reached.

        ``surveys`` and ``reached`` are by node rank. Raises LaunchError if no address was reached
        by all.
        """
        names = self._hosts_of_ranks
        hosts = names if len(names) == len(surveys) else tuple(each.hostname for each in surveys)
        return self._address_chooser.choose(
            surveys,
            reached,
            hosts,
            of_scheduler=of_scheduler,
            set_by_user={**self._base, **self._given},
            nccl=any(each.gpus.gpus for each in surveys),
        )

    # --- parts

    def _find_here(self) -> int | None:
        return next(
            (number for number, node in enumerate(self._hosts) if self.is_here(node.host)), None
        )

    def _choose_nodes(self, surveys: Mapping[int, Surveyed]) -> tuple[int, ...]:
        """Return the numbers of the hosts that become nodes. Raises NodesError if too few were
        surveyed."""
        fewest, most = self.bounds
        there = [number for number in sorted(surveys) if self._hosts[number].host in self._listed]
        wanted = max(fewest, min(most, len(self._listed) - self._options.spares))
        if len(there) < fewest:
            missing = [
                node.host for number, node in enumerate(self._hosts) if number not in surveys
            ]
            away = (
                f": {name_hosts(missing)} {'is' if len(missing) == 1 else 'are'} missing"
                if missing
                else ""
            )
            raise NodesError(
                f"{counted(len(there), 'node')} of the {fewest:,} that are needed{away}"
            )
        return tuple(there[:wanted])

    def _granted_cpus(self, number: int, surveyed: Surveyed) -> int | None:
        """Return how many CPUs a scheduler grants on a node, if known; for this machine by the
        launcher's environment."""
        return (
            self._allocation.cpus
            if surveyed.granted_cpus is None and number == self._here
            else surveyed.granted_cpus
        )

    def _interpreter_notes(
        self, node_numbers: Sequence[int], interpreters: Sequence[Interpreter]
    ) -> list[str]:
        """Return at most one note, with the workers' interpreters and their hosts.

        It omits hosts for which an earlier note has named the same interpreter. If all nodes use
        the launcher's interpreter, there is a note only if another environment is active; with
        --python or --no-python there is none.
        """
        options, ours = self._options, self._facts.python
        if options.no_python or options.python is not None:
            return []
        by_python: dict[str, list[str]] = {}
        for number, each in zip(node_numbers, interpreters, strict=True):
            by_python.setdefault(each.python, []).append(self._hosts[number].host)
        if list(by_python) == [ours]:
            note = interpreter_note(options, self._facts.environ, self._facts.python)
            return [] if note is None else [note]
        new = {python: self._mark_shown(python, hosts) for python, hosts in by_python.items()}
        kinds = [
            f"{printable(python)} on {name_hosts(hosts)}" for python, hosts in new.items() if hosts
        ]
        how = f"the interpreter that {Opt.SETUP} provides, " if options.setup is not None else ""
        why = f"the launcher's, {printable(ours)}, is not on all nodes; see {Opt.PYTHON}"
        return [f"workers run {how}{', '.join(kinds)}: {why}"] if kinds else []

    def _mark_shown(self, note: str, hosts: Sequence[str]) -> list[str]:
        """Record that this note has been shown for the hosts, and return those for which it had not
        been before."""
        known = self._shown_notes.setdefault(note, set())
        new = [host for host in hosts if host not in known]
        known.update(new)
        return new

    def _complete_node(self, node: Node, mine: Interpreter, common: str) -> Node:
        """Return a node with the command line for its interpreter, and with the launcher's software
        variables if it has the launcher's."""
        same = mine.python == common or self._options.no_python
        own = (
            None if same else command_line(self._options, mine.python, self._target, self._backend)
        )
        if own is None and not mine.with_ours:
            return node
        return replace(node, argv=own, env=self._with_ours if mine.with_ours else {})


def _facts_of(surveyed: Surveyed, host: str) -> Facts:
    return Facts(
        environ=surveyed.environ,
        cwd="",
        hostname=host,
        python=surveyed.python or "",
        cpus=surveyed.cpus,
        gpus=surveyed.gpus,
        paths={},
        texts={},
        programs={},
    )
