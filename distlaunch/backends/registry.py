"""Layer backends: backends by the name that ``--backend`` takes; each is a module, imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import cast

from distlaunch.core.errors import ConfigError
from distlaunch.resolve.variables import BackendVariables

_MODULES = {"pytorch-ddp": "distlaunch.backends.pytorch_ddp"}


def backend_names() -> tuple[str, ...]:
    """List the names that ``--backend`` takes."""
    return tuple(_MODULES)


def find_backend(name: str) -> BackendVariables:
    """Load a backend. Raises ConfigError that names what there is."""
    module = _MODULES.get(name)
    if module is None:
        raise ConfigError(f"--backend {name}: no such backend", hint=f"there is: {', '.join(backend_names())}")
    return cast("BackendVariables", importlib.import_module(module))
