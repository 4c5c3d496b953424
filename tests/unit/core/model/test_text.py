"""Text from outside stays on its line and moves no cursor."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.model.text import format_ranks, name_ranks, printable, quoted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 漢", "plain ü 漢"),
        (os.fsdecode(b"l\xff\x80"), "l\\xff\\x80"),
        ("two\nlines\t\0", "two\\nlines\\t\\x00"),
        ("\x1b]0;t\x07\x9b2J\u202e", "\\x1b]0;t\\x07\\x9b2J\\u202e"),
        ("\ud800", "\\ud800"),
        ("a\\b", "a\\b"),
    ],
)
def test_only_unprintable_characters_are_escaped(text, shown):
    assert printable(text) == shown


def test_newlines_can_be_kept():
    assert printable("a\n\r\x1bb", keep="\n") == "a\n\\r\\x1bb"


@given(st.text(st.characters()))
def test_any_text_becomes_one_line_that_can_be_encoded(text):
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert quoted(text).isprintable()
    quoted(text).encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [("", "''"), ("a b", "'a b'"), ("it's", '"it\'s"'), ("x" * 99, "'" + "x" * 77 + "'...")],
)
def test_user_input_is_quoted_and_shortened(text, shown):
    assert quoted(text) == shown


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "rank 0"), ((3, 2, 0), "ranks 0,2-3"), (range(4), "ranks 0-3"), ([10, 10], "rank 10")],
)
def test_ranks_are_written_with_their_noun(ranks, text):
    assert name_ranks(ranks) == text
    assert text.endswith(f" {format_ranks(ranks)}")
