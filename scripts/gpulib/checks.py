"""The checks, in their order, and how one is made."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from benchlib.process import BenchError

from . import failing, frameworks, launching, training
from .check_environment import CheckEnvironment, CheckError, NotHereError
from .machine import Gpu

TOTAL_S = 225.0
"""What all of them together may take, and some seconds to end the last; a check for which nothing
is left fails."""


class Check(NamedTuple):
    """A row of the table."""

    name: str
    about: str
    run: Callable[[CheckEnvironment], str]
    """Returns a line about what was seen."""
    limit_s: float = 60.0


class Row(NamedTuple):
    """How one went."""

    check: str
    result: Literal["ok", "FAILED", "skipped"]
    seconds: float
    detail: str


CHECKS = (
    Check("nccl", "init() forms cpu:gloo,cuda:nccl, and the end is silent", training.nccl),
    Check("ddp", "wrap() by DDP has the losses of a plain loop", training.ddp),
    Check("shared", "two workers share a GPU by gloo", training.shared),
    Check("bf16", "--backend fsdp -o precision=bf16", training.bf16),
    Check("fp16", "--backend fsdp -o precision=fp16, with a gradient scaler", training.fp16),
    Check("offload", "--backend fsdp -o cpu-offload", training.offload),
    Check("recompute", "--backend fsdp -o activation-checkpointing", training.recompute),
    Check(
        "checkpoint",
        "resumed = uninterrupted, bit for bit, CUDA's random numbers too",
        training.checkpoint,
    ),
    Check(
        "masks",
        "--gpus, --isolate-gpus, CUDA_VISIBLE_DEVICES, --num-procs, more GPUs than there are",
        launching.masks,
    ),
    Check("preload", "--preload torch: CUDA in forked workers, restart too", launching.preload),
    Check(
        "preload-cuda",
        "a preloaded module that starts CUDA: cold start, said once",
        launching.preload_cuda,
    ),
    Check("recorder", "-o dump-pipe: NCCL's flight recorder, read by torch", failing.recorder),
    Check("memory", "torch.OutOfMemoryError is the cause that is reported", failing.memory),
    Check("assert", "a device-side assert is the cause that is reported", failing.assertion),
    Check("kill", "kill -9 of the launcher frees the GPU", launching.kill),
    Check("facts", "name, UUID and memory as nvidia-smi has them", launching.facts),
    Check("accelerate", "--backend accelerate -o mixed-precision=bf16", frameworks.accelerate),
    Check("deepspeed", "--backend deepspeed -o zero=2", frameworks.deepspeed),
    Check("ray", "--backend ray -o address=local --num-gpus 1", frameworks.ray),
)


def make(check: Check, gpu: Gpu, *, until: float, environ: Mapping[str, str] = os.environ) -> Row:
    """Run a check within its limit and before ``until`` (monotonic). All that it started has ended
    then."""
    began = time.monotonic()
    limit_s = min(check.limit_s, until - began)
    if limit_s < 1:
        return Row(check.name, "FAILED", 0.0, f"not made: all together may take {TOTAL_S:g} s")
    result: Literal["ok", "FAILED", "skipped"]
    try:
        with CheckEnvironment(gpu, environ, limit_s=limit_s) as gpu_check:
            result, detail = "ok", check.run(gpu_check)
    except NotHereError as exc:
        result, detail = "skipped", str(exc)
    except (CheckError, BenchError) as exc:
        result, detail = "FAILED", str(exc)
    except Exception as exc:  # noqa: BLE001 - whatever one meets, the others are made
        result, detail = "FAILED", f"{type(exc).__name__}: {exc}"
    return Row(check.name, result, time.monotonic() - began, detail)
