"""Draw the charts of a report as SVG elements. No I/O.

Colours are classes of the page's style sheet, so that they follow the colour scheme of the reader.
All text is inside the view box; long names are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from xml.etree.ElementTree import Element, SubElement

from distlaunch.core.model.duration import format_duration
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.jobs.report.job_report import (
    AttemptOutcome,
    AttemptReport,
    JobReport,
    NodeTime,
    WorkerTime,
)
from distlaunch.jobs.report.job_time import Span, TimeUse
from distlaunch.jobs.report.step_times import Curve

WIDTH = 960
_LEFT, _RIGHT = 130, 24
_ROW, _GAP = 16, 4
_AXIS = 24
_LABEL_CHARS = 17
_MOST_BARS = 3000
"""Largest number of bars of workers. Neighbouring ranks share a bar in a larger job."""
_MOST_ROWS = 32
_LEAST_ROWS = 8
_MOST_NODE_ROWS = 32
_MOST_ATTEMPTS = 100
_HEIGHT = 240
_LOGARITHMIC = 50.0
"""Values whose largest is larger than the smallest by this factor get a logarithmic axis."""
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0

USE_NAMES = {
    TimeUse.STEPS: "Steps that counted",
    TimeUse.LOST: "Lost steps",
    TimeUse.START: "Start",
    TimeUse.RECOVERY: "Recovery",
    TimeUse.WAITING: "Waiting for nodes",
    TimeUse.END: "After the last step",
    TimeUse.UNKNOWN: "Workers ran, no steps reported",
}
OUTCOME_NAMES = {
    AttemptOutcome.RUNNING: "running",
    AttemptOutcome.SUCCEEDED: "succeeded",
    AttemptOutcome.FAILED: "failed",
    AttemptOutcome.HUNG: "hung",
    AttemptOutcome.NODE_LOST: "node lost",
    AttemptOutcome.STOPPED: "stopped",
    AttemptOutcome.UNKNOWN: "not known",
}


class ChartLine(Record):
    """Curves of one job in a chart."""

    label: str
    style: str
    """Class of the style sheet."""
    curves: tuple[Curve, ...]
    shift: float = 0.0
    """Is subtracted from x."""


def draw_time_bar(spans: Sequence[Span]) -> Element:
    """Return a bar that shows the shares of each use of time."""
    whole = sum(span.seconds for span in spans) or 1.0
    svg = _create_svg(WIDTH, 28, "Shares of the time")
    at = 0.0
    for use in TimeUse:
        seconds = sum(span.seconds for span in spans if span.use is use)
        width = WIDTH * seconds / whole
        if width > 0:
            share = f"{USE_NAMES[use]}: {format_duration(seconds)}, {seconds / whole:.1%}"
            _add_rect(svg, at, 0, width, 28, f"use-{use.value}", share)
        at += width
    return svg


def draw_timeline(report: JobReport) -> Element:
    """Return the timeline of the job: uses of time, attempts, nodes, ranks."""
    chart = _Timeline(report.begin, report.end)
    chart.row("time")
    for span in report.division.spans:
        title = f"{USE_NAMES[span.use]}: {format_duration(span.seconds)}"
        chart.bar(span.begin, span.end, f"use-{span.use.value}", title)
    chart.row("attempts")
    shown = report.attempts[-_MOST_ATTEMPTS:]
    for attempt in shown:
        chart.bar(
            attempt.begin, attempt.end, f"end-{attempt.outcome.value}", _attempt_title(attempt)
        )
        chart.text(attempt.begin, attempt.end, str(attempt.number))
    if report.checkpoint_times:
        chart.row("checkpoints")
        for place in sorted({chart.x(when) for when in report.checkpoint_times}):
            chart.tick(place)
    _draw_nodes(chart, report.nodes)
    _draw_ranks(chart, shown)
    return chart.finish()


def _attempt_title(attempt: AttemptReport) -> str:
    how = OUTCOME_NAMES[attempt.outcome]
    return f"attempt {attempt.number}: {how} after {format_duration(attempt.end - attempt.begin)}"


def _draw_nodes(chart: _Timeline, nodes: Sequence[NodeTime]) -> None:
    by_host: dict[str, list[NodeTime]] = {}
    for node in nodes:
        by_host.setdefault(node.host, []).append(node)
    # Nodes that were lost come first if there are too many.
    hosts = sorted(by_host, key=lambda host: all(each.lost_at is None for each in by_host[host]))
    shown = set(hosts[:_MOST_NODE_ROWS])
    for host, times in by_host.items():
        if host not in shown:
            continue
        chart.row(host)
        for node in times:
            style = "end-running" if node.lost_at is None else "end-node_lost"
            lost = "" if node.lost_at is None else ", lost"
            title = f"{host}, attempt {node.attempt}: {name_ranks(node.ranks)}{lost}"
            chart.bar(node.begin, node.end, style, title)
    if len(hosts) > len(shown):
        chart.row(f"{len(hosts) - len(shown)} more nodes")


def _draw_ranks(chart: _Timeline, attempts: Sequence[AttemptReport]) -> None:
    ranks = 1 + max((worker.rank for each in attempts for worker in each.workers), default=-1)
    if not ranks:
        return
    rows = max(_LEAST_ROWS, min(_MOST_ROWS, _MOST_BARS // max(1, len(attempts)), ranks))
    size = math.ceil(ranks / rows)
    for first in range(0, ranks, size):
        last = min(first + size, ranks) - 1
        chart.row(f"rank {first}" if first == last else f"ranks {first}-{last}", height=_ROW // 2)
        for attempt in attempts:
            block = [each for each in attempt.workers if first <= each.rank <= last]
            if block:
                _draw_block(chart, attempt, block)


def _draw_block(chart: _Timeline, attempt: AttemptReport, block: Sequence[WorkerTime]) -> None:
    failed = [each for each in block if each.returncode and not each.told_to_stop]
    if failed:
        how = f"ended with {failed[0].returncode}"
        style = "end-failed"
    elif any(each.returncode is None for each in block):
        how = "no end is known" if attempt.outcome is not AttemptOutcome.RUNNING else "running"
        style = "end-running"
    elif any(each.told_to_stop for each in block):
        how, style = "stopped by distlaunch", "end-stopped"
    else:
        how, style = "ended with 0", "end-succeeded"
    named = name_ranks(each.rank for each in failed or block)
    chart.bar(
        min(each.begin for each in block),
        max(each.end for each in block),
        style,
        f"{named}, attempt {attempt.number}: {how}",
    )


class _Timeline:
    """Rows of bars over a common axis of time. ``row`` begins a row; bars, ticks and texts are
    drawn in the newest one."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._seconds = max(end - begin, 0.001)
        self._svg = _create_svg(WIDTH, 0, "Timeline of attempts, nodes and ranks")
        self._grid = SubElement(self._svg, "g")
        self._y = 0.0
        self._height = float(_ROW)

    def x(self, when: float) -> float:
        share = min(1.0, max(0.0, (when - self._begin) / self._seconds))
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def row(self, label: str, *, height: float = _ROW) -> None:
        self._y += self._height + _GAP if self._svg.findall("text") else 0.0
        self._height = height
        _add_label(self._svg, _LEFT - 8, self._y + height / 2 + 4, _cut_label(label), "end")

    def bar(self, begin: float, end: float, style: str, title: str) -> None:
        left, right = self.x(begin), self.x(end)
        _add_rect(self._svg, left, self._y, max(right - left, 1.0), self._height, style, title)

    def tick(self, x: float) -> None:
        _add_rect(self._svg, min(x, WIDTH - _RIGHT - 2), self._y, 2, self._height, "mark", "")

    def text(self, begin: float, end: float, text: str) -> None:
        left, right = self.x(begin), self.x(end)
        if right - left > 8 * len(text) + 4:
            _add_label(self._svg, (left + right) / 2, self._y + 12, text, "middle", "on")

    def finish(self) -> Element:
        bottom = self._y + self._height
        for tick in _time_ticks(self._seconds):
            x = self.x(self._begin + tick)
            _add_path(self._grid, f"M{x} 0V{bottom + 4:g}", "grid")
            _add_label(self._svg, x, bottom + 18, format_duration(tick) if tick else "0", "middle")
        height = math.ceil(bottom + _AXIS)
        self._svg.set("viewBox", f"0 0 {WIDTH} {height}")
        return self._svg


def draw_lines(
    lines: Sequence[ChartLine], *, title: str, x_text: Callable[[float], str], is_time: bool
) -> Element | None:
    """Return a chart of the lines with their bands; None if there is nothing to draw.

    ``is_time``: x is in seconds, and both axes begin at 0. ``x_text`` words the values of the axis.
    """
    points = [
        (point.x - line.shift, point)
        for line in lines
        for curve in line.curves
        for point in curve.points
    ]
    if not points:
        return None
    x_scale = _Scale(
        0.0 if is_time else min(x for x, _ in points),
        max(x for x, _ in points),
        _LEFT,
        WIDTH - _RIGHT,
        is_log=False,
    )
    low, high = _axis_range(
        [value for _, point in points for value in (point.low, point.middle, point.high)]
    )
    is_log = low > 0 and high / low > _LOGARITHMIC
    if is_time and not is_log:
        low = min(low, 0.0)
    y_scale = _Scale(low, high, _HEIGHT - _AXIS - 4, 8, is_log=is_log)
    svg = _create_svg(WIDTH, _HEIGHT, title)
    for tick in y_scale.ticks():
        y = y_scale(tick)
        _add_path(svg, f"M{_LEFT} {y}H{WIDTH - _RIGHT}", "grid")
        _add_label(svg, _LEFT - 8, y + 4, number(tick), "end")
    for tick in _time_ticks(x_scale.high) if is_time else x_scale.ticks():
        if x_scale.low <= tick <= x_scale.high:
            _add_label(svg, x_scale(tick), _HEIGHT - 6, x_text(tick), "middle")
    for line in lines:
        for curve in line.curves:
            _draw_curve(svg, line, curve, x_scale, y_scale)
    return svg


def _draw_curve(
    svg: Element, line: ChartLine, curve: Curve, x_scale: _Scale, y_scale: _Scale
) -> None:
    xs = [x_scale(point.x - line.shift) for point in curve.points]
    if any(point.low < point.high for point in curve.points) and len(xs) > 1:
        above = [(x, y_scale(point.high)) for x, point in zip(xs, curve.points, strict=True)]
        below = [(x, y_scale(point.low)) for x, point in zip(xs, curve.points, strict=True)]
        _add_path(svg, f"{_path_data([*above, *reversed(below)])}Z", f"band {line.style}")
    middle = [(x, y_scale(point.middle)) for x, point in zip(xs, curve.points, strict=True)]
    if len(middle) == 1:
        x, y = middle[0]
        dot = SubElement(svg, "circle", {"cx": f"{x:g}", "cy": f"{y:g}", "r": "3"})
        dot.set("class", f"dot {line.style}")
        _add_title(dot, f"{line.label}, attempt {curve.attempt}")
        return
    path = _add_path(svg, _path_data(middle), f"line {line.style}")
    _add_title(path, f"{line.label}, attempt {curve.attempt}")


class _Scale:
    """Maps values to places, linear or logarithmic. Values outside are moved to the edge."""

    def __init__(self, low: float, high: float, begin: float, end: float, *, is_log: bool) -> None:
        if not high > low:
            low, high = low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9
        self.low, self.high = low, high
        self._begin, self._end = begin, end
        self._is_log = is_log

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self._is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self._begin + share * (self._end - self._begin), 1)

    def ticks(self) -> list[float]:
        if self._is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, (last - first) // 6)
            powers = [10.0**power for power in range(first, last + 1, every)]
            return [each for each in powers if self.low <= each <= self.high]
        step = _round_step_up((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        return [place * step for place in range(first, math.floor(self.high / step) + 1)]


def _axis_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value of an axis. Single values far above all others are
    cut."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    if low > 0 and high > 20 * usual:
        high = 3 * usual
    if low > 0 and high / low <= _LOGARITHMIC:
        low = 0.0 if high > 2 * low else low - (high - low) * 0.1
    return low, high + (high - low) * 0.05


def _round_step_up(size: float) -> float:
    """Return 1, 2 or 5 times a power of ten that is at least ``size``."""
    if size <= 0 or not math.isfinite(size):
        return 1.0
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * 0.999)


_TIME_STEPS = (60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def _time_ticks(seconds: float) -> list[float]:
    wanted = seconds / 7
    if wanted < _MINUTE_S / 2:
        step = _round_step_up(wanted)
    elif wanted < _TIME_STEPS[-1]:
        step = next(float(each) for each in _TIME_STEPS if each >= wanted)
    else:
        step = _DAY_S * math.ceil(wanted / _DAY_S)
    return [place * step for place in range(int(seconds / step) + 1)]


def number(value: float) -> str:
    """Return a number for people: an integer in full, any other with four digits."""
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


def _cut_label(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LABEL_CHARS else f"{shown[: _LABEL_CHARS - 1]}…"


def _create_svg(width: int, height: int, title: str) -> Element:
    return Element("svg", {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": title})


def _add_rect(
    parent: Element, x: float, y: float, width: float, height: float, style: str, title: str
) -> None:
    places = {"x": x, "y": y, "width": width, "height": height}
    rect = SubElement(
        parent, "rect", {name: f"{round(each, 1):g}" for name, each in places.items()}
    )
    rect.set("class", style)
    if title:
        _add_title(rect, title)


def _add_title(parent: Element, text: str) -> None:
    SubElement(parent, "title").text = printable(text)


def _add_path(parent: Element, route: str, style: str) -> Element:
    return SubElement(parent, "path", {"d": route, "class": style})


def _add_label(
    parent: Element, x: float, y: float, text: str, anchor: str, style: str = ""
) -> None:
    label = SubElement(parent, "text", {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor})
    if style:
        label.set("class", style)
    label.text = text


def _path_data(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
