"""Checks of the toolkit on a GPU: the group, what ``wrap`` makes of a model, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .check_environment import CheckEnvironment, CheckError, expect, expect_that

_NEAR = 1e-3
"""How far losses may differ that are added up in another order: TF32 is off, so they agree to some
1e-5."""


def nccl(gpu_check: CheckEnvironment) -> str:
    """Reduce by both backends, and end without a word."""
    job = gpu_check.train("reduces.py", "--num-gpus", "1").end()
    observations = job.observations()
    check_group(observations)
    if more := [line for line in job.log() if not line.startswith("observed ")]:
        raise CheckError(f"the worker wrote more than its line: {' / '.join(more)[:500]}")
    complaints = [
        line
        for line in job.stderr.splitlines()
        if "warning" in line.lower() or "error" in line.lower()
    ]
    expect_that(not complaints, f"the launcher complained: {' / '.join(complaints)[:500]}")
    return f"{observations['backend']}, NCCL {observations['nccl']}: both reduce, no message at the end"


def check_group(observations: Mapping[str, Any]) -> None:
    """Check the observations of one worker of reduces.py against those of a GPU."""
    expect(
        observations,
        device="cuda:0",
        backend="cpu:gloo,cuda:nccl",
        backends={"cpu": "gloo", "cuda": "nccl"},
    )
    numbers = [0.0, 1.0, 2.0, 3.0]
    expect(observations, reduced={"cpu": numbers, "cuda": numbers})


def ddp(gpu_check: CheckEnvironment) -> str:
    """Train one worker by NCCL, and a plain loop beside it."""
    observations = gpu_check.train("trains.py", "--num-gpus", "1").end().observations()
    expect(observations, device="cuda:0", wrapper="DistributedDataParallel", world=1)
    return f"{len(observations['wrapped'])} losses as a plain loop's, to {same_losses(observations):.1g}"


def shared(gpu_check: CheckEnvironment) -> str:
    """Train two workers on one GPU, by gloo."""
    job = gpu_check.train(
        "trains.py", "--num-procs", "2", "--device", "cuda", args=["--group", "gloo"]
    ).end()
    for rank in (0, 1):
        expect(job.observations(rank), backend="gloo", wrapper="DistributedDataParallel", world=2)
        expect_that(
            str(job.observations(rank)["device"]).startswith("cuda:"),
            f"rank {rank} is on {job.observations(rank)['device']}",
        )
    if gpu_check.gpu.visible == 1:
        expect(job.observations(1), device="cuda:0")
    return f"two workers by gloo, losses as one's at the same batch, to {same_losses(job.observations()):.1g}"


def same_losses(observations: Mapping[str, Any]) -> float:
    """Compare what trains.py tells; return by how much losses differ at most. Raises CheckError."""
    plain, wrapped = observations["plain"], observations["wrapped"]
    pairs = list(zip(plain, wrapped, strict=True))
    expect_that(
        all(math.isfinite(loss) for pair in pairs for loss in pair),
        f"a loss is no number: {wrapped}",
    )
    expect_that(
        plain[-1] < plain[0] / 2,
        f"the plain loop learnt nothing: {plain[0]:.4f} to {plain[-1]:.4f}",
    )
    most = max(abs(one - other) for one, other in pairs)
    expect_that(most <= _NEAR, f"losses differ by {most:.2g}: plain {plain}, wrapped {wrapped}")
    return most


def bf16(gpu_check: CheckEnvironment) -> str:
    """Train by FSDP2 in bf16, which keeps fp32."""
    return _sharded(gpu_check, "torch.bfloat16", "-o", "precision=bf16")


def fp16(gpu_check: CheckEnvironment) -> str:
    """Train by FSDP2 in fp16, with a gradient scaler."""
    return _sharded(gpu_check, "torch.float16", "-o", "precision=fp16", args=("--scaler",))


def offload(gpu_check: CheckEnvironment) -> str:
    """Train with parameters and the optimizer's states in the host's memory."""
    return _sharded(gpu_check, "torch.float32", "-o", "cpu-offload", kept_on="cpu")


def recompute(gpu_check: CheckEnvironment) -> str:
    """Train with blocks that compute twice a step."""
    return _sharded(gpu_check, "torch.float32", "-o", "activation-checkpointing", times=2)


def _sharded(
    gpu_check: CheckEnvironment,
    computed_in: str,
    *options: str,
    args: tuple[str, ...] = (),
    kept_on: str = "cuda",
    times: int = 1,
) -> str:
    observations = (
        gpu_check.train("shards.py", "--num-gpus", "1", "--backend", "fsdp", *options, args=args)
        .end()
        .observations()
    )
    expect(observations, device="cuda:0")
    return judge_sharded(observations, computed_in, kept_on=kept_on, times=times)


def judge_sharded(
    observations: Mapping[str, Any], computed_in: str, *, kept_on: str, times: int = 1
) -> str:
    """Check the observations of shards.py against the request. Return a line about it. Raises
    CheckError."""
    losses = observations["losses"]
    expect(
        observations,
        strategy="fsdp",
        computed_in=[computed_in],
        outputs=["torch.float32"],
        parameters=["torch.float32"],
    )
    expect(observations, kept_on=[kept_on], calls=[times * observations["steps"]])
    expect_that(all(math.isfinite(loss) for loss in losses), f"a loss is no number: {losses}")
    expect_that(
        losses[-1] < losses[0] / 2, f"the loss falls from {losses[0]:.4f} to {losses[-1]:.4f} only"
    )
    scaled = "" if observations["scale"] is None else f", scale {observations['scale']:g}"
    often = "" if times == 1 else f", blocks computed {times} times a step"
    return (
        f"computes in {computed_in.removeprefix('torch.')}, keeps float32 on {kept_on}{often}; "
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}{scaled}"
    )


def checkpoint(gpu_check: CheckEnvironment) -> str:
    """Compare a training that failed and went on with one that did not."""
    whole = gpu_check.train("goes_on.py", "--num-gpus", "1", args=[gpu_check.folder()])
    words = ("--num-gpus", "1", "--max-restarts", "1", "--min-uptime", "0")
    broken = gpu_check.train("goes_on.py", *words, args=[gpu_check.folder(), "--fail-at", "8"])
    straight, resumed = whole.end().observations(), broken.end().observations(attempt=1)
    expect(straight, device="cuda:0", first=0)
    expect(resumed, device="cuda:0")
    return judge_resumed(straight, resumed)


def judge_resumed(straight: Mapping[str, Any], resumed: Mapping[str, Any]) -> str:
    """Compare two endings of goes_on.py. Return a line about it. Raises CheckError."""
    expect(resumed, attempt=1, first=5)
    expect_that(
        straight["digest"] == resumed["digest"],
        "weights or random numbers differ from an uninterrupted run's",
    )
    return (
        f"resumed at step {resumed['first']}: the same bits as uninterrupted, dropout's random "
        "numbers too"
    )
