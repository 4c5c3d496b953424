"""A launcher of several that is node 0 as nobody has said which it is; torchrun's static ones all are."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from distlaunch.cli.compat.torchrun.translate import WAYS_OUT
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import printable
from distlaunch.core.probe.lookup import Address, look_up
from distlaunch.launch.surroundings import read_surroundings
from distlaunch.planning.hosts.this_host import is_this_machine
from distlaunch.planning.node_source import endpoint
from distlaunch.planning.train_options import TrainOptions

_LOOKUP_S = 3.0


def check_is_node_zero(options: TrainOptions, environ: Mapping[str, str]) -> None:
    """Raise ConfigError where the launchers meet at another machine: all of them would be node 0, and wait in vain.

    A name that nobody knows within 3 s may be this machine's.
    """
    host = endpoint(options)[0]
    identity = read_surroundings(options, environ).identity
    if host is None or is_this_machine(host, identity):
        return
    found = _addresses(host)
    if found and not any(is_this_machine(address, identity) for address in found):
        raise ConfigError(
            f"--rendezvous: {printable(host)} is another machine, but without --node-rank this launcher is node 0",
            hint=WAYS_OUT,
        )


def _addresses(host: str) -> list[str]:
    """Look a name, or an address, up; empty where that fails, or takes too long."""
    answers: list[list[Address] | OSError | UnicodeError] = []
    answered = threading.Event()

    def done(found: list[Address] | OSError | UnicodeError) -> None:
        answers.append(found)
        answered.set()

    try:
        look_up(host, 0, done)
    except RuntimeError:
        return []
    answered.wait(_LOOKUP_S)
    return [str(to[0]) for found in answers if isinstance(found, list) for _, to in found]
