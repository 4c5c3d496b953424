"""The kinds of files there are; pure."""

from __future__ import annotations

from collections.abc import Callable

from distlaunch.render import kubernetes, pytorchjob, slurm, trainjob
from distlaunch.render.request import Request, Target
from distlaunch.render.shape import Shape, shape_of

_RENDER: dict[Target, Callable[[Request, Shape], str]] = {
    "slurm": slurm.render,
    "kubernetes": kubernetes.render,
    "pytorchjob": pytorchjob.render,
    "trainjob": trainjob.render,
}


def render(request: Request) -> str:
    """Write the file that was asked for; the same request gives the same bytes. Raises
    ConfigError."""
    return _RENDER[request.target](request, shape_of(request))
