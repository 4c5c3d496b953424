"""No message names an option that the user's command does not have.

Messages name options by ``Opt``, whose text is the name in the user's command
(``distlaunch/core/model/option_names.py``). Tests in ``tests/unit/cli/test_drop_in.py`` hold that each
of these names is an option or a variable of the command, or is said to be an option of
``distlaunch train``.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.core.model.option_names import TRAIN_NAMES, Opt, use_names
from tests.arch.test_messages import docstrings, literals
from tests.unit.cli.test_drop_in import DROP_INS, names_of

PACKAGE = Path(__file__).parents[2] / "distlaunch"
NAMES_FILE = Path(__file__).parents[1] / "data" / "option_names.txt"
"""The names of options in each drop-in, for readers."""
SHARED = (
    "planning",
    "coordinator",
    "diagnosis",
    "launch",
    "transport",
    "core",
    "console",
    "backends",
)
"""Rooms that run under every command."""
OF_ALL_COMMANDS = ("cli/parser.py", "cli/misplaced_options.py", "cli/commands/train.py")
ALLOWED = {
    ("diagnosis/hint_table.py", "--gpus"),
    ("coordinator/runtime/metrics.py", "--max-restarts"),
    ("cli/parser.py", "--backend"),
    ("cli/parser.py", "--script"),
    ("planning/outer_launcher.py", "--backend"),
}
"""Options of docker, in a help of a metric, which the parser itself looks for, and in the hint
``distlaunch train --backend``."""
OF_TRAIN_ALONE = ("transport/ray/", "backends/ray.py")
"""Drop-ins do not have the backend ray."""
NAMES = {flag for option in TRAIN_OPTIONS for flag in option.all_flags if flag.startswith("--")}
NAME = re.compile(r"(?<![\w-])--[a-z][a-z-]+(?![\w=-])")


def modules() -> list[Path]:
    rooms = [path for room in SHARED for path in (PACKAGE / room).rglob("*.py")]
    return sorted([*rooms, *(PACKAGE / name for name in OF_ALL_COMMANDS)])


def written_out(tree: ast.Module) -> Iterator[str]:
    """Yield the options of train that literals name, except for helps of options (``about``)."""
    helps = {
        node
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "about"
        for node in ast.walk(keyword.value)
    }
    for node in literals(tree):
        if node not in helps:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "{}".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
            yield from (name for name in NAME.findall(text) if name in NAMES)


def used_as_constant(node: ast.AST) -> Iterator[int]:
    """Yield the lines on which ``Opt`` is used when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Lambda):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for default in (*child.args.defaults, *child.args.kw_defaults):
                if default is not None:
                    yield from used_as_constant(ast.Expression(body=default))
        elif isinstance(child, ast.Name) and child.id == "Opt":
            yield child.lineno
        else:
            yield from used_as_constant(child)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_messages_name_options_by_opt(path):
    name = str(path.relative_to(PACKAGE))
    if name.startswith(OF_TRAIN_ALONE) or name == "core/model/option_names.py":
        return
    tree = ast.parse(path.read_text())
    assert {(name, each) for each in written_out(tree)} <= ALLOWED
    assert not list(used_as_constant(tree))


def test_a_written_out_option_is_found_and_a_help_is_not():
    code = 'f(f"{x}: use --num-gpus N", about="like --num-procs", argv="--num-gpus=2")'
    assert list(written_out(ast.parse(code))) == ["--num-gpus"]


def test_a_constant_with_an_option_is_found():
    code = "A = f'{Opt.ENV}'\ndef f(x=str(Opt.ENV)):\n    return Opt.ENV\nB = lambda: Opt.ENV\n"
    assert list(used_as_constant(ast.parse(code))) == [1, 2]
    assert not list(docstrings(ast.parse(code)))


def test_the_table_of_names_is_the_one_that_was_read():
    """``WRITE_MESSAGES=1`` writes the table anew, as it does for the messages."""
    lines = []
    for option in Opt:
        lines.append(TRAIN_NAMES.name(option.value))
        for command in DROP_INS:
            with use_names(names_of(command)):
                shown = f"{option}, {option('N')}" if option is not Opt.SCRIPT else str(option)
                lines.append(f"  {command:<10} {shown}")
    table = "\n".join(lines) + "\n"
    if os.environ.get("WRITE_MESSAGES") == "1":
        NAMES_FILE.write_text(table)
    assert table == NAMES_FILE.read_text(), "look at the change, then set WRITE_MESSAGES=1"
