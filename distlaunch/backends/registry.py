"""Backends by the name that ``--backend`` takes; each is a module, imported when it is asked
for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from distlaunch.backends.base import Backend, BackendError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import Distribution, EntryPoint

ENTRY_POINTS = "distlaunch.backends"
"""The group of entry points by which other packages add backends; each names a class like ours."""

_CLASSES = {
    "pytorch-ddp": ("pytorch_ddp", "PytorchDdp"),
    "fsdp": ("fsdp", "Fsdp"),
    "accelerate": ("accelerate", "Accelerate"),
    "deepspeed": ("deepspeed", "DeepSpeed"),
    "horovod": ("horovod", "Horovod"),
    "tensorflow": ("tensorflow", "TensorFlow"),
    "ray": ("ray", "Ray"),
}


_SHORT = {"tf": "tensorflow", "hvd": "horovod", "torch": "pytorch-ddp", "torchrun": "pytorch-ddp"}
"""What people call some of them; for hints alone."""


def backend_names() -> tuple[str, ...]:
    """List the names of our own backends."""
    return tuple(_CLASSES)


def backend_called(word: str) -> str | None:
    """Return the backend that people call so, by its name or for short; None if there is none."""
    name = _SHORT.get(word.lower(), word.lower())
    return name if name in _CLASSES or name in other_backends() else None


def find_backend(name: str) -> type[Backend]:
    """Load a backend: ours, else that of another package. Raises BackendError."""
    ours = _CLASSES.get(name)
    if ours is not None:
        module, attribute = ours
        found: type[Backend] = getattr(
            importlib.import_module(f"distlaunch.backends.{module}"), attribute
        )
        return found
    return _load(name)


def other_backends() -> dict[str, list[EntryPoint]]:
    """Return the backends of other packages by name; a name that several have cannot be used."""
    found: dict[str, list[EntryPoint]] = {}
    for point in _entry_points():
        known = found.setdefault(point.name, [])
        where = (point.value, package_of(point))
        if all((each.value, package_of(each)) != where for each in known):  # found by two paths
            known.append(point)
    return found


def _entry_points() -> Iterable[EntryPoint]:
    """Return those of our group; a package whose list of them cannot be read has none, and takes no
    other's away."""
    from importlib.metadata import distributions, entry_points

    try:
        return entry_points(group=ENTRY_POINTS)
    except Exception:  # noqa: BLE001 - whatever parsing comes to: one list spoils all, and which is not said
        return [point for each in distributions() for point in _points_of(each)]


def _points_of(package: Distribution) -> list[EntryPoint]:
    try:
        return list(package.entry_points.select(group=ENTRY_POINTS))
    except Exception:  # noqa: BLE001 - as above
        return []


def _load(name: str) -> type[Backend]:
    from difflib import get_close_matches

    others = other_backends()
    there = [*_CLASSES, *(other for other in others if other not in _CLASSES)]
    points = others.get(name, [])
    if not points:
        small = _SHORT.get(name.lower(), name.lower())
        named = [other for other in there if small in (other, *other.split("-"))]
        near = named or get_close_matches(small, there, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BackendError(name, "no such backend", hint=f"{hint}there is: {', '.join(there)}")
    if len(points) > 1:
        packages = " and ".join(sorted(f"{point.value} ({package_of(point)})" for point in points))
        raise BackendError(name, f"two packages have one of that name: {packages}")
    from distlaunch.backends.plugins import guarded, loaded

    point = points[0]
    failed = f"{package_of(point)} could not be loaded"
    found = loaded(point, lambda why: BackendError(name, f"{failed}: {why}"))
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendError(
            name,
            f"{point.value} of {package_of(point)} is no backend",
            hint="an entry point names a subclass of distlaunch.backends.base.Backend",
        )
    return guarded(found, name, package_of(point))


def package_of(point: EntryPoint) -> str:
    """Name the package that an entry point is of, for people."""
    try:
        name = None if point.dist is None else point.dist.name
    except (
        LookupError,
        OSError,
        TypeError,
    ):  # where the records have no name: one of these, or None, by release
        name = None
    return str(name or "an unknown package")
