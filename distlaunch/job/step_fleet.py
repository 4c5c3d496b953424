"""Layer job: the agents that srun has started, as a fleet: what Slurm does to them is told as what it is."""

from __future__ import annotations

import signal
from collections import deque
from typing import Any

from distlaunch.core.wire import remote as r
from distlaunch.job import actions as a
from distlaunch.job.fleet import Fleet
from distlaunch.job.peers import Peer
from distlaunch.job.transport.srun import Srun

_ENDED_WITH = "Slurm ended it, as an agent of the same step had ended"
_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_MOST_SAID = 40


class StepFleet(Fleet):
    """A ``Fleet`` whose links come of ``srun``. ``signals_all``: Slurm's signals reach the workers as well."""

    def __init__(self, *args: Any, srun: Srun, signals_all: bool, **kwargs: Any) -> None:
        super().__init__(*args, open_link=srun.open, **kwargs)
        self._srun = srun
        self._signals_all = signals_all
        self._said: deque[str] = deque()
        self._much = 0
        self._lost: set[str] = set()
        self._leaving = False
        srun.say = self._hear

    def _hear(self, line: str) -> None:
        """Take a line of srun's, in its thread."""
        self._said.append(line)
        self._notify()

    def receive(self) -> list[a.Event]:
        """Give what has happened; see ``Fleet``."""
        while self._said:
            line = self._said.popleft()
            self._much += 1
            if self._much <= _MOST_SAID and not self._leaving:
                self._events.append(a.Noted(text=line))
        return super().receive()

    def _take(self, peer: Peer[r.FromRemote], message: r.FromRemote) -> None:
        if not isinstance(message, r.Signalled) or not peer.greeted:
            super()._take(peer, message)
            return
        host = self.targets[peer.node].host
        if message.signum in _TO_END and any(self._srun.ended_with(host, other) for other in self._lost):
            self._lose(peer, _ENDED_WITH)
            return
        self._events.append(a.Signalled(signum=message.signum, node=peer.node, reached=self._signals_all))

    def _lose(self, peer: Peer[r.FromRemote], why: str) -> None:
        if peer.greeted:
            self._lost.add(self.targets[peer.node].host)
        super()._lose(peer, why)

    def close(self) -> None:
        """Have all agents leave, then srun end; see ``Fleet``."""
        broken = bool(self._lost)
        self._leaving = True
        super().close()
        self._srun.close(broken=broken)
