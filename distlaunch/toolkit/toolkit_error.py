"""The error of the toolkit."""

from __future__ import annotations

from distlaunch.core.errors import ConfigError


class ToolkitError(ConfigError):
    """Wrong use of the toolkit, or an environment that it cannot work in.

    ``str`` includes the hint, for the last line of a traceback.
    """

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} (hint: {self.hint})"
