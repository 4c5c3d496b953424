from __future__ import annotations

import json
import math
import string
import time
import tracemalloc
from contextlib import suppress

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distlaunch.backends.config_file import read_document
from distlaunch.core.errors import ConfigError
from tests.examples import examples
from tests.facts import mentions

KEYS = st.text(string.ascii_letters + "_", min_size=1, max_size=12).filter(
    lambda key: yaml.safe_load(f"{key}: 1") == {key: 1}
)
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=200),
    st.lists(
        st.sampled_from(["Block", "a.b", "it's", '"x"', "#", "-", ":", "é", "\\", "C:", "{", "no"]),
        max_size=60,
    ).map(" ".join),
    st.sampled_from(
        [
            "no",
            "NO",
            "0",
            "1e8",
            "0.5",
            "null",
            "~",
            "",
            "all",
            "0,1",
            "10.0.0.1",
            "a\nb",
            "a\n\n b\n",
            " x ",
        ]
    ),
)
SCALARS = st.one_of(
    TEXTS, st.integers(-(2**40), 2**40), st.booleans(), st.none(), st.floats(allow_nan=False)
)
TREES = st.dictionaries(
    KEYS,
    st.one_of(SCALARS, st.dictionaries(KEYS, SCALARS, max_size=4), st.lists(SCALARS, max_size=4)),
    max_size=6,
)


@settings(deadline=None, max_examples=examples(60))
@given(TREES, st.booleans())
@example({"key": "word " * 40 + "it's: #"}, True)
@example({"key": "é" + "word " * 40}, False)
def test_yaml_written_by_pyyaml_is_read_back(values, unicode):
    text = yaml.safe_dump(values, allow_unicode=unicode)
    assert read_document(text, "c.yaml").values == yaml.safe_load(text) == values


@pytest.mark.parametrize(
    "value",
    [
        "no",
        "NO",
        "off",
        "yes",
        "On",
        "true",
        "FALSE",
        "~",
        "null",
        "Null",
        "0",
        "7",
        "-3",
        "+4",
        "0x1F",
        "0b101",
        "017",
        "1_000",
        "1.5",
        "-.5",
        "1.",
        "1e8",
        "1.0e+8",
        "1.e-3",
        ".inf",
        "-.inf",
        ".nan",
        "fp16",
        "all",
        "0,1",
        "10.0.0.1",
        "a:b",
        "http://x",
        "1.2.3",
        "TRANSFORMER_BASED_WRAP",
        "nO",
        "-",
        "08",
        "_1",
        "0o17",
        "-x",
        "?",
        "[a, b,]",
        "[a]",
        "[ 'a, b' , \"c\\t]\" , no, 1.5 ]  # d",
        "{a: 1}",
        "{ a: 1, 'b c': no , \"d\": 'it''s', e: , f: x # y }",
        "{a: b:c, d: http://x#y,}",
        "{a: x y, b: '{', c: \"\\x41\"} # d",
        "[a?b]",
        "[:a]",
        "{a: -1, b: ~}",
        "{ }",
        "{a: b: c}",
    ],
)
def test_scalars_have_the_values_of_pyyaml(value):
    text = f"key: {value}\nlast: 1\n"
    read, theirs = None, None
    try:
        theirs = yaml.safe_load(text)["key"]
    except yaml.YAMLError:
        with pytest.raises(ConfigError):
            read_document(text, "c.yaml")
        return
    read = read_document(text, "c.yaml").values["key"]
    assert type(read) is type(theirs)
    assert read == theirs or (math.isnan(read) and math.isnan(theirs))


BY_HAND = """\
# what we use on the small machine

compute_environment: LOCAL_MACHINE   # here
fsdp_config:
    fsdp_version: 2
    # between
    fsdp_transformer_layer_cls_to_wrap: Block,
       Layer
    'quoted key': it's
empty:
deepspeed_config: {}
commands:
- one
-   "two: 2"
hosts: [a, 1, no]
dynamo_config: {dynamo_backend: INDUCTOR, 'dynamo_mode': "default"}
pairs:
- {a: 1}
- {a: 2}
none: []
last: 'a # b'  # c
"""


def test_handwritten_yaml_is_read():
    document = read_document("---\n" + BY_HAND + "...\n", "c.yaml")
    assert document.values == yaml.safe_load(BY_HAND)
    assert document.where("fsdp_config", "fsdp_version") == "c.yaml:6"
    assert document.where("dynamo_config", "dynamo_mode") == "c.yaml:17"
    assert document.where("nothing") == "c.yaml"


def test_flow_and_block_styles_are_read():
    text = """\
names: &names [a, [b,
  {c: 1}]]
again: *names
text: |
  one
  two
each:
- name: x
  value: !!str 1
"""
    document = read_document(text, "c.yaml")
    assert document.values == yaml.safe_load(text)
    assert document.where("each", "0", "value") == "c.yaml:9"


def test_a_tab_is_named_in_the_hint():
    with pytest.raises(ConfigError) as caught:
        read_document("a:\n\tb: 1\n", "c.yaml")
    assert mentions(caught.value.hint, "spaces", "tabs")


def test_aliases_that_multiply_are_refused_in_bounded_memory():
    levels = "".join(
        f"b{level}: &b{level} [{', '.join([f'*b{level - 1}'] * 9)}]\n" for level in range(1, 15)
    )
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"^c\.yaml:\d+: more than 100,000 values"):
            read_document(f"b0: &b0 [lol]\n{levels}", "c.yaml")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_an_empty_file_is_an_empty_document():
    assert (
        read_document("", "c.yaml").values
        == read_document("# only this\n\n", "c.yaml").values
        == {}
    )


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("a: 1\nb\n", 2, "could not find expected ':'"),
        ("a: 1\na: 2\n", 2, "'a' is given twice, first on line 1"),
        ("a:\n  b: 1\n    c: 2\n", 3, "mapping values are not allowed here"),
        ("a:\n    b: 1\n  c: 2\n", 3, "expected <block end>"),
        ("  a: 1\nb: 2\n", 2, "but found '<block mapping start>'"),
        ("a:\n\tb: 1\n", 2, "found character '\\t' that cannot start any token"),
        ("a: !mine 1\n", 1, "the tag '!mine' is not supported here"),
        (
            "a: !!python/object/apply:os.system [true]\n",
            1,
            "the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        ("b: 1\na: !!set {x: null}\n", 2, "the tag 'tag:yaml.org,2002:set' is not supported here"),
        ("a: !!binary aGVsbG8=\n", 1, "the tag 'tag:yaml.org,2002:binary' is not supported here"),
        ("a: !!int abc\n", 1, "'abc' is not a number"),
        ("a: !!bool maybe\n", 1, "'maybe' is not of the type bool"),
        ("a: *b\n", 1, "found undefined alias 'b'"),
        ("a: &b [*b]\n", 1, "nested too deeply"),
        ("b: &b {x: 1}\na:\n  <<: *b\n", 3, "merge keys (<<) are not supported"),
        ("a: [b, c # d]\n", 2, "expected ',' or ']'"),
        ("a: [b}\n", 1, "expected ',' or ']', but got '}'"),
        ("a: {b: 1, b: 2}\n", 1, "'b' is given twice, first on line 1"),
        ("a: {no: 1}\n", 1, "no is a value in YAML, not text"),
        ("a: {b: 12:30}\n", 1, "'12:30' is not text"),
        ("a: {b: 1} c\n", 1, "but found '<scalar>'"),
        ("a: b: c\n", 1, "mapping values are not allowed here"),
        ("a: 'open\nb: 1\n", 1, "found unexpected end of stream (while scanning a quoted scalar)"),
        ("a: 'x' y\n", 1, "but found '<scalar>'"),
        ('x: 1\na: "\\q"\n', 2, "found unknown escape character 'q'"),
        ('a: "\\UFFFFFFFF"\n', 1, "not YAML: "),
        ("- a\n- b\n", 1, "expected 'name: value'"),
        (
            "a: 1\n---\nb: 2\n",
            2,
            "but found another document (expected a single document in the stream from line 1 on)",
        ),
        ("a: 'x\n" + "y\n" * 5000, 1, "found unexpected end of stream"),
        ("".join(" " * level + "a:\n" for level in range(300)), 22, "nested too deeply"),
        ("x: 1\na: " + "[" * 100_000, 2, "nested too deeply"),
        ("? " * 100_000, 1, "nested too deeply"),
        ("? [a]\n: b\n", 1, "a list or a mapping cannot be a name"),
        ("a:1\n", 1, "expected 'name: value'"),
        ("a: 1\nb: [a,,b]\n", 2, "but found ','"),
        ("a: [@b]\n", 1, "found character '@' that cannot start any token"),
        ("a: 12:30\n", 1, "'12:30' is not text in YAML"),
        ("a: 1:30.5\n", 1, "'1:30.5' is not text"),
        ("a:\n- 2024-01-31\n", 2, "'2024-01-31' is not text"),
        ("a: 2024-1-3 1:20:30.5 +01:00\n", 1, "is not text"),
        ("a: <<\n", 1, "'<<' is not text"),
        ("a: 0x_\n", 1, "'0x_' is not a number"),
        ("a: 0b_\n", 1, "'0b_' is not a number"),
        ("a: " + "9" * 5000, 1, "is not a number"),
        ("a: 1\nno: 2\n", 2, "no is a value in YAML, not text"),
        ("a:\n  null: 2\n", 2, "null is a value in YAML"),
        ("1: 2\n", 1, "1 is a value in YAML, not text"),
        ("a: b\n# \x07\n", 2, "'\\x07' is not allowed in YAML"),
        ("a: b\tc: d\n", 1, "that cannot start any token"),
        ("a: b\n# c\n  d\n", 3, "expected <block end>"),
        ("a: 1\n...\nb: 2\n", 3, "expected '<document start>'"),
        ("# " + "x" * 300_000, None, "larger than 256 KiB"),
        ('{"a": 1,\n "b" 2}', 2, "not JSON"),
        ('{"a": {"b": 1, "b": 2}}', None, "'b' is given twice"),
        ('{"a": ' + "[" * 100_000, None, "recursion"),
    ],
)
def test_unsupported_yaml_is_refused_with_its_line(text, line, why):
    with pytest.raises(ConfigError) as caught:
        read_document(text, "dir/c.yaml")
    assert caught.value.exit_code == 2
    assert why in caught.value.message
    assert caught.value.message.startswith("dir/c.yaml" if line is None else f"dir/c.yaml:{line}: ")


PIECES = st.sampled_from([
    *'abk,:-#?|[]{}"&*!@%<=', "no", "on", "~", "12:30", "1:30.5", "2024-01-01", "<<", "0x_", "0o7", "1_0", "1.0e+3", " ", "  ",
    "\n", "\n  ", "\n- ", "\nk2: ", "'", " #", "\t", "\x85", "\u2028", "[a,b,]", "[a,,b]", "{}", "---", "...", "\\n",
    "{a: ", ", b: ", "'c'",
])  # fmt: skip


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(PIECES, max_size=8).map("".join))
def test_documents_have_the_values_of_pyyaml(value):
    text = f"k: {value}"
    try:
        read = read_document(text, "c.yaml").values
    except ConfigError:
        return
    assert repr(read) == repr(yaml.safe_load(text))


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=examples(60))
def test_any_text_is_read_or_refused(text):
    try:
        read_document(text, "c.yaml")
    except ConfigError as exc:
        refused = exc.message
    else:
        return
    assert refused.startswith("c.yaml")


@settings(deadline=None)
@given(TREES)
def test_json_is_read_too(values):
    assert read_document(json.dumps(values), "c.json").values == values


@pytest.mark.parametrize(
    "text",
    [
        "a: x" + " " * 200_000 + "x\n",
        "a: 'x" + " " * 4_000_000 + "x'\n",
        "a: 'x\n" + (" " * 4_000 + "y\n") * 60,
        'a: "x\n' + ("\\" * 2_000 + "\n") * 120,
        "a: x\n" + "  y\n" * 60_000,
        "a: '" + "''" * 100_000 + "\n",
        "a: {" + "b: 'x' " * 30_000 + "}\n",
        "a: [" + "b, " * 80_000 + "\n",
        "a: [" + "[]," * 80_000 + "\n",
        "".join(f"k{number}: {number}\n" for number in range(18_000)),
    ],
    ids=[
        "blanks",
        "blanks in quotes",
        "open quote",
        "open quote with escapes",
        "many lines",
        "quotes in quotes",
        "no commas in one line",
        "open list in one line",
        "lists in an open list",
        "many keys",
    ],
)
def test_large_files_are_read_or_refused_in_time(text):
    begun = time.process_time()
    with suppress(ConfigError):
        read_document(text, "c.yaml")
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    "data",
    ["a: 1\n".encode("utf-16"), "a: 1\n".encode("utf-16-le"), b"\x7fELF\xff\x00", b"a: \xff"],
)
def test_a_file_that_is_not_text_is_refused_as_such(data):
    with pytest.raises(ConfigError, match=r"^c\.yaml:1: not UTF-8 text"):
        read_document(data.decode(errors="surrogateescape"), "c.yaml")


@pytest.mark.parametrize(
    "value",
    [
        "'a\n  b'",
        '"a\\\n   b \\\n  c"',
        "'it''s\n\n  ''x''y'",
        '"a\\\\\n  \\" b"',
        "a \n  \n  b",
        '" a\n  \n b "',
    ],
)
def test_multiline_quotes_have_the_values_of_pyyaml(value):
    text = f"key: {value}\nlast: 1\n"
    assert read_document(text, "c.yaml").values == yaml.safe_load(text)
