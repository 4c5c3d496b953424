"""Checks of the launcher on a GPU: what workers see, warm starts, what is left, what is found."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from .check_environment import (
    WORKERS,
    CheckEnvironment,
    CheckError,
    Job,
    NotHereError,
    expect,
    expect_that,
)

_GIB_MIB = 1024
_RELEASE_S = 10.0
"""When the launcher is gone, workers have the failure grace (5 s), and the driver some time of its
own."""
_PROBE = """
import json
from distlaunch.core.probe.gpus import probe_gpus
found = probe_gpus()
memory = {gpu.uuid: gpu.memory_mib for gpu in found.gpus}
print(json.dumps({"source": found.source, "problem": found.problem, "memory": memory}))
"""


def masks(gpu_check: CheckEnvironment) -> str:
    """Try all ways to choose a GPU, and those that are to be refused, at the same time."""
    gpu = gpu_check.gpu
    index = {"CUDA_VISIBLE_DEVICES": str(gpu.index)}
    jobs = {
        f"--gpus {gpu.index}": gpu_check.train("sees.py", "--gpus", str(gpu.index)),
        "--gpus UUID": gpu_check.train("sees.py", "--gpus", gpu.uuid),
        "--isolate-gpus": gpu_check.train("sees.py", "--num-gpus", "1", "--isolate-gpus"),
        f"CUDA_VISIBLE_DEVICES={gpu.index}": gpu_check.train("sees.py", env=index),
        "CUDA_VISIBLE_DEVICES=UUID": gpu_check.train(
            "sees.py", env={"CUDA_VISIBLE_DEVICES": gpu.uuid}
        ),
    }
    hidden = gpu_check.train("sees.py", "--num-procs", "1")
    refused = {
        f"--num-gpus {gpu.visible + 1}": gpu_check.train(
            "sees.py", "--num-gpus", str(gpu.visible + 1)
        ),
        "--num-gpus 2 of one": gpu_check.train("sees.py", "--num-gpus", "2", env=index),
        "--num-gpus 1 of none": gpu_check.train(
            "sees.py", "--num-gpus", "1", env={"CUDA_VISIBLE_DEVICES": ""}
        ),
    }
    problems = [
        f"{name}: {problem}"
        for name, job in jobs.items()
        if (problem := _problem_of_one(job, gpu.uuid))
    ]
    try:
        expect(hidden.end().observations(), available=False, count=0)
    except CheckError as exc:
        problems.append(f"--num-procs 1: {exc}")
    for name, job in refused.items():
        try:
            job.end(2)
            expect_that(
                "asked for" in job.stderr and "Traceback" not in job.stderr,
                f"it says {job.last_output()}",
            )
        except CheckError as exc:
            problems.append(f"{name}: {exc}")
    if problems:
        raise CheckError("; ".join(problems))
    return (
        f"{', '.join(jobs)}: this GPU alone; --num-procs 1: none; {', '.join(refused)}: exit code 2"
    )


def _problem_of_one(job: Job, uuid: str) -> str | None:
    try:
        observations = job.end().observations()
        expect(observations, available=True, count=1, local_rank=0)
        expect_that(
            uuid.lower().endswith(observations["uuids"][0].lower()),
            f"the worker sees {observations['uuids']}, not {uuid}",
        )
    except CheckError as exc:
        return str(exc)
    return None


def preload(gpu_check: CheckEnvironment) -> str:
    """Use CUDA in workers forked from a loaded torch, also after a failure."""
    words = ("--num-gpus", "1", "--preload", "torch", "--max-restarts", "1", "--min-uptime", "0")
    job = gpu_check.train("forks.py", *words, args=["--fail"]).end()
    for attempt in (0, 1):
        observations = job.observations(attempt=attempt)
        expect(observations, device="cuda")
        judge_fork(observations, attempt=attempt, warm=True)
    (preloaded,) = job.events("preload")
    expect(preloaded, problem=None)
    return (
        f"torch imported in {preloaded['elapsed_s']:.1f} s; CUDA works in the forked worker, "
        "and in that of a restart"
    )


def preload_cuda(gpu_check: CheckEnvironment) -> str:
    """Preload a module that starts CUDA as it is imported: the start is a cold one."""
    job = gpu_check.train("forks.py", "--num-gpus", "1", "--preload", "torch,starts_cuda").end()
    observations = job.observations()
    expect(observations, device="cuda")
    judge_fork(observations, attempt=0, warm=False)
    (preloaded,) = job.events("preload")
    reason = str(preloaded.get("problem"))
    expect_that("starts_cuda" in reason and "failed" not in reason, f"the reason is {reason!r}")
    times = job.stderr.count("workers start without preloading")
    expect_that(times == 1, f"the notice of the cold start came {times} times: {job.last_output()}")
    return f"cold start, said once: {reason}"


def judge_fork(observations: Mapping[str, Any], *, attempt: int, warm: bool) -> None:
    """Check that forks.py was started as expected. Raises CheckError."""
    expect(observations, attempt=attempt, warm=warm, sum=1000.0)


def kill(gpu_check: CheckEnvironment) -> str:
    """Kill the launcher: its worker's GiB is free again soon."""
    memory, holders = gpu_check.memory_used_mib(), gpu_check.holders()
    job = gpu_check.train("holds.py", "--num-gpus", "1")
    job.until(job.has_observations, "worker that holds memory")
    with_memory, with_holders = gpu_check.memory_used_mib(), gpu_check.holders()
    by_memory = memory is not None and with_memory is not None and with_memory - memory >= _GIB_MIB
    by_process = with_holders > holders
    if not (by_memory or by_process):
        raise NotHereError("nvidia-smi shows neither a worker's memory nor its process here")
    began = time.monotonic()
    job.command.process.kill()
    job.command.process.wait(gpu_check.left_s())
    while True:
        left, used = job.command.related(), gpu_check.memory_used_mib()
        held = by_memory and used is not None and memory is not None and used - memory >= _GIB_MIB
        if not left and not held and (not by_process or gpu_check.holders() <= holders):
            break
        if time.monotonic() - began > _RELEASE_S:
            running = ", ".join(left.values()) or "none"
            raise CheckError(
                f"after {_RELEASE_S:g} s: processes {running}; MiB used: {memory} before, {used} "
                "now"
            )
        time.sleep(0.1)
    seen = " and ".join(["its memory"] * by_memory + ["its process"] * by_process)
    return (
        f"kill -9 of the launcher: {time.monotonic() - began:.1f} s later nothing is held (seen "
        f"by {seen})"
    )


def facts(gpu_check: CheckEnvironment) -> str:
    """Compare what plan and probe tell of the GPU with what nvidia-smi does."""
    gpu = gpu_check.gpu
    shown = gpu_check.distlaunch(
        "plan", "--format", "json", "--num-gpus", "1", f"{WORKERS}/sees.py"
    )
    (node,) = json.loads(shown.end().stdout)["nodes"]
    (planned,) = node["gpus"]
    expect(planned, index=gpu.index, uuid=gpu.uuid, name=gpu.name)
    probed = json.loads(gpu_check.python("-c", _PROBE))
    memory = probed["memory"].get(gpu.uuid)
    if gpu.memory_mib is not None:
        near = memory is not None and abs(memory - gpu.memory_mib) <= 2
        expect_that(near, f"the probe finds {memory} MiB, nvidia-smi {gpu.memory_mib}")
    expect(probed, problem=None)
    return (
        f"index, UUID and name in the plan, memory of the probe ({probed['source']}): as "
        "nvidia-smi has them"
    )
