"""All texts that distlaunch may show, in one file for each room: ``tests/data/messages``.

They are there to be read, and to show in a change what a user will read. ``WRITE_MESSAGES=1`` writes
the files anew.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "data" / "messages"
ROOMS = sorted(
    path.name for path in (ROOT / "distlaunch").iterdir() if (path / "__init__.py").exists()
)
PROSE = re.compile(r"[a-z]{2,}[,:;]? [a-z(]{1,}.* ", re.DOTALL)
"""Three words, of which the first two begin with small letters."""


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the literals of a module that read as prose, in order, with ``{}`` for values."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        if isinstance(node, ast.JoinedStr):
            skipped.update(value for value in node.values if isinstance(value, ast.Constant))
    found = [
        node
        for node in ast.walk(tree)
        if node not in skipped
        and (
            isinstance(node, ast.JoinedStr)
            or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        )
    ]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
        text = worded(node)
        if PROSE.search(text):
            yield " ".join(text.split())


def worded(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(
        str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values
    )


def messages(room: str) -> str:
    parts = []
    for path in sorted((ROOT / "distlaunch" / room).rglob("*.py")):
        lines = [f"  {text}\n" for text in texts(ast.parse(path.read_text()))]
        if lines:
            parts.append(f"{path.relative_to(ROOT / 'distlaunch')}\n{''.join(lines)}")
    return "\n".join(parts)


@pytest.mark.parametrize("room", ROOMS)
def test_the_texts_of_a_room_are_those_that_were_read(room):
    file = FILES / f"{room}.txt"
    if os.environ.get("WRITE_MESSAGES") == "1":
        FILES.mkdir(exist_ok=True)
        file.write_text(messages(room))
    assert messages(room) == file.read_text(), "look at the change, then set WRITE_MESSAGES=1"


def test_texts_are_found_with_their_values_left_out():
    code = 'def f(n):\n    """Do a thing or two."""\n    g(f"no such host {n} in the file", "abc", "a b")\n'
    assert list(texts(ast.parse(code))) == ["no such host {} in the file"]
