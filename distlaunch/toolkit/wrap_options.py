"""Options of ``wrap`` and ``init``, of the launcher and of the script."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Literal

from distlaunch.core.model.record import Record
from distlaunch.core.model.text import quoted
from distlaunch.core.model.variables import BACKEND_OPTIONS
from distlaunch.toolkit.toolkit_error import ToolkitError

Strategy = Literal["ddp", "fsdp", "horovod"]

BACKEND = "DISTLAUNCH_BACKEND"
_STRATEGIES: Mapping[str, Strategy] = {"fsdp": "fsdp", "horovod": "horovod"}
"""Strategy by backend. All other backends, and other launchers, use DDP."""
_OWN_WRAPPERS = {
    "accelerate": "Accelerator().prepare(model, optimizer)",
    "deepspeed": "deepspeed.initialize(model=model, optimizer=optimizer)",
    "tensorflow": "tf.distribute.MultiWorkerMirroredStrategy()",
}
"""Backends whose frameworks wrap models themselves, and their call."""

_OPTION_TYPES: Mapping[str, type | tuple[str, ...]] = {
    "find-unused-parameters": bool,
    "bucket-mb": int,
    "static-graph": bool,
    "sharding": ("full", "grad", "hybrid"),
    "precision": ("fp32", "bf16", "fp16"),
    "cpu-offload": bool,
    "wrap-min-params": int,
    "wrap-classes": str,
    "activation-checkpointing": bool,
    "compression": ("none", "fp16"),
    "collective-timeout": float,
}
_INIT_OPTIONS = {"collective-timeout"}
_MAX_NUMBER = 1 << 40


class WrapOptions(Record):
    """The options of ``wrap``. Each strategy ignores the other strategies' options."""

    find_unused_parameters: bool = False
    bucket_mb: int | None = None
    static_graph: bool = False
    sharding: str = "full"
    precision: str = "fp32"
    cpu_offload: bool = False
    wrap_min_params: int | None = None
    wrap_classes: str = ""
    """Class names, comma-separated."""
    activation_checkpointing: bool = False
    compression: str = "none"


def strategy_of_backend(environ: Mapping[str, str] = os.environ) -> Strategy:
    """Return the strategy that belongs to the launcher's backend."""
    return _STRATEGIES.get(environ.get(BACKEND, ""), "ddp")


def refuse_other_wrappers(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ToolkitError if the job's backend wraps models itself."""
    backend = environ.get(BACKEND, "")
    if backend in _OWN_WRAPPERS:
        raise ToolkitError(
            f"wrap() does not wrap models for --backend {backend}",
            hint=f"{_OWN_WRAPPERS[backend]}, or --backend pytorch-ddp or fsdp",
        )


def launched_options(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Return the launcher's options that the toolkit uses.

    The launcher has checked the names. If the variable was set without it, raises ToolkitError for
    unknown names and invalid values.
    """
    text = environ.get(BACKEND_OPTIONS)
    if not text:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ToolkitError(f"{BACKEND_OPTIONS} is not JSON: {exc}") from exc
    if not isinstance(given, dict):
        raise ToolkitError(
            f"{BACKEND_OPTIONS} is not a JSON object: {quoted(text)}", hint='{"sharding": "full"}'
        )
    if "DISTLAUNCH_JOB_ID" in environ:
        given = {name: value for name, value in given.items() if name in _OPTION_TYPES}
    return {
        name: _check_value(name, value, f"{BACKEND_OPTIONS}: {name}")
        for name, value in given.items()
    }


def collective_timeout_s(given: object, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the timeout of collectives in seconds; None for torch's default.

    The launcher's option takes precedence. Raises ToolkitError for an invalid value.
    """
    if given is not None:
        given = _check_value("collective-timeout", given, "init(collective_timeout=...)")
    seconds = launched_options(environ).get("collective-timeout", given)
    return None if seconds is None else float(seconds)  # type: ignore[arg-type]


def wrap_options(
    given: Mapping[str, object], environ: Mapping[str, str] = os.environ
) -> WrapOptions:
    """Return the options of the script and of the launcher, which take precedence.

    Raises ToolkitError for an unknown option or an invalid value.
    """
    chosen: dict[str, object] = {}
    for argument, value in given.items():
        name = argument.replace("_", "-")
        if name not in _OPTION_TYPES or name in _INIT_OPTIONS:
            names = [each.replace("-", "_") for each in _OPTION_TYPES if each not in _INIT_OPTIONS]
            raise ToolkitError(
                f"wrap() takes no {quoted(argument)}", hint=name_hint(argument, names)
            )
        chosen[name.replace("-", "_")] = _check_value(name, value, f"wrap({argument}=...)")
    for name, value in launched_options(environ).items():
        if name not in _INIT_OPTIONS:
            chosen[name.replace("-", "_")] = value
    return WrapOptions(**chosen)  # type: ignore[arg-type]


def _check_value(name: str, value: object, where: str) -> object:
    kind = _OPTION_TYPES.get(name)
    if kind is None:
        raise ToolkitError(f"{where}: no such option", hint=name_hint(name, list(_OPTION_TYPES)))
    if isinstance(kind, tuple):
        if value in kind:
            return value
        raise ToolkitError(f"{where} is {quoted(str(value))}", hint=f"it takes {', '.join(kind)}")
    fits = type(value) is kind or (kind is float and type(value) is int)
    if fits and (
        kind in {bool, str} or (isinstance(value, (int, float)) and 0 < value < _MAX_NUMBER)
    ):
        return value
    takes = {
        bool: "true or false",
        int: "a whole number above 0",
        float: "seconds, above 0",
        str: "text",
    }[kind]
    raise ToolkitError(f"{where} is {quoted(str(value))}", hint=f"it takes {takes}")


def name_hint(name: str, names: Sequence[str]) -> str:
    """Return the closest known name, or all names, as a hint."""
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
