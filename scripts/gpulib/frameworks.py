"""Checks of frameworks that bring their own way to GPUs, each where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from .check_environment import CheckEnvironment, CheckError, NotHereError, expect, expect_that
from .training import check_group


def _need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise NotHereError(f"no {module} here")


def accelerate(gpu_check: CheckEnvironment) -> str:
    """Train by a script of Accelerate's in bf16."""
    _need("accelerate")
    words = ("--num-gpus", "1", "--backend", "accelerate", "-o", "mixed-precision=bf16")
    observations = gpu_check.train("accelerated.py", *words).end().observations()
    expect(observations, device="cuda:0", processes=1, precision="bf16")
    expect_that(
        "torch.bfloat16" in observations["computed_in"],
        f"blocks computed in {observations['computed_in']}",
    )
    return judge_learnt(observations)


def deepspeed(gpu_check: CheckEnvironment) -> str:
    """Train by the same script, which comes to DeepSpeed's ZeRO."""
    _need("accelerate", "deepspeed")
    words = ("--num-gpus", "1", "--backend", "deepspeed", "-o", "zero=2")
    observations = gpu_check.train("accelerated.py", *words).end().observations()
    expect(observations, device="cuda:0", processes=1, kind="DEEPSPEED", stage=2)
    return judge_learnt(observations)


def judge_learnt(observations: Mapping[str, Any]) -> str:
    """Check the losses that accelerated.py reports. Return a line about it. Raises CheckError."""
    losses = observations["losses"]
    if not losses[-1] < losses[0] / 2:  # also where one is no number
        raise CheckError(f"the loss goes from {losses[0]} to {losses[-1]}")
    stage = "" if observations["stage"] is None else f", ZeRO {observations['stage']}"
    return (
        f"{observations['kind']}{stage}, precision {observations['precision']}; loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}"
    )


def ray(gpu_check: CheckEnvironment) -> str:
    """Start a Ray here that places a worker with the GPU."""
    _need("ray")
    observations = (
        gpu_check.train("reduces.py", "--backend", "ray", "-o", "address=local", "--num-gpus", "1")
        .end()
        .observations()
    )
    check_group(observations)
    return f"Ray places a worker on {observations['device']}, {observations['backend']}"
