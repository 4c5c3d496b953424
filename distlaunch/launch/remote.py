"""The nodes of a job whose agents SSH, srun or Ray starts. ``launch.run`` runs the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from distlaunch.coordinator.policy.events_and_actions import AttemptPlan
from distlaunch.coordinator.policy.job_settings import NodeSetupSettings
from distlaunch.coordinator.runtime.remote_agents import Feeder, RemoteAgents
from distlaunch.coordinator.runtime.remote_output import AttemptOutputSink, OutputThread
from distlaunch.core.model.topology import Node
from distlaunch.launch.discovery import run_discover
from distlaunch.launch.process import run_alone_hint
from distlaunch.planning.train_options import TrainOptions
from distlaunch.transport.child_process import KillSwitch
from distlaunch.transport.connection import Target
from distlaunch.transport.open_files import raise_limit_for_job
from distlaunch.transport.route import opener

if TYPE_CHECKING:
    from distlaunch.core.protocol.agent_messages import Surveyed
    from distlaunch.launch.slurm import SlurmJob
    from distlaunch.planning.allocation import Allocation
    from distlaunch.planning.surveyed_nodes import SurveyedPlanner
    from distlaunch.transport.ray.nodes import RayCluster

_UNKNOWN_SLOTS = 64
"""Assumed number of workers of a node that has not reported its own."""
_LEAST_CONNECT_S = 10.0
_LEAST_STEP_S, _BEFORE_S = 1.0, 0.5
"""srun starts all agents at once and does not retry. Its last message should arrive before the join
timeout."""
_FIRST_TRY_S = 15.0
"""Time to wait by default for machines that refuse the first connection. They are more likely off,
or misspelt, than about to start."""
_TOKEN_BYTES = 16


class RemoteNodes:
    """The nodes of one job, for the policy, and the connections to their agents."""

    def __init__(
        self,
        planner: SurveyedPlanner,
        options: TrainOptions,
        environ: Mapping[str, str],
        *,
        slurm_job: SlurmJob | None = None,
        allocation: Allocation | None = None,
        ray_cluster: RayCluster | None = None,
    ) -> None:
        """``slurm_job`` and ``allocation`` are set if srun starts the agents, ``ray_cluster`` if
        Ray does."""
        self._planner = planner
        self._ray_cluster = ray_cluster
        self._slurm_job, self._allocation = slurm_job, allocation
        self._options = options
        self._environ = environ
        self.feeder = Feeder() if Feeder.is_worth_it() else None

    @property
    def most_workers(self) -> int:
        """Upper limit of the workers that the console may have to show.

        A node whose workers are not known counts as ``_UNKNOWN_SLOTS``.
        """
        return sum(
            _UNKNOWN_SLOTS if node.slots is None else node.slots for node in self._planner.hosts
        )

    @property
    def _are_named(self) -> bool:
        """Whether the user named the hosts. Slurm and Ray name their own nodes."""
        if self._slurm_job is not None or self._ray_cluster is not None:
            return False
        return self._allocation is not None and self._allocation.by_user

    def node_setup_settings(self) -> NodeSetupSettings:
        """Return the settings of the policy for the nodes, with the functions that it calls."""
        planner, options = self._planner, self._options
        tokens: dict[int, str] = {}
        if self._slurm_job is not None:
            self._slurm_job.addresses.ask()

        def plan_attempt(surveys: Mapping[int, Surveyed]) -> AttemptPlan:
            node_numbers, plan = planner.plan_attempt(surveys)
            return AttemptPlan(node_numbers=node_numbers, plan=plan)

        def of_scheduler(host: str) -> tuple[str, ...]:
            return () if self._slurm_job is None else self._slurm_job.addresses.of(host)

        return NodeSetupSettings(
            hosts=tuple(node.host for node in planner.hosts),
            bounds=planner.bounds,
            survey=planner.survey,
            plan_attempt=plan_attempt,
            addresses=partial(planner.addresses, of_scheduler=of_scheduler),
            choose_master=partial(planner.choose_master, of_scheduler=of_scheduler),
            token=lambda attempt: tokens.setdefault(attempt, os.urandom(_TOKEN_BYTES).hex()),
            join_timeout_s=options.join_timeout,
            retry_timeout_s=None if options.who_set("join_timeout") else _FIRST_TRY_S,
            discover=options.discover is not None,
            named_once=self._are_named,
            alone=None if self._slurm_job is None else run_alone_hint(options),
            may_have_bounds=self._ray_cluster is None,  # Ray assigns a fixed number of nodes
        )

    def remote_agents(
        self, files: AttemptOutputSink, clock: Callable[[], float], *, run_dir: str, job_id: str
    ) -> RemoteAgents:
        """Return the connections to the agents, by srun, Ray or SSH. Nothing is connected yet.

        Raises the limit of open files. Raises ConfigError.
        """
        options = self._options
        planner = self._planner = self._planner.set_job(job_id, run_dir)
        targets = [self._connect_target(node) for node in planner.hosts]
        connect_s = max(_LEAST_CONNECT_S, options.join_timeout)
        raise_limit_for_job(connections=len(targets), logs=2 * self.most_workers)

        def output_thread(grant: Callable[[int, int], None]) -> OutputThread:
            return OutputThread(files, nodes=len(planner.hosts), grant=grant)

        if self._slurm_job is not None and self._allocation is not None:
            srun = self._slurm_job.srun(
                [target.host for target in targets], self._allocation, job_id=job_id
            )
            steps = self._slurm_job.remote_agents(
                targets,
                srun=srun,
                end_opening=srun.cancel,
                fanout=len(targets),
                connect_s=max(_LEAST_STEP_S, options.join_timeout - _BEFORE_S),
                output_thread=output_thread,
                clock=clock,
                feeder=self.feeder,
            )
            steps.silence_s = options.lost_after
            return steps
        if self._ray_cluster is not None:
            in_ray = RemoteAgents(
                targets,
                open_connection=self._ray_cluster.open,
                end_opening=self._ray_cluster.cancel,
                cut_off=self._ray_cluster.driver_end,
                fanout=len(targets),
                connect_s=connect_s,
                output_thread=output_thread,
                clock=clock,
                feeder=self.feeder,
            )
            self._ray_cluster.note = in_ray.note
            in_ray.silence_s = options.lost_after
            return in_ray
        kill_switch = KillSwitch()

        def note(text: str) -> None:
            agents.note(text)

        def logged_in(target: Target) -> None:
            agents.logged_in(target)

        agents = RemoteAgents(
            targets,
            open_connection=opener(
                options, self._environ, kill_switch, note=note, logged_in=logged_in
            ),
            end_opening=kill_switch.close,
            fanout=options.ssh_fanout,
            connect_s=connect_s,
            output_thread=output_thread,
            clock=clock,
            feeder=self.feeder,
            find=None if options.discover is None else self._run_discover,
            read=self._targets_of_output,
        )
        agents.silence_s = options.lost_after
        return agents

    def _connect_target(self, node: Node) -> Target:
        return Target(
            host=node.host, user=node.user, port=node.port, here=self._planner.is_here(node.host)
        )

    def _run_discover(self) -> str:
        options = self._options
        return run_discover(options.discover or "", self._environ, who=options.named("discover"))

    def _targets_of_output(self, output: str) -> list[Target]:
        return [self._connect_target(node) for node in self._planner.update_hosts(output)]
