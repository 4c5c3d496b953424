"""Written YAML is read back unchanged by a reader of YAML 1.1."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.render.yaml import Commented, plain, write_documents

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=15,
)


def noted(value, why):
    """Add a comment to every value."""
    if isinstance(value, dict):
        return {key: Commented(value=noted(item, why), why=why) for key, item in value.items()}
    if isinstance(value, list):
        return [Commented(value=noted(item, why), why=why) for item in value]
    return value


@given(st.dictionaries(TEXTS, VALUES, max_size=5))
def test_written_yaml_is_read_back(document):
    assert yaml.safe_load(write_documents([], [document])) == (document or {}) or not document
    assert all(char.isprintable() or char == "\n" for char in write_documents([], [document]))


@given(
    st.dictionaries(TEXTS, VALUES, min_size=1, max_size=5),
    st.text(st.characters(codec="ascii", categories=("L", "Zs", "P"))),
)
def test_comments_change_nothing(document, why):
    assert yaml.safe_load(write_documents([why], [noted(document, why)])) == document
    assert plain(noted(document, why)) == document


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "On",
        "y",
        "NULL",
        "~",
        "",
        "012",
        "1e3",
        "0x1f",
        "1_000",
        "12:30:45",
        ".5",
        ".inf",
        "2026-01-01",
        "=",
        "<<",
        "-",
        "- a",
        "a: b",
        "a #b",
        "#a",
        "[a]",
        "{a}",
        "!tag",
        "&a",
        "*a",
        "%a",
        "@a",
        "`a",
        "|",
        ">",
        "?",
        "'",
        '"',
        "\\",
        " a ",
        "a\nb\n",
        "\t",
        "\r\n",
        "\x00",
        "\x1b[0m",
        "\x85",
        "\u2028",
        "\ufeff",
        "\ue000",
        "\uffff",
        "😀",
        "👩\u200d🚀",
        "\U000e0001",
        "None",
        "true",
        "a" * 500,
    ],
)
def test_texts_that_look_like_something_else_stay_texts(text):
    body = write_documents([], [{text: text, "list": [text, [text]]}])
    assert yaml.safe_load(body) == {text: text, "list": [text, [text]]}


def test_json_readers_escapes_are_not_used_where_yaml_has_none():
    assert json.dumps("\U000e0001") not in write_documents([], [{"a": "\U000e0001"}])
    assert '"\\U000e0001"' in write_documents([], [{"a": "\U000e0001"}])


def test_long_comments_are_broken_and_commands_are_not():
    body = write_documents(["word " * 60, "  command " + "word " * 60], [{"a": 1}])
    lines = body.splitlines()
    assert all(len(line) <= 112 for line in lines if "command" not in line)
    assert sum("command" in line for line in lines) == 1
