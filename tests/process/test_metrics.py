from __future__ import annotations

import json
import socket
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.launcher import PROGRAMS

REPORTS = """
import os, sys, time
from pathlib import Path
from distlaunch.toolkit import heartbeat

rank = int(os.environ["RANK"])
print("x" * 99, flush=True)
heartbeat(step=5 + rank, loss=0.5, samples=10)
while not Path("go").exists():
    time.sleep(0.01)
sys.exit(int(os.environ["DISTLAUNCH_ATTEMPT"] == "0"))
"""


def read(url: str) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_metrics_follow_the_job(distlaunch):
    (distlaunch.work / "train.py").write_text(REPORTS)
    running = distlaunch.start(
        ["train", "--num-procs", "2", "--max-restarts", "1", "--metrics", "0", "train.py"]
    )
    url = running.wait_event("metrics_served")["url"]
    running.wait_stderr(url)
    status = distlaunch.run(["status", "latest", "--format", "json"])
    assert json.loads(status.stdout)["metrics"] == url

    def of_both():
        found = read(url)
        is_whole = found.get(("distlaunch_step_highest",)) == 6
        return found if is_whole and found["distlaunch_output_bytes_total",] == 200 else None

    found = running.wait_for(of_both, "the steps of both ranks")
    assert found["distlaunch_workers_up",] == 2
    assert found["distlaunch_step",] == 5
    assert found["distlaunch_samples",] == 20
    assert found["distlaunch_restarts_total",] == 0
    assert found["process_cpu_seconds_total",] > 0
    [agent] = [value for (name, *_), value in found.items() if name.startswith("distlaunch_agent")]
    assert agent > 0
    memory = [
        value for (name, *_), value in found.items() if name == "distlaunch_rank_memory_bytes"
    ]
    assert min(memory) > 1 << 20
    assert len(memory) == 2
    hosts = {host for name, *labels in found if name == "distlaunch_rank_up" for host in labels[1:]}
    assert len(hosts) == 1
    (distlaunch.work / "go").touch()
    result = running.wait()
    assert result.returncode == 0, result.stderr
    address = url.removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.socket() as client:
        assert client.connect_ex((address[0], int(address[1]))) != 0


def test_a_taken_port_is_an_error_before_anything_is_made(distlaunch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = distlaunch.train(
            *("--num-procs", "1", "--metrics", str(port), PROGRAMS / "prints_and_waits.py", "1")
        )
    assert (result.returncode, result.stdout, result.run_dir) == (2, "", None)
    assert str(port) in result.stderr
