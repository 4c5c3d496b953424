"""No file of ours grows beyond what one reads at a sitting (design, section 2)."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 400


@pytest.mark.parametrize(("folder", "least"), [("distlaunch", 100), ("tests", 200)])
def test_no_file_has_more_than_400_lines(folder, least):
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / folder).rglob("*.py")}
    assert len(files) > least
    counts = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    assert {name: lines for name, lines in counts.items() if lines > MOST_LINES} == {}
