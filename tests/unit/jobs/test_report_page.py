"""The HTML and Markdown of a report: size, well-formed, texts of workers escaped, labels inside."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from distlaunch.coordinator.runtime.records import DiskWork
from distlaunch.coordinator.runtime.series_file import SeriesFile
from distlaunch.core.model.log_times import Mark
from distlaunch.core.protocol import agent_messages as m
from distlaunch.jobs.job import read_job
from distlaunch.jobs.report.job_report import JobReport, Missing, build_report, report_record
from distlaunch.jobs.report.report_charts import number
from distlaunch.jobs.report.report_page import comparison_page, page_of
from distlaunch.jobs.report.report_tables import comparison_table
from distlaunch.jobs.report.report_text import comparison_markdown, markdown_of
from distlaunch.jobs.status import read_status

HOSTILE = "</td><script>alert(1)</script>&\"'\x1b[31m\x00\u202e|`"
TIME = 1_800_000_000.0
CHAR_WIDTH = 6.5
"""A wide estimate for the font of labels, in units of the view box."""


class Written:
    """A run directory that a test writes."""

    def __init__(self, path) -> None:
        path.mkdir()
        (path / ".distlaunch-run").write_text("a job")
        self.path = path
        self._events = (path / "events.jsonl").open("w")
        self._series = SeriesFile(str(path / "steps.bin"), DiskWork())

    def event(self, time: float, kind: str, **fields) -> None:
        record = {"time": TIME + time, "type": kind, **fields}
        self._events.write(json.dumps(record) + "\n")

    def start(self, ranks: int, host: str = "n1") -> None:
        self.event(
            0, "job_started", schema=1, job_id="a job", world_size=ranks, backend="pytorch-ddp",
            host=host, argv=["python", "train.py", HOSTILE], cwd="/",
        )  # fmt: skip

    def attempt(self, time: float, number: int, ranks: int, *, host: str = "n1") -> None:
        self.event(time, "attempt_started", attempt=number, master_port=1)
        pids = {str(rank): rank + 1 for rank in range(ranks)}
        self.event(time, "workers_started", attempt=number, pids=pids)
        nodes = [
            {"host": f"{host}-{node}", "workers": [{"rank": rank} for rank in range(node * 8, node * 8 + 8)]}
            for node in range((ranks + 7) // 8)
        ]  # fmt: skip
        (self.path / f"plan-{number}.json").write_text(json.dumps({"nodes": nodes}))

    def report(self, time: float, attempt: int, ranks: int, step: float, **values: float) -> None:
        beats = [m.Heartbeat(rank=rank, values={"step": step, **values}) for rank in range(ranks)]
        self._series.add(attempt, beats, now=time, time=TIME + time)
        if self._series.due is not None and time >= self._series.due:
            self._series.write(time)

    def end(self, time: float, code: int) -> JobReport:
        self.event(time, "job_ended", exit_code=code)
        self._events.close()
        self._series.write(time)
        self._series.close()
        return self.read()

    def close(self) -> None:
        self._events.close()
        self._series.close()

    def read(self) -> JobReport:
        job = read_job(str(self.path))
        assert job is not None
        return build_report(job, now=TIME + 1000.0)


@pytest.fixture
def run_dir(tmp_path):
    return Written(tmp_path / "job")


VOID = {"meta", "br"}
"""Elements of the documents that have no end tag."""


class Page(HTMLParser):
    """A document as a browser reads it: open tags must match, and nothing may be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.boxes: list[float] = []
        self.text = ""
        self.labels: list[tuple[dict[str, str | None], str, float, float]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "svg":
            self.boxes = [float(each) for each in values["viewbox"].split()]
        if tag == "text":
            self.labels.append((values, "", self.boxes[2], self.boxes[3]))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] == "text":
            values, _, width, height = self.labels[-1]
            self.labels[-1] = (values, data, width, height)
        if self.open and self.open[-1] not in ("style", "title"):
            self.text += data + "\n"

    def check(self) -> None:
        names = {tag for tag, _ in self.tags}
        assert not names & {"script", "link", "img", "iframe", "object", "image", "use"}
        for _, values in self.tags:
            assert not [name for name in values if name.startswith("on") or name in ("src", "href")]
        for values, text, width, height in self.labels:
            x, y = float(values["x"]), float(values["y"])
            size = len(text) * CHAR_WIDTH
            left = x - {"end": size, "middle": size / 2}.get(values["text-anchor"], 0)
            assert left >= 0, text
            assert left + size <= width + 1, text
            assert 0 < y <= height, text


def whole_job(run_dir: Written, ranks: int = 8) -> JobReport:
    """Write a job whose first attempt fails and whose second one succeeds."""
    run_dir.start(ranks, HOSTILE)
    run_dir.event(4, "composed", attempt=0, nodes=1, world_size=ranks, hosts="n1")
    run_dir.attempt(5, 0, ranks, host=HOSTILE)
    for second in range(40):
        run_dir.report(10 + second, 0, ranks, second * 2, loss=3 - second / 20, samples=second)
    run_dir.event(41, "checkpoint", attempt=0, rank=0, step=40, seconds=1.5, bytes=5_000_000)
    run_dir.event(50, "worker_exited", attempt=0, rank=1, pid=2, returncode=1, told_to_stop=False)
    run_dir.event(
        51, "failure", attempt=0, final=False,
        diagnosis={"ranks": [1], "host": HOSTILE, "summary": "exit code 1", "exception_type": HOSTILE,
                   "message": HOSTILE, "frame": HOSTILE, "hint": HOSTILE, "log_path": HOSTILE},
    )  # fmt: skip
    run_dir.event(
        52, "node_lost", attempt=0, node=0, host=f"{HOSTILE}-0", why=HOSTILE, ranks=[0, 1]
    )
    run_dir.event(53, "restarting", attempt=1, of=3)
    run_dir.event(60, "composed", attempt=1, nodes=1, world_size=ranks, hosts="n1")
    run_dir.attempt(61, 1, ranks, host=HOSTILE)
    for second in range(60):
        run_dir.report(70 + second, 1, ranks, 40 + second * 2, loss=1.5)
    for rank in range(ranks):
        run_dir.event(
            130, "worker_exited", attempt=1, rank=rank, pid=1, returncode=0, told_to_stop=False
        )
    return run_dir.end(131, 0)


def test_a_page_has_all_parts_and_escapes_what_workers_wrote(run_dir):
    report = whole_job(run_dir)
    text = page_of(report)
    page = Page(text)
    page.check()
    assert not re.search(r"https?:|url\(|@import", text)
    assert text.count("alert(1)") >= 5
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "\u202e" not in text
    assert "prefers-color-scheme" in text
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Time", "Timeline", "Failures", "Step time", "Loss", "Slow ranks", "Checkpoints", "Nodes",
    ]  # fmt: skip
    assert report.missing == ()


def test_the_record_has_the_same_figures(run_dir):
    record = json.loads(json.dumps(report_record(whole_job(run_dir))))
    assert record["goodput"] == pytest.approx((29.5 - 10 + 129 - 70) / 131, abs=0.02)
    assert record["lost_steps"] == 39
    assert set(record["time_s"]) == {"start", "waiting", "steps", "lost", "recovery", "end"}
    assert record["time_s"]["waiting"] == pytest.approx(4 + 7)
    assert sum(record["time_s"].values()) == pytest.approx(131)
    assert [each["outcome"] for each in record["attempts"]] == ["failed", "succeeded"]
    assert record["attempts"][1]["first_step"] == 40
    assert [each["kind"] for each in record["failures"]] == ["failed", "node_lost"]
    assert record["checkpoints"]["count"] == 1
    assert record["step_s"] == pytest.approx(0.5, rel=0.05)
    assert [(node["attempt"], node["lost_at"] is not None) for node in record["nodes"]] == [
        (0, True),
        (1, False),
    ]


def test_ranks_with_equal_step_times_are_said_to_wait_for_each_other(run_dir):
    report = whole_job(run_dir)
    assert report.slow == ()
    assert report_record(report)["equal_step_times"]
    for text in (page_of(report), markdown_of(report)):
        assert "distlaunch stack" in text


def test_a_page_of_a_thousand_ranks_is_below_two_megabytes(run_dir):
    ranks = 1000
    run_dir.start(ranks)
    step = 0
    for attempt in range(4):
        begin = attempt * 200
        run_dir.attempt(begin, attempt, ranks)
        for second in range(0, 190, 2):
            step += 26
            run_dir.report(begin + second + 1.0, attempt, ranks, step, loss=1.0 + second / 190)
        for rank in range(ranks):
            run_dir.event(
                begin + 195 + rank / 1000, "worker_exited", attempt=attempt, rank=rank, pid=1,
                returncode=0 if attempt == 3 else -9 + rank % 3, told_to_stop=False,
            )  # fmt: skip
        if attempt < 3:
            diagnosis = {"ranks": list(range(0, ranks, 3)), "summary": "signal 9"}
            run_dir.event(begin + 197, "failure", attempt=attempt, final=False, diagnosis=diagnosis)
    report = run_dir.end(800, 0)
    text = page_of(report)
    Page(text).check()
    assert len(text.encode()) < 2_000_000
    assert report.world_size == ranks
    assert report.last_step is not None
    assert report.last_step > 9000


def test_a_job_without_progress_has_its_times_and_says_what_is_missing(run_dir):
    run_dir.start(2)
    run_dir.attempt(1, 0, 2)
    report = run_dir.end(60, 0)
    (run_dir.path / "steps.bin").unlink(missing_ok=True)
    assert report.missing == (Missing.PROGRESS,)
    assert report_record(report)["goodput"] is None
    assert report_record(report)["time_s"]["unknown"] == pytest.approx(59)
    page = Page(page_of(report))
    page.check()
    assert "distlaunch help progress" in page.text
    assert "distlaunch help progress" in markdown_of(report)


def test_counts_differ_by_numbers_and_a_job_without_steps_has_no_percentages_of_steps(
    run_dir, tmp_path
):
    steps = whole_job(run_dir)
    silent = Written(tmp_path / "silent")
    silent.start(8)
    silent.attempt(1, 0, 8)
    without = silent.end(60, 0)
    for first, second in ((steps, without), (without, steps)):
        rows = {row[0]: row[1:] for row in comparison_table(first, second).rows}
        assert rows["Workers"] == ("8", "8", "0")
        assert rows["Restarts"][2] in ("+1", "-1")
        assert not any("100.0%" in cell for row in rows.values() for cell in row)
        assert "not known" in rows["Time: Steps that counted"]
    same = {row[0]: row[3] for row in comparison_table(steps, steps).rows}
    assert same["Restarts"] == same["Nodes lost"] == "0"
    assert set(same.values()) == {"0", "+0.0%"}


def test_a_failure_has_the_time_of_the_first_worker_that_ended_wrongly(run_dir):
    report = whole_job(run_dir)
    assert report.failures[0].time == TIME + 50, "not that of the event, which comes later"
    assert report.failures[0].time == report.attempts[0].end


def test_markdown_has_no_marks_of_its_own_and_no_fractions_at_the_start(run_dir):
    run_dir.start(2)
    run_dir.attempt(0.004, 0, 2)
    text = markdown_of(run_dir.end(60, 0))
    assert "`" not in text
    [attempt] = [line for line in text.splitlines() if line.startswith("| 0 |")]
    assert [cell.strip() for cell in attempt.split("|")][3] == "0 s"


def test_without_the_file_of_steps_those_of_the_events_count(run_dir):
    run_dir.start(2)
    run_dir.attempt(1, 0, 2)
    for when, step in ((5, 0), (15, 100), (25, 200)):
        run_dir.event(when, "progress", attempt=0, ranks=2, step_min=step, step_max=step + 1)
    report = run_dir.end(30, 0)
    assert Missing.SERIES in report.missing
    assert report.division.goodput == pytest.approx(20 / 30)
    Page(page_of(report)).check()


@pytest.mark.parametrize("damage", ["empty", "rubbish", "gone", "cut", "plan"])
def test_a_damaged_run_directory_still_has_a_report(run_dir, damage):
    whole_job(run_dir)
    events, steps = run_dir.path / "events.jsonl", run_dir.path / "steps.bin"
    match damage:
        case "empty":
            events.write_text("")
        case "rubbish":
            rubbish = [
                '{"type": "attempt_started", "time": "soon"}', '{"type": "failure", "time": 5, "diagnosis": 7}',
                '{"type": "worker_exited", "time": 1e308, "rank": -5, "returncode": 2}', "[]", "{",
                '{"type": "checkpoint", "time": 1, "step": NaN}', '{"type": "node_lost", "time": 3, "ranks": {}}',
                '{"type": "workers_started", "time": 3, "pids": {"x": 1}}', '{"type": "progress", "time": 3}',
            ]  # fmt: skip
            events.write_text("\n".join(rubbish))
            steps.write_bytes(b"DLSTEPS1" + b"\xff" * 1000)
        case "gone":
            events.unlink()
            steps.unlink()
        case "cut":
            events.write_bytes(events.read_bytes()[:-300])
            steps.write_bytes(steps.read_bytes()[:-100])
        case _:
            (run_dir.path / "plan-0.json").write_text('{"nodes": {"host": 5}}')
    report = run_dir.read()
    Page(page_of(report)).check()
    json.dumps(report_record(report))
    assert markdown_of(report)


def test_two_jobs_are_compared(tmp_path):
    first = whole_job(Written(tmp_path / "first"))
    slow = Written(tmp_path / "second")
    slow.start(8)
    slow.attempt(1, 0, 8)
    for second in range(100):
        slow.report(2 + second, 0, 8, second, loss=2.0)
    second = slow.end(102, 1)
    page = Page(comparison_page(first, second))
    page.check()
    rows = {
        line.split(" | ")[0].strip("| "): line
        for line in comparison_markdown(first, second).splitlines()
    }
    assert "+100.0%" in rows["Step time"]
    assert "not known" in rows["Lost steps"], "no checkpoint of the failed job is known"
    assert {"first", "second"} <= set(page.text.split())


def test_the_report_and_the_status_of_a_stopped_job_name_the_signal_and_the_last_steps(run_dir):
    run_dir.start(2)
    run_dir.attempt(1, 0, 2)
    for second in range(10):
        run_dir.report(2 + second, 0, 2, second * 3)
    run_dir.event(12, "signal", signal="SIGUSR1")
    run_dir.event(13, "signal", signal="SIGTERM")
    for rank in range(2):
        run_dir.event(14, "worker_exited", attempt=0, rank=rank, returncode=-15, told_to_stop=True)
    report = run_dir.end(15, 143)
    assert "was stopped by SIGTERM, with exit code 143, after 15 s" in markdown_of(report)
    assert "was stopped by SIGTERM" in page_of(report)
    assert report_record(report)["stop_signal"] == "SIGTERM"
    status = read_status(read_job(str(run_dir.path))).record()
    assert [worker["step"] for worker in status["workers"]] == [27, 27]


def test_a_job_without_an_end_event_ended_with_its_last_output(run_dir):
    run_dir.start(2)
    run_dir.attempt(1, 0, 2)
    marks = [Mark(time=TIME + second, rank=0, stream=0, offset=second) for second in (2, 300)]
    (run_dir.path / "times-0.index").write_bytes(b"".join(mark.pack() for mark in marks))
    run_dir.close()
    report = run_dir.read()
    assert report.end - report.begin == 300.0


def test_without_series_the_step_is_that_of_the_rank_in_the_last_event(run_dir):
    run_dir.start(2)
    run_dir.attempt(1, 0, 2)
    values = {"step": 7, "loss": 1.0}
    run_dir.event(2, "progress", attempt=0, ranks=2, step_min=5, step_max=7, rank=1, values=values)
    run_dir.end(3, 0)
    (run_dir.path / "steps.bin").unlink(missing_ok=True)
    status = read_status(read_job(str(run_dir.path))).record()
    assert [worker["step"] for worker in status["workers"]] == [None, 7]


def test_markdown_shows_what_workers_wrote_as_text(run_dir):
    text = markdown_of(whole_job(run_dir))
    assert "<script" not in text.replace("\\<script", "")
    assert "\x1b" not in text
    assert all(line.count(" | ") < 8 for line in text.splitlines())


def test_numbers_are_short():
    assert [number(each) for each in (0, 1234567, 0.123456, 1e12)] == [
        "0", "1,234,567", "0.1235", "1e+12",
    ]  # fmt: skip
