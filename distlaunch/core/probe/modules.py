"""Layer core.probe: which modules a worker's interpreter would find, asked without importing any."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import PathFinder

_CUTOFF = 0.75
"""Of likeness: toch is torch, but rich is not."""


def is_importable(name: str, path: Sequence[str]) -> bool:
    """Tell whether a top-level module is there: built in, on ``path`` or ours, or known to a finder of its own."""
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return True
    if PathFinder.find_spec(name, [*path, *sys.path]) is not None:
        return True
    for finder in sys.meta_path:  # editable installs have their own
        with suppress(Exception):
            if finder.find_spec(name, None) is not None:
                return True
    return False


def nearest_module(name: str, path: Sequence[str]) -> str | None:
    """Give the module that was most likely meant, if one is like it."""
    from difflib import get_close_matches
    from pkgutil import iter_modules

    there = {module.name for module in iter_modules([*path, *sys.path])} | sys.stdlib_module_names
    near = get_close_matches(name, sorted(there), n=1, cutoff=_CUTOFF)
    return near[0] if near else None
