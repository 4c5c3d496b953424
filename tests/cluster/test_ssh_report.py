"""The report of a job that loses a node, and limited logs on two hosts over SSH."""

from __future__ import annotations

from distlaunch.jobs.job import read_job
from distlaunch.jobs.report.job_report import build_report, report_record
from distlaunch.jobs.report.report_page import page_of
from tests.cluster.hosts import faults

STEPS = """
import json, os, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["DISTLAUNCH_ATTEMPT"])
pipe = int(os.environ["DISTLAUNCH_PROGRESS_FD"])
for number in range(5000):
    print("line", number, "x" * 50)
print("last line", flush=True)
step = 20 if attempt else 0
while not (attempt and step > 40 and os.path.exists("go")):
    time.sleep(0.05)
    try:
        os.write(pipe, json.dumps({"step": step, "loss": 1 / (1 + step)}).encode() + b"\\n")
        if rank == 0 and step == 20 and not attempt:
            saved = {"step": 20, "seconds": 0.5, "bytes": 1000}
            os.write(pipe, json.dumps({"checkpoint": saved}).encode() + b"\\n")
    except BlockingIOError:
        pass
    step += 1
"""


def test_a_lost_node_costs_steps_and_recovery_and_logs_keep_both_ends(hosts):
    script = hosts.work / "steps.py"
    script.write_text(STEPS)
    running = hosts.start(
        [
            *("train", "--hosts", "n1:1,n2:1", "--device", "cpu", "--num-nodes", "1:2"),
            *("--max-restarts", "2", "--min-uptime", "0"),
            *("--log-max-size", "64K", "--node-logs", f"{hosts.local}/logs", script),
        ]
    )
    running.wait_event("checkpoint", timeout=60)
    faults.kill_sessions(hosts, "n2")
    running.wait_event("attempt_started", count=2, timeout=60)
    (hosts.work / "go").touch()
    result = running.wait(timeout=60)
    assert result.returncode == 0, result.stderr
    job = read_job(str(result.run_dir))
    assert job is not None
    report = build_report(job)
    record = report_record(report)
    assert [each["outcome"] for each in record["attempts"]] == ["node_lost", "succeeded"]
    assert [each["world_size"] for each in record["attempts"]] == [2, 1]
    assert [each["host"] for each in record["failures"] if each["kind"] == "node_lost"] == ["n2"]
    assert {(each["host"], each["lost_at"] is not None) for each in record["nodes"]} == {
        ("n1", False),
        ("n2", True),
    }
    assert record["lost_steps"] > 0
    assert record["checkpoints"]["last_step"] == 20
    assert {"waiting", "start", "steps", "lost", "recovery"} <= set(record["time_s"])
    assert 0 < record["goodput"] < 1
    assert "n2" in page_of(report)
    assert result.stderr.count("--log-max-size") == 1
    logs = [result.run_dir / "attempt-0" / f"rank-{rank}.log" for rank in (0, 1)]
    texts = [log.read_text() for log in logs]
    name = f"{hosts.local}/logs/{job.job_id}/attempt-0/rank-0.log"
    texts.append(hosts.run("n1", f"cat {name}").stdout)
    for text in texts:
        assert text.startswith("line 0 x")
        assert text.splitlines()[-1] == "last line"
        assert text.count("left out here") == 1
        assert len(text) < 512 << 10
