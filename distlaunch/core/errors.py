"""The one error tree. Every error has an exit code and may carry a hint.

A handled error prints as one or two lines: ``distlaunch: error: <message>`` and ``  hint: <hint>``.
Exit codes are the design's: 2 usage or configuration, 70 a fault of ours, 69 nodes that are not to
be reached or too few, 75 a job of Slurm that should get another turn and could not ask for it, 124
a job that hangs.
"""

from __future__ import annotations

EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69
EXIT_SOFTWARE = 70
EXIT_REQUEUE = 75
EXIT_HANG = 124


class LaunchError(Exception):
    """Base of everything that distlaunch reports to a user on purpose."""

    exit_code = EXIT_SOFTWARE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(LaunchError):
    """What the user asked for cannot be done as asked: nothing has been started."""

    exit_code = EXIT_USAGE


class NodesError(LaunchError):
    """Nodes cannot be reached, or are too few."""

    exit_code = EXIT_UNAVAILABLE


class UsageError(ConfigError):
    """The command line itself is off."""


class ProtocolError(LaunchError):
    """A peer sent what the wire format does not allow."""
