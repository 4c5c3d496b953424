from __future__ import annotations

import base64
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples


def records(shown: bytes) -> list[dict]:
    assert not shown or shown.endswith(b"\n")
    return [json.loads(line) for line in shown.split(b"\n")[:-1]]


def content(record: dict) -> bytes:
    return base64.b64decode(record["base64"]) if "base64" in record else record["text"].encode()


def test_each_line_is_one_object_on_stdout(memory):
    two = memory(world_size=2, format="jsonl")
    two.console.output(1, 2, "für\r\nx\n".encode(), 0.0)
    out, err = two.read()
    assert err == b""
    assert records(out) == [
        {"time": 1000.5, "type": "output", "rank": 1, "stream": "stderr", "text": "für"},
        {"time": 1000.5, "type": "output", "rank": 1, "stream": "stderr", "text": "x"},
    ]


def test_equal_lines_are_not_folded(memory):
    two = memory(world_size=2, format="jsonl")
    for rank in (0, 1):
        two.console.output(rank, 1, b"same\n", 0.0)
    assert [record["rank"] for record in records(two.stdout())] == [0, 1]


def test_launcher_lines_and_events_are_records(memory):
    one = memory(world_size=1, format="jsonl")
    one.console.say("note", level="warning")
    one.console.event({"event": "started", "attempt": 0})
    assert records(one.stdout()) == [
        {"time": 1000.5, "type": "message", "level": "warning", "text": "note"},
        {"event": "started", "attempt": 0},
    ]


def test_bytes_that_are_not_utf8_are_added_in_base64(memory):
    one = memory(world_size=1, format="jsonl")
    one.console.output(0, 1, b"ok\n\xff\xfe\n", 0.0)
    good, bad = records(one.stdout())
    assert "base64" not in good
    assert bad["text"] == "\ufffd\ufffd"
    assert content(bad) == b"\xff\xfe"


def test_a_partial_line_is_marked_and_its_end_is_too(memory):
    one = memory(world_size=1, format="jsonl")
    one.console.output(0, 1, b"Continue? ", 0.0)
    assert one.console.tick(0.4) == 0.5
    assert one.console.tick(0.5) is None
    one.console.output(0, 1, b"\n", 0.6)
    assert [(record["text"], record.get("partial")) for record in records(one.stdout())] == [
        ("Continue? ", True),
        ("", None),
    ]


def test_a_long_line_is_split_into_pieces_that_do_not_cut_a_character(memory):
    line = "x" + "é" * 100_000
    whole, pieces = memory(world_size=1, format="jsonl"), memory(world_size=1, format="jsonl")
    whole.console.output(0, 1, line.encode() + b"\n", 0.0)
    data = line.encode() + b"\n"
    for start in range(0, len(data), 5001):
        pieces.console.output(0, 1, data[start : start + 5001], 0.0)
    for found in (records(whole.stdout()), records(pieces.stdout())):
        assert len(found) > 1
        assert "".join(record["text"] for record in found) == line
        assert all(len(record["text"].encode()) <= 64 << 10 for record in found)
        assert not any("base64" in record for record in found)
        assert [record.get("partial", False) for record in found] == [True] * (len(found) - 1) + [
            False
        ]


def test_a_bar_is_its_states_marked_as_progress_and_its_last_one_as_a_line(memory):
    one = memory(world_size=1, format="jsonl")
    for second in range(25):
        one.console.output(0, 2, b"\r%d" % second, float(second))
        one.console.tick(float(second))
    one.console.output(0, 2, b"\ra\r\nb\rc\nd\r\n", 25.0)
    found = [
        (record["text"], record.get("progress"), record.get("partial"))
        for record in records(one.stdout())
    ]
    assert found == [
        ("10", True, None),
        ("20", True, None),
        ("a", None, None),
        ("c", None, None),
        ("d", None, None),
    ]


def test_a_bar_after_a_partial_record_ends_that_record(memory):
    one = memory(world_size=1, format="jsonl")
    one.console.output(0, 1, b"loading", 0.0)
    one.console.tick(0.5)
    one.console.output(0, 1, b"\r10%\r20%\n", 1.0)
    found = [(record["text"], record.get("partial")) for record in records(one.stdout())]
    assert found == [("loading", True), ("", None), ("20%", None)]


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 2), st.binary(max_size=40), st.floats(0, 0.6)),
        max_size=20,
    )
)
def test_every_stream_can_be_put_together_again(memory, chunks):
    some = memory(world_size=2, format="jsonl")
    written: dict[tuple[int, str], bytes] = {}
    now = 0.0
    for rank, stream, raw, wait in chunks:
        now += wait
        data = raw.replace(b"\r", b"").replace(
            b"\x1b", b""
        )  # of what is drawn over only the end is shown
        some.console.output(rank, stream, data, now)
        some.console.tick(now)
        key = (rank, {1: "stdout", 2: "stderr"}[stream])
        written[key] = written.get(key, b"") + data
    found: dict[tuple[int, str], bytes] = {}
    for record in records(some.stdout()):
        key = (record["rank"], record["stream"])
        found[key] = (
            found.get(key, b"") + content(record) + (b"" if record.get("partial") else b"\n")
        )
    expected = {
        key: text if text.endswith(b"\n") else text + b"\n" for key, text in written.items() if text
    }
    assert found == expected
