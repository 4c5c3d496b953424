"""Progress of real workers: by the helper, by hand, from a shell, and invalid lines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from distlaunch.core.model import step_series
from tests.facts import mentions

HELPER = """
import os, time
from distlaunch.toolkit import heartbeat
for step in range(1, 101):
    heartbeat(step=step, loss=1 / step)
print("said nothing else", flush=True)
"""
SHELL = """#!/bin/sh
echo '{"step": 4, "loss": 0.5}' > /dev/fd/$DISTLAUNCH_PROGRESS_FD
"""
FLOOD = """
import os, time
pipe = int(os.environ["DISTLAUNCH_PROGRESS_FD"])
junk = {"0": b'{"step": 1}\\n' * 5000, "1": b"[" * 60000, "2": os.urandom(60000), "3": b'{"step": 1e999}\\n\\0\\n' * 999}
end = time.monotonic() + 2
while time.monotonic() < end:
    try:
        os.write(pipe, junk[os.environ["RANK"]])
    except BlockingIOError:
        time.sleep(0.0005)
"""


def script(distlaunch, source: str, name: str = "train.py") -> Path:
    path = distlaunch.work / name
    path.write_text(source)
    path.chmod(0o755)
    return path


def test_the_helper_reports_and_the_last_state_is_recorded(job, distlaunch):
    result = job.run(script(distlaunch, HELPER))
    assert result.returncode == 0, result.stderr
    event = result.of_type("progress")[-1]
    assert (event["attempt"], event["ranks"], event["rank"]) == (0, 2, 0)
    assert event["values"].keys() == {"step", "loss"}
    assert event["step_min"] == event["step_max"] == 100, "the last one is sent when Python ends"
    assert result.stdout.count("said nothing else") == 1, (
        "reports are no output, and the ranks' lines fold"
    )


def test_the_last_step_before_a_failure_counts(job):
    result = job.run("reports.py", "--upto", "7", "--then", "fail")
    assert result.returncode == 1
    event = result.of_type("progress")[-1]
    assert (event["step_min"], event["step_max"], event["values"]["loss"]) == (
        7,
        7,
        pytest.approx(1 / 7, abs=1e-6),
    )


def test_a_failure_at_the_same_step_is_no_progress_however_fast_the_steps_are(job, distlaunch):
    source = """
from distlaunch.toolkit import heartbeat
for step in range(400):
    heartbeat(step=step)
raise RuntimeError("always here")
"""
    result = job.run(
        script(distlaunch, source), options=["--max-restarts", "5", "--min-uptime", "0"]
    )
    assert [event["step_max"] for event in result.of_type("progress") if event["step_max"] > 1] == [
        399,
        399,
    ]
    assert len(result.of_type("attempt_started")) == 2
    assert mentions(result.stderr, "higher step", "heartbeat")


def test_a_shell_script_can_report(distlaunch):
    result = distlaunch.train(
        "--num-procs", "2", "--no-python", script(distlaunch, SHELL, "train.sh")
    )
    assert result.returncode == 0, result.stderr
    assert result.of_type("progress")[-1]["values"] == {"step": 4, "loss": 0.5}


def test_jsonl_shows_progress_as_it_is_recorded(distlaunch):
    result = distlaunch.train("--num-procs", "1", "--format", "jsonl", script(distlaunch, HELPER))
    shown = [json.loads(line) for line in result.stdout.splitlines()]
    assert (
        [event for event in shown if event["type"] == "progress"]
        == result.of_type("progress")
        != []
    )


def test_a_job_without_reports_has_no_progress(job):
    assert job.run("output_lines.py", "3").of_type("progress") == []


def test_floods_and_rubbish_do_not_harm_the_job(job, distlaunch):
    result = job.run(script(distlaunch, FLOOD), procs=4)
    assert result.returncode == 0, result.stderr
    assert [event["values"] for event in result.of_type("progress")] in (
        [{"step": 1}],
        [{"step": 1}] * 2,
    )
    assert result.of_type("progress")[-1]["ranks"] in (1, 2), (
        "an infinite step is no number, but a heartbeat"
    )


@pytest.mark.parametrize(("upto", "attempts"), [("5,5", 2), ("5,6,6", 3)])
def test_the_same_failure_again_is_retried_only_after_more_steps(job, upto, attempts):
    options = ["--max-restarts", "5", "--min-uptime", "0"]
    result = job.run("reports.py", "--upto", upto, "--then", "fail", options=options)
    assert result.returncode == 1
    assert len(result.of_type("attempt_started")) == attempts
    assert result.of_type("failure")[-1]["reason"] == "no_progress"


def test_pipes_of_many_attempts_are_all_closed(job, distlaunch):
    options = ["--max-restarts", "50", "--min-uptime", "0", "--hang-timeout", "600"]
    running = job.start("ends.py", *(["raise-a", "raise-b"] * 15), "ok", options=options)
    counts = []
    for attempt in range(30):
        running.wait_event("attempt_started", count=attempt + 1)
        counts.append(len(os.listdir(f"/proc/{running.pid}/fd")))
    assert running.wait().returncode == 0
    assert min(counts[25:]) <= max(counts[:5]) + 15, (
        counts
    )  # streams of the moment come and go; one kept by each attempt would make 25


def test_the_helper_works_in_children_of_every_kind(job, distlaunch):
    source = """
import multiprocessing, os
from distlaunch.toolkit import heartbeat, progress
def work(kind):
    heartbeat(step=1, kind=1)
if __name__ == "__main__":
    for kind in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(kind).Process(target=work, args=(kind,))
        child.start(); child.join(); assert child.exitcode == 0, kind
"""
    result = job.run(script(distlaunch, source), procs=1)
    assert result.returncode == 0, result.stderr
    assert result.of_type("progress")[-1]["values"] == {"step": 1, "kind": 1}


def test_the_protocol_is_documented_beside_the_code():
    import distlaunch

    text = (Path(distlaunch.__file__).parent / "docs" / "progress.md").read_text("utf-8")
    assert "DISTLAUNCH_PROGRESS_FD" in text
    [snippet] = [
        block
        for block in text.split("```python\n")[1:]
        if "def heartbeat" in block.partition("```")[0]
    ]
    source = snippet.partition("```")[0]
    assert len(source.split("\n\n")) <= 3
    assert len(list(filter(None, source.splitlines()))) < 12
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ["DISTLAUNCH_PROGRESS_FD"] = str(writer)
        code = 1
        try:
            exec(compile(source, "snippet", "exec"), space := {})
            space["heartbeat"](step=3)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    reported = os.read(reader, 100)
    os.close(reader)
    assert os.waitpid(pid, 0)[1] == 0
    assert json.loads(reported) == {"step": 3}


SAVES = """
import json, os, time
from distlaunch.toolkit import heartbeat
pipe = int(os.environ["DISTLAUNCH_PROGRESS_FD"])
saved = {"step": 7, "seconds": 0.5, "bytes": 123456}
for step in range(10):
    heartbeat(step=step, loss=0.5, samples=step * 32)
    if step == 6 and os.environ["RANK"] == "0":
        os.write(pipe, json.dumps({"checkpoint": saved}).encode() + b"\\n")
open(f"done-{os.environ['RANK']}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def reports_in(run_dir: Path) -> list[step_series.Row]:
    data = (run_dir / "steps.bin").read_bytes()
    blocks = step_series.split_blocks(data)
    return [row for block in blocks for row in step_series.unpack_block(block)[1]]


def test_a_checkpoint_is_an_event_and_steps_are_kept_for_each_rank(job, distlaunch):
    (distlaunch.work / "go").touch()
    result = job.run(script(distlaunch, SAVES))
    assert result.returncode == 0, result.stderr
    [event] = result.of_type("checkpoint")
    assert (event["attempt"], event["rank"]) == (0, 0)
    assert (event["step"], event["seconds"], event["bytes"]) == (7, 0.5, 123456)
    last = {row[0]: row[2] for row in reports_in(result.run_dir)}
    assert last == {0: 9.0, 1: 9.0}
    assert result.of_type("progress")[-1]["values"]["step"] == 9


def test_steps_that_were_written_survive_a_kill_of_the_launcher(job, distlaunch):
    running = job.start(script(distlaunch, SAVES))
    path = running.wait_event("job_started") and running.run_dir / "steps.bin"
    running.wait_for(
        lambda: path.exists() and {row[0] for row in reports_in(running.run_dir)} == {0, 1},
        "steps of both ranks",
    )
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    found = reports_in(running.run_dir)
    assert {row[3] for row in found} == {0.5}
    assert {row[0] for row in found} == {0, 1}
