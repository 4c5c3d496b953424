"""The error of the toolkit."""

from __future__ import annotations

from distlaunch.core.errors import ConfigError


class ToolkitError(ConfigError):
    """Wrong use of the toolkit, or an environment that the toolkit cannot work in.

    ``str`` includes the hint, so that the hint appears in the last line of a traceback.
    """

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} (hint: {self.hint})"
