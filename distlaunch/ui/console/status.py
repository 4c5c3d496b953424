"""Layer ui.console: the text of the live status line, and when it changes next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distlaunch.job.sink import StatusView

_HOUR_S = 3600


def status_text(view: StatusView, now: float) -> str | None:
    """Describe the job in one line; None when there is nothing to show any more."""
    if view.phase == "ended":
        return None
    phase = "" if view.phase == "running" else f"{view.phase} · "
    limit = f"/{view.max_restarts}" if view.max_restarts else ""
    return (
        f"distlaunch: {phase}{view.workers_up}/{view.workers_total} workers up · attempt {view.attempt}{limit}"
        f" · {_clock(now - view.started_s)} · {view.log_dir}"
    )


def next_change(view: StatusView, now: float) -> float | None:
    """Give the monotonic time at which the elapsed time shown changes; None when nothing is shown."""
    if view.phase == "ended":
        return None
    return view.started_s + int(max(0.0, now - view.started_s)) + 1.0


def _clock(elapsed_s: float) -> str:
    seconds = max(0, int(elapsed_s))
    hours, seconds = divmod(seconds, _HOUR_S)
    short = f"{seconds // 60:02d}:{seconds % 60:02d}"
    return f"{hours}:{short}" if hours else short
