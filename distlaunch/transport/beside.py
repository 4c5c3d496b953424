"""The agent of this machine, where it is one node of several: a child process, same bytes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from distlaunch.core.model.text import printable
from distlaunch.transport.bootstrap import FLAGS, STUB, start_agent
from distlaunch.transport.connect_errors import Trouble
from distlaunch.transport.connection import Link, Target, Unconnected
from distlaunch.transport.open_files import as_found
from distlaunch.transport.process_link import ProcessLink


def open_beside(target: Target, within_s: float, *, code: bytes, environ: Mapping[str, str]) -> Link:
    """Start an agent on this machine; see ``Open``. It ends, after its workers, when the link is closed."""
    until = time.monotonic() + within_s
    word = os.urandom(16).hex()
    python = sys.executable or "python3"
    try:
        link = _started([python, *FLAGS, "-c", STUB, str(len(code)), word], environ)
        start_agent(link, code, word, until=until, where=target.host)
    except Trouble as trouble:
        raise Unconnected(trouble.failure(target.host)) from trouble
    link.is_polled = True
    return link


def _started(argv: list[str], environ: Mapping[str, str]) -> ProcessLink:
    try:
        return ProcessLink(as_found(argv), environ=environ, leash=None)
    except OSError as exc:
        raise Trouble("python", f"{printable(argv[0])} cannot be run: {exc.strerror}") from exc
