"""All texts that distlaunch may show, in one file for each room: ``tests/data/messages``.

They show in a change what a user will read. ``WRITE_MESSAGES=1`` writes the files anew.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlaunch.core.model.option_names import TRAIN_NAMES, Opt

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "data" / "messages"
ROOMS = sorted(
    path.name for path in (ROOT / "distlaunch").iterdir() if (path / "__init__.py").exists()
)
PROSE = re.compile(r"[a-z]{2,}[,:;]? [a-z(]{1,}.* ", re.DOTALL)
"""Three words, of which the first two begin with small letters."""
OPTION_FIELD = re.compile(r"\{Opt\.(\w+)\}")


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the literals of a module that read as prose, in order, with ``{}`` for values and the
    names of options as in ``train``."""
    for node in sorted(literals(tree), key=lambda node: (node.lineno, node.col_offset)):
        text = worded(node)
        if PROSE.search(text):
            yield " ".join(text.split())


def literals(tree: ast.Module) -> Iterator[ast.JoinedStr | ast.Constant]:
    """Yield the literal texts of a module, except for docstrings."""
    skipped = set(docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(value for value in node.values if isinstance(value, ast.Constant))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        if is_text and node not in skipped:
            yield node


def docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the texts that are statements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def worded(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return OPTION_FIELD.sub(
            lambda found: TRAIN_NAMES.name(Opt[found[1]].value), str(node.value)
        )
    return "".join(
        worded(value) if isinstance(value, ast.Constant) else field(value) for value in node.values
    )


def field(value: ast.expr) -> str:
    """Return the name of an option in ``train``; ``{}`` for any other value."""
    match value:
        case ast.FormattedValue(value=ast.Attribute(value=ast.Name(id="Opt"), attr=name)):
            return TRAIN_NAMES.name(Opt[name].value)
        case ast.FormattedValue(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id="Opt"), attr=name), args=[argument])
        ):
            shown = argument.value if isinstance(argument, ast.Constant) else "{}"
            return TRAIN_NAMES.setting(Opt[name].value, shown)
        case _:
            return "{}"


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
