"""Files that are read where the user names none, such as the default configuration of Accelerate."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence

NEITHER = "none"
"""As the value of an option that has a usual file: neither that nor another."""


def usual_files(usual: Mapping[str, Sequence[str]], environ: Mapping[str, str], cwd: str) -> dict[str, str]:
    """Find by option those that are there; ``usual`` is ``Backend.usual``, and relative ones are below ``cwd``."""
    found = {name: _usual_file(places, environ, cwd) for name, places in usual.items()}
    return {name: path for name, path in found.items() if path is not None}


def without(name: str) -> str:
    """Say how the usual file of an option is left out."""
    return f"-o {name}={NEITHER} does without"


def _usual_file(places: Sequence[str], environ: Mapping[str, str], cwd: str) -> str | None:
    for place in places:
        first, _, rest = place.partition("/")
        folder = environ.get(first[1:]) if first[0] == "$" else first
        if folder is not None:
            path = os.path.join(cwd, os.path.expanduser(os.path.join(folder, rest)))
            return path if os.path.isfile(path) else None
    return None
