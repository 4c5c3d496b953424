"""The error for what a script, or its environment, asks of the toolkit and cannot have."""

from __future__ import annotations

from distlaunch.core.errors import ConfigError


class ToolkitError(ConfigError):
    """Ends a script with a traceback, whose last line has the hint, too."""

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} (hint: {self.hint})"
