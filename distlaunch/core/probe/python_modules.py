"""Which modules a worker's interpreter would find, asked without importing any."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder

_CUTOFF = 0.75
"""Of likeness: toch is torch, but rich is not."""


def is_importable(name: str, path: Sequence[str], *, folders: bool = True) -> bool:
    """Return whether a top-level module is there: built in, on ``path`` or ours, or known to a finder
    of its own.

    ``folders``: one without an ``__init__.py`` is one too, as it is for Python.
    """
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return True
    if _counts(PathFinder.find_spec(name, [*path, *sys.path]), folders=folders):
        return True
    for finder in sys.meta_path:  # editable installs have their own
        with suppress(Exception):
            if _counts(finder.find_spec(name, None), folders=folders):
                return True
    return False


def _counts(spec: ModuleSpec | None, *, folders: bool) -> bool:
    return spec is not None and (folders or spec.origin is not None)


def environment_has(name: str, prefix: str) -> bool:
    """Return whether the environment in this folder has a top-level module among its packages."""
    from glob import escape, glob

    path = glob(os.path.join(escape(prefix), "lib", "python3*", "site-packages"))
    return bool(path) and PathFinder.find_spec(name, path) is not None


def nearest_module(name: str, path: Sequence[str]) -> str | None:
    """Return the module that was most likely meant, if one is like it."""
    from difflib import get_close_matches
    from pkgutil import iter_modules

    there = {module.name for module in iter_modules([*path, *sys.path])} | sys.stdlib_module_names
    near = get_close_matches(name, sorted(there), n=1, cutoff=_CUTOFF)
    return near[0] if near else None
