"""Common parts of the benchmark's workers: start time, rank, and a directory for results."""

import os
import time

STARTED_NS = time.monotonic_ns()
"""As near to the worker's first instruction as a program can say; CLOCK_MONOTONIC is one clock for
all processes."""

BENCH_DIR = os.environ["BENCH_DIR"]


def _number(*names: str) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


RANK = _number("RANK", "OMPI_COMM_WORLD_RANK")
LOCAL_RANK = _number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
WORLD_SIZE = _number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
ATTEMPT = _number("TORCHELASTIC_RESTART_COUNT")


def stamp(name: str, value: int) -> None:
    """Write a time (or a pid) under a name that tells attempt and rank; it appears whole or not at
    all."""
    path = f"{BENCH_DIR}/{name}-{ATTEMPT}-{RANK}"
    with open(f"{path}.tmp", "w", encoding="ascii") as file:
        file.write(str(value))
    os.rename(f"{path}.tmp", path)


def wait_for_all() -> None:
    """Return when every worker of this attempt has said that it started."""
    while not all(
        os.path.exists(f"{BENCH_DIR}/start-{ATTEMPT}-{rank}") for rank in range(WORLD_SIZE)
    ):
        time.sleep(0.005)
