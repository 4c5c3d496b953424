"""Medians, ratios and the machine, as a table to read and as data."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from .launchers import ROOT
from .rows import Measurement, Row, Sample

Samples = dict[str, dict[str, list[Sample]]]
"""By measurement, then by launcher."""

LAUNCHERS = (
    "distlaunch",
    "torchrun",
    "torchrun static",
    "mpirun",
    "clush",
    "pdsh",
    "ssh",
    "one machine",
)
"""All that are compared anywhere, in the order of columns."""


def launchers_of(measurements: Sequence[Measurement]) -> list[str]:
    """Return which take part, in the order of columns."""
    return [
        name
        for name in LAUNCHERS
        if any(name in measurement.launchers for measurement in measurements)
    ]


def _first_line(*argv: str) -> str:
    try:
        done = subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
    except OSError:
        return "not installed"
    return (done.stdout or done.stderr).strip().split("\n")[0]


def machine(programs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Describe what the figures depend on; ``programs``: what tells their versions."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    changed = bool(
        _first_line("git", "status", "--porcelain", "--untracked-files=no", "distlaunch")
    )
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch,
        **{name: _first_line(*words) for name, words in programs.items()},
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "revision": _first_line("git", "rev-parse", "--short=12", "HEAD")
        + (" (changed)" if changed else ""),
        "load at the start": f"{os.getloadavg()[0]:.2f}",
    }


def medians(samples: Mapping[str, Sequence[Sample]], key: str) -> dict[str, float]:
    """Return the median of ``key`` for each launcher that has it."""
    found = {}
    for launcher, runs in samples.items():
        values = [run[key] for run in runs if key in run]
        if values:
            found[launcher] = statistics.median(values)
    return found


def figure(value: float, unit: str) -> str:
    if unit == "lines/s":
        return f"{value:,.0f}"
    if unit == "%":
        return f"{value:.2f}"
    return (
        f"{value:.3f}"
        if unit == "s" and value < 1
        else f"{value:.2f}"
        if unit == "s"
        else f"{value:.1f}"
    )


def _verdict(row: Row, found: Mapping[str, float]) -> str:
    if not row.goal:
        return ""
    try:
        return "yes" if row.reached(found) else "NO"
    except KeyError:  # a launcher was left out of this run
        return "?"


def table(
    measurements: Sequence[Measurement], samples: Samples, predicted: Mapping[str, float]
) -> list[str]:
    """Return the lines of a Markdown table."""
    names = launchers_of(measurements)
    heads = [
        "measure",
        "predicted",
        *names,
        *(f"vs {name}" for name in names[1:]),
        "to reach",
        "reached",
    ]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' --: |' * (len(heads) - 3)} --- | --- |"]
    for measurement in measurements:
        for row in measurement.rows:
            found = medians(samples[measurement.name], row.key)
            cells = [f"{row.title} ({row.unit})"]
            cells.append(figure(predicted[row.key], row.unit) if row.key in predicted else "")
            cells += [figure(found[name], row.unit) if name in found else "-" for name in names]
            for other in names[1:]:
                if (
                    "distlaunch" in found
                    and other in found
                    and min(found["distlaunch"], found[other]) > 0
                ):
                    times = (
                        found["distlaunch"] / found[other]
                        if row.more_is_better
                        else found[other] / found["distlaunch"]
                    )
                    cells.append(f"{times:.1f}x")
                else:
                    cells.append("-")
            cells += [row.goal, _verdict(row, found)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def side_figures(measurements: Sequence[Measurement], samples: Samples) -> list[str]:
    """Return what was recorded beside the rows: exit codes, lost lines, memory, the curve of
    growing numbers."""
    lines = []
    for measurement in measurements:
        keys = {key for runs in samples[measurement.name].values() for run in runs for key in run}
        for key in sorted(keys - {row.key for row in measurement.rows}):
            found = medians(samples[measurement.name], key)
            lines.append(
                f"* {key}: " + ", ".join(f"{name} {value:.6g}" for name, value in found.items())
            )
    return lines


def write(
    directory: str,
    subject: str,
    measurements: Sequence[Measurement],
    samples: Samples,
    predicted: Mapping[str, float],
    facts: Mapping[str, str],
    problems: Sequence[str],
) -> str:
    """Write SUBJECT.json and SUBJECT.md; return the latter's text."""
    os.makedirs(directory, exist_ok=True)
    runs = {
        name: max((len(each) for each in by.values()), default=0) for name, by in samples.items()
    }
    text = "\n".join(
        [
            f"# `scripts/bench {subject}`",
            "",
            "Medians of one run, the launchers taking turns; rounds: "
            + ", ".join(f"{name} {count}" for name, count in runs.items()),
            "",
            *table(measurements, samples, predicted),
            "",
            "Ratios above 1 are in favour of distlaunch. Beside the rows (medians):",
            "",
            *side_figures(measurements, samples),
            "",
            *(["Problems:", "", *[f"* {problem}" for problem in problems], ""] if problems else []),
            "Machine: " + ", ".join(f"{name}: {value}" for name, value in facts.items()),
            "",
        ]
    )
    with open(f"{directory}/{subject}.md", "w", encoding="utf-8") as file:
        file.write(text)
    data = {
        "machine": facts,
        "command": sys.argv[1:],
        "predicted": predicted,
        "medians": {
            row.key: medians(samples[measurement.name], row.key)
            for measurement in measurements
            for row in measurement.rows
        },
        "samples": samples,
        "problems": list(problems),
    }
    with open(f"{directory}/{subject}.json", "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.write("\n")
    return text
