"""The layout of every help page."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from distlaunch.cli.option import Group, Option, Place
from distlaunch.cli.option_table import GROUP_TITLES
from distlaunch.core.model.record import Record

Row = tuple[str, str]
"""An option or command as typed, and its description."""
Section = tuple[str, Sequence[Row]]

COMMON = (
    "num_gpus",
    "num_proc",
    "num_processes",
    "gpus_per_node",
    "num_nodes",
    "num_machines",
    "hosts",
    "image",
    "time",
    "out",
    "max_restarts",
    "hang_timeout",
    "log_dir",
    "backend",
)
"""Fields of the options that most people use, in the order of the help."""
_INDENT = " " * 2
_BELOW = " " * 6
_WIDEST = 100
_NARROWEST = 40
_HELP_ROW: Section = ("Help:", (("-h, --help", "Print this help and exit."),))


class HelpPage(Record):
    """The help of one command, before it is wrapped to the terminal's width."""

    usage: str
    """The usage line; empty if the page is not about one command."""
    about: str
    examples: Sequence[Row] = ()
    lists: Sequence[Section] = ()
    """Sections with short names, whose descriptions are printed beside them."""
    sections: Sequence[Section] = ()
    closing: Sequence[str] = ()


def format_page(page: HelpPage, columns: int) -> str:
    """Return the text of a help page. Names are never cut; they may be wider than ``columns``."""
    width = max(_NARROWEST, min(columns, _WIDEST))
    sections = (*page.sections, _HELP_ROW) if page.usage else page.sections
    blocks = [
        *([[f"Usage: {page.usage}"]] if page.usage else []),
        textwrap.wrap(page.about, width),
        *([["Examples:", *_example_lines(page.examples, width)]] if page.examples else []),
        *([title, *_column_lines(rows, width)] for title, rows in page.lists),
        *([title, *_two_line_rows(rows, width)] for title, rows in sections),
        *(textwrap.wrap(text, width, break_on_hyphens=False) for text in page.closing),
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def option_sections(options: Iterable[Option], place: Place | None = None) -> Iterator[Section]:
    """Yield sections of options: the common ones first, then each group.

    Options that do not apply to the command ``place`` are left out.
    """
    shown = [option for option in options if place not in option.absent]
    common = {option.field: option for option in shown if option.field in COMMON}
    if common:
        rows = [option_row(common[field], place) for field in COMMON if field in common]
        yield "Common options:", rows
    groups: dict[Group, list[Row]] = {}
    for option in shown:
        if option.field not in common:
            groups.setdefault(option.group, []).append(option_row(option, place))
    for group, title in GROUP_TITLES.items():
        if group in groups:
            yield f"{title}:", groups[group]


def default_note(option: Option, place: Place | None = None) -> str:
    """Return a sentence with the default of an option at the command ``place``; empty if the table
    has none."""
    if option.group in ("no effect", "refused"):
        return ""
    unset = option.unset if place is None else option.unset_at.get(place, option.unset)
    if unset in ("on", "off"):
        return f"{unset.capitalize()} by default."
    if unset:
        return f"Default: {unset}."
    match option.default:
        case bool():
            return "On by default." if option.default else "Off by default."
        case float():
            return f"Default: {option.default:g} s."
        case None | ():
            return ""
        case _:
            return f"Default: {option.default}."


def described(option: Option, place: Place | None = None) -> str:
    """Return the description of an option with its default at the command ``place``."""
    return f"{option.help} {default_note(option, place)}".rstrip()


def terminal_columns(environ: Mapping[str, str]) -> int:
    """Return the width for output: COLUMNS, else the terminal's width, else 80."""
    given = environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


def option_row(option: Option, place: Place | None = None) -> Row:
    """Return an option as typed, and its description at the command ``place``."""
    negation = f" / {option.negation}" if option.negation is not None else ""
    metavar = "" if option.kind == "flag" else f" {option.metavar}"
    return ", ".join(option.flags) + negation + metavar, described(option, place)


def _two_line_rows(rows: Iterable[Row], width: int) -> Iterator[str]:
    for name, text in rows:
        yield from _break_line(_INDENT + name, width)
        yield from textwrap.wrap(
            text,
            width,
            initial_indent=_BELOW,
            subsequent_indent=_BELOW,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _example_lines(rows: Iterable[Row], width: int) -> Iterator[str]:
    for command, text in rows:
        first, *others = textwrap.wrap(
            _INDENT + command,
            width - 2,
            subsequent_indent=_BELOW[:4],
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield " \\\n".join([first, *others])
        yield from textwrap.wrap(text, width, initial_indent=_BELOW, subsequent_indent=_BELOW)


def _column_lines(rows: Sequence[Row], width: int) -> Iterator[str]:
    column = max(len(name) for name, _ in rows) + 4
    for name, text in rows:
        lines = textwrap.wrap(text, width - column, break_on_hyphens=False)
        yield f"{_INDENT}{name}".ljust(column) + lines[0]
        yield from (" " * column + line for line in lines[1:])


def _break_line(line: str, width: int) -> Iterator[str]:
    while len(line) > width and (end := line.rfind("|", 0, width) + 1) > 0:
        yield line[:end]
        line = _BELOW + line[end:]
    yield line
