"""TensorFlow's MultiWorkerMirroredStrategy, whose workers find each other by ``TF_CONFIG``.

Each worker has a server on a port of its own, which all others have to know before they start: the
nodes hold these ports. The cluster is the same text for all; the task, behind it, is each one's
own. A worker computes on every GPU that it sees, so it gets to see its own alone, or (``-o
per=node``) there is one worker a node, with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from distlaunch.backends.base import Backend, BackendOption, Requirement
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import Topology
from distlaunch.planning.train_options import TrainOptions, check_kind

_CONFIG = "TF_CONFIG"
_LEGACY = "TF_USE_LEGACY_KERAS"
_SAYS_YES = ("1", "true", "True")
"""As TensorFlow 2.21 reads it."""


class TensorFlow(Backend):
    """``TF_CONFIG`` for each worker."""

    name = "tensorflow"
    about = "TensorFlow's MultiWorkerMirroredStrategy: TF_CONFIG for a worker per GPU, or per node"
    requires = (
        Requirement(module="tensorflow", package="tensorflow", at_least="2.4"),
        # of which tf.keras is made where TF_USE_LEGACY_KERAS says so; before, tensorflow had its
        # own
        Requirement(
            module="tf_keras",
            package="tf-keras",
            beside=Requirement(module="tensorflow", package="tensorflow", at_least="2.16"),
        ),
    )
    worker_ports = 1

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """List who is a worker, and which of them have another part."""
        return (
            BackendOption(
                name="per",
                about="a worker for each GPU, or one with all of its node's",
                kind="choice",
                choices=("gpu", "node"),
            ),
            BackendOption(
                name="chief",
                about="rank 0 is the chief, not worker 0, who acts as one",
                kind="flag",
            ),
            BackendOption(
                name="evaluator",
                about="the last rank is the evaluator, which is no part of the cluster",
                kind="flag",
            ),
        )

    def needed(self, variables: Mapping[str, str]) -> tuple[Requirement, ...]:
        """Do without Keras 2 where the user says so."""
        return self.requires if variables.get(_LEGACY) in _SAYS_YES else self.requires[:1]

    def sized(self, options: TrainOptions) -> TrainOptions:
        """Show each worker the GPUs that are its own. Raises ConfigError for sizes that ``-o
        per=node`` contradicts.

        ``--gpus-per-node N`` is then so many for the one worker: as when a GPU has one, it is what
        nodes are asked for.
        """
        if self.chosen.get("per") != "node":
            return replace(options, isolate_gpus=True)
        size = options.who_set("num_gpus", "num_procs", "isolate_gpus")
        if size is None and options.procs_per_node not in (None, 1):
            size = options.named("procs_per_node")
        if size is not None:
            raise ConfigError(
                f"-o per=node and {size} contradict each other: each node has one worker, with all "
                "of its GPUs",
                hint=f"leave {size} out; --num-nodes says how many nodes, --gpus-per-node how many "
                "GPUs the worker has",
            )
        if options.gpus_per_node is not None:
            check_kind(options)
        gpus = options.gpus_per_node
        return replace(
            options, procs_per_node=1, gpus_per_node=None, whole_nodes=True, whole_gpus=gpus
        )

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Have ``tf.keras`` be Keras 2 (the package tf_keras), as Keras 3 does not train under this
        strategy."""
        return {_LEGACY: "1"}

    def check(self, topology: Topology) -> None:
        """Refuse a job in which nobody would be left to train."""
        if self.chosen.get("evaluator") and topology.world_size == 1:
            raise ConfigError(
                "-o evaluator=on: there is one worker, and nobody to train",
                hint="ask for one worker more",
            )

    def cluster_variables(self, cluster: tuple[str, ...]) -> Mapping[str, str]:
        """Name the cluster: the JSON up to the worker's task in it."""
        chiefs, training = self._parts(len(cluster))
        parts = {"chief": cluster[:chiefs], "worker": cluster[chiefs:training]}
        named = json.dumps({part: who for part, who in parts.items() if who}, separators=(",", ":"))
        return {_CONFIG: f'{{"cluster":{named},"task":'}

    def task_variables(self, workers: int, rank: int) -> Mapping[str, str]:
        """Name the worker's task, which ends the JSON."""
        chiefs, training = self._parts(workers)
        if rank >= training:
            kind, index = "evaluator", 0
        elif rank < chiefs:
            kind, index = "chief", 0
        else:
            kind, index = "worker", rank - chiefs
        return {_CONFIG: f'{{"type":"{kind}","index":{index}}}}}'}

    def fewer_workers(self) -> str:
        """Point at the option by which a node has one."""
        if self.chosen.get("per") == "node":
            return "ask for fewer nodes"
        return "ask for fewer workers; -o per=node has one for each node, with all of its GPUs"

    def _parts(self, workers: int) -> tuple[int, int]:
        """Return the rank after the last chief's, and that after the last one's who trains."""
        return (1 if self.chosen.get("chief") else 0), workers - (
            1 if self.chosen.get("evaluator") else 0
        )
