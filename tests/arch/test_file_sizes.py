"""No file of ours grows beyond what one reads at a sitting (design, section 2)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 400


def test_no_module_has_more_than_400_lines():
    counts = {path: len(path.read_text().splitlines()) for path in (ROOT / "distlaunch").rglob("*.py")}
    assert len(counts) > 100
    assert {str(path.relative_to(ROOT)): lines for path, lines in counts.items() if lines > MOST_LINES} == {}
