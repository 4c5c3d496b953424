"""How a step of connecting fails, before host and address are added."""

from __future__ import annotations

from distlaunch.transport.failures import ConnectFailure, Step


class Trouble(Exception):  # noqa: N818 - it is an outcome: an opener turns it into Unconnected
    """A step did not succeed; the words are those of ``ConnectFailure``, and printable."""

    def __init__(self, step: Step, text: str, *, hint: str | None = None, passing: bool = True) -> None:
        super().__init__(text)
        self.step: Step = step
        self.text = text
        self.hint = hint
        self.passing = passing

    def failure(self, host: str, *, address: str = "", user: str = "") -> ConnectFailure:
        """Make the row of the table that the user sees."""
        return ConnectFailure(
            host=host, address=address, user=user, step=self.step, text=self.text, hint=self.hint, passing=self.passing
        )
