"""Horovod by gloo: its variables for each worker; its store is ours, on the master's port.

``base_environment`` has dropped what an outer launcher set of these. Elastic Horovod is not offered: its protocol
unpickles what comes over the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.backends.base import Backend, BackendOption, Requirement, Value
from distlaunch.backends.horovod_settings import SETTINGS, is_idle
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.text import printable
from distlaunch.core.model.topology import Topology
from distlaunch.core.protocol.remote import Surveyed
from distlaunch.planning.master_address import led_astray
from distlaunch.planning.ranks import cross_ranks, cross_sizes

_COMPRESSION = BackendOption(
    name="compression", about="what wrap() compresses gradients to", kind="choice", choices=("none", "fp16")
)
_IN_URLS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_")


class Horovod(Backend):
    """Horovod 0.28 with gloo for control, gloo or NCCL for data."""

    name = "horovod"
    about = "Horovod: its variables and its store; gloo for control, NCCL or gloo for data"
    requires = (
        Requirement(
            module="horovod",
            package="horovod",
            at_least="0.21",
            variables="HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1",
            see="compiling it beside a new torch takes more: distlaunch help horovod",
        ),
    )
    store = True
    ipv4_only = "Horovod's workers find each other by IPv4 alone"

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        for setting in SETTINGS:
            if not setting.fits(chosen.get(setting.name, 0)):
                raise ConfigError(f"-o {setting.name}={chosen[setting.name]}: it is {setting.most:g} at most")

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """List the options that ``-o`` takes: what horovodrun has of its own."""
        return (_COMPRESSION, *(setting.option for setting in SETTINGS))

    @property
    def notes(self) -> Sequence[str]:
        """Name what is chosen and changes nothing."""
        return [
            f"-o {setting.name} has no effect without -o {setting.of}"
            for setting in SETTINGS
            if setting.name in self.chosen and is_idle(setting, self.chosen)
        ]

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Name the controller, and how many workers there are."""
        world = topology.world_size
        chosen = self.chosen
        variables = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        if world is not None:
            variables["HOROVOD_SIZE"] = str(world)
        for setting in SETTINGS:
            if setting.name in chosen and not is_idle(setting, chosen):
                variables[setting.variable] = setting.text(chosen[setting.name])
        return variables

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Keep a job of one machine on its loopback interface, which is always there; show where a worker crashes.

        Horovod 0.28 minds the interface only while it starts: its groups for data listen where the machine's own name
        leads, and it crashes where that leads nowhere.
        """
        shown = {"PYTHONFAULTHANDLER": "1"}
        return shown | {"HOROVOD_GLOO_IFACE": "lo"} if len(topology.nodes) == 1 else shown

    def check_meeting(self, surveys: Sequence[Surveyed], hosts: Sequence[str]) -> None:
        """Refuse nodes whose own name leads to a loopback address where not all are one machine.

        Horovod 0.28 has the groups that move data listen where that name leads, whatever HOROVOD_GLOO_IFACE says.
        """
        astray = led_astray(surveys, hosts)
        for host, address in astray.items():
            raise ConfigError(
                f"{name_hosts(astray)}: the machine's own name leads to {address}, and Horovod's workers would listen"
                " there, where no other node reaches them",
                hint=f"in /etc/hosts of {printable(host)} its name has to stand beside the address that others use",
            )

    def repeated(self) -> Mapping[str, str]:
        """Give where the store is, and the interface that the nodes have found for gloo."""
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "MASTER_ADDR",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "MASTER_PORT",
            "HOROVOD_GLOO_IFACE": "GLOO_SOCKET_IFNAME",
        }

    def node_variables(self, topology: Topology, node_rank: int) -> Mapping[str, str]:
        """Name the node, which has to be unlike all others, and may stand in a URL."""
        host = topology.nodes[node_rank].host
        variables = {"HOROVOD_HOSTNAME": host if self._of(topology).distinct else f"node-{node_rank}"}
        if (slots := topology.nodes[node_rank].slots) is not None:
            variables["HOROVOD_LOCAL_SIZE"] = str(slots)
        return variables

    def worker_variables(self, topology: Topology, node_rank: int, local_rank: int, rank: int) -> Mapping[str, str]:
        """Give the worker's place, also among the workers of all nodes that have its local rank."""
        places = self._of(topology)
        return {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_LOCAL_RANK": str(local_rank),
            "HOROVOD_CROSS_RANK": str(places.ranks[node_rank][local_rank]),
            "HOROVOD_CROSS_SIZE": str(places.sizes[local_rank]),
        }

    def _of(self, topology: Topology) -> _Places:
        places: _Places | None = getattr(self, "_places", None)
        if places is None or places.topology is not topology:
            places = self._places = _Places(topology)
        return places


class _Places:
    """Where workers are among those of all nodes: made once a topology, asked for every worker of it."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        hosts = {node.host for node in topology.nodes}
        self.distinct = len(hosts) == len(topology.nodes) and all(host and _IN_URLS.issuperset(host) for host in hosts)
        """Names of hosts do for all nodes; else all are numbered, as a number beside them may be another's name."""
        slots = [node.slots or 0 for node in topology.nodes]
        self.ranks, self.sizes = cross_ranks(slots), cross_sizes(slots)
