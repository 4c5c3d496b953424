"""The interface between planning and a backend: its variables, arguments, and requirements. No I/O.

``backends.base`` adds options, required packages, and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from distlaunch.core.model.topology import Topology

if TYPE_CHECKING:
    from distlaunch.core.protocol.agent_messages import Surveyed

Value = str | int | float | bool


class PlannedBackend:
    """Base class of backends. By default every hook adds nothing.

    ``backends.base.Backend`` adds the hooks that are called before planning.
    """

    name: ClassVar[str]
    """As on the command line."""
    store: ClassVar[bool] = False
    """Whether the launcher serves a store on the master port, for the workers to find each other
    (Horovod)."""
    worker_ports: ClassVar[int] = 0
    """How many ports a node reserves for each worker, for ``cluster_variables``."""
    uses_master_port: ClassVar[bool] = False
    """Workers that train together always use MASTER_PORT."""
    shared_memory: ClassVar[tuple[str, ...]] = ()
    """Names of files that a worker may leave in /dev/shm, which the node removes after every
    attempt. {uid}, {address}, {port} and {rank} stand for the user's id, MASTER_ADDR, MASTER_PORT
    and RANK. Without address and port, the file could be another job's."""
    ipv4_only: ClassVar[str] = ""
    """Why the nodes cannot use IPv6, as a sentence, if they cannot."""
    chosen: Mapping[str, Value] = {}
    """The user's options by name."""

    def agreed(self) -> Mapping[str, Value]:
        """Return the options that must be equal on all nodes if each node has a launcher."""
        return self.chosen

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user on the chosen options."""
        return ()

    def notes_on(self, topology: Topology) -> Sequence[str]:
        """Return notes on the chosen options with these nodes and workers."""
        del topology
        return ()

    def notes_on_script(self, name: str, text: str) -> Sequence[str]:
        """Return notes on how the chosen options fit the script, whose source is ``text``."""
        del name, text
        return ()

    def check(self, topology: Topology) -> None:
        """Raise ConfigError if the chosen options are impossible with these nodes and workers."""
        del topology

    def check_nodes(self, surveys: Sequence[Surveyed], hosts: Sequence[str]) -> None:
        """Raise ConfigError if the backend cannot work on these nodes, which all reach the first
        one.

        Both arguments are by node rank.
        """
        del surveys, hosts

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return variables that are the same for all workers.

        They override the inherited environment, and ``--env`` overrides them. ``--env`` may not
        name variables of ``node_variables`` and ``worker_variables``.
        """
        del topology
        return {}

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return variables for all workers that apply only if neither environment nor user sets
        them."""
        del topology
        return {}

    def unwanted(self) -> Sequence[str]:
        """Return the names of inherited variables that contradict the chosen options.

        Another launcher may have set them. Workers do not inherit these variables, and a note says
        so. ``--env`` and ``job_variables`` can still set them.
        """
        return ()

    def node_variables(self, topology: Topology, node_rank: int) -> Mapping[str, str]:
        """Return variables of all workers of a node, which ``--env`` may not name."""
        del topology, node_rank
        return {}

    def worker_variables(
        self, topology: Topology, node_rank: int, local_rank: int, rank: int
    ) -> Mapping[str, str]:
        """Return the variables of one worker, which ``--env`` may not name."""
        del topology, node_rank, local_rank, rank
        return {}

    def repeated(self) -> Mapping[str, str]:
        """Return variable -> the one of MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME that has
        the same value."""
        return {}

    def cluster_variables(self, cluster: tuple[str, ...]) -> Mapping[str, str]:
        """Return variables that list the addresses of all workers, which ``--env`` may not name.

        ``cluster`` has ``worker_ports`` entries ``HOST:PORT`` for each worker, by rank, new for
        every attempt. The value of ``task_variables`` under the same name is appended for each
        worker. So a list of thousands of workers is built and sent to a node only once.
        """
        del cluster
        return {}

    def task_variables(self, workers: int, rank: int) -> Mapping[str, str]:
        """Return the ends of ``cluster_variables`` for one worker, and further variables of it."""
        del workers, rank
        return {}

    def fewer_workers(self) -> str:
        """Return the hint for a job with too many workers to list in a variable."""
        return "ask for fewer workers"

    def attempt_files(self, topology: Topology) -> Mapping[str, str]:
        """Return variables whose values are file names, or prefixes of them, in the attempt's
        directory.

        A variable is set only if neither environment nor user sets it. Variables with the same file
        are an old and a new name of one setting: if one is set, the other is not added.
        """
        del topology
        return {}

    def script_words(self) -> tuple[str, ...]:
        """Return arguments before the script's own, which take precedence, for all workers."""
        return ()

    def worker_words(self, local_rank: int) -> tuple[str, ...]:
        """Return words after ``script_words`` that differ by worker.

        Workers with such words cannot be forked (--preload). ``local_rank`` is the value of
        LOCAL_RANK.
        """
        del local_rank
        return ()
