"""Search all options and pages for a word, for ``distlaunch help WORD``.

Matches in a page's name come first, then in a table's first cell, a title, a heading, the text.
Pages for contributors come last.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module

from distlaunch.cli.help_layout import HelpPage, Row, Section, option_row
from distlaunch.cli.option import Option, Place
from distlaunch.cli.option_table import PLAN_OPTIONS, TRAIN_OPTIONS
from distlaunch.cli.pages import (
    Block,
    developer_topics,
    page_blocks,
    page_text,
    reference_topics,
    topics,
    without_marks,
)
from distlaunch.cli.suggestions import replace_sbatch_option, replace_torchrun_option
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, quoted

_MOST_PAGES = 7
_MOST_OPTIONS = 3
_LONGEST_LINE = 160
_OPTIONS_PAGE = "options"
"""Has the same options as the tables, so it is skipped if they match."""
_SENTENCE_END = re.compile(r"(?<=[.:;]) +(?=[A-Z`*\"])")
_NAME, _TITLE, _HEADING, _SUBJECT_OF_REFERENCE, _SUBJECT, _WHOLE_WORD = 60, 55, 50, 45, 30, 10
_LATE_FOR_DEVELOPERS, _LATE_FOR_NUMBERS = 100, 50
_NUMBERS = ("benchmarks", "differences")
_HINTS_PAGE = "hints"
"""Its headings name failures, so a word in one of them is not the subject of the page."""
_MOST_COUNTED = 9
_DROP_INS: tuple[Place, ...] = ("accelerate", "deepspeed", "horovodrun")


class _Hit(Record):
    topic: str
    heading: str
    line: str
    score: int


def find_option(word: str) -> HelpPage | None:
    """Return the help of the option with this flag or variable; None if there is none."""
    flag = word.replace("_", "-") if word.startswith("-") else word
    commands: dict[tuple[Row, ...], list[str]] = {}
    for command, place, options in _option_tables():
        rows = tuple(
            option_row(option, place)
            for option in options
            if flag in option.all_flags or word == option.variable
        )
        if rows:
            commands.setdefault(rows, []).append(command)
    if not commands:
        return None
    return HelpPage(
        usage="",
        about=f"An option of distlaunch {next(iter(commands.values()))[0]}."
        if len(commands) == 1
        else "An option of several commands.",
        sections=[
            (f"distlaunch {', '.join(names)}:", list(rows)) for rows, names in commands.items()
        ],
        closing=_notes_on_other_programs(flag),
    )


def find_word(word: str) -> HelpPage | None:
    """Return the options and passages that mention a word; None if there are none."""
    pattern = _compile_pattern(word)
    if pattern is None:
        return None
    rows = _option_rows(pattern)
    hits = sorted(
        filter(
            None,
            (
                _best_place(topic, pattern)
                for topic in topics()
                if not (rows and topic == _OPTIONS_PAGE)
            ),
        ),
        key=lambda hit: -hit.score,
    )
    if not rows and not hits:
        return None
    pages = [(f"distlaunch help {hit.topic}: {hit.heading}", hit.line) for hit in hits]
    sections: list[Section] = []
    if pages:
        sections.append(("Pages:", pages[:_MOST_PAGES]))
    if rows:
        sections.append(("Options:", rows[:_MOST_OPTIONS]))
    left_out = [
        counted(len(found) - most, f"more {name}")
        for found, most, name in ((pages, _MOST_PAGES, "page"), (rows, _MOST_OPTIONS, "option"))
        if len(found) > most
    ]
    return HelpPage(
        usage="",
        about=f"There is no command or page {quoted(word)}. These mention it:",
        sections=sections,
        closing=(
            *_notes_on_other_programs(word.replace("_", "-")),
            *([f"Not shown: {' and '.join(left_out)}."] if left_out else []),
        ),
    )


def _notes_on_other_programs(flag: str) -> tuple[str, ...]:
    texts = (
        (f"Instead of torchrun's {flag}", replace_torchrun_option(flag)),
        (f"Instead of sbatch's {flag}, for render slurm", replace_sbatch_option(flag)),
    )
    return tuple(f"{of}: {text}." for of, text in texts if text is not None)


def _option_tables() -> Iterator[tuple[str, Place | None, Sequence[Option]]]:
    """Yield for each command its name, its key in ``Option.absent``, and the options that only it
    has."""
    from distlaunch.cli.commands.render import TARGETS, options_of

    yield "train", None, TRAIN_OPTIONS
    fields = {option.field for option in TRAIN_OPTIONS}
    yield "plan", None, [option for option in PLAN_OPTIONS if option.field not in fields]
    known = {option.name for option in TRAIN_OPTIONS}
    for target in TARGETS:
        own = [option for option in options_of(target) if option.name not in known]
        yield f"render {target}", target, own
    for name in _DROP_INS:
        options = import_module(f"distlaunch.cli.compat.{name}.options").OPTIONS
        command = "accelerate launch" if name == "accelerate" else name
        own = [option for option in options if option.name not in known]
        yield command, name, own


def _compile_pattern(word: str) -> re.Pattern[str] | None:
    """Return a pattern for words that begin with ``word``; None if it has no letters. Dash,
    underscore and space are equal. A number must match as a whole."""
    stem = word.lower().lstrip("-").rstrip("-")
    if len(stem) > 3 and stem.endswith("s") and not stem.endswith("ss"):
        stem = stem[:-1]
    parts = [re.escape(part) for part in re.split(r"[-_ ]+", stem) if part]
    if not parts:
        return None
    end = r"(?!\w)" if stem.isdigit() else ""
    return re.compile(r"(?<!\w)" + "[-_ ]".join(parts) + end, re.IGNORECASE)


def _option_rows(pattern: re.Pattern[str]) -> list[Row]:
    """Return the rows of options that mention the word, those with the word in their name first."""
    found: dict[str, tuple[bool, Row]] = {}
    for command, place, options in _option_tables():
        if place in _DROP_INS:
            continue
        for option in options:
            in_name = pattern.search(option.name.lstrip("-")) is not None
            if option.name not in found and (in_name or pattern.search(option.help)):
                name, text = option_row(option, place)
                where = "" if command == "train" else f"  (distlaunch {command})"
                found[option.name] = in_name, (name + where, text)
    ordered = sorted(found.values(), key=lambda each: not each[0])
    return [row for _, row in ordered]


def _best_place(topic: str, pattern: re.Pattern[str]) -> _Hit | None:
    best: _Hit | None = None
    count = 0
    title = heading = ""
    for block in page_blocks(page_text(topic)):
        if block.kind == "heading":
            heading = without_marks(block.text)
            title = title or heading
        elif best is not None and not best.line and best.heading == heading:
            best = _Hit(topic=topic, heading=heading, line=_first_line(block), score=best.score)
        for text, is_subject in _matching_passages(block, pattern):
            count += 1
            score = _score_passage(block, topic, text, pattern, is_subject=is_subject)
            if best is None or score > best.score:
                line = (
                    "" if block.kind == "heading" else _shorten_around(without_marks(text), pattern)
                )
                best = _Hit(topic=topic, heading=heading, line=line, score=score)
    if best is None:
        return None
    score = max(best.score, _NAME if _has_whole_word(pattern, topic) else 0) + min(
        count, _MOST_COUNTED
    )
    if topic in developer_topics():
        score -= _LATE_FOR_DEVELOPERS
    elif topic in _NUMBERS:
        score -= _LATE_FOR_NUMBERS
    return _Hit(topic=topic, heading=best.heading, line=best.line, score=score)


def _score_passage(
    block: Block, topic: str, text: str, pattern: re.Pattern[str], *, is_subject: bool
) -> int:
    if block.kind == "heading":
        if topic == _HINTS_PAGE:
            return _SUBJECT
        return _TITLE if block.level == 1 else _HEADING
    if is_subject:
        return _SUBJECT_OF_REFERENCE if topic in reference_topics() else _SUBJECT
    return _WHOLE_WORD if _has_whole_word(pattern, text) else 0


def _first_line(block: Block) -> str:
    if block.kind == "table":
        return without_marks(": ".join(block.rows[1][:2]))
    text = block.text.partition("\n")[0] if block.kind == "code" else block.text
    return textwrap.shorten(
        without_marks(_SENTENCE_END.split(text)[0]), _LONGEST_LINE, placeholder=" …"
    )


def _matching_passages(block: Block, pattern: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Yield each passage of a block that matches, and whether the word is its subject: the first
    cell of a table's row, or the bold beginning of an item."""
    if block.kind == "table":
        for row in block.rows[1:]:
            if any(pattern.search(cell) for cell in row):
                yield ": ".join(row[:2]), _has_whole_word(pattern, row[0])
        return
    sentences: Iterable[str] = (
        block.text.splitlines() if block.kind == "code" else _SENTENCE_END.split(block.text)
    )
    for sentence in sentences:
        if pattern.search(sentence):
            bold = re.match(r"\*\*(.*?)\*\*", sentence) if block.kind == "item" else None
            yield sentence.strip(), bold is not None and _has_whole_word(pattern, bold[1])


def _has_whole_word(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether the text contains the word, or its plural with s."""
    return any(
        not re.match(r"(?!s\b)\w", text[found.end() :], re.IGNORECASE)
        for found in pattern.finditer(text.replace("-", " "))
    )


def _shorten_around(text: str, pattern: re.Pattern[str]) -> str:
    if len(text) <= _LONGEST_LINE:
        return text
    found = pattern.search(text)
    begin = 0
    if found is not None and found.end() > _LONGEST_LINE - 20:
        begin = text.rfind(" ", 0, max(1, found.start() - _LONGEST_LINE // 3)) + 1
    end = len(text)
    if end - begin > _LONGEST_LINE:
        end = text.rfind(" ", begin, begin + _LONGEST_LINE)
        end = begin + _LONGEST_LINE if end <= begin else end
    before, after = "… " if begin else "", " …" if end < len(text) else ""
    return before + text[begin:end] + after
