"""The ``tensorflow`` backend: MultiWorkerMirroredStrategy, configured by ``TF_CONFIG``.

Each worker has a server. All workers must know the ports of all servers before they start, so the
nodes reserve these ports. ``TF_CONFIG`` consists of the cluster, equal for all workers, and the
worker's task. A worker uses every GPU that it sees. So either each worker sees only one GPU, or
(``-o per=node``) each node has one worker that sees all GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from distlaunch.backends.base import Backend, BackendOption, Requirement
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import Topology
from distlaunch.planning.train_options import TrainOptions, check_kind

_CONFIG = "TF_CONFIG"
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_TRUE = ("1", "true", "True")
"""Values that TensorFlow 2.21 accepts as true."""


class TensorFlow(Backend):
    """Sets ``TF_CONFIG`` for each worker."""

    name = "tensorflow"
    about = "TensorFlow's MultiWorkerMirroredStrategy: TF_CONFIG for a worker per GPU, or per node"
    requires = (
        Requirement(module="tensorflow", package="tensorflow", at_least="2.4"),
        # With TF_USE_LEGACY_KERAS, tf.keras is tf_keras since TensorFlow 2.16; before, TensorFlow
        # contained Keras 2.
        Requirement(
            module="tf_keras",
            package="tf-keras",
            beside=Requirement(module="tensorflow", package="tensorflow", at_least="2.16"),
        ),
    )
    worker_ports = 1

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """Return options for the number of workers and their roles."""
        return (
            BackendOption(
                name="per",
                about="one worker per GPU, or one per node with all of its GPUs",
                kind="choice",
                choices=("gpu", "node"),
            ),
            BackendOption(
                name="chief",
                about="rank 0 is the chief; without it, worker 0 does the chief's work",
                kind="flag",
            ),
            BackendOption(
                name="evaluator",
                about="the last rank is the evaluator, outside the cluster",
                kind="flag",
            ),
        )

    def needed(self, variables: Mapping[str, str]) -> tuple[Requirement, ...]:
        """Return TensorFlow, and Keras 2 unless the user chooses Keras 3."""
        return self.requires if variables.get(_LEGACY_KERAS) in _TRUE else self.requires[:1]

    def sized(self, options: TrainOptions) -> TrainOptions:
        """Return the options with one visible GPU per worker, or with one worker per node.

        With ``-o per=node``, ``--gpus-per-node N`` is the number of GPUs of the node's worker.
        Raises ConfigError for sizes that contradict ``-o per=node``.
        """
        if self.chosen.get("per") != "node":
            return replace(options, isolate_gpus=True)
        size = options.who_set("num_gpus", "num_procs", "isolate_gpus")
        if size is None and options.procs_per_node not in (None, 1):
            size = options.named("procs_per_node")
        if size is not None:
            raise ConfigError(
                f"{Opt.OPT} per=node and {size} contradict each other: each node has one worker, "
                "with all "
                "of its GPUs",
                hint=f"leave {size} out; {Opt.NUM_NODES} is the number of nodes, "
                f"{Opt.GPUS_PER_NODE} that of GPUs of each worker",
            )
        if options.gpus_per_node is not None:
            check_kind(options)
        gpus = options.gpus_per_node
        return replace(
            options, procs_per_node=1, gpus_per_node=None, whole_nodes=True, whole_gpus=gpus
        )

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return the variable that makes ``tf.keras`` Keras 2 (tf_keras).

        Keras 3 does not train under this strategy.
        """
        return {_LEGACY_KERAS: "1"}

    def check(self, topology: Topology) -> None:
        """Raise ConfigError if the only worker would be the evaluator, so that none trains."""
        if self.chosen.get("evaluator") and topology.world_size == 1:
            raise ConfigError(
                f"{Opt.OPT} evaluator=on: with one worker, no worker would train",
                hint="start one more worker",
            )

    def cluster_variables(self, cluster: tuple[str, ...]) -> Mapping[str, str]:
        """Return the beginning of TF_CONFIG's JSON, with the cluster, equal for all workers."""
        chiefs, training = self._role_bounds(len(cluster))
        roles = {"chief": cluster[:chiefs], "worker": cluster[chiefs:training]}
        named = json.dumps({role: who for role, who in roles.items() if who}, separators=(",", ":"))
        return {_CONFIG: f'{{"cluster":{named},"task":'}

    def task_variables(self, workers: int, rank: int) -> Mapping[str, str]:
        """Return the end of TF_CONFIG's JSON, with the worker's task."""
        chiefs, training = self._role_bounds(workers)
        if rank >= training:
            kind, index = "evaluator", 0
        elif rank < chiefs:
            kind, index = "chief", 0
        else:
            kind, index = "worker", rank - chiefs
        return {_CONFIG: f'{{"type":"{kind}","index":{index}}}}}'}

    def fewer_workers(self) -> str:
        """Return a hint on how to use fewer workers.

        It mentions ``-o per=node`` unless that is set.
        """
        if self.chosen.get("per") == "node":
            return "ask for fewer nodes"
        return (
            f"ask for fewer workers; {Opt.OPT} per=node starts one worker per node, with all "
            "of its GPUs"
        )

    def _role_bounds(self, workers: int) -> tuple[int, int]:
        """Return the first rank after the chief, and the first after the workers that train."""
        return (1 if self.chosen.get("chief") else 0), workers - (
            1 if self.chosen.get("evaluator") else 0
        )
