"""The training scripts on toolkit.md and checkpoints.md run as printed."""

from __future__ import annotations

import re
import shlex

from tests.launcher import TRAINING
from tests.pages import DOCS, blocks


def script_of(page: str) -> str:
    """Return the first script on a page."""
    return next(block.text for block in blocks(DOCS / page) if block.language == "python")


def test_the_script_on_the_toolkit_page_trains(distlaunch):
    (distlaunch.work / "train.py").write_text(script_of("toolkit.md"))
    result = distlaunch.train("--num-procs", "2", "--preload", TRAINING, "train.py", timeout=100)
    assert result.returncode == 0, result.stderr
    found = re.search(
        r"^\[0\] loss ([0-9.]+) after 96 steps on 2 workers$", result.stdout, re.MULTILINE
    )
    assert found is not None, result.stdout
    assert float(found[1]) < 0.68, "it has learnt: ln 2 is a guess"


def test_the_script_on_the_checkpoints_page_is_continued_by_the_command_on_it(distlaunch):
    text = script_of("checkpoints.md")
    line = "        checkpoint.step(step)"
    assert line in text
    fails = f"        if step == 250 and context.attempt == 0:\n            raise OSError\n{line}"
    (distlaunch.work / "train.py").write_text(text.replace(line, fails))
    [block] = [
        block
        for block in blocks(DOCS / "checkpoints.md")
        if block.mark == "run: tests/integration/test_page_scripts.py"
    ]
    words = shlex.split(block.text)[1:]
    first = distlaunch.run([*words[:1], "--preload", TRAINING, *words[1:]], 100)
    assert first.returncode == 0, first.stderr
    resumed = re.findall(r"resumed from \S*/step-0*([0-9]+), after", first.stdout + first.stderr)
    assert [100 <= int(step) <= 250 for step in resumed] == [True]
    saved = sorted(path.name for path in (distlaunch.work / "runs" / "a").glob("step-*"))
    assert saved[-1] == "step-000000300"
    (distlaunch.work / "train.py").write_text(text)
    again = distlaunch.run([*words[:1], "--preload", TRAINING, *words[1:]], 100)
    assert again.returncode == 0
    assert "the training had already ended after 300 steps" in again.stdout + again.stderr
