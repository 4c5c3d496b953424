"""A round of chaos on hosts, as it is drawn: which job, what goes wrong with what and when, and
what may come of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

UNAVAILABLE, SOFTWARE, KILLED = 69, 70, 137
GRACE_S = 1.0
"""--failure-grace and --grace of all jobs."""
SILENCE_S = 10.0 + 2.0
"""Until silence is noticed: the design's 10 s, and as long as pings may be apart."""
END_S = 5.0
"""What the design gives beyond noticing and grace."""
WAIT_S = 12.0
"""A job that comes together with enough nodes waits 10 s for others that may come."""
RETRY_S = 6.0
"""A host that is back is tried again by then."""
JOIN_S = 20.0
"""--join-timeout."""
LAUNCHER = "head"
"""Where it is if it is not on a host that trains."""

Place = Literal[
    "launcher", "agent", "spawner", "worker", "sessions", "sshd", "host", "network", "disk"
]
Moment = Literal["connecting", "running", "restarting", "ending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    name: str
    what: Place
    noticed_s: float = 0.0
    """How long after it began it can be noticed by those who have to act."""
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """How long it lasts, if it is one that passes, at least and at most."""
    loses: bool = False
    """A host is lost to the job by it."""
    wipes: bool = False
    """It ends whoever would have cleaned up on its host."""

    @property
    def hits_whole_host(self) -> bool:
        """Return whether it hits all that is on a host, a launcher there included."""
        return self.what in ("host", "network", "sshd", "sessions")


def _passing(name: str, what: Place, least_s: float, most_s: float) -> Fault:
    return Fault(name=name, what=what, lasts_s=(least_s, most_s))


def _silent(name: str, what: Place, *, wipes: bool = False) -> Fault:
    return Fault(
        name=name, what=what, noticed_s=SILENCE_S, lasts_s=(16.0, 22.0), loses=True, wipes=wipes
    )


FAULTS: Sequence[Fault] = (
    Fault(name="kill -9 launcher", what="launcher"),
    Fault(name="kill -9 launcher and agent", what="launcher"),
    Fault(name="kill -9 agent", what="agent", loses=True),
    Fault(name="kill -9 spawner", what="spawner", loses=True),
    Fault(name="kill -9 worker", what="worker"),
    Fault(name="kill -9 sessions", what="sessions", loses=True),
    Fault(name="kill -9 sshd", what="sshd", lasts_s=(0.0, 8.0), loses=True),
    Fault(name="stop sshd", what="sshd", lasts_s=(0.0, 8.0)),
    Fault(name="kill -9 all", what="host", lasts_s=(0.0, 8.0), loses=True, wipes=True),
    _passing("cut", "network", 0.1, 5.0),
    _silent("cut", "network"),
    _passing("link down", "network", 0.1, 5.0),
    _silent("link down", "network"),
    _silent("power off", "host", wipes=True),
    _passing("delay", "network", 1.0, 6.0),
    _passing("STOP agent", "agent", 0.1, 5.0),
    _silent("STOP agent", "agent"),
    _passing("STOP spawner", "spawner", 0.1, 5.0),
    _passing("STOP worker", "worker", 0.1, 5.0),
    _passing("STOP launcher", "launcher", 0.1, 5.0),
    Fault(name="STOP launcher", what="launcher", noticed_s=SILENCE_S, lasts_s=(16.0, 22.0)),
    _passing("STOP host", "host", 0.1, 5.0),
    _silent("STOP host", "host"),
    _passing("disk full", "disk", 1.0, 4.0),
    _passing("launcher's disk full", "disk", 1.0, 4.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of job over all hosts."""

    name: str
    options: tuple[str, ...]
    elastic: bool = False
    restarts: int = 0
    spares: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One job, one fault."""

    shape: Shape
    warm: bool
    words: tuple[str, ...]
    """Of the worker program: how it obeys, and whether it writes a lot."""
    fault: Fault
    host: str
    standing_by: tuple[str, ...]
    """Hosts that are spares."""
    moment: Moment
    delay_s: float
    """After the moment has come."""
    lasts_s: float
    checks_before_healing: bool
    """What a silent host's own agent does is looked at while the host is still cut off."""
    second: tuple[str, float] | None
    """A host whose agent is killed so soon afterwards."""
    launcher_on: str
    """The head, or a host that trains."""
    fails_after: bool
    """Once all is mended, the job is restarted by a failure, if it may."""

    @staticmethod
    def draw(dice: random.Random, hosts: Sequence[str], only: str | None) -> Round:
        """Draw one; ``only``: a part of the names of the faults that may come."""
        count = len(hosts)
        shapes = (
            Shape(name="fixed", options=()),
            Shape(name="fixed, restarts", options=("--max-restarts", "3"), restarts=3),
            Shape(name="elastic", options=("--num-nodes", f"{count - 2}:{count}"), elastic=True),
            Shape(
                name="elastic, restarts",
                options=("--num-nodes", f"{count - 1}:{count}", "--max-restarts", "3"),
                elastic=True,
                restarts=3,
            ),
            Shape(
                name="spare",
                options=("--spares", "1", "--max-restarts", "3"),
                elastic=True,
                restarts=3,
                spares=1,
            ),
        )
        shape = dice.choice(shapes)
        launcher_on = dice.choice((LAUNCHER, LAUNCHER, hosts[0]))
        fault = dice.choice([fault for fault in FAULTS if only is None or only in fault.name])
        moments: tuple[Moment, ...] = ("connecting", "running", "running", "ending")
        moment = dice.choice((*moments, "restarting") if shape.restarts else moments)
        host = dice.choice(
            hosts[1:] if launcher_on != LAUNCHER and fault.hits_whole_host else hosts
        )
        second = None
        if shape.name == "elastic" and fault.loses and not fault.noticed_s and dice.random() < 0.5:
            others = [name for name in hosts if name != host]
            second = (dice.choice(others), dice.uniform(0.0, 1.5))
        return Round(
            shape=shape,
            warm=dice.random() < 0.25,
            words=dice.choice(((), ("ignore-signals",), ("slow",), ("chats",))),
            fault=fault,
            host=host,
            second=second,
            launcher_on=launcher_on,
            standing_by=tuple(hosts[count - shape.spares :]),
            moment=moment,
            delay_s=dice.uniform(
                0.0, {"connecting": 1.5, "running": 1.0, "restarting": 1.5, "ending": 0.3}[moment]
            ),
            lasts_s=dice.uniform(*fault.lasts_s),
            checks_before_healing=fault.noticed_s > 0 and dice.random() < 0.5,
            fails_after=shape.restarts > 0 and dice.random() < 0.3,
        )

    def __str__(self) -> str:
        how = "warm" if self.warm else "cold"
        words = f" {self.words[0]}" if self.words else ""
        lasts = f" for {self.lasts_s:.2f} s" if self.fault.lasts_s[1] else ""
        where = (
            ""
            if self.fault.name in ("kill -9 launcher", "STOP launcher", "launcher's disk full")
            else f" on {self.host}"
        )
        second = (
            f", and of the agent on {self.second[0]} {self.second[1]:.2f} s later"
            if self.second
            else ""
        )
        job = f"{self.shape.name}{'' if self.launcher_on == LAUNCHER else ' from ' + self.launcher_on}, {how}{words}"
        return (
            f"{job}: {self.fault.name}{where}{lasts} {self.delay_s:.3f} s into "
            f"{self.moment}{second}"
        )

    # --- what may come of it

    @property
    def kills_launcher(self) -> bool:
        """Return whether the launcher itself is killed."""
        return self.fault.name.startswith("kill -9 launcher")

    @property
    def is_certain(self) -> bool:
        """Return whether the fault hits a job that runs, and so shows: else it may have come too
        early or too late."""
        return self.moment == "running"

    def may_go_on(self) -> bool:
        """Return whether the job may go on, as it was or re-formed."""
        fault, shape = self.fault, self.shape
        if self.kills_launcher:
            return False
        if not self.is_certain or not self.hits_trainer:
            return True
        ends = (
            fault.loses
            or (fault.what == "worker" and not fault.lasts_s[1])
            or self.has_launcher_asleep
        )
        return not ends or shape.restarts > 0 or (shape.elastic and fault.what != "worker")

    def may_end_with(self) -> set[int]:
        """Return the exit codes with which it may end instead."""
        fault, shape = self.fault, self.shape
        if self.kills_launcher:
            return {-9}
        if self.has_launcher_asleep:
            return {UNAVAILABLE}  # it wakes, and all hosts are lost at once
        if fault.name == "kill -9 worker":
            return set() if shape.restarts else {KILLED}
        if not fault.loses or shape.elastic:
            return set()
        if not shape.restarts:
            return {SOFTWARE if fault.what == "spawner" else UNAVAILABLE, UNAVAILABLE}
        waits_in_vain = self.moment != "running" and self.lasts_s > JOIN_S / 4
        return {UNAVAILABLE} if waits_in_vain else set()

    @property
    def has_launcher_asleep(self) -> bool:
        """Return whether the launcher sleeps until all agents have given it up."""
        return self.fault.name == "STOP launcher" and self.fault.noticed_s > 0

    @property
    def hits_trainer(self) -> bool:
        """Return whether a host that trains, not one that stands by, is hit."""
        return self.host not in self.standing_by

    @property
    def bound_s(self) -> float:
        """How long after the fault has begun the job has ended, or goes on."""
        bound_s = self.fault.noticed_s + GRACE_S + END_S
        if self.second is not None:
            bound_s += self.second[1] + GRACE_S + END_S
        if not self.is_certain:
            bound_s += WAIT_S
        if self.fault.lasts_s[1] and (
            not self.fault.loses or not self.shape.elastic or self.has_launcher_asleep
        ):
            bound_s = max(bound_s, self.lasts_s + END_S + RETRY_S)
        return bound_s
