"""The file formats of ``distlaunch render``, with the function that writes each. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from distlaunch.render import kubernetes, pytorchjob, slurm, trainjob
from distlaunch.render.request import RenderRequest, Target
from distlaunch.render.shape import Shape, job_shape

_RENDER: dict[Target, Callable[[RenderRequest, Shape], str]] = {
    "slurm": slurm.render,
    "kubernetes": kubernetes.render,
    "pytorchjob": pytorchjob.render,
    "trainjob": trainjob.render,
}


def render(request: RenderRequest) -> str:
    """Return the text of the requested file.

    Raises ConfigError if the format cannot express an option.
    """
    return _RENDER[request.target](request, job_shape(request))
