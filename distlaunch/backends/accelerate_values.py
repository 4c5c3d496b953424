"""Which values Accelerate 1.15 takes from its variables, so that a slip is told of before the start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import quoted

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_NUMBERS_OF_STRATEGIES = tuple("12345")
_DEVICES = ("none", "cpu", "nvme")
_SWITCH = ("true", "false")
_WHOLE, _WHOLE_OR_AUTO, _NUMBER_OR_AUTO = "a whole number", "a whole number or auto", "a number or auto"
_SHAPES: Mapping[str, re.Pattern[str]] = {
    _WHOLE: re.compile("[0-9]+"),
    _WHOLE_OR_AUTO: re.compile("[0-9]+|auto"),
    _NUMBER_OR_AUTO: re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|auto", re.IGNORECASE),
}
_TAKES: Mapping[str, str | tuple[str, ...]] = {
    "FSDP_VERSION": ("1", "2"),
    "FSDP_SHARDING_STRATEGY": _STRATEGIES,
    "FSDP_RESHARD_AFTER_FORWARD": (*_SWITCH, *_STRATEGIES),  # of version 2, and of 1
    "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "FSDP_STATE_DICT_TYPE": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": tuple("0123"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": _DEVICES,
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": _DEVICES,
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _WHOLE_OR_AUTO,
    "ACCELERATE_GRADIENT_CLIPPING": _NUMBER_OR_AUTO,
    **dict.fromkeys(
        (
            "FSDP_OFFLOAD_PARAMS", "FSDP_FORWARD_PREFETCH", "FSDP_USE_ORIG_PARAMS", "FSDP_CPU_RAM_EFFICIENT_LOADING",
            "FSDP_SYNC_MODULE_STATES", "FSDP_ACTIVATION_CHECKPOINTING", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
            "ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_DYNAMO_USE_DYNAMIC",
            "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        ),
        _SWITCH,
    ),
    **dict.fromkeys(
        (
            "FSDP_MIN_NUM_PARAMS", "MEGATRON_LM_TP_DEGREE", "MEGATRON_LM_PP_DEGREE", "MEGATRON_LM_NUM_MICRO_BATCHES",
            *(f"PARALLELISM_CONFIG_{name}_SIZE" for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")),
        ),
        _WHOLE,
    ),
}  # fmt: skip
"""What else than any text a variable takes: one of these in any letters, or what has this shape."""
_SAME = {word: each for each, words in (("true", "y yes t on 1"), ("false", "n no f off 0")) for word in words.split()}


def check_value(what: str, value: Any, variable: str) -> None:
    """Raise ConfigError, begun by ``what``, for a value that Accelerate does not have (a traceback on every rank)."""
    takes = _TAKES.get(variable, ())
    if isinstance(value, Mapping | list):
        found, hint = ("names and values", None) if isinstance(value, Mapping) else ("a list", "A,B for several")
        raise ConfigError(f"{what} takes one value, not {found}", hint=hint)
    text = str(value)
    if isinstance(takes, str):
        if not _SHAPES[takes].fullmatch(text):
            raise ConfigError(f"{what} takes {takes}, not {quoted(text)}")
        return
    names = [each.lower() for each in takes]
    small = text.lower()
    small = _SAME.get(small, small) if "true" in names else small
    is_number_of_one = _STRATEGIES[0] in takes and text in _NUMBERS_OF_STRATEGIES
    if takes and small not in names and not is_number_of_one:
        near = get_close_matches(small, names, n=1, cutoff=0.6)
        hint = f"did you mean {takes[names.index(near[0])]}?" if near else None
        raise ConfigError(f"{what} takes {', '.join(takes[:-1])} or {takes[-1]}, not {quoted(text)}", hint=hint)
