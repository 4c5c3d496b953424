"""Draw the timeline of a sample job as the picture of the page on reports."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from xml.etree.ElementTree import SubElement, tostring

from distlaunch.coordinator.runtime.records import DiskWork
from distlaunch.coordinator.runtime.series_file import SeriesFile
from distlaunch.core.protocol import agent_messages as m
from distlaunch.jobs.job import read_job
from distlaunch.jobs.report.job_report import build_report
from distlaunch.jobs.report.report_charts import draw_timeline
from distlaunch.jobs.report.report_page import STYLE

TIMELINE = Path(__file__).parents[2] / "distlaunch" / "docs" / "timeline.svg"
_BEGIN = 1_790_000_000.0
_RANKS = 16
# begin and end of the steps, first step, whether it ended with a lost node
_ATTEMPTS = ((45.0, 900.0, 0, False), (960.0, 2100.0, 600, True), (2490.0, 4200.0, 1800, None))


def draw_sample_timeline() -> str:
    """Return the picture: a failure, a restart, a lost node, and an attempt that succeeds."""
    with tempfile.TemporaryDirectory() as folder:
        _write_job(Path(folder))
        job = read_job(folder)
        assert job is not None
        svg = draw_timeline(build_report(job))
    svg.set("xmlns", "http://www.w3.org/2000/svg")
    style = SubElement(svg, "style")
    style.text = STYLE
    svg.remove(style)
    svg.insert(0, style)
    text: str = tostring(svg, encoding="unicode")
    return text + "\n"


def _write_job(path: Path) -> None:
    (path / ".distlaunch-run").write_text("sample")
    series = SeriesFile(str(path / "steps.bin"), DiskWork())
    events: list[dict[str, object]] = []

    def record(when: float, kind: str, **fields: object) -> None:
        events.append({"time": _BEGIN + when, "type": kind, **fields})

    record(0, "job_started", job_id="sample", world_size=_RANKS, host="n1")
    for attempt, (begin, end, step, lost) in enumerate(_ATTEMPTS):
        record(begin - 35, "composed", attempt=attempt, nodes=2, world_size=_RANKS)
        record(begin - 30, "attempt_started", attempt=attempt)
        pids = {str(rank): rank + 1 for rank in range(_RANKS)}
        record(begin - 29, "workers_started", attempt=attempt, pids=pids)
        nodes = [
            {"host": f"n{node + 1}", "workers": [{"rank": node * 8 + rank} for rank in range(8)]}
            for node in range(2)
        ]
        (path / f"plan-{attempt}.json").write_text(json.dumps({"nodes": nodes}))
        for second in range(0, int(end - begin), 20):
            beats = [
                m.Heartbeat(rank=rank, values={"step": step + second}) for rank in range(_RANKS)
            ]
            when = begin + second
            series.add(attempt, beats, now=when, time=_BEGIN + when)
            series.write(when)
            if second % 600 == 0 and second:
                record(when, "checkpoint", attempt=attempt, step=step + second, seconds=9, bytes=1)
        if lost:
            record(end, "node_lost", attempt=attempt, node=1, host="n2", ranks=list(range(8, 16)))
        for rank in range(_RANKS):
            told = lost is not None and (lost or rank != 5)
            code = 0 if lost is None else -15 if told else 1
            record(
                end + 5 * told, "worker_exited", attempt=attempt, rank=rank, returncode=code,
                told_to_stop=told,
            )  # fmt: skip
        if lost is not None:
            record(end + 6, "failure", attempt=attempt, final=False, diagnosis={"ranks": [5]})
            record(end + 6, "restarting", attempt=attempt + 1, of=3)
    record(_ATTEMPTS[-1][1] + 20, "job_ended", exit_code=0)
    series.close()
    events.sort(key=lambda event: event["time"])  # type: ignore[arg-type, return-value]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
