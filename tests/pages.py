"""The pages of documentation, and the blocks of commands on them.

Before each block of shell commands stands a comment that says how it is tested: ``<!-- run -->`` (by
``tests/process/test_pages.py``), ``<!-- run: FILE -->`` (by another test), or ``<!-- needs: ... -->``
for what the tests cannot run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "distlaunch" / "docs"
README = ROOT / "README.md"
PAGES = (README, ROOT / "distlaunch" / "ARCHITECTURE.md", *sorted(DOCS.glob("**/*.md")))
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SEPARATORS = re.compile(r"[|&;<>()]+")


@dataclass(frozen=True)
class Block:
    """A fenced block, its language, and the comment before it."""

    page: Path
    language: str
    text: str
    mark: str

    @property
    def is_run_here(self) -> bool:
        return self.language == "sh" and self.mark == "run"

    def commands(self) -> Iterator[list[str]]:
        """Return the words of each call of distlaunch in the block."""
        words: list[str] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.wordchars += "$=:,@[]%{}+"
            for word in [*lexer, ";"]:
                if not _SEPARATORS.fullmatch(word):
                    words.append(word)
                    continue
                while words and "=" in words[0]:
                    words.pop(0)
                if words[:1] == ["distlaunch"]:
                    yield words[1:]
                words = []


def name(page: Path) -> str:
    """Name a page for a test's id."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [
        Block(page, found["language"], found["text"], found["mark"] or "")
        for found in _FENCE.finditer(page.read_text("utf-8"))
    ]
