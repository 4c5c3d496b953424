"""Write a report, or the comparison of two, as Markdown. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.core.model.text import printable
from distlaunch.jobs.report.job_report import JobReport
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
)

_SPECIAL = "\\`*_{}[]<>#|~&"


def markdown_of(report: JobReport) -> str:
    """Return the Markdown of one job."""
    key_figures = Table(heads=("Figure", "Value"), rows=tuple(figures(report)))
    lines = [f"# {_escaped(report.job.name)}", "", _escaped(headline(report)), ""]
    for text in missing_texts(report):
        lines += [_escaped(text), ""]
    no_slow_ranks = slow_ranks_text(report) if report.has_equal_steps else ""
    for title, table, empty in (
        ("Figures", key_figures, ""),
        ("Time", time_table(report), ""),
        ("Attempts", attempts_table(report), ""),
        ("Failures", failures_table(report), ""),
        ("Slow ranks", slow_ranks_table(report), no_slow_ranks),
        ("Checkpoints", checkpoints_table(report), ""),
        ("Nodes", nodes_table(report), ""),
    ):
        if table is not None:
            lines += [f"## {title}", "", *_table_lines(table), ""]
        elif empty:
            lines += [f"## {title}", "", _escaped(empty), ""]
    return "\n".join(lines)


def comparison_markdown(first: JobReport, second: JobReport) -> str:
    """Return the Markdown that compares two jobs."""
    title = f"# {_escaped(first.job.name)} and {_escaped(second.job.name)}"
    lines = [title, ""]
    for report in (first, second):
        name = _escaped(report.job.name)
        for text in (headline(report), *missing_texts(report)):
            lines += [f"{name}: {_escaped(text)}", ""]
    return "\n".join([*lines, *_table_lines(comparison_table(first, second)), ""])


def _table_lines(table: Table) -> Iterator[str]:
    if table.omitted:
        yield f"{table.omitted:,} earlier ones are left out."
        yield ""
    yield _table_line(table.heads)
    yield _table_line(
        ["--:" if place in table.right else "---" for place in range(len(table.heads))]
    )
    for row in table.rows:
        yield _table_line([_escaped(text) for text in row])


def _table_line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line."""
    marked = "".join(f"\\{letter}" if letter in _SPECIAL else letter for letter in text)
    return "<br>".join(printable(line) for line in marked.split("\n"))
