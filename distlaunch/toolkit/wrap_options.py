"""What the launcher's ``-o NAME=VALUE`` and the script ask of ``wrap`` and ``init``."""

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
"""By the launcher's backend; with all others, and with other launchers, it is DDP."""
_OWN_WRAPPERS = {
    "accelerate": "Accelerator().prepare(model, optimizer)",
    "deepspeed": "deepspeed.initialize(model=model, optimizer=optimizer)",
    "tensorflow": "tf.distribute.MultiWorkerMirroredStrategy()",
}
"""Backends whose frameworks wrap models themselves, and how."""

_KINDS: Mapping[str, type | tuple[str, ...]] = {
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
_OF_INIT = {"collective-timeout"}
_MOST = 1 << 40


class WrapOptions(Record):
    """How ``wrap`` does it; each strategy takes what concerns it."""

    find_unused_parameters: bool = False
    bucket_mb: int | None = None
    static_graph: bool = False
    sharding: str = "full"
    precision: str = "fp32"
    cpu_offload: bool = False
    wrap_min_params: int | None = None
    wrap_classes: str = ""
    """Names with commas between."""
    activation_checkpointing: bool = False
    compression: str = "none"


def launched_strategy(environ: Mapping[str, str] = os.environ) -> Strategy:
    """Tell how models are to be wrapped."""
    return _STRATEGIES.get(environ.get(BACKEND, ""), "ddp")


def refuse_other_wrappers(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ToolkitError where a framework that the job was started for wraps models itself."""
    backend = environ.get(BACKEND, "")
    if backend in _OWN_WRAPPERS:
        raise ToolkitError(
            f"wrap() does not wrap models for --backend {backend}",
            hint=f"{_OWN_WRAPPERS[backend]}, or --backend pytorch-ddp or fsdp",
        )


def launched_options(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Read those of the launcher's options that concern us. Raises ToolkitError for what we do not
    understand.

    The launcher has checked the names; what is not ours is its own. Without it they were set by
    hand.
    """
    text = environ.get(BACKEND_OPTIONS)
    if not text:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ToolkitError(f"{BACKEND_OPTIONS} is no JSON: {exc}") from exc
    if not isinstance(given, dict):
        raise ToolkitError(
            f"{BACKEND_OPTIONS} is no JSON object: {quoted(text)}", hint='{"sharding": "full"}'
        )
    if "DISTLAUNCH_JOB_ID" in environ:
        given = {name: value for name, value in given.items() if name in _KINDS}
    return {
        name: _checked(name, value, f"{BACKEND_OPTIONS}: {name}") for name, value in given.items()
    }


def collective_timeout_s(given: object, environ: Mapping[str, str] = os.environ) -> float | None:
    """Join what ``init`` was given with what the launcher was told, which wins. Raises
    ToolkitError."""
    if given is not None:
        given = _checked("collective-timeout", given, "init(collective_timeout=...)")
    seconds = launched_options(environ).get("collective-timeout", given)
    return None if seconds is None else float(seconds)  # type: ignore[arg-type]


def wrap_options(
    given: Mapping[str, object], environ: Mapping[str, str] = os.environ
) -> WrapOptions:
    """Join what the script gives with what the launcher was told, which wins. Raises
    ToolkitError."""
    chosen: dict[str, object] = {}
    for word, value in given.items():
        name = word.replace("_", "-")
        if name not in _KINDS or name in _OF_INIT:
            names = [each.replace("-", "_") for each in _KINDS if each not in _OF_INIT]
            raise ToolkitError(f"wrap() takes no {quoted(word)}", hint=near_name(word, names))
        chosen[name.replace("-", "_")] = _checked(name, value, f"wrap({word}=...)")
    for name, value in launched_options(environ).items():
        if name not in _OF_INIT:
            chosen[name.replace("-", "_")] = value
    return WrapOptions(**chosen)  # type: ignore[arg-type]


def _checked(name: str, value: object, where: str) -> object:
    kind = _KINDS.get(name)
    if kind is None:
        raise ToolkitError(f"{where}: no such option", hint=near_name(name, list(_KINDS)))
    if isinstance(kind, tuple):
        if value in kind:
            return value
        raise ToolkitError(f"{where} is {quoted(str(value))}", hint=f"it takes {', '.join(kind)}")
    fits = type(value) is kind or (kind is float and type(value) is int)
    if fits and (kind in {bool, str} or (isinstance(value, (int, float)) and 0 < value < _MOST)):
        return value
    takes = {
        bool: "true or false",
        int: "a whole number above 0",
        float: "seconds, above 0",
        str: "text",
    }[kind]
    raise ToolkitError(f"{where} is {quoted(str(value))}", hint=f"it takes {takes}")


def near_name(name: str, names: Sequence[str]) -> str:
    """Return a hint: the known name that was meant, or all of them."""
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
