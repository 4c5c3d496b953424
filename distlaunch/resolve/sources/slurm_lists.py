"""Layer resolve: Slurm's lists of nodes and of counts, read from a variable; pure."""

from __future__ import annotations

from distlaunch.resolve.hostlist import expand_nodelist, parse_counts
from distlaunch.resolve.sources.environment import Environ, text


def nodes_of(environ: Environ, name: str) -> list[str]:
    """Expand a node list that is set. Raises ConfigError that names the variable."""
    return expand_nodelist(environ[name], where=name)


def counts_of(environ: Environ, name: str) -> list[int] | None:
    """Read ``2(x3),1`` as 2, 2, 2, 1; None if unset. Raises ConfigError that names the variable."""
    value = text(environ, name)
    return None if value is None else list(parse_counts(value, where=name))
