"""Before a restart the driver must have given back the old workers' GPU memory; nvidia-smi is a
script here (no GPU)."""

from __future__ import annotations

import subprocess
import sys

# Runs an attempt and then prepares the next one on a real agent and spawner.
DRIVER = """
import os, select, sys, time
from distlaunch.core.agent.workers.spawner import start_spawner
from distlaunch.core.protocol import agent_messages as m
from distlaunch.coordinator.runtime.local_agent import LocalTransport

class Nowhere:
    def output(self, *_): pass
    def rank_ended(self, *_): pass
    def tick(self, now): return None
    def has_room(self): return True
    def on_room(self, wake): pass

spawner = start_spawner(job_id="j", orphan_grace_s=1)
agent = LocalTransport(job_id="j", cookie="c", nofile=256, spawner=spawner, sink=Nowhere(), clock=time.monotonic)
agent.start()

def await_(kind):
    while True:
        for event in agent.receive():
            if isinstance(event.message, kind):
                return event.message
        poll = select.poll()
        for descriptor, wanted in agent.descriptors().items():
            poll.register(descriptor, wanted)
        poll.poll(1000)

spec = m.WorkerSpec(rank=0, local_rank=0, argv=None, env={}, cpus=None, error_file=None)
agent.send(0, m.Prepare(attempt=0, port=None))
await_(m.Prepared)
agent.send(0, m.Start(attempt=0, argv=("/bin/sh", "-c", "echo $$ > worker.pid"), env={}, cwd=os.getcwd(), workers=(spec,),
    uses_gpus=USES_GPUS, signal_group=False, terminal=False, rows=0, columns=0, stdin_rank=None))
await_(m.AttemptEnded)
agent.send(0, m.Prepare(attempt=1, port=None))
prepared = await_(m.Prepared)
print(prepared.attempt, prepared.warning)
agent.close()
"""

# Shows the worker's memory twice, then no more.
NVIDIA_SMI = """#!/bin/sh
echo asked >> asked
[ "$(wc -l < asked)" -gt 2 ] || cat worker.pid
echo 4194304
"""


def run_driver(tmp_path, *, uses_gpus: bool) -> tuple[str, int]:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvidia-ml.so.1").write_text("not a library")  # hides the machine's own
    done = subprocess.run(
        [sys.executable, "-c", DRIVER.replace("USES_GPUS", str(uses_gpus))],
        cwd=tmp_path,
        env={"PATH": f"{smi.parent}:/usr/bin:/bin", "LD_LIBRARY_PATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    asked = tmp_path / "asked"
    return done.stdout, len(asked.read_text().split()) if asked.exists() else 0


def test_the_next_attempt_waits_until_the_old_pids_hold_no_gpu_memory(tmp_path):
    assert run_driver(tmp_path, uses_gpus=True) == ("1 None\n", 3)


def test_nothing_is_asked_and_waited_for_without_gpus(tmp_path):
    assert run_driver(tmp_path, uses_gpus=False) == ("1 None\n", 0)
