"""debugpy, which VS Code runs, with a client that follows child processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.dap import Client
from tests.ports import free_port

SOURCE = """\
import os
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"])
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "words",
    [
        ("train", "--num-procs", "2", "--format", "plain"),
        ("accelerate", "launch", "--num_processes", "2", "--cpu"),
    ],
    ids=lambda words: words[0],
)
def test_a_breakpoint_stops_in_both_workers_and_each_is_announced_once(distlaunch, words):
    script = distlaunch.work / "train.py"
    script.write_text(SOURCE)
    port = free_port()
    debugger = ["-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client"]
    output = (distlaunch.work / "output").open(
        "w+"
    )  # the adapter would keep a pipe open until the client has left
    process = subprocess.Popen(
        [
            sys.executable,
            "-X",
            "frozen_modules=off",
            *debugger,
            "-m",
            "distlaunch",
            *words,
            "train.py",
        ],
        env=distlaunch.env,
        cwd=distlaunch.work,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    client = Client(port, source=str(script), line=3)
    try:
        stops = [client.stops.get(timeout=100) for _ in range(2)]
        process.wait(timeout=100)
    finally:
        process.kill()
        process.wait()
        client.close()
        output.seek(0)
        text = output.read()
        output.close()
    assert process.returncode == 0, text
    assert sorted(stops) == [(str(script), 3, "'0'"), (str(script), 3, "'1'")]
    assert len(client.announced) == len(set(client.announced)) == 2
    assert client.stops.empty()
    for rank in (0, 1):
        assert f"rank {rank} of 2" in text
