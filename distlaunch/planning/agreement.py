"""Check that all nodes of a job agree on the script and on the options, and choose each node's
interpreter. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.protocol.agent_messages import Surveyed
from distlaunch.core.protocol.launcher_messages import LauncherInfo
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.train_options import TrainOptions

ELSEWHERE = "python3"
"""The workers' interpreter on nodes that lack the launcher's, on the PATH that --setup sets."""
_HASH_SHOWN = 8


def _directory_hint() -> str:
    return (
        f"copy it to every node, use a shared file system, or give its directory with {Opt.WORKDIR}"
    )


class NodesDifferError(ConfigError):
    """Nodes have different scripts, or none. A network file system may deliver the right file a
    moment later."""

    def __init__(self, message: str, *, nodes: tuple[int, ...], hint: str | None = None) -> None:
        """``nodes`` are the numbers of the nodes to survey again."""
        super().__init__(message, hint=hint)
        self.nodes = nodes


def check_script(
    script: str,
    workdir: str,
    hashes: Mapping[int, str | None],
    hosts: Sequence[str],
    ours: int | None,
) -> None:
    """Raise NodesDifferError if the script is missing on a node or differs between nodes.

    ``hashes`` and ``hosts`` are by node number. The reference is the script of this machine
    (``ours``), or the script that most nodes have.
    """
    by_hash: dict[str | None, list[int]] = {}
    for number, sha in hashes.items():
        by_hash.setdefault(sha, []).append(number)

    def names(numbers: Sequence[int]) -> str:
        return name_hosts(hosts[number] for number in numbers)

    shown = printable(script)
    if (lacking := by_hash.get(None)) is not None:
        where = f"{names(lacking)} (directory: {printable(workdir)})"
        raise NodesDifferError(
            f"{shown} is missing on {where}", nodes=tuple(lacking), hint=_directory_hint()
        )
    if len(by_hash) <= 1:
        return
    right = hashes.get(ours) if ours is not None else None
    right = right or max(by_hash, key=lambda sha: len(by_hash[sha]))
    others = {sha: numbers for sha, numbers in by_hash.items() if sha != right}
    kinds = ", ".join(
        f"{(sha or '')[:_HASH_SHOWN]} on {names(numbers)}" for sha, numbers in others.items()
    )
    raise NodesDifferError(
        f"{shown} is not the same on all nodes: {kinds}, but {(right or '')[:_HASH_SHOWN]} on "
        f"{names(by_hash[right])}",
        nodes=tuple(sorted(number for numbers in others.values() for number in numbers)),
        hint=_directory_hint(),
    )


def command_digest(options: TrainOptions) -> str:
    """Return a digest of script and arguments, by which launchers compare their commands.

    The directory of the script may differ between nodes.
    """
    name = (options.script or "").rpartition("/")[2]
    command = (
        "m" if options.module else "x" if options.no_python else "s",
        name,
        *options.script_args,
    )
    return hashlib.sha256("\0".join(command).encode(errors="surrogateescape")).hexdigest()


def choices_digest(backend: PlannedBackend) -> str:
    """Return a digest of the backend's options that must be equal on all nodes."""
    return hashlib.sha256(json.dumps(dict(backend.agreed()), sort_keys=True).encode()).hexdigest()


def difference(
    other: LauncherInfo, own: LauncherInfo, *, who: str, me: str, what: str
) -> str | None:
    """Return how the options of another launcher differ from the coordinator's (``own``); None if
    they agree.

    ``who`` and ``me`` name the two launchers. ``what`` is "nodes" or "launchers", whichever
    ``num_nodes`` counts.
    """
    if tuple(other.num_nodes) != tuple(own.num_nodes):
        return (
            f"{who} was started for {_bounds_text(other.num_nodes)} {what}, {me} for "
            f"{_bounds_text(own.num_nodes)}"
        )
    if other.backend != own.backend:
        return (
            f"{who} has {Opt.BACKEND(quoted(other.backend))}, {me} "
            f"{Opt.BACKEND(quoted(own.backend))}"
        )
    if other.choices != own.choices:
        return f"{who} has other options of {Opt.BACKEND(own.backend)} ({Opt.OPT}) than {me}"
    if other.command != own.command:
        return f"{who} runs another command than {me}: the script or its arguments differ"
    return None


def _bounds_text(bounds: Sequence[int]) -> str:
    fewest, most = bounds
    return str(most) if fewest == most else f"{fewest}:{most}"


class Interpreter(Record):
    """What runs the workers of a node."""

    python: str
    """The interpreter as on the command line. Not used with --no-python."""
    with_ours: bool
    """Whether the launcher's own interpreter exists there at the same path."""


def interpreter_of(options: TrainOptions, ours: str, surveyed: Surveyed) -> Interpreter:
    """Return the workers' interpreter on a node: --python, the launcher's (``ours``) if the node
    has it, or the survey's."""
    if options.python is not None:
        # The survey did not look for our interpreter. A shared run directory suggests shared
        # software.
        return Interpreter(python=options.python, with_ours=surveyed.shares_run_dir)
    if surveyed.python == ours:
        return Interpreter(python=ours, with_ours=True)
    brought = options.setup is not None or surveyed.python is None
    return Interpreter(
        python=ELSEWHERE if brought else surveyed.python or ELSEWHERE, with_ours=False
    )
