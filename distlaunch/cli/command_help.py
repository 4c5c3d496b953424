"""The help of a command whose options are a table: one plain layout, in which no name is ever
cut."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from distlaunch.cli.option import Option
from distlaunch.cli.option_table import GROUP_TITLES, HELP_FLAGS

_COLUMN = 30
"""Where descriptions begin; a longer name stands on a line of its own."""
_WIDEST = 120
_NARROWEST = 40


def command_help(
    program: str, usage: str, about: str, options: Sequence[Option], epilog: str, columns: int
) -> str:
    """Return the help, for a terminal of so many columns, with the options by group in the order of
    the table."""
    width = max(_NARROWEST, min(columns, _WIDEST))
    head = [f"Usage: {program} [OPTIONS] {usage} [ARGS]...", "", *textwrap.wrap(about, width)]
    groups = dict.fromkeys(option.group for option in options)
    sections = []
    for group in groups:
        rows = [
            (_spelled(option), _described(option)) for option in options if option.group == group
        ]
        sections.append((f"{GROUP_TITLES[group]}:", rows))
    sections.append(("Help:", [(", ".join(reversed(HELP_FLAGS)), "Show this and exit.")]))
    lines = [line for title, rows in sections for line in ("", title, *_rows(rows, width))]
    return (
        "\n".join([*head, *lines, "", *textwrap.wrap(epilog, width, break_on_hyphens=False)]) + "\n"
    )


def default_note(option: Option) -> str:
    """Return what stands behind the description: the default, if there is one worth naming."""
    if option.default is None or option.default is False or option.default == ():
        return ""
    text = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    return f" (default {text})"


def _spelled(option: Option) -> str:
    negation = f" / {option.negation}" if option.negation is not None else ""
    metavar = "" if option.kind == "flag" else f" {option.metavar}"
    return ", ".join(option.flags) + negation + metavar


def _described(option: Option) -> str:
    return option.help + default_note(option)


def _rows(rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    column = min(_COLUMN, width // 2)
    lines = []
    for name, text in rows:
        folded = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False)
        first = f"  {name}"
        if len(first) + 2 <= column:
            first = f"{first:<{column}}{folded.pop(0) if folded else ''}"
        lines += [*_broken(first.rstrip(), width), *(" " * column + line for line in folded)]
    return lines


def _broken(line: str, width: int) -> list[str]:
    """Break a line that is too long between the choices of an option; a name stays whole."""
    lines: list[str] = []
    while len(line) > width and (end := line.rfind("|", 0, width) + 1) > 0:
        lines.append(line[:end])
        line = "      " + line[end:]
    return [*lines, line]
