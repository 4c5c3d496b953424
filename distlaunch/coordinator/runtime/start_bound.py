"""Whether a node is late with its workers: it answers pings, so nothing else tells. No clock, no I/O."""

from __future__ import annotations

from distlaunch.core.protocol import agent_messages as m

START_S = 60.0
"""How long a node may take to start its workers, or to say what takes longer (an import, for --preload)."""


class StartBound:
    """One node's start of an attempt. Times are on the job's clock."""

    __slots__ = ("_awaited", "_began", "until")

    def __init__(self) -> None:
        self.until: float | None = None
        """When its workers are too late; None: none are to start."""
        self._awaited = 0
        self._began = 0.0

    def begin(self, workers: int, now: float) -> None:
        """Take in that the node is told to start so many workers."""
        self._awaited, self._began, self.until = workers, now, now + START_S

    def heard(self, message: object, now: float) -> None:
        """Take in what tells how far it is with that."""
        if self.until is None:
            return
        match message:
            case m.WorkerExited() | m.Gone() | m.Fault():
                self._awaited = 0
            case m.Started():
                self._awaited -= len(message.pids)
            case m.Remark() | m.PreloadEnded():
                pass
            case _:
                return
        # What takes long is told of again and again, each time after twice as long as before.
        self.until = None if self._awaited <= 0 else now + (now - self._began) + START_S

    def stop(self, grace_s: float) -> None:
        """Take in that it is told to stop what has started, which may take so long."""
        if self.until is not None:
            self.until += grace_s

    def end(self) -> None:
        """Await nothing any more."""
        self.until = None

    def why_late(self, now: float) -> str | None:
        """Say what is the matter, as a clause; None if it is not late."""
        if self.until is None or now < self.until:
            return None
        return f"its workers have not started within {now - self._began:.0f} s"
