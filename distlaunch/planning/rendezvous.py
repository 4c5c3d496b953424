"""Choose the address at which the launchers of a job meet, and which of them is the
coordinator. No I/O.

The coordinator is the launcher with node rank 0. Without ranks, it is the one on the machine that
the rendezvous names; of several there, the first that can listen on the port.
"""

from __future__ import annotations

from typing import Literal

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, printable
from distlaunch.core.model.topology import Node, Topology
from distlaunch.planning.master_address import (
    MasterOrigin,
    master_of_allocation,
    planned_master,
    rendezvous_endpoint,
)
from distlaunch.planning.node_source import Location
from distlaunch.planning.train_options import TrainOptions

DEFAULT_PORT = 29400
_SERIES, _FIRST, _SPAN = 4, 20000, 10000
"""If the scheduler numbers its jobs, a job tries four ports in turn, outside of the kernel's
ephemeral range."""


class Rendezvous(Record):
    """How one launcher finds the others."""

    host: str
    ports: tuple[int, ...]
    """The coordinator listens on the first of these ports that is free."""
    of_source: bool
    """Whether the source set the port for rank 0's store. The store then gets another port."""
    job_key: str
    """A text that only the launchers of the job know."""
    rank: int | None
    """This launcher's number; None if the coordinator assigns it."""
    leads: Literal["yes", "no", "first"]
    """Whether this launcher is the coordinator. ``first``: if it is the first to listen on the
    port."""


def choose_rendezvous(options: TrainOptions, location: Location, topology: Topology) -> Rendezvous:
    """Return how this launcher finds the others: address, ports, and whether it is the coordinator.

    Raises ConfigError if neither the options nor the source of the nodes determine the address, or
    if rank 0's port is the same.
    """
    allocation = location.allocation
    host, port = rendezvous_endpoint(options)
    port_of_source = None
    if host is None:
        master = planned_master(options, topology)
        host = master.address
        port_of_source = master.port if master.port_origin is MasterOrigin.SYSTEM else None
    if host is None:
        raise ConfigError(
            f"{location.who} starts several launchers, but the address of node 0's launcher is not "
            "known",
            hint=f"start all of them with {Opt.RENDEZVOUS('HOST:PORT')}, HOST being the node of "
            "rank 0",
        )
    numbered = allocation.number
    if port is not None:
        ports: tuple[int, ...] = (port,)
    elif port_of_source is not None:
        ports = (port_of_source,)
    elif numbered is not None:
        first = _FIRST + numbered * _SERIES % _SPAN
        ports = tuple(range(first, first + _SERIES))
    else:
        ports = (DEFAULT_PORT,)
    if options.master_port in ports:
        raise ConfigError(
            f"port {options.master_port} cannot be both rank 0's ({options.named('master_port')}) "
            "and the launchers'",
            hint=f"use {Opt.RENDEZVOUS('HOST:PORT')} with another port for the launchers",
        )
    rank = _own_number(location, topology)
    leads: Literal["yes", "no", "first"] = (
        "yes" if rank == 0 else "no" if rank is not None else "first"
    )
    if leads == "first" and topology.here != 0:
        leads = "no"
    job_key = options.dialect.run_id or options.job_id or allocation.job_id or ""
    return Rendezvous(
        host=host,
        ports=ports,
        of_source=port_of_source is not None,
        job_key=job_key,
        rank=rank,
        leads=leads,
    )


def choose_rendezvous_without_plan(options: TrainOptions, location: Location) -> Rendezvous:
    """Return the rendezvous of a launcher that has no plan because of an error.

    Raises ConfigError if nothing determines the address.
    """
    allocation, master = location.allocation, None
    if len(allocation.hosts) > 1:
        own_name = location.name if location.here == 0 else None
        master = master_of_allocation(options, allocation, index=0, hostname=own_name)
    topology = Topology(
        nodes=tuple(
            Node(host=host.name, slots=host.slots, known=host.known) for host in allocation.hosts
        ),
        device="cpu",
        here=location.here,
        master_addr=None if master is None else master.address,
        master_port=None if master is None else master.port,
    )
    return choose_rendezvous(options, location, topology)


def _own_number(location: Location, topology: Topology) -> int | None:
    """Return the rank of this launcher's node, or of its worker if each has a launcher."""
    if not location.ranked:
        return None
    allocation, here = location.allocation, topology.here
    if allocation.part != "worker":
        return here
    before = sum(host.slots or 0 for host in allocation.hosts[: allocation.node_rank or 0])
    return before + (allocation.local_rank or 0)


def check_joinable(location: Location, topology: Topology) -> None:
    """Raise ConfigError for options that do not work with one launcher per node."""
    if topology.spares:
        raise ConfigError(
            f"{Opt.SPARES(counted(len(topology.spares), 'node'))}: {location.who} starts a "
            "launcher "
            "on each node",
            hint=f"use {Opt.NUM_NODES} MIN:MAX, which goes on without lost nodes and lets new "
            "ones join",
        )
    if location.allocation.part == "node" and topology.here is None:
        name = printable(location.name)
        raise ConfigError(
            f"this machine, {name}, is not one of the nodes that train",
            hint="distlaunch plan shows the nodes",
        )
