"""Errors for nodes that cannot be reached: the failed step, the reason, and a hint.

Code that connects to a node raises ``ConnectStepError``, without the host. A transport adds the
host and reports ``ConnectFailure`` to the coordinator, one row of a table for the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable

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
    "a start-up file of the login shell there (~/.profile, ~/.bashrc) may be waiting, "
    "for input or a file system"
)
"""For a node whose login worked but whose agent does not start."""


SSH_PORT = 22


class KeyScan(Record):
    """The command in a hint that adds a host's keys to a known_hosts file."""

    host: str
    port: int = SSH_PORT
    file: str = "~/.ssh/known_hosts"

    def command(self, hosts: Sequence[str] | None = None) -> str:
        """Return the ssh-keyscan command for this host, or for ``hosts``."""
        at = "" if self.port == SSH_PORT else f"-p {self.port} "
        names = " ".join(map(printable, hosts or (self.host,)))
        return f"ssh-keyscan {at}-H {names} >> {printable(self.file)}"


class ConnectStepError(Exception):
    """A step of connecting failed. The fields are those of ``ConnectFailure``; texts are
    printable."""

    def __init__(
        self,
        step: Step,
        text: str,
        *,
        hint: str | None = None,
        passing: bool = True,
        scan: KeyScan | None = None,
    ) -> None:
        super().__init__(text)
        self.step: Step = step
        self.text = text
        self.hint = hint
        self.passing = passing
        self.scan = scan

    def failure(self, host: str, *, address: str = "", user: str = "") -> ConnectFailure:
        """Return the failure of a host, one row of the table for the user."""
        return ConnectFailure(
            host=host,
            address=address,
            user=user,
            step=self.step,
            text=self.text,
            hint=self.hint,
            passing=self.passing,
            scan=self.scan,
        )


class ConnectFailure(Record):
    """A node that cannot take part: one row of the table for the user."""

    host: str
    """The host as the user or the source of the nodes wrote it."""
    address: str = ""
    """The address that was tried: ``10.0.0.7:22``; may be empty."""
    user: str = ""
    step: Step
    text: str
    """What went wrong, as a printable clause."""
    hint: str | None = None
    passing: bool = True
    """Whether a later try may succeed: connection refused, no route, no answer. A wrong key or a
    missing Python requires the user."""
    scan: KeyScan | None = None
    """The ssh-keyscan command in ``hint``. One hint can cover several hosts."""
