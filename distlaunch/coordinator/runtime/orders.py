"""What a coordinator may say to a launcher that has joined: numbers in bounds, attempts in order.

No clock, no I/O.

The counterpart of ``parts``. Nothing that can arrive names what is run; what is checked here would else meet the
kernel, or a table of ours, as a number that neither takes. Whoever plans checks what a ``Commence`` says of nodes;
one that no ``Prepare`` came before is taken, for it holds all that a start needs.
"""

from __future__ import annotations

import signal

from distlaunch.core.agent.liveness import LONGEST_S
from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol import remote as r
from distlaunch.planning.told import MOST_SLOTS, is_address

ASKING = frozenset({0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL})
"""0: somebody has asked them already, as Slurm does with all processes of a step."""
PASSED_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})
_LONGEST_TOKEN = 256
_LONGEST_REACH_S = 600.0


class Orders:
    """The attempts that a launcher has had, and was to prepare."""

    def __init__(self) -> None:
        self.attempt = -1
        """The newest that was started here; -1: none."""
        self._prepared = -1

    def joined(self) -> None:
        """Take in that another coordinator, perhaps, goes on: it knows of no attempt that was not started."""
        self._prepared = self.attempt

    def check(self, message: p.ToPeer, *, running: bool) -> None:
        """Refuse what no coordinator of ours says; ``running``: there are workers. Raises ProtocolError."""
        match message:
            case m.Prepare():
                if message.port is not None:
                    raise ProtocolError("it wants a port held, which is its own node's to hold")
                if message.attempt <= self._prepared or not p.may_start(message.attempt):
                    raise ProtocolError(f"it prepares attempt {message.attempt} after {self._prepared}")
                if not 0 <= message.ports <= MOST_SLOTS:
                    raise ProtocolError(f"it wants {message.ports} ports held")
                self._prepared = message.attempt
            case r.Reach():
                self._check_reach(message)
            case p.Commence():
                # To stop those that run first would take their grace, for which nobody waits: it must know they run.
                if running:
                    raise ProtocolError(f"it starts attempt {message.attempt} while {self.attempt} runs")
            case m.Stop():
                if message.signum not in ASKING or not 0 <= message.grace_s <= LONGEST_S:
                    raise ProtocolError(f"it stops workers by signal {message.signum} within {message.grace_s:.3g} s")
            case m.Linger():
                if not (0 <= message.linger_s <= LONGEST_S and 0 <= message.grace_s <= LONGEST_S):
                    raise ProtocolError(f"it has what workers left end within {message.linger_s:.3g} s")
            case m.Forward():
                if message.signum not in PASSED_ON:
                    raise ProtocolError(f"it passes signal {message.signum} on")
            case p.Verdict():
                if not 0 <= message.exit_code <= 255:
                    raise ProtocolError(f"it ends the job with {message.exit_code}, which is no exit code")
                if running and message.exit_code == 0:
                    raise ProtocolError("it ends the job with 0 while workers run here")
            case p.Challenge() | p.Turned() | p.Welcome():
                raise ProtocolError(f"it says {type(message).__name__} to whom it has let in")
            case _:
                pass

    def _check_reach(self, order: r.Reach) -> None:
        sane = (
            order.attempt == self._prepared
            and 0 < order.port <= 65535
            and all(map(is_address, order.addresses))
            and order.token.isascii()
            and order.token.isalnum()
            and len(order.token) <= _LONGEST_TOKEN
            and 0 < order.bound_s <= _LONGEST_REACH_S
        )
        if not sane:
            raise ProtocolError("it sends a search for rank 0's node that makes no sense")
