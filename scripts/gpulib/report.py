"""The printed result of the check and its exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .checks import Row
from .machine import Gpu

_WIDTHS = "{:12}  {:7}  {:>7}  {}"
_SHOWN = 160
"""Characters of a detail that the table shows; what failed is shown whole below it."""
RESULTS = ("ok", "FAILED", "skipped")


def head(gpu: Gpu | None, missing: str | None) -> str:
    """Return the lines above the rows; ``missing``: why there is no GPU."""
    return f"gpu-check: {gpu or f'no GPU: {missing}'}\n" + _WIDTHS.format(
        "check", "result", "seconds", "detail"
    )


def line(row: Row) -> str:
    """Return a row of the table."""
    detail = " ".join(row.detail.split())
    shown = detail if len(detail) <= _SHOWN else f"{detail[:_SHOWN]}…"
    return _WIDTHS.format(row.check, row.result, f"{row.seconds:.1f}", shown)


def foot(rows: Sequence[Row], seconds: float) -> str:
    """Return what failed, in full, and how many rows there are of each kind."""
    failed = [f"\n{row.check}: {row.detail}" for row in rows if row.result == "FAILED"]
    counts = ", ".join(
        f"{sum(row.result == result for row in rows)} {result}" for result in RESULTS
    )
    return "\n".join([*failed, f"{len(rows)} checks in {seconds:.0f} s: {counts}"])


def as_json(rows: Sequence[Row], seconds: float, gpu: Gpu | None, missing: str | None) -> str:
    """Return all of it as data."""
    about = {"gpu": str(gpu) if gpu else None, "missing": missing, "seconds": round(seconds, 1)}
    return json.dumps({**about, "checks": [row._asdict() for row in rows]}, indent=1)


def exit_code(rows: Sequence[Row], gpu: Gpu | None, *, required: bool) -> int:
    """Return 1 if a check failed, or if a GPU is required and not there."""
    failed = any(row.result == "FAILED" for row in rows)
    return 1 if failed or (gpu is None and required) else 0
