"""Pages of documentation in the package, printed by ``distlaunch help TOPIC``."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from distlaunch.core.model.record import Record

_FOLDERS = ("", "reference", "contributing")
"""Folders of pages, in the order in which their topics are listed."""
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(`[^`]*`)")
_ITEM = re.compile(r"( *)([*-]|[0-9]{1,2}\.) +(.*)")
_CELL_END = re.compile(r"(?<!\\)\|")
_WIDEST = 100
_NARROWEST = 40
_MOST_OF_A_LINE = 0.4
"""If the first column of a table is wider than this share of the line, the other cells are printed
below it."""


class Block(Record):
    """One block of a page."""

    kind: Literal["heading", "paragraph", "item", "code", "table"]
    text: str = ""
    """Markdown on one line. For code, the unchanged lines."""
    level: int = 0
    """For a heading, its level (1 is the title). For a list item, its indentation in columns."""
    mark: str = ""
    """The mark of a list item: ``*`` or its number."""
    rows: tuple[tuple[str, ...], ...] = ()
    """For a table: the cells of each row. The first row is the head."""


def topics() -> tuple[str, ...]:
    """Return the names of the pages, without folder and suffix."""
    return tuple(_page_files())


def developer_topics() -> frozenset[str]:
    """Return the topics of the pages for contributors."""
    folder = os.path.join("docs", "contributing")
    return frozenset(
        topic
        for topic, path in _page_files().items()
        if topic == "architecture" or os.path.dirname(path).endswith(folder)
    )


def reference_topics() -> frozenset[str]:
    """Return the topics of the reference pages."""
    folder = os.path.join("docs", "reference")
    return frozenset(
        topic for topic, path in _page_files().items() if os.path.dirname(path).endswith(folder)
    )


def page_text(topic: str) -> str:
    """Return the page of a topic, as Markdown without comments."""
    with open(_page_files()[topic], encoding="utf-8") as file:
        return _COMMENT.sub("", file.read())


def show_page(topic: str, columns: int) -> None:
    """Show the page of a topic: formatted on a terminal, in a pager if there is one, and otherwise
    as plain text."""
    text = page_text(topic)
    if not sys.stdout.isatty():
        sys.stdout.write(plain_page(text, columns))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    # less leaves the text on the screen (X), does not wait if it fits (F), and shows colours (R):
    # without R, the user's own options would show them as escape sequences.
    os.environ["LESS"] = f"{os.environ.get('LESS', 'FX')} -R"
    console = Console()
    if not _has_pager(os.environ):
        console.print(Markdown(text))
        return
    with console.pager(styles=True):
        console.print(Markdown(text))


def _has_pager(environ: Mapping[str, str]) -> bool:
    """Return whether the user's pager is installed. A shell would run a missing pager and show
    nothing."""
    import shlex
    import shutil

    chosen = environ.get("MANPAGER") or environ.get("PAGER") or ""
    try:
        words = shlex.split(chosen)
    except ValueError:  # the shell will say what is wrong
        return True
    while words and "=" in words[0]:
        words.pop(0)
    return not words or shutil.which(words[0]) is not None


def page_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page. Only the Markdown that our pages use is known."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        begin = at
        at += 1
        if not line.strip():
            continue
        if line.lstrip().startswith("```"):
            while at < len(lines) and not lines[at].lstrip().startswith("```"):
                at += 1
            yield Block(kind="code", text=textwrap.dedent("\n".join(lines[begin + 1 : at])))
            at += 1
        elif line.startswith("#"):
            marks, _, title = line.partition(" ")
            yield Block(kind="heading", text=title, level=len(marks))
        elif line.startswith("|"):
            while at < len(lines) and lines[at].startswith("|"):
                at += 1
            rows = [_split_cells(row) for row in lines[begin:at]]
            yield Block(kind="table", rows=(rows[0], *rows[2:]))
        else:
            while at < len(lines) and not _begins_block(lines[at]):
                at += 1
            if item := _ITEM.fullmatch(line):
                words = [item[3], *lines[begin + 1 : at]]
                yield Block(kind="item", text=_join_lines(words), level=len(item[1]), mark=item[2])
            else:
                yield Block(kind="paragraph", text=_join_lines(lines[begin:at]))


def without_marks(text: str) -> str:
    """Return a line of Markdown without links and bold marks. Backticks are kept."""
    text = _LINK.sub(r"\1", text)
    parts = _CODE.split(text)
    return "".join(
        part if part.startswith("`") else part.replace("**", "").replace("\\|", "|")
        for part in parts
    ).replace("\\|", "|")


def file_topics() -> dict[str, str]:
    """Return the topic of each page by file name."""
    return {os.path.basename(path): topic for topic, path in _page_files().items()}


def with_topics(text: str, names: Mapping[str, str]) -> str:
    """Return a line of Markdown without marks, with the topic after each link to another page."""

    def named(link: re.Match[str]) -> str:
        target = link[2].partition("#")[0]
        topic = names.get(os.path.basename(target)) if "://" not in target else None
        if topic is None:
            return f"{link[1]} ({link[2]})" if "://" in target else link[1]
        return f"{link[1]} (help {topic})"

    return without_marks(_LINK.sub(named, text))


def plain_page(text: str, columns: int) -> str:
    """Return a page as plain text, wrapped to at most ``columns``."""
    width = max(_NARROWEST, min(columns, _WIDEST))
    names = file_topics()
    shown: list[str] = []
    before: Block | None = None
    for block in page_blocks(text):
        if before is not None and not (before.kind == block.kind == "item"):
            shown.append("")
        shown += _plain_block(block, width, names)
        before = block
    return "\n".join(shown) + "\n"


def _plain_block(block: Block, width: int, names: Mapping[str, str]) -> list[str]:
    match block.kind:
        case "heading":
            lines = _wrap(without_marks(block.text), width)
            underline = {1: "=", 2: "-"}.get(block.level, "") * len(lines[-1])
            return [*lines, underline] if underline else lines
        case "code":
            return [f"    {line}".rstrip() for line in block.text.splitlines()]
        case "table":
            rows = [[with_topics(cell, names) for cell in row] for row in block.rows]
            return _plain_table(rows, width)
        case "item":
            first = " " * block.level + f"{block.mark} "
            return _wrap(with_topics(block.text, names), width, first, " " * len(first))
        case "paragraph":
            return _wrap(with_topics(block.text, names), width)


def _plain_table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    head, *body = rows
    body = [[*row, *[""] * (len(head) - len(row))] for row in body]
    first = max((len(row[0]) for row in body), default=0) + 2
    if len(head) == 2 and first <= width * _MOST_OF_A_LINE:
        return [
            line for row in body for line in _wrap(row[1], width, row[0].ljust(first), " " * first)
        ]
    lines: list[str] = []
    for row in body:
        lines += _wrap(row[0], width)
        for title, cell in zip(head[1:], row[1:], strict=False):
            label = f"{title}: " if title and len(head) > 2 else ""
            if cell:
                lines += _wrap(label + cell, width, " " * 4, " " * 4)
    return lines


def _wrap(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _split_cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in _CELL_END.split(line.strip())[1:-1])


def _begins_block(line: str) -> bool:
    return (
        not line.strip()
        or line.startswith(("#", "|"))
        or line.lstrip().startswith("```")
        or _ITEM.fullmatch(line) is not None
    )


def _join_lines(lines: Sequence[str]) -> str:
    return " ".join(line.strip() for line in lines)


def _page_files() -> dict[str, str]:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found: dict[str, str] = {}
    for folder in _FOLDERS:
        path = os.path.join(package, "docs", folder)
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        found |= {name[:-3]: os.path.join(path, name) for name in names if name.endswith(".md")}
    found["architecture"] = os.path.join(package, "ARCHITECTURE.md")
    return found
