"""Why a node could not be reached, as every transport says it. Pure data."""

from __future__ import annotations

from typing import Literal

from distlaunch.core.model.record import Record

Step = Literal[
    "resolve",
    "connect",
    "host key",
    "login",
    "srun",
    "ray",
    "call",
    "python",
    "agent",
    "directory",
    "script",
    "devices",
]


STARTUP_HINT = (
    "a start-up file of the login shell there (~/.profile, ~/.bashrc) may be waiting, for input or a file system"
)
"""Of a node that was logged in to, and whose agent does not start."""


class ConnectFailure(Record):
    """One node that cannot take part; a row of the table that the user sees."""

    host: str
    """As the user or the source wrote it."""
    address: str = ""
    """Where it was tried: ``10.0.0.7:22``; empty before that is known."""
    user: str = ""
    step: Step
    text: str
    """What went wrong, as a clause; printable."""
    hint: str | None = None
    passing: bool = True
    """It may work in a moment: refused, no route, silent. A wrong key or a missing Python will not mend itself."""
