"""The error tree. Every error has an exit code and may carry a hint.

A handled error is printed as ``distlaunch: error: <message>``, with ``hint: <hint>`` on a second
line.
"""

from __future__ import annotations

EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69
EXIT_SOFTWARE = 70
"""An internal error of distlaunch."""
EXIT_REQUEUE = 75
"""Exit code if a Slurm job should be requeued, but distlaunch could not request it."""
EXIT_HANG = 124


class LaunchError(Exception):
    """Base class of errors that are reported without a traceback."""

    exit_code = EXIT_SOFTWARE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(LaunchError):
    """The request cannot be carried out. Nothing has been started."""

    exit_code = EXIT_USAGE


class NodesError(LaunchError):
    """Nodes cannot be reached, or too few nodes are available."""

    exit_code = EXIT_UNAVAILABLE


class UsageError(ConfigError):
    """The command line is wrong."""


class ProtocolError(LaunchError):
    """The other side of a connection sent data that violates the protocol."""
