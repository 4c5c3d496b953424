"""The kinds of files to render. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from distlaunch.render import kubernetes, pytorchjob, slurm, trainjob
from distlaunch.render.request import Request, Target
from distlaunch.render.shape import Shape, job_shape

_RENDER: dict[Target, Callable[[Request, Shape], str]] = {
    "slurm": slurm.render,
    "kubernetes": kubernetes.render,
    "pytorchjob": pytorchjob.render,
    "trainjob": trainjob.render,
}


def render(request: Request) -> str:
    """Return the requested file as text, which is equal for equal requests. Raises ConfigError."""
    return _RENDER[request.target](request, job_shape(request))
