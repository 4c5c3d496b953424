"""Checks of what is told of failures on a GPU: the report, and NCCL's flight recorder."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Mapping
from typing import Any

from .check_environment import WORKERS, CheckEnvironment, CheckError, Job, expect_that


def memory(gpu_check: CheckEnvironment) -> str:
    """Ask for too much GPU memory: that is the cause that is named."""
    job = gpu_check.train("breaks.py", "--num-gpus", "1", args=["memory"])
    return judge_report(
        _diagnosis(job.end(1)), "OutOfMemoryError", "out of memory", hint="GPU memory is full"
    )


def assertion(gpu_check: CheckEnvironment) -> str:
    """Fail by an assertion within a kernel: that is the cause that is named."""
    job = gpu_check.train("breaks.py", "--num-gpus", "1", args=["assert"])
    diagnosis = _diagnosis(
        job.end(1, 134)
    )  # CUDA may abort a process that ends with a broken context
    return judge_report(diagnosis, "Error", "device-side assert", hint="CUDA_LAUNCH_BLOCKING=1")


def _diagnosis(job: Job) -> dict[str, Any]:
    found = [event["diagnosis"] for event in job.events("failure") if event.get("diagnosis")]
    if not found:
        raise CheckError(f"no event with a diagnosis: {job.last_output()}")
    diagnosis: dict[str, Any] = found[-1]
    report = job.stderr.partition("failed:")[2]
    expect_that(
        str(diagnosis["exception_type"]) in report,
        f"the screen does not name it: {job.last_output()}",
    )
    return diagnosis


def judge_report(diagnosis: Mapping[str, Any], kind: str, message: str, *, hint: str) -> str:
    """Compare a diagnosis with the cause. Return a line about it. Raises CheckError."""
    last_output = {
        name: str(diagnosis.get(name)) for name in ("exception_type", "message", "hint", "frame")
    }
    expect_that(
        last_output["exception_type"].endswith(kind),
        f"the cause is {last_output['exception_type']}: {last_output['message']}",
    )
    expect_that(
        message in last_output["message"].lower(), f"its message is {last_output['message']!r}"
    )
    expect_that(hint in last_output["hint"], f"the hint is {last_output['hint']!r}")
    expect_that("breaks.py" in last_output["frame"], f"its place is {last_output['frame']!r}")
    return f"{last_output['exception_type']} at {last_output['frame']}"


def recorder(gpu_check: CheckEnvironment) -> str:
    """Write a byte to the pipe: the recorder is dumped where torch's reader finds it."""
    go_on = f"{gpu_check.folder()}/go-on"
    job = gpu_check.train(
        "reduces.py", "--num-gpus", "1", "-o", "dump-pipe", args=["--wait", go_on]
    )
    job.until(job.has_observations, "worker that has reduced")
    pipe, dump = (
        f"{job.folder}/attempt-0/nccl_{name}" for name in ("dump_rank_0.pipe", "trace_rank_0")
    )
    job.until(lambda: os.path.exists(pipe), f"pipe {pipe}")
    began = time.monotonic()
    with open(
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0
    ) as file:  # ENXIO: torch does not read it
        file.write(b"1")
        job.until(lambda: _is_whole(dump), f"dump {dump}")
    took = time.monotonic() - began
    with open(go_on, "wb"):
        pass
    read = gpu_check.python(f"{WORKERS}/reads_trace.py", "nccl_trace_rank_", dump)
    observations = json.loads(read.splitlines()[-1].removeprefix("observed "))
    names = observations["entries"]
    expect_that(
        any("all_reduce" in name for name in names), f"no all-reduce is among the entries: {names}"
    )
    job.end()
    return (
        f"dumped {took:.1f} s after a byte in the pipe; torch's reader finds "
        f"{', '.join(dict.fromkeys(names))}"
    )


def _is_whole(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            pickle.load(file)  # noqa: S301 - our own worker's
    except Exception:  # noqa: BLE001 - a file that is being written breaks off anywhere
        return False
    return True
