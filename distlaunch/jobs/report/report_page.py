"""Draw a report, or the comparison of two, as one HTML document. No I/O.

The document needs no network and no script. Texts of workers are escaped by the serialiser, and
characters that a terminal or browser would not show are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from distlaunch.core.model.duration import format_duration
from distlaunch.core.model.text import printable
from distlaunch.jobs.report.job_report import JobReport
from distlaunch.jobs.report.report_charts import (
    ChartLine,
    draw_lines,
    draw_time_bar,
    draw_timeline,
    number,
)
from distlaunch.jobs.report.report_tables import (
    Table,
    attempts_table,
    checkpoints_table,
    comparison_table,
    failures_table,
    figures,
    headline,
    missing_texts,
    nodes_table,
    slow_ranks_table,
    slow_ranks_text,
    time_table,
    time_uses,
)
from distlaunch.jobs.show import local_time

STYLE = """
:root{color-scheme:light dark;--page:#fcfcfb;--ink:#16181d;--soft:#5b616e;--line:#e1e3e8;--card:#fff;
--steps:#2a78d6;--lost:#d1403f;--start:#9aa1ad;--recovery:#e0940a;--waiting:#7b5cd6;--end:#c9cdd5;
--unknown:#8fb3e0;--good:#1f8f5f;--a:#2a78d6;--b:#d0620a}
@media(prefers-color-scheme:dark){:root{--page:#15171b;--ink:#e8eaee;--soft:#a2a9b6;--line:#31353d;
--card:#1c1f25;--steps:#5b9fef;--lost:#ef6a68;--start:#767e8c;--recovery:#eeb04a;--waiting:#a48df0;
--end:#4a505b;--unknown:#48688f;--good:#45b985;--a:#5b9fef;--b:#f09a4e}}
body{margin:0 auto;max-width:1024px;padding:24px 20px 64px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0;overflow-wrap:anywhere}h2{font-size:17px;margin:36px 0 10px}
p{margin:6px 0}.soft{color:var(--soft)}code{font:13px/1.5 ui-monospace,monospace;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(116px,1fr));gap:12px;
margin:18px 0;padding:0;list-style:none}
.figures li{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.figures b{display:block;font-size:19px;white-space:nowrap}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:14px}
td,th{text-align:left;vertical-align:top;padding:5px 16px 5px 0;border-bottom:1px solid var(--line);
overflow-wrap:anywhere}th{color:var(--soft);font-weight:600}td.right,th.right{text-align:right;
font-variant-numeric:tabular-nums;white-space:nowrap}
svg{display:block;width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg text.on{fill:#fff;font-weight:600}.grid{stroke:var(--line);fill:none}.mark{fill:var(--good)}
.use-steps,.end-running{fill:var(--steps);background:var(--steps)}
.use-lost,.end-failed,.end-hung,.end-node_lost{fill:var(--lost);background:var(--lost)}
.use-start{fill:var(--start);background:var(--start)}
.use-recovery{fill:var(--recovery);background:var(--recovery)}
.use-waiting{fill:var(--waiting);background:var(--waiting)}
.use-end,.end-stopped,.end-unknown{fill:var(--end);background:var(--end)}
.use-unknown{fill:var(--unknown);background:var(--unknown)}
.end-succeeded{fill:var(--good);background:var(--good)}
.key{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:8px}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.band{stroke:none;opacity:.2}
.line.a{stroke:var(--a)}.line.b{stroke:var(--b)}.band.a,.dot.a,.key.a{fill:var(--a);background:var(--a)}
.band.b,.dot.b,.key.b{fill:var(--b);background:var(--b)}
"""


def page_of(report: JobReport) -> str:
    """Return the HTML document of one job."""
    page = _Page(f"{report.job.name}: report")
    page.paragraph(headline(report))
    page.code(" ".join(report.job.argv))
    when = local_time(report.begin, "%Y-%m-%d %H:%M:%S %Z")
    page.paragraph(f"Started {when} on {report.job.host or 'a host that is not known'}", "soft")
    page.figures(figures(report))
    for text in missing_texts(report):
        page.paragraph(text, "soft")
    page.heading("Time")
    page.draw(draw_time_bar(report.division.spans))
    page.table(time_table(report), keys=[f"use-{use.value}" for use in time_uses(report)])
    page.heading("Timeline")
    page.draw(draw_timeline(report))
    page.table(attempts_table(report))
    page.titled_table("Failures", failures_table(report))
    _draw_curves(page, [(report, "a")])
    if report.step_times:
        page.heading("Slow ranks")
        page.paragraph(
            "Ranks whose mean step time is far above the median of all ranks, in the newest attempt.",
            "soft",
        )
        page.table(slow_ranks_table(report), empty=slow_ranks_text(report))
    page.titled_table("Checkpoints", checkpoints_table(report))
    page.titled_table("Nodes", nodes_table(report))
    return page.text()


def comparison_page(first: JobReport, second: JobReport) -> str:
    """Return the HTML document that compares two jobs."""
    page = _Page(f"{first.job.name} and {second.job.name}")
    styled = [(first, "a"), (second, "b")]
    for report, style in styled:
        page.key(style, report.job.name, headline(report))
        for text in missing_texts(report):
            page.paragraph(text, "soft")
    page.heading("Figures")
    page.table(comparison_table(first, second))
    page.heading("Time")
    for report, style in styled:
        page.key(style, report.job.name, "")
        page.draw(draw_time_bar(report.division.spans))
        page.table(time_table(report), keys=[f"use-{use.value}" for use in time_uses(report)])
    _draw_curves(page, styled)
    for report, _ in styled:
        page.heading(f"Timeline of {report.job.name}")
        page.draw(draw_timeline(report))
        page.table(failures_table(report))
    return page.text()


def _draw_curves(page: _Page, styled: Sequence[tuple[JobReport, str]]) -> None:
    """Draw step times and losses, if there are any."""
    times = [
        ChartLine(label=each.job.name, style=style, curves=each.step_times, shift=each.begin)
        for each, style in styled
    ]
    losses = [
        ChartLine(label=each.job.name, style=style, curves=each.losses) for each, style in styled
    ]
    if (
        chart := draw_lines(times, title="Step time", x_text=_elapsed_text, is_time=True)
    ) is not None:
        page.heading("Step time")
        page.paragraph(
            "Seconds, over the time since the start. The line is the median of the ranks, the band "
            "from the tenth to the ninetieth percentile.",
            "soft",
        )
        page.draw(chart)
    if (chart := draw_lines(losses, title="Loss", x_text=number, is_time=False)) is not None:
        page.heading("Loss")
        page.paragraph(
            "Over the steps, a line for each attempt. The line is the mean of the ranks, the band "
            "from the lowest to the highest.",
            "soft",
        )
        page.draw(chart)


def _elapsed_text(seconds: float) -> str:
    return format_duration(seconds) if seconds else "0"


class _Page:
    """An HTML document. Each method adds an element at its end; ``text`` returns the document."""

    def __init__(self, title: str) -> None:
        self._html = Element("html", {"lang": "en"})
        head = SubElement(self._html, "head")
        SubElement(head, "meta", {"charset": "utf-8"})
        SubElement(head, "meta", {"name": "viewport", "content": "width=device-width"})
        SubElement(head, "title").text = printable(title)
        SubElement(head, "style").text = STYLE
        self._body = SubElement(self._html, "body")
        SubElement(self._body, "h1").text = printable(title)

    def text(self) -> str:
        whole: str = tostring(self._html, encoding="unicode", method="html")
        return f"<!doctype html>\n{whole}\n"

    def heading(self, text: str) -> None:
        SubElement(self._body, "h2").text = printable(text)

    def paragraph(self, text: str, style: str = "") -> None:
        paragraph = SubElement(self._body, "p")
        paragraph.text = printable(text)
        if style:
            paragraph.set("class", style)

    def code(self, text: str) -> None:
        if text:
            SubElement(SubElement(self._body, "p"), "code").text = printable(text)

    def key(self, style: str, name: str, text: str) -> None:
        line = SubElement(self._body, "p")
        SubElement(line, "span", {"class": f"key {style}"})
        SubElement(line, "b").text = printable(name)
        SubElement(line, "span", {"class": "soft"}).text = f" {printable(text)}"

    def figures(self, rows: Iterable[tuple[str, str]]) -> None:
        box = SubElement(self._body, "ul", {"class": "figures"})
        for name, text in rows:
            item = SubElement(box, "li")
            SubElement(item, "b").text = text
            SubElement(item, "span", {"class": "soft"}).text = name

    def draw(self, svg: Element) -> None:
        self._body.append(svg)

    def titled_table(self, title: str, table: Table | None) -> None:
        if table is not None:
            self.heading(title)
            self.table(table)

    def table(self, table: Table | None, *, keys: Sequence[str] = (), empty: str = "") -> None:
        """Add a table. If it is None, add the paragraph ``empty`` instead.

        ``keys``: for each row, the style of a coloured mark in the first cell.
        """
        if table is None:
            if empty:
                self.paragraph(empty)
            return
        if table.omitted:
            self.paragraph(f"{table.omitted:,} earlier ones are left out.", "soft")
        box = SubElement(SubElement(self._body, "div", {"class": "wide"}), "table")
        row = SubElement(SubElement(box, "thead"), "tr")
        for place, head in enumerate(table.heads):
            _add_cell(row, "th", head, is_right=place in table.right)
        body = SubElement(box, "tbody")
        for index, texts in enumerate(table.rows):
            row = SubElement(body, "tr")
            for place, text in enumerate(texts):
                key = keys[index] if keys and not place else ""
                _add_cell(row, "td", text, is_right=place in table.right, key=key)


def _add_cell(row: Element, kind: str, text: str, *, is_right: bool, key: str = "") -> None:
    """Add a cell. Newlines of the text become line breaks."""
    cell = SubElement(row, kind, {"class": "right"} if is_right else {})
    first, *others = text.split("\n")
    if key:
        SubElement(cell, "span", {"class": f"key {key}"}).tail = printable(first)
    else:
        cell.text = printable(first)
    for other in others:
        SubElement(cell, "br").tail = printable(other)
