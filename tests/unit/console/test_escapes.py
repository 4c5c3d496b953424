from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.console.escapes import clean, clean_text, hold_back, is_clean


def test_text_keeps_its_lines_and_carriage_returns():
    assert clean_text(b"1%\r2%\r\n\x1b[2Ja\n") == "1%\r2%\r\n␛[2Ja\n".encode()


@pytest.mark.parametrize("line", [b"plain", "überall · 100 % ░█\tü".encode(), b"", "°µ£".encode()])
def test_harmless_lines_are_clean(line):
    assert is_clean(line)
    assert clean(line) == line


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"\x1b]0;title\x07", "␛]0;title␇"),
        (b"\x1b[2J\x1b[H", "␛[2J␛[H"),
        (b"\x1b[6n", "␛[6n"),
        (b"\x1b[?1049h", "␛[?1049h"),
        (b"\x1bPq\x1b\\", "␛Pq␛\\"),
        (b"\x1bc", "␛c"),
        (b"\x1b[31", "␛[31"),
        (b"\x1b", "␛"),
        (b"a\x00b\x08c\x0e\x7f", "a␀b␈c␎␡"),
        ("\x9b2J\x9d0;t\x9c".encode(), "\ufffd2J\ufffd0;t\ufffd"),
        (b"raw \x9b2J", "raw \ufffd2J"),
        (b"\x1b[3\x1b[31mm\x1b[0m", "␛[3\x1b[31mm\x1b[0m"),
        (b"\x1b[" + b"1" * 70 + b"m", "␛[" + "1" * 70 + "m"),
        (b"bar\x1b[A", "bar"),
    ],
)
def test_hostile_sequences_are_made_visible(line, shown):
    assert not is_clean(line)
    assert clean(line).decode() == shown


@pytest.mark.parametrize(
    "line",
    [b"\x1b[31mred\x1b[0m", b"\x1b[1;32mok\x1b[m done", b"x\x1b[K", b"\x1b[38:5:3mx\x1b[00m"],
)
def test_colours_that_end_and_erase_in_line_pass(line):
    assert clean(line) == line


@pytest.mark.parametrize("line", [b"\x1b[31mred", b"\x1b[0mx\x1b[0;31m"])
def test_colours_left_open_end_with_the_line(line):
    assert clean(line) == line + b"\x1b[0m"
    assert clean(line, reset=False) == line


@given(st.binary(max_size=200))
def test_no_raw_escape_but_colours_and_erase_survives(data):
    text = clean(data, reset=False).decode()
    for piece in text.split("\x1b")[1:]:
        head = piece[1:].lstrip("0123456789:;")
        assert piece[0] == "["
        assert head[0] in "mK"
    assert not any(
        (char < " " and char not in "\t\n\x1b") or "\x7f" <= char <= "\x9f" for char in text
    )


@pytest.mark.parametrize(
    ("piece", "held"),
    [
        (b"abc", b""),
        (b"abc\x1b", b"\x1b"),
        (b"abc\x1b[", b"\x1b["),
        (b"abc\x1b[3;1", b"\x1b[3;1"),
        (b"abc\x1b[31m", b""),
        (b"abc\x1b]0;t", b""),
        ("abc█".encode()[:-1], "█".encode()[:-1]),
        ("abc😀".encode()[:-2], "😀".encode()[:-2]),
        ("abc😀".encode(), b""),
        (b"\xc2", b"\xc2"),
        (b"\x80\x80\x80\x80", b""),
        (b"", b""),
    ],
)
def test_an_unfinished_sequence_or_character_is_held_back(piece, held):
    assert hold_back(piece) == (piece.removesuffix(held) if held else piece, held)


@given(st.binary(max_size=100))
def test_holding_back_loses_nothing_and_is_short(data):
    shown, held = hold_back(data)
    assert shown + held == data
    assert len(held) <= 32
