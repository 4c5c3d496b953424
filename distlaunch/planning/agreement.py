"""Whether the nodes of a job have the same: one script on all, one command where each has a
launcher.

And which interpreter there is on each. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.protocol.agent_messages import Surveyed
from distlaunch.core.protocol.launcher_messages import LauncherInfo
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.train_options import TrainOptions

ELSEWHERE = "python3"
"""The workers' interpreter where ours is not, if no other is named; with --setup the one that this
has brought."""
_HINT = (
    "have it on every node: copy it there, use a shared file system, or name where it is by "
    "--workdir"
)
_HASH_SHOWN = 8


class NodesDiffer(ConfigError):  # noqa: N818 - it says of nodes, not of an error
    """Nodes do not have the same script, which a network file system may mend in a moment."""

    def __init__(self, message: str, *, nodes: tuple[int, ...], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.nodes = nodes
        """By number: those to look at again."""


def check_script(
    script: str,
    workdir: str,
    hashes: Mapping[int, str | None],
    hosts: Sequence[str],
    ours: int | None,
) -> None:
    """Raise NodesDiffer if the script is missing somewhere, or is not the same on all nodes.

    ``hashes`` and ``hosts`` go by the nodes' numbers; ``ours`` is that of this machine, which then
    has the right one.
    """
    by_hash: dict[str | None, list[int]] = {}
    for number, sha in hashes.items():
        by_hash.setdefault(sha, []).append(number)

    def names(numbers: Sequence[int]) -> str:
        return name_hosts(hosts[number] for number in numbers)

    said = printable(script)
    if (lacking := by_hash.get(None)) is not None:
        where = f"{names(lacking)} (directory: {printable(workdir)})"
        raise NodesDiffer(f"{said} is not there on {where}", nodes=tuple(lacking), hint=_HINT)
    if len(by_hash) <= 1:
        return
    right = hashes.get(ours) if ours is not None else None
    right = right or max(by_hash, key=lambda sha: len(by_hash[sha]))
    others = {sha: numbers for sha, numbers in by_hash.items() if sha != right}
    kinds = ", ".join(
        f"{(sha or '')[:_HASH_SHOWN]} on {names(numbers)}" for sha, numbers in others.items()
    )
    raise NodesDiffer(
        f"{said} is not the same on all nodes: {kinds}, but {(right or '')[:_HASH_SHOWN]} on "
        f"{names(by_hash[right])}",
        nodes=tuple(sorted(number for numbers in others.values() for number in numbers)),
        hint=_HINT,
    )


def command_digest(options: TrainOptions) -> str:
    """Fingerprint the command, but for paths, which may differ from node to node."""
    name = (options.script or "").rpartition("/")[2]
    words = (
        "m" if options.module else "x" if options.no_python else "s",
        name,
        *options.script_args,
    )
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()


def choices_digest(backend: PlannedBackend) -> str:
    """Fingerprint a backend's options."""
    return hashlib.sha256(json.dumps(dict(backend.agreed()), sort_keys=True).encode()).hexdigest()


def contradiction(
    told: LauncherInfo, own: LauncherInfo, *, who: str, me: str, what: str
) -> str | None:
    """Say what a launcher was told otherwise than we, the coordinator; None if nothing.

    ``what``: the numbers are of nodes or of launchers.
    """
    if tuple(told.num_nodes) != tuple(own.num_nodes):
        return (
            f"{who} was told of {_written(told.num_nodes)} {what}, {me} of "
            f"{_written(own.num_nodes)}"
        )
    if told.backend != own.backend:
        return f"{who} has --backend {quoted(told.backend)}, {me} --backend {quoted(own.backend)}"
    if told.choices != own.choices:
        return f"{who} has other options of --backend {own.backend} (-o) than {me}"
    if told.command != own.command:
        return f"{who} was told to run something else than {me}: script, or its arguments, differ"
    return None


def _written(bounds: Sequence[int]) -> str:
    fewest, most = bounds
    return str(most) if fewest == most else f"{fewest}:{most}"


class Interpreter(Record):
    """What the workers of a node are run by."""

    python: str
    """As the command line has it; of no account under --no-python."""
    with_ours: bool
    """The launcher's own interpreter is there, at the same path."""


def interpreter_of(options: TrainOptions, ours: str, surveyed: Surveyed) -> Interpreter:
    """Choose the workers' interpreter on a node: the user's, else ours if it is there, else what
    there is."""
    if options.python is not None:
        # Ours was not asked for there: folders that are shared say that software may be as well.
        return Interpreter(python=options.python, with_ours=surveyed.shares_run_dir)
    if surveyed.python == ours:
        return Interpreter(python=ours, with_ours=True)
    brought = options.setup is not None or surveyed.python is None
    return Interpreter(
        python=ELSEWHERE if brought else surveyed.python or ELSEWHERE, with_ours=False
    )
