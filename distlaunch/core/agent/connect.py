"""Call the listener on the rendezvous port, until it is there and lets us in.

A name may be known late (the DNS of pods), the port open later, and what answers first be somebody else: all of that is
tried again until the deadline, and its last reason told. Only what cannot mend itself ends the calling sooner.
"""

from __future__ import annotations

import os
import random
import select
import socket
import time
from collections.abc import Callable, Sequence

from distlaunch.core.agent.naming import Names, Several
from distlaunch.core.agent.trying import Place, together
from distlaunch.core.errors import LaunchError, NodesError
from distlaunch.core.probe.lookup import Address
from distlaunch.core.protocol.handshake import NONCE_BYTES, CallerSide, Party
from distlaunch.core.protocol.launcher_messages import Turned, Welcome
from distlaunch.core.protocol.token_keys import CallerSecret

TICK_S = 1.0
"""``progress`` hears of a wait at least so often."""

_STAGGER_S = 0.25
"""After so long the next address is tried beside the one that has not answered (RFC 8305)."""
_HEARD_OUT_S = 1.0
"""The same once it has accepted: two addresses may be one launcher's, which is busy."""
_SOON_S, _LATER_S, _MUCH_LATER_S = 0.05, 0.25, 1.0
_LONG_S = 60.0
_TURNED_S = 0.5
_STRANGER_S = 2.0
"""Before the next try at a listener that turns us away, and has not shown that it is one of our job."""
_TOO_SHORT_S = 0.1
"""With no more time than this another try would only blur why the last one failed."""
_MOST_ADDRESSES = 64


class TurnedAwayError(LaunchError):
    """The listener does not let us take part, and that will not change."""

    def __init__(self, message: str, turned: Turned) -> None:
        super().__init__(message, hint=turned.hint)
        self.exit_code = turned.exit_code


class Stopped(Exception):  # noqa: N818 - an outcome
    """The watched descriptor has something: whoever called has other things to do."""


def call(
    host: str | Sequence[str],
    ports: Sequence[int],
    *,
    party: Party,
    rank: int | None,
    own_host: str,
    instance: str,
    until: float,
    who: str = "node 0",
    progress: Callable[[float, str], None] | None = None,
    watched: int | None = None,
    stops: Callable[[], bool] = lambda: True,
    otherwise: Callable[[], Sequence[str]] | None = None,
) -> tuple[socket.socket, Welcome]:
    """Give the connection once we are welcome; not a byte that follows is read from it.

    ``until`` is monotonic time. ``progress`` gets the seconds since the beginning and why we still wait, as a clause,
    again and again. Of several ports, and hosts, each is tried: other jobs may have some of them. ``otherwise`` gives
    other addresses of the one host if its name cannot be resolved; it is called in a thread. Raises NodesError at the
    deadline, TurnedAwayError, Stopped as soon as ``watched`` can be read and ``stops()``, which reads it, is true.
    """
    secret = CallerSecret(party.token, party.munge)

    def side() -> CallerSide:
        nonce = os.urandom(NONCE_BYTES).hex()
        return CallerSide(party, secret=secret, nonce=nonce, rank=rank, host=own_host, instance=instance)

    calling = _Calling(
        host,
        ports,
        side,
        until=until,
        who=who,
        progress=progress,
        watched=watched,
        stops=stops,
        otherwise=otherwise,
    )
    try:
        return calling.run()
    finally:
        calling.close()


class _Calling:
    """Tries all places, each on its own: one that says nothing holds up no other."""

    def __init__(
        self,
        host: str | Sequence[str],
        ports: Sequence[int],
        side: Callable[[], CallerSide],
        *,
        until: float,
        who: str,
        progress: Callable[[float, str], None] | None,
        watched: int | None,
        stops: Callable[[], bool],
        otherwise: Callable[[], Sequence[str]] | None,
    ) -> None:
        self._host = host if isinstance(host, str) else ", ".join(host)
        self._ports = ports
        self._side = side
        self._until = until
        self._who = who
        self._progress = progress
        self._watched = watched
        self._stops = stops
        self._begun = self._told = time.monotonic()
        self._names = Names(host, otherwise) if isinstance(host, str) else Several(host)
        self._places: dict[Address, Place] = {}
        self._next_at = 0.0
        """When a place that was never tried may be begun beside those that are under way."""

    def run(self) -> tuple[socket.socket, Welcome]:
        tries = 0
        while True:
            self._look()
            left_s = self._until - time.monotonic()
            if left_s <= 0 or (left_s < _TOO_SHORT_S and not self._under_way):
                raise self._given_up()
            if not self._places:
                if self._names.settled.is_set():
                    self._tell()
                    self._pause(_pause_s(tries, time.monotonic() - self._begun))
                    tries += 1
                continue
            if left_s >= _TOO_SHORT_S:
                self._begin(time.monotonic())
            found = self._turn()
            if found is not None:
                return found
            self._leave_if_refused()

    def close(self) -> None:
        """Close what is left."""
        for place in self._places.values():
            place.close()

    @property
    def _under_way(self) -> list[Place]:
        return [place for place in self._places.values() if place.connection is not None]

    @property
    def _proving(self) -> bool:
        return any(place.proves for place in self._places.values())

    def _look(self) -> None:
        """Have the places that the name stands for now, and those that still may turn out to be right."""
        self._names.refresh()
        if not self._names.known and not self._names.settled.wait(0.05):
            self._tell_at_times()
            self._pause(0.0)
        known = [(family, (to[0], port, *to[2:])) for port in self._ports for family, to in self._names.known]
        wanted = dict.fromkeys(known[:_MOST_ADDRESSES])
        for address in [each for each, place in self._places.items() if place.connection is None]:
            if address not in wanted:
                del self._places[address]
        for address in wanted:
            if address not in self._places:
                self._places[address] = Place(address, self._side)

    def _begin(self, now: float) -> None:
        """Begin what is due: places that are new one after the other, the first that answers being the first used."""
        if self._proving:
            return
        for place in self._places.values():
            if place.connection is not None or place.refusal is not None or now < place.retry_at:
                continue
            if not place.why:
                if self._under_way and now < self._next_at:
                    continue
                self._next_at = now + _STAGGER_S
            place.begin(now)
            self._after(place, now)

    def _turn(self) -> tuple[socket.socket, Welcome] | None:
        """Wait for what comes next, and take it in."""
        poll = self._poll()
        by_number = {}
        for place in self._under_way:
            if place.connection is not None:
                poll.register(place.connection, place.wanted)
                by_number[place.connection.fileno()] = place
        for number in self._wait(poll, self._due() - time.monotonic()):
            place = by_number[number]
            now = time.monotonic()
            speaks = place.speaks
            outcome = place.on_ready(now)
            if isinstance(outcome, Welcome) and (connection := place.taken()) is not None:
                connection.setblocking(True)  # noqa: FBT003 - the standard library's signature
                return connection, outcome
            if isinstance(outcome, Turned):
                self._turned(place, outcome)
            elif not speaks and place.speaks:
                self._next_at = now + _HEARD_OUT_S
            self._after(place, now)
        now = time.monotonic()
        for place in self._under_way:
            if now >= place.until:
                place.late()
                self._after(place, now)
        ready = next((place for place in self._places.values() if place.may_prove), None)
        if ready is not None and not self._proving:
            ready.prove(now)
            self._after(ready, now)
        return None

    def _turned(self, place: Place, turned: Turned) -> None:
        place.fail(turned.text)
        place.hint = turned.hint
        if not place.is_final:  # anybody may have the port, for now
            place.retry_at = time.monotonic() + _STRANGER_S
        elif turned.again:
            place.retry_at = time.monotonic() + _TURNED_S
        else:
            place.refusal = turned

    def _after(self, place: Place, now: float) -> None:
        """Have a place that has failed tried again later, and the next one now."""
        if place.connection is not None:
            return
        place.retry_at = max(place.retry_at, now + _pause_s(place.tries, now - self._begun))
        self._next_at = now
        if all(each.why for each in self._places.values()):
            self._tell()

    def _leave_if_refused(self) -> None:
        """Give up once a listener wants us to, and no other place may turn out to be right. Raises TurnedAwayError."""
        places = self._places.values()
        refused = next((place for place in places if place.refusal is not None), None)
        if refused is None or refused.refusal is None or self._proving or not all(place.why for place in places):
            return
        text = f"{self._who} at {self._place(refused.port)}: {refused.refusal.text}"
        raise TurnedAwayError(text, refused.refusal)

    def _due(self) -> float:
        times = [self._until, *(place.until for place in self._under_way)]
        if not self._proving:  # else nothing is begun
            idle = [each for each in self._places.values() if each.connection is None and each.refusal is None]
            times += [place.retry_at if place.why else self._next_at for place in idle]
        return min(times)

    def _given_up(self) -> NodesError:
        given_s = self._until - self._begun
        hint = f"is {self._who} running, and does every node have the same --rendezvous?"
        if (told := next((place.hint for place in self._places.values() if place.hint), None)) is not None:
            hint = told
        elif not self._places:
            hint = f"--rendezvous ADDRESS:PORT, an address of {self._who} instead of its name, on every node"
        return NodesError(
            f"{self._who} has not answered at {self._place()} within {given_s:.0f} s: {self._why}", hint=hint
        )

    # --- waiting

    def _poll(self) -> select.poll:
        poll = select.poll()
        if self._watched is not None:
            poll.register(self._watched, select.POLLIN)
        return poll

    def _wait(self, poll: select.poll, within_s: float) -> list[int]:
        """Give what is ready; nothing when ``within_s`` is over, or sooner if that is long. Raises Stopped."""
        ready = [number for number, _ in poll.poll(max(0.0, min(within_s, TICK_S)) * 1000 + 1)]
        if self._watched in ready:
            if self._stops():
                raise Stopped
            ready.remove(self._watched)
        if not ready:
            self._tell_at_times()
        return ready

    def _pause(self, pause_s: float) -> None:
        until = min(self._until, time.monotonic() + pause_s)
        poll = self._poll()
        while True:
            left_s = until - time.monotonic()
            self._wait(poll, left_s)
            if left_s <= 0:
                return

    @property
    def _why(self) -> str:
        return together([*self._places.values()]) if self._places else self._names.problem

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._progress is not None:
            self._progress(self._told - self._begun, self._why)

    def _tell_at_times(self) -> None:
        if time.monotonic() - self._told >= TICK_S:
            self._tell()

    def _place(self, port: int | None = None) -> str:
        host = f"[{self._host}]" if ":" in self._host and ", " not in self._host else self._host
        if port is None and len(self._ports) > 1:
            return f"{host}, ports {', '.join(map(str, self._ports))}"
        return f"{host}:{self._ports[0] if port is None else port}"


def _pause_s(tries: int, waited_s: float) -> float:
    """Give how long to wait after so many tries in vain; all nodes of a job call, and not at the same moment."""
    most_s = _LATER_S if waited_s < _LONG_S else _MUCH_LATER_S
    return random.uniform(0.5, 1.0) * min(most_s, _SOON_S * 1.5 ** min(tries, 20))
