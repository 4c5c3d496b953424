"""Layer launch_ray: the composition root's part for a Ray cluster: it says which nodes there are, and starts agents."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from distlaunch.backends.ray import Ray, located
from distlaunch.backends.requirements import check_installed
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.text import printable
from distlaunch.job.transport.ray_places import RayPlaces
from distlaunch.planning import Planned, make_plan
from distlaunch.resolve.allocation import Host
from distlaunch.resolve.options import TrainOptions

_SIGNALLED = 128
_LOCAL_S = 10.0
"""Nobody adds nodes to a cluster that was started here."""


class Interrupted(LaunchError):  # noqa: N818 - as KeyboardInterrupt
    """A signal came before Ray had placed anything."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name} while Ray placed the workers: none has been started")
        self.exit_code = _SIGNALLED + signum


@contextmanager
def _interruptible() -> Iterator[None]:
    """Have signals that end a job raise Interrupted; they are ignored once one has, as what follows is bounded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, _: object) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted(signum)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    except Interrupted:
        raise  # closing what there is should not be interrupted, too
    except BaseException:
        _set(before)
        raise
    else:
        _set(before)


@contextmanager
def placed_in_ray(
    planned: Planned, options: TrainOptions, environ: Mapping[str, str]
) -> Iterator[tuple[Planned, RayPlaces]]:
    """Have Ray place the workers, and plan for where it did; in the end everything is given back.

    ``planned`` has found all that is wrong and needs no cluster. Raises ConfigError, NodesError and Interrupted.
    """
    backend = planned.backend
    if not isinstance(backend, Ray):
        raise TypeError(backend)
    check_installed(Ray.name, Ray.requires, sys.executable, ())
    demand = backend.demand(options)
    places = RayPlaces(environ)

    def say(text: str) -> None:
        if not options.quiet:
            with suppress(OSError, ValueError):  # nobody reads it any more
                sys.stderr.write(f"distlaunch: waiting for Ray: {text}\n")

    try:
        with _interruptible():
            found = places.place(
                backend.address,
                demand.bundles,
                each=demand.each,
                strategy=demand.strategy,
                within_s=_LOCAL_S if backend.address == "local" else options.join_timeout,
                say=say,
            )
        hosts = [Host(name=place.host, slots=place.bundles * demand.workers, unit=demand.unit) for place in found]
        location = located(hosts, printable(socket.gethostname()) or "localhost")
        yield make_plan(options, environ, location=location), places
    finally:
        places.close()


def _set(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
