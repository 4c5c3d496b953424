"""Find backends by name, and import their modules when needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from distlaunch.backends.base import Backend, BackendError
from distlaunch.core.model.option_names import Opt

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import Distribution, EntryPoint

ENTRY_POINTS = "distlaunch.backends"
"""An entry point names a subclass of ``Backend``."""

_CLASSES = {
    "pytorch-ddp": ("pytorch_ddp", "PytorchDdp"),
    "fsdp": ("fsdp", "Fsdp"),
    "accelerate": ("accelerate", "Accelerate"),
    "deepspeed": ("deepspeed", "DeepSpeed"),
    "horovod": ("horovod", "Horovod"),
    "tensorflow": ("tensorflow", "TensorFlow"),
    "ray": ("ray", "Ray"),
}


_ALIASES = {"tf": "tensorflow", "hvd": "horovod", "torch": "pytorch-ddp", "torchrun": "pytorch-ddp"}
"""Other names for backends, for hints only."""
_COLLECTIVES = ("nccl", "gloo", "mpi", "ucc", "xccl", "hccl")
"""Backends of torch.distributed, which a user may mean."""


def backend_names() -> tuple[str, ...]:
    """Return the names of distlaunch's own backends."""
    return tuple(_CLASSES)


def spelled_backend(name: str) -> str:
    """Return the name of our backend that differs only in capitals or underscores.

    Return any other name unchanged.
    """
    ours = name.lower().replace("_", "-")
    return ours if ours in _CLASSES else name


def backend_name_for(text: str) -> str | None:
    """Return the backend with this name or short name; None if there is none."""
    name = spelled_backend(_ALIASES.get(text.lower(), text.lower()))
    return name if name in _CLASSES or name in other_backends() else None


def find_backend(name: str) -> type[Backend]:
    """Return the class of a backend, its module imported.

    Raises BackendError if there is none of this name, or it cannot be loaded.
    """
    ours = _CLASSES.get(name)
    if ours is not None:
        module, attribute = ours
        found: type[Backend] = getattr(
            importlib.import_module(f"distlaunch.backends.{module}"), attribute
        )
        return found
    return _load_other_backend(name)


def other_backends() -> dict[str, list[EntryPoint]]:
    """Return the entry points of other packages by name. A name with several cannot be used."""
    found: dict[str, list[EntryPoint]] = {}
    for point in _entry_points():
        known = found.setdefault(point.name, [])
        where = (point.value, package_of(point))
        if all(
            (each.value, package_of(each)) != where for each in known
        ):  # found twice on the path
            known.append(point)
    return found


def _entry_points() -> Iterable[EntryPoint]:
    """Return the backends' entry points, without packages whose metadata cannot be read."""
    from importlib.metadata import distributions, entry_points

    try:
        return entry_points(group=ENTRY_POINTS)
    except Exception:  # noqa: BLE001 - one malformed list breaks the whole call, with any exception
        return [point for each in distributions() for point in _points_of(each)]


def _points_of(package: Distribution) -> list[EntryPoint]:
    try:
        return list(package.entry_points.select(group=ENTRY_POINTS))
    except Exception:  # noqa: BLE001 - as above
        return []


def _load_other_backend(name: str) -> type[Backend]:
    from difflib import get_close_matches

    others = other_backends()
    if name.lower() in _COLLECTIVES and name not in others:
        raise BackendError(
            name,
            "no such backend",
            hint=f"{Opt.BACKEND} names the training framework. The script chooses {name.lower()}: "
            "torch.distributed.init_process_group, or init(backend=...) of the toolkit",
        )
    known_names = [*_CLASSES, *(other for other in others if other not in _CLASSES)]
    points = others.get(name, [])
    if not points:
        lower = _ALIASES.get(name.lower(), name.lower())
        named = [other for other in known_names if lower in (other, *other.split("-"))]
        near = named or get_close_matches(lower, known_names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BackendError(
            name, "no such backend", hint=f"{hint}there is: {', '.join(known_names)}"
        )
    if len(points) > 1:
        packages = " and ".join(sorted(f"{point.value} ({package_of(point)})" for point in points))
        raise BackendError(name, f"two packages have a backend of that name: {packages}")
    from distlaunch.backends.plugins import checked_backend, load_entry_point

    point = points[0]
    failed = f"{package_of(point)} could not be loaded"
    found = load_entry_point(point, lambda why: BackendError(name, f"{failed}: {why}"))
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendError(
            name,
            f"{point.value} of {package_of(point)} is not a backend",
            hint="an entry point names a subclass of distlaunch.backends.base.Backend",
        )
    return checked_backend(found, name, package_of(point))


def package_of(point: EntryPoint) -> str:
    """Return the name of an entry point's package."""
    try:
        name = None if point.dist is None else point.dist.name
    except (LookupError, OSError, TypeError):  # metadata without a name, in some releases of Python
        name = None
    return str(name or "an unknown package")
