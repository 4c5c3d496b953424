"""Compute steps of some milliseconds each and report them as heartbeats, until BENCH_DIR/enough exists.

Appends the wall and the processor time of each step, with its end, to ``steps-RANK``.
"""

import os
import time

import common

enough = f"{common.BENCH_DIR}/enough"
pipe = int(os.environ["DISTLAUNCH_PROGRESS_FD"])
common.stamp("pid", os.getpid())
common.stamp("start", common.STARTED_NS)
step, beat = 0, 0.0
with open(f"{common.BENCH_DIR}/steps-{common.RANK}", "w", buffering=1, encoding="ascii") as file:
    while not os.path.exists(enough):
        began, used = time.monotonic_ns(), time.process_time_ns()
        total = 0
        for number in range(100_000):
            total += number * number
        step += 1
        if time.monotonic() >= beat:
            beat = time.monotonic() + 0.5
            os.write(pipe, b'{"step": %d, "loss": 0.5}\n' % step)
            print("step", step, flush=True)
        now = time.monotonic_ns()
        file.write(f"{now} {now - began} {time.process_time_ns() - used}\n")
