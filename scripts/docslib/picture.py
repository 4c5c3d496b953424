"""The picture of a failure report: a job that really fails, drawn by rich."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from docslib.reference import DOCS

PICTURE = DOCS / "report.svg"
_SCRIPT = """\
import math
import os
import time

from distlaunch.toolkit import heartbeat


def train(step):
    loss = math.nan if step == 3 and os.environ["RANK"] == "2" else 1 / step
    if math.isnan(loss):
        raise ValueError(f"loss is {loss} at step {step}")
    return loss


for step in range(1, 100):
    heartbeat(step=step, loss=train(step))
    time.sleep(0.1)
"""
_COMMAND = "distlaunch train --num-procs 4 train.py"
_COLUMNS = 92


def draw_report() -> str:
    """Run the job on a terminal and return the picture of all that it shows."""
    from rich.console import Console
    from rich.text import Text

    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "train.py").write_text(_SCRIPT, "utf-8")
        shown = _run(work)
    console = Console(record=True, width=_COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ {_COMMAND}\n{shown.strip()}"))
    svg = console.export_svg(title="distlaunch", unique_id="report")
    # The picture loads no font from elsewhere.
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("font-family: Fira Code, monospace", "font-family: monospace")
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def _run(work: str) -> str:
    environ = {
        **os.environ,
        "HOME": work,
        "XDG_STATE_HOME": f"{work}/state",
        "TERM": "xterm-256color",
        "COLUMNS": str(_COLUMNS),
        "PYTHONPATH": str(DOCS.parents[1]),
    }
    words = _COMMAND.split()[1:]
    reader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "distlaunch", *words],
        cwd=work,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    chunks = []
    while True:
        try:
            chunk = os.read(reader, 65536)
        except OSError:  # Linux: no process has the terminal any more
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(reader)
    if process.wait() != 1:
        raise SystemExit(f"docs: error: the job ended with {process.returncode}, not 1")
    text = b"".join(chunks).decode().replace("\r\n", "\n")
    return _lines_left(text.replace(f"{work}/state", "~/.local/state").replace(work, "~"))


def _lines_left(text: str) -> str:
    """Return the text without rows that were drawn over."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-LN-Zn-z]|\x1b\[[0-9;?]*[a-ln-z]", "\x00", text)
    kept = [line.rsplit("\r", 1)[-1].replace("\x00", "") for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept))
