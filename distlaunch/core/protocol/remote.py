"""What passes between the coordinator and an agent on a machine of its own, beside ``messages``.

An agent says ``Hello`` first. Then, in this order: ``Survey``, per attempt ``Prepare`` (the master's node also
listens), ``Reach`` for the others, ``Start``; at the end ``Leave``. ``Ping`` goes on all the time.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.model.gpus import Gpu, GpuInventory, MigDevice
from distlaunch.core.model.node import CpuInventory
from distlaunch.core.model.record import Record
from distlaunch.core.protocol import agent_messages as m

GREETING = b"\ndistlaunch-agent "
"""Before an agent's first frame: this, the launcher's random word for it, and a newline. What came earlier (banners,
what a shell's start-up files print) is no frame."""
PING_S = 2.0
"""How often the coordinator pings."""
SILENCE_S = 10.0
"""After so long without a word the network, or the peer, is taken for lost (design, section 5), on both sides."""


# --- what messages are made of


class Interface(Record):
    """One address of a network interface that is up."""

    name: str
    address: str
    """Numeric, without a scope."""
    prefix: int
    """Bits of the network part."""


class Route(Record):
    """An address that a node has connected to, and by which interface of its own it did."""

    address: str
    local: str
    """Our end's address."""
    interface: str
    """Our end's interface; empty where the kernel does not tell."""


# --- coordinator to agent


class Survey(Record):
    """Look around on this node; answered with ``Surveyed``, as often as it is asked."""

    serial: int
    workdir: str
    pythons: tuple[str, ...]
    """Interpreters for the workers, the first that can be run counts; empty if the workers are no Python."""
    script: str
    """Relative to ``workdir`` if it is not absolute; empty if no file is named (``-m``)."""
    program: str
    """The workers' program under ``--no-python``; empty otherwise."""
    run_dir: str
    """The job's folder, which nodes may share with the launcher."""
    gpus: bool
    topology: bool
    """CPUs with their NUMA nodes and cores, for ``--bind``."""


class Reach(Record):
    """Connect to the port that the master's node listens on, at each of these addresses; answered with ``Reached``."""

    attempt: int
    addresses: tuple[str, ...]
    """Numeric ones or names, the preferred first."""
    port: int
    token: str
    """What the right listener says at once (ASCII, and a newline): others may have the same address."""
    bound_s: float


class Ping(Record):
    """Answer with ``Pong``. An agent that hears nothing for ``SILENCE_S`` takes the coordinator for lost."""

    serial: int
    silence_s: float | None = None
    """It is to be so long instead, as the user wants it."""


class Credit(Record):
    """So many more bytes of output may be sent."""

    size: int


class Feed(Record):
    """Bytes for the stdin of the rank that has the launcher's; none: the end. ``Fed`` answers as they are taken."""

    data: bytes


class Leave(Record):
    """The job is over: kill what is left, and end."""


# --- agent to coordinator


class Hello(Record):
    """The first word of an agent. ``clock`` is its own (seconds), which ``Pong`` and ``WorkerExited`` use."""

    hostname: str
    python: str
    """Its interpreter's version, as 3.11.4."""
    pid: int
    clock: float


class Surveyed(Record):
    """Answer to ``Survey``."""

    serial: int
    hostname: str
    environ: Mapping[str, str]
    """Device masks, and what else of its environment decides about devices."""
    interfaces: tuple[Interface, ...]
    named: tuple[str, ...]
    """The addresses that the node's own host name stands for, in the resolver's order; none if that took too long."""
    gpus: GpuInventory
    cpus: CpuInventory
    granted_cpus: int | None
    python: str | None
    """The first of the interpreters that is there."""
    script_sha256: str | None
    """Of the script (of a folder's ``__main__.py``); None if it is not there."""
    problem: str | None
    """Why workers cannot run here, as a clause: ``there is no directory /work``."""
    hint: str | None
    shares_run_dir: bool
    """The job's folder, with the launcher's marker in it, is there as well."""
    machine: str = ""
    """Tells this machine, or container, from all others, whatever it is called; empty if it cannot be told."""


class Reached(Record):
    """Answer to ``Reach``: to which of the addresses this node has a way; ``problem`` says why to none."""

    attempt: int
    routes: tuple[Route, ...]
    problem: str | None


class Pong(Record):
    """Answer to ``Ping``; ``clock`` is the agent's own, when the ping came."""

    serial: int
    clock: float


class Output(Record):
    """What a worker wrote to its stream (1 or 2)."""

    rank: int
    stream: int
    data: bytes


class RankEnded(Record):
    """Nothing more comes of this rank's output in this attempt."""

    rank: int


class Fed(Record):
    """So many bytes of stdin were taken; more may be sent. ``closed``: nobody reads it any more.

    ``unread``: so many bytes that were sent will never be read.
    """

    size: int
    closed: bool
    unread: int = 0


class Ending(Record):
    """The agent was told to end on its node, or has failed: it ends its workers and then itself, and says no more.

    The channel may stay open for as long: it is held by the shell that the agent was started from.
    """

    why: str
    """As a clause: ``the agent was told to end by signal 15``."""
    unheard: bool = False
    """It is because nothing was heard of the coordinator for too long."""


class Signalled(Record):
    """An agent that a scheduler's step has started got a signal, which is for the job: it only passes it on."""

    signum: int


ToRemote = m.ToAgent | Survey | Reach | Ping | Credit | Feed | Leave
FromRemote = m.FromAgent | Hello | Surveyed | Reached | Pong | Output | RankEnded | Fed | Ending | Signalled
TO_REMOTE: tuple[type, ...] = (*m.TO_AGENT, Survey, Reach, Ping, Credit, Feed, Leave)
FROM_REMOTE: tuple[type, ...] = (
    *m.FROM_AGENT, Hello, Surveyed, Reached, Pong, Output, RankEnded, Fed, Ending, Signalled,
)  # fmt: skip
REMOTE_PARTS: tuple[type, ...] = (*m.PARTS, Interface, Route, Gpu, MigDevice, GpuInventory, CpuInventory)
