"""Checks of frameworks that bring their own way to GPUs, each where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from .ground import CheckError, Ground, NotHereError, expect, expect_that
from .training import check_group


def _need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise NotHereError(f"no {module} here")


def accelerate(ground: Ground) -> str:
    """Train by a script of Accelerate's in bf16."""
    _need("accelerate")
    words = ("--num-gpus", "1", "--backend", "accelerate", "-o", "mixed-precision=bf16")
    told = ground.train("accelerated.py", *words).end().told()
    expect(told, device="cuda:0", processes=1, precision="bf16")
    expect_that(
        "torch.bfloat16" in told["computed_in"], f"blocks computed in {told['computed_in']}"
    )
    return judge_learnt(told)


def deepspeed(ground: Ground) -> str:
    """Train by the same script, which comes to DeepSpeed's ZeRO."""
    _need("accelerate", "deepspeed")
    words = ("--num-gpus", "1", "--backend", "deepspeed", "-o", "zero=2")
    told = ground.train("accelerated.py", *words).end().told()
    expect(told, device="cuda:0", processes=1, kind="DEEPSPEED", stage=2)
    return judge_learnt(told)


def judge_learnt(told: Mapping[str, Any]) -> str:
    """Check the losses that accelerated.py reports. Return a line about it. Raises CheckError."""
    losses = told["losses"]
    if not losses[-1] < losses[0] / 2:  # also where one is no number
        raise CheckError(f"the loss goes from {losses[0]} to {losses[-1]}")
    stage = "" if told["stage"] is None else f", ZeRO {told['stage']}"
    return (
        f"{told['kind']}{stage}, precision {told['precision']}; loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}"
    )


def ray(ground: Ground) -> str:
    """Start a Ray here that places a worker with the GPU."""
    _need("ray")
    told = (
        ground.train("reduces.py", "--backend", "ray", "-o", "address=local", "--num-gpus", "1")
        .end()
        .told()
    )
    check_group(told)
    return f"Ray places a worker on {told['device']}, {told['backend']}"
