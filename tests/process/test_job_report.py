"""``report``: real jobs that fail and continue, hang, run, or report nothing; and the page in a
browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from tests.facts import mentions
from tests.launcher import PROGRAMS

LONG_S = 60.0
RESUMES = """
import json, os, time
from distlaunch.toolkit import heartbeat
rank, attempt = int(os.environ["RANK"]), int(os.environ["DISTLAUNCH_ATTEMPT"])
pipe = int(os.environ["DISTLAUNCH_PROGRESS_FD"])
for step in range(20 if attempt else 0, 40):
    time.sleep(0.05)
    heartbeat(step=step, loss=2 / (1 + step))
    if step == 19 and rank == 0:
        saved = {"step": 20, "seconds": 0.25, "bytes": 1000}
        os.write(pipe, json.dumps({"checkpoint": saved}).encode() + b"\\n")
    if step == 30 and not attempt and rank == 1:
        raise RuntimeError("</td><script>alert(1)</script>")
"""
CHECK = """<script>
const wrong = [];
for (const svg of document.querySelectorAll("svg")) {
  const box = svg.viewBox.baseVal;
  if (!svg.getBoundingClientRect().width) wrong.push("a chart without a size");
  for (const label of svg.querySelectorAll("text")) {
    const b = label.getBBox();
    if (b.x < 0 || b.y < -1 || b.x + b.width > box.width || b.y + b.height > box.height + 1)
      wrong.push("outside: " + label.textContent);
  }
}
const page = document.documentElement;
document.title = JSON.stringify({
  wrong, charts: document.querySelectorAll("svg").length, scripts: document.scripts.length,
  overflow: page.scrollWidth - page.clientWidth,
  loaded: performance.getEntriesByType("resource").length,
  page: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.body).color,
});
</script>"""


@pytest.fixture
def resumed(distlaunch):
    """Return the result of a job that fails at step 30 and continues at step 20."""
    path = distlaunch.work / "train.py"
    path.write_text(RESUMES)
    options = ["--num-procs", "2", "--max-restarts", "2", "--min-uptime", "0", "--job-id", "exp"]
    result = distlaunch.train(*options, path, timeout=LONG_S)
    assert result.returncode == 0, result.stderr
    return result


def record_of(distlaunch, *jobs: str):
    return json.loads(distlaunch.run(["report", *jobs, "--format", "json"]).stdout)


def test_a_job_that_continues_from_a_checkpoint_has_lost_steps_and_recovery(distlaunch, resumed):
    record = record_of(distlaunch, "exp")
    assert record["job"]["state"] == "succeeded"
    assert 0 < record["lost_steps"] <= 12
    assert record["last_step"] == 39
    assert [(each["outcome"], each["first_step"]) for each in record["attempts"]] == [
        ("failed", 0),
        ("succeeded", 20),
    ]
    assert record["failures"][0]["ranks"] == [1]
    assert "alert(1)" in record["failures"][0]["cause"]
    times = record["time_s"]
    assert {"start", "steps", "lost", "recovery"} <= set(times)
    assert sum(times.values()) == pytest.approx(record["total_s"])
    assert record["goodput"] == pytest.approx(times["steps"] / record["total_s"])
    assert record["checkpoints"]["count"] == 1
    assert record["missing"] == []
    text = distlaunch.run(["report", "exp", "--format", "md"]).stdout
    assert mentions(text, "rank 1", "RuntimeError", "alert")


def test_a_page_is_written_beside_and_never_over_something_that_is_not_its_file(
    distlaunch, resumed
):
    done = distlaunch.run(["report", "exp"])
    assert done.returncode == 0, done.stderr
    page = (distlaunch.work / "distlaunch-exp.html").read_text()
    assert "<script" not in page
    assert distlaunch.run(["report", "exp", "--output", "-"]).stdout.startswith("<!doctype html>")
    (distlaunch.work / "folder").mkdir()
    refused = distlaunch.run(["report", "exp", "-o", "folder"])
    assert refused.returncode != 0
    assert mentions(refused.stderr, "folder")
    assert os.listdir(distlaunch.work / "folder") == []


def test_two_jobs_are_compared_and_a_third_is_refused(distlaunch, resumed):
    shutil.copytree(resumed.run_dir, resumed.run_dir.with_name("other"))
    (resumed.run_dir.with_name("other") / ".distlaunch-run").write_text("other")
    assert [each["job"]["job_id"] for each in record_of(distlaunch, "exp", "other")] == [
        "exp",
        "other",
    ]
    done = distlaunch.run(["report", "exp", "other", "-o", "both.html"])
    assert done.returncode == 0, done.stderr
    assert "other" in (distlaunch.work / "both.html").read_text()
    assert distlaunch.run(["report", "exp", "other", "exp"]).returncode == 2
    assert distlaunch.run(["report"]).returncode == 2


@pytest.mark.parametrize(
    ("name", "begin"),
    [("a.md", "# exp"), ("a.json", "{"), ("a.html", "<!doctype html>"), ("a", "<!")],
)
def test_the_suffix_of_the_file_says_the_format(distlaunch, resumed, name, begin):
    assert distlaunch.run(["report", "exp", "-o", name]).returncode == 0
    assert (distlaunch.work / name).read_text().startswith(begin)


def test_a_file_named_as_another_format_is_refused(distlaunch, resumed):
    unknown = distlaunch.run(["report", "exp", "-o", "a.txt"])
    assert (unknown.returncode, mentions(unknown.stderr, "--output", ".txt")) == (2, True)
    refused = distlaunch.run(["report", "exp", "-o", "a.md", "--format", "html"])
    assert refused.returncode == 2
    assert mentions(refused.stderr, "--format", "a.md", "md")
    assert not (distlaunch.work / "a.md").exists()
    assert distlaunch.run(["report", "exp", "-o", "a.txt", "--format", "md"]).returncode == 0


def _brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_in_both_colour_schemes(distlaunch, resumed, scheme, tmp_path):
    browser = shutil.which("chromium")
    assert browser is not None, "scripts/test installs chromium"
    assert distlaunch.run(["report", "exp", "-o", "page.html"]).returncode == 0
    page = distlaunch.work / "page.html"
    page.write_text(page.read_text().replace("</body>", f"{CHECK}</body>"))
    done = subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--dump-dom",
            "--window-size=1100,900",
            f"--user-data-dir={tmp_path}/browser",
            "--disable-dev-shm-usage",
            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
            f"file://{page}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    found = json.loads(html.unescape(title.group(1)))
    assert found["wrong"] == []
    assert found["charts"] == 4
    assert found["scripts"] == 1, "the one of this test"
    assert found["overflow"] == 0
    assert found["loaded"] == 0
    light, dark = ("page", "ink") if scheme == "light" else ("ink", "page")
    assert _brightness(found[light]) > 600
    assert _brightness(found[dark]) < 150


def test_a_job_that_runs_and_reports_nothing_has_a_report_that_says_so(distlaunch):
    running = distlaunch.start(["train", "--num-procs", "2", PROGRAMS / "prints_and_waits.py", "3"])
    running.wait_event("workers_started")
    record = record_of(distlaunch, "latest")
    assert record["job"]["state"] == "running"
    assert record["missing"] == ["progress"]
    assert record["goodput"] is None
    assert [each["outcome"] for each in record["attempts"]] == ["running"]
    assert distlaunch.run(["report", "latest"]).returncode == 0
    (distlaunch.work / "go").touch()
    assert running.wait(LONG_S).returncode == 0


def test_a_hang_is_a_failure_with_its_place(distlaunch):
    path = distlaunch.work / "train.py"
    path.write_text(
        "import time\nfrom distlaunch.toolkit import heartbeat\n"
        "heartbeat(step=0)\ntime.sleep(0.6)\nheartbeat(step=1)\ntime.sleep(600)\n"
    )
    options = ["--num-procs", "2", "--hang-timeout", "1.5", "--failure-grace", "1"]
    result = distlaunch.train(*options, path, timeout=LONG_S)
    assert result.returncode == 124, result.stderr
    record = record_of(distlaunch, "latest")
    assert [(each["outcome"], each["last_step"]) for each in record["attempts"]] == [("hung", 1)]
    assert record["failures"][0]["kind"] == "hung"
    assert "train.py:6" in json.dumps(record["failures"])
    assert record["time_s"]["end"] > 1, "the silence after the last step"
