"""Run a job on a Ray cluster, which assigns the nodes and starts the agents.

Ray reserves bundles: resources on one node, with room for one or more workers.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from distlaunch.backends.ray import Ray, ray_location
from distlaunch.backends.requirements import check_installed
from distlaunch.core.errors import ConfigError, LaunchError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable
from distlaunch.launch.make_plan import Planned, make_plan
from distlaunch.planning.allocation import Host
from distlaunch.planning.train_options import TrainOptions
from distlaunch.transport.ray.nodes import RayCluster

_SIGNALLED = 128
_LOCAL_S = 10.0
"""Time limit for reserving bundles in a local cluster, which never grows."""
_SLOW_S = 2.0
"""After this time the user gets a line on what a start waits for."""
_SAY_S = 1.0
"""Limit for writing a line, in case nothing reads stderr."""


class Interrupted(LaunchError):  # noqa: N818 - as KeyboardInterrupt
    """A signal arrived before Ray had reserved all bundles."""

    def __init__(self, signum: int) -> None:
        super().__init__(
            f"{signal.Signals(signum).name} stopped the job while Ray placed the workers; no worker "
            "was started"
        )
        self.exit_code = _SIGNALLED + signum


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise Interrupted at INT or TERM.

    Further signals are ignored, because the cleanup has a time limit. In another thread than the
    main thread, do nothing.
    """
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
        raise  # signals stay ignored while the cluster is closed
    except BaseException:
        _set_handlers(before)
        raise
    else:
        _set_handlers(before)


@contextmanager
def place_in_ray(
    planned: Planned, options: TrainOptions, environ: Mapping[str, str]
) -> Iterator[tuple[Planned, RayCluster]]:
    """Reserve the job's bundles. Yield the plan for their nodes, and the cluster. Return all
    bundles to Ray at the end.

    Raises ConfigError if the launcher's Python lacks Ray or the options do not fit the cluster,
    NodesError if the bundles are not reserved in time, and Interrupted after a signal.
    """
    backend = planned.backend
    if not isinstance(backend, Ray):
        raise TypeError(backend)
    check_own_python(options.python)
    placement_request = backend.placement_request(options)
    cluster = RayCluster(environ)

    def say(text: str) -> None:
        if not options.quiet:
            with suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(f"distlaunch: {text}\n")

    is_local = backend.address == "local"
    try:
        doing = "starting Ray here" if is_local else "connecting to Ray"
        with _interruptible(), notice_if_slow(say, doing) as done:
            found = cluster.place_bundles(
                backend.address,
                placement_request.bundles,
                each=placement_request.each,
                strategy=placement_request.strategy,
                within_s=_LOCAL_S if is_local else options.join_timeout,
                say=lambda text: say(f"waiting for Ray: {text}"),
                when_connected=done,
            )
        hosts = [
            Host(
                name=node.host,
                slots=node.bundles * placement_request.workers,
                unit=placement_request.unit,
            )
            for node in found
        ]
        location = ray_location(hosts, printable(socket.gethostname()) or "localhost")
        yield make_plan(options, environ, location=location), cluster
    finally:
        cluster.close()


def check_own_python(python: str | None) -> None:
    """Raise ConfigError if the interpreter of this launcher lacks Ray.

    The launcher needs Ray itself, whatever interpreter the workers have (``python``).
    """
    try:
        check_installed(Ray.name, Ray.requires, sys.executable, ())
    except ConfigError as exc:
        there = (
            f"{printable(python)} -m distlaunch train ..., if distlaunch is installed there, or "
            if python
            else ""
        )
        text = (
            f"{exc.message}: distlaunch itself runs there and uses it to reach the cluster, "
            f"whatever {Opt.PYTHON} is"
        )
        raise ConfigError(text, hint=f"{there}{exc.hint}") from None


@contextmanager
def notice_if_slow(
    say: Callable[[str], None], text: str, *, after_s: float = _SLOW_S
) -> Iterator[Callable[[], None]]:
    """Call ``say`` with ``text`` if the work takes longer than ``after_s``. Yield a function to
    call when it is done."""
    timer = threading.Timer(after_s, say, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()
        timer.join(_SAY_S)


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
