"""Layer launch_ray: the composition root's part for a Ray cluster: it says which nodes there are, and starts agents."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from distlaunch.backends.ray import Ray, located
from distlaunch.backends.requirements import check_installed
from distlaunch.core.model.text import printable
from distlaunch.job.transport.ray_places import RayPlaces
from distlaunch.planning import Planned, make_plan
from distlaunch.resolve.allocation import Host
from distlaunch.resolve.options import TrainOptions

_LOCAL_S = 10.0
"""Nobody adds nodes to a cluster that was started here."""


@contextmanager
def placed_in_ray(
    planned: Planned, options: TrainOptions, environ: Mapping[str, str]
) -> Iterator[tuple[Planned, RayPlaces]]:
    """Have Ray place the workers, and plan for where it did; in the end everything is given back.

    ``planned`` has found all that is wrong and needs no cluster. Raises ConfigError and NodesError.
    """
    backend = planned.backend
    if not isinstance(backend, Ray):
        raise TypeError(backend)
    check_installed(Ray.name, Ray.requires, sys.executable, ())
    demand = backend.demand(options)
    places = RayPlaces(environ)

    def say(text: str) -> None:
        if not options.quiet:
            sys.stderr.write(f"distlaunch: waiting for Ray: {text}\n")

    try:
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
