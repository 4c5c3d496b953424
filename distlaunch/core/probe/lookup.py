"""The addresses that a host's name stands for; by a thread, as no lookup can be interrupted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

Address = tuple[int, tuple[object, ...]]
"""Family and socket address."""


def addresses(host: str, port: int, *, family: int = 0, numeric: bool = False) -> list[Address]:
    """Give the addresses of a host, each once; ``numeric``: it is one already. Raises OSError, UnicodeError."""
    name: str | bytes = host.encode() if host.isascii() else host  # str would load the codec for IDNA
    flags = socket.AI_NUMERICHOST if numeric else 0
    rows = socket.getaddrinfo(name, port, family=family, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((int(family), tuple(to)) for family, _, _, _, to in rows))


def look_up(
    host: str,
    port: int,
    done: Callable[[list[Address] | OSError | UnicodeError], None],
    *,
    family: int = 0,
    otherwise: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Have a thread look a name up and call ``done``; where the resolver hangs, it is left to it.

    ``otherwise`` is called in that thread if nobody knows the name; it gives other names or addresses of the host.
    Raises RuntimeError where no thread can be started.
    """

    def work() -> None:
        found: list[Address] | OSError | UnicodeError
        try:
            found = addresses(host, port, family=family)
        except (OSError, UnicodeError) as exc:
            found = exc
            others: list[Address] = []
            for other in () if otherwise is None else otherwise():
                with suppress(OSError, UnicodeError):
                    others += addresses(other, port, family=family)
            if others:
                found = list(dict.fromkeys(others))
        done(found)

    threading.Thread(target=work, name="dl-resolve", daemon=True).start()
