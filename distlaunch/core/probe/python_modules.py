"""Find out which modules a worker's interpreter can import, without importing them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder

_CUTOFF = 0.75
"""Similarity for ``nearest_module``: accepts toch for torch, but not rich."""


def is_importable(name: str, path: Sequence[str], *, folders: bool = True) -> bool:
    """Return whether a top-level module exists: built in, on ``path``, on this process's path, or
    by an import hook.

    With ``folders``, a directory without ``__init__.py`` counts, as in Python.
    """
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return True
    if _counts_as_module(PathFinder.find_spec(name, [*path, *sys.path]), folders=folders):
        return True
    for finder in sys.meta_path:  # editable installs use an import hook
        with suppress(Exception):
            if _counts_as_module(finder.find_spec(name, None), folders=folders):
                return True
    return False


def _counts_as_module(spec: ModuleSpec | None, *, folders: bool) -> bool:
    return spec is not None and (folders or spec.origin is not None)


def environment_has(name: str, prefix: str) -> bool:
    """Return whether the environment at ``prefix`` has the top-level module in its site-packages."""
    from glob import escape, glob

    path = glob(os.path.join(escape(prefix), "lib", "python3*", "site-packages"))
    return bool(path) and PathFinder.find_spec(name, path) is not None


def nearest_module(name: str, path: Sequence[str]) -> str | None:
    """Return the importable module with the most similar name; None if none is similar enough."""
    from difflib import get_close_matches
    from pkgutil import iter_modules

    there = {module.name for module in iter_modules([*path, *sys.path])} | sys.stdlib_module_names
    near = get_close_matches(name, sorted(there), n=1, cutoff=_CUTOFF)
    return near[0] if near else None
