"""What planning asks of a backend: its variables and words, and what the nodes need; all of it
pure.

``backends.base`` has the rest: its options, what has to be installed, which sizes it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from distlaunch.core.model.topology import Topology

if TYPE_CHECKING:
    from distlaunch.core.protocol.agent_messages import Surveyed

Value = str | int | float | bool


class PlannedBackend:
    """Base class of backends: the hooks that planning calls, each of which adds nothing by default.

    ``backends.base.Backend`` extends it by what is needed before planning.
    """

    name: ClassVar[str]
    """On the command line."""
    store: ClassVar[bool] = False
    """Workers find each other by a store of ours on the master's port, as Horovod's do."""
    worker_ports: ClassVar[int] = 0
    """How many ports its node holds for each worker, to listen on; see ``cluster_variables``."""
    meets_at_port: ClassVar[bool] = False
    """Workers that train together always use MASTER_PORT."""
    shared_memory: ClassVar[tuple[str, ...]] = ()
    """Names of the files that each worker may leave in /dev/shm: its node removes them after every
    attempt.

    {uid}, {address}, {port} and {rank} in them stand for the user's id, MASTER_ADDR, MASTER_PORT
    and RANK; the second and third have to be there, or the file could be another job's.
    """
    ipv4_only: ClassVar[str] = ""
    """Why nodes cannot meet by IPv6, in a sentence; empty: they can."""
    chosen: Mapping[str, Value] = {}
    """The options that were given, by name."""

    def agreed(self) -> Mapping[str, Value]:
        """Return the options that have to be the same where each node has a launcher of its own."""
        return self.chosen

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know of the choices made."""
        return ()

    def notes_on(self, topology: Topology) -> Sequence[str]:
        """Say what the user should know of the choices made, given these nodes and workers."""
        del topology
        return ()

    def notes_on_script(self, name: str, text: str) -> Sequence[str]:
        """Say what the user should know of the choices made, given the text of the script."""
        del name, text
        return ()

    def check(self, topology: Topology) -> None:
        """Raise ConfigError where these nodes and workers cannot have what was chosen."""
        del topology

    def check_meeting(self, surveys: Sequence[Surveyed], hosts: Sequence[str]) -> None:
        """Raise ConfigError where nodes, by rank, of which each reaches the first one will not
        do."""
        del surveys, hosts

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return variables that are the same for all workers.

        They win over the environment. ``--env`` wins over them, and may not name variables of
        ``node_variables`` and ``worker_variables``.
        """
        del topology
        return {}

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return values for all workers that are set only where neither environment nor user sets
        them."""
        del topology
        return {}

    def unwanted(self) -> Sequence[str]:
        """Name variables that contradict the choices made, as another launcher may have left them.

        Workers do not inherit them, which is told; the user may still give them, and
        ``job_variables`` set them.
        """
        return ()

    def node_variables(self, topology: Topology, node_rank: int) -> Mapping[str, str]:
        """Return the same values for all workers of a node. ``--env`` may not name these."""
        del topology, node_rank
        return {}

    def worker_variables(
        self, topology: Topology, node_rank: int, local_rank: int, rank: int
    ) -> Mapping[str, str]:
        """Return what only this worker has. ``--env`` may not name these."""
        del topology, node_rank, local_rank, rank
        return {}

    def repeated(self) -> Mapping[str, str]:
        """Return by variable which of ours has its value: of MASTER_ADDR, MASTER_PORT and
        GLOO_SOCKET_IFNAME."""
        return {}

    def cluster_variables(self, cluster: tuple[str, ...]) -> Mapping[str, str]:
        """Tell where all workers listen, once that is settled, the same for all. ``--env`` may not
        name these.

        ``cluster``: ``HOST:PORT``, ``worker_ports`` of them for each worker, by rank. New for every
        attempt. A value goes on with what ``task_variables`` has under the same name: where one
        value tells a worker of thousands, and of its place among them, the thousands are put
        together, and sent to its node, once.
        """
        del cluster
        return {}

    def task_variables(self, workers: int, rank: int) -> Mapping[str, str]:
        """Return what only this one of the workers has beside ``cluster_variables``, or as the end of
        their values."""
        del workers, rank
        return {}

    def fewer_workers(self) -> str:
        """Say, as a hint, how to get by with fewer workers, where they are too many to be told of
        one another."""
        return "ask for fewer workers"

    def attempt_files(self, topology: Topology) -> Mapping[str, str]:
        """Return by variable the name of a file, or how names begin, in the attempt's folder.

        Set only where nobody else sets it. Variables with the same file are names of one thing, old
        and new: where one of them is set, none is.
        """
        del topology
        return {}

    def script_words(self) -> tuple[str, ...]:
        """Return words that stand before the script's own arguments, which so have the last word; for
        all workers."""
        return ()

    def worker_words(self, local_rank: int) -> tuple[str, ...]:
        """Return words between these that are not the same for all workers, which then cannot be
        forked.

        ``local_rank`` is what LOCAL_RANK says.
        """
        del local_rank
        return ()
