"""Hooks of mkdocs: the architecture page, which lies beside the code, is a page of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ARCHITECTURE = Path(__file__).resolve().parents[2] / "distlaunch" / "ARCHITECTURE.md"
_PAGE = "contributing/architecture.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the architecture page, with its links as they have to be there."""
    from mkdocs.structure.files import File

    text = ARCHITECTURE.read_text("utf-8").replace("](docs/", "](../")
    files.append(File.generated(config, _PAGE, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the architecture page's own file to its page."""
    del page
    markdown = markdown.replace("](../../ARCHITECTURE.md)", "](architecture.md)")
    return markdown.replace("](../ARCHITECTURE.md)", "](contributing/architecture.md)")
