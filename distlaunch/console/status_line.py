"""The text of the live status line, and the times at which it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlaunch.coordinator.policy.job_progress import STEP
from distlaunch.core.model.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distlaunch.coordinator.policy.job_progress import Summary
    from distlaunch.coordinator.runtime.sink import StatusView

SEPARATOR = " · "
"""Separates items. On a narrow terminal, items are dropped from the end."""
_HOUR_S = 3600
_STALE_S = 10.0
"""A rate that is older than this is not shown."""
_NUMBERS = 3
_NAME_CHARS = 16
_WHOLE = 1e12


def status_text(view: StatusView, now: float) -> str | None:
    """Return the job's state in one line; None after the end."""
    if view.phase == "ended":
        return None
    phase = "" if view.phase == "running" else f"{view.phase} · "
    restarts = f" (restart {view.restarts} of {view.max_restarts})" if view.restarts else ""
    parts = [
        f"distlaunch: {phase}{view.workers_up}/{view.workers_total} workers up",
        *(_progress_parts(view.progress, now - view.heard_s) if view.progress is not None else ()),
        f"attempt {view.attempt}{restarts}",
        _clock_text(now - view.started_s),
        view.log_dir,
    ]
    return SEPARATOR.join(parts)


def _progress_parts(progress: Summary, age_s: float) -> Iterator[str]:
    if progress.step_min is not None and progress.step_max is not None:
        low, high = _number_text(progress.step_min), _number_text(progress.step_max)
        yield f"step {low}" if low == high else f"step {low}-{high}"
    if age_s > _STALE_S:
        yield f"no heartbeat for {_clock_text(age_s)}"
    elif progress.steps_per_s is not None:
        yield f"{progress.steps_per_s:.3g} steps/s"
    others = [(name, value) for name, value in progress.values.items() if name != STEP]
    for name, value in others[:_NUMBERS]:
        yield f"{printable(name[:_NAME_CHARS])} {_number_text(value)}"


def _number_text(value: float) -> str:
    if value == int(value) and abs(value) < _WHOLE:
        return f"{int(value):,}"
    return f"{value:.4g}"


def next_change(view: StatusView, now: float) -> float | None:
    """Return the monotonic time at which the elapsed time in the text changes; None after the
    end."""
    if view.phase == "ended":
        return None
    return view.started_s + int(max(0.0, now - view.started_s)) + 1.0


def _clock_text(elapsed_s: float) -> str:
    seconds = max(0, int(elapsed_s))
    hours, seconds = divmod(seconds, _HOUR_S)
    short = f"{seconds // 60:02d}:{seconds % 60:02d}"
    return f"{hours}:{short}" if hours else short
