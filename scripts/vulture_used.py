"""Names that vulture cannot see in use: called by a framework, part of the protocol, or for users of the package."""

from distlaunch.core import errors
from distlaunch.core.model import ids
from distlaunch.core.probe import nvml
from distlaunch.ui import cli

_ = (
    # exit codes and errors of the design that the next transports raise
    errors.EXIT_HANG,
    errors.NodesError,
    errors.InternalError,
    # the field's numbers, for annotations
    ids.Rank,
    ids.LocalRank,
    ids.NodeRank,
    ids.Attempt,
    # called by the interpreter
    nvml.__getattr__,
)

# read by typer and click, by name
cli.command.collect_usage_pieces  # noqa: B018 - vulture takes a mention as a use
cli.command.__signature__  # noqa: B018
cli.command.__annotations__  # noqa: B018
