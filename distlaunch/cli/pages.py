"""The pages of documentation that come with the package, shown by ``distlaunch help TOPIC``."""

from __future__ import annotations

import os
import re
import sys

_FOLDERS = ("", "reference", "contributing")
"""Folders of ``docs/`` with pages, in the order in which their topics are listed."""
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


def topics() -> tuple[str, ...]:
    """Return the topics: the names of the pages, without folder and suffix."""
    return tuple(_files())


def page_text(topic: str) -> str:
    """Return the page of a topic, as Markdown without comments."""
    with open(_files()[topic], encoding="utf-8") as file:
        return _COMMENT.sub("", file.read())


def show_page(topic: str) -> None:
    """Show the page of a topic: formatted and by a pager on a terminal, else as Markdown."""
    text = page_text(topic)
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    # less shows colours (R), leaves the text on the screen (X) and does not wait if it fits (F).
    os.environ.setdefault("LESS", "FRX")
    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text))


def _files() -> dict[str, str]:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found: dict[str, str] = {}
    for folder in _FOLDERS:
        path = os.path.join(package, "docs", folder)
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        found |= {name[:-3]: os.path.join(path, name) for name in names if name.endswith(".md")}
    found["architecture"] = os.path.join(package, "ARCHITECTURE.md")
    return found
