"""The pages of documentation that come with the package, shown by ``distlaunch help TOPIC``."""

from __future__ import annotations

import os
import sys

PAGES = {
    "checkpoints": "CHECKPOINTS.md",
    "debugging": "DEBUGGING.md",
    "from-torchrun": "TORCHRUN.md",
    "horovod": "HOROVOD.md",
    "peers": "PEERS.md",
    "progress": "PROGRESS.md",
    "toolkit": "TOOLKIT.md",
}
"""Topic -> file in the package's folder."""


def page_text(topic: str) -> str:
    """Return the page of a topic, as Markdown."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(os.path.join(folder, PAGES[topic]), encoding="utf-8") as file:
        return file.read()


def show_page(topic: str) -> None:
    """Print the page of a topic to stdout: formatted on a terminal, else as the Markdown that it
    is."""
    text = page_text(topic)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        sys.stdout.write(text)
