from __future__ import annotations

import contextlib
import json
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.record import Record, fields_of, replace
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import codec, spawner_messages
from distlaunch.core.protocol.codec import Decoder, encode
from tests.examples import examples
from tests.facts import mentions

NESTED_TYPES = {cls.__name__: cls for cls in m.REMOTE_NESTED_TYPES}
TYPES = {
    "agent": (*m.TO_REMOTE, *m.FROM_REMOTE),
    "spawner": (*spawner_messages.TO_SPAWNER, *spawner_messages.FROM_SPAWNER),
}
NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(
    st.characters(exclude_categories=[]), max_size=20
)  # with lone surrogates: bytes that are no UTF-8
BY_KIND = {
    "int": NUMBERS,
    "float": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53),
    "str": TEXTS,
    "bool": st.booleans(),
    "bytes": st.binary(max_size=100),
    "Mapping[str, str]": st.dictionaries(TEXTS, TEXTS, max_size=4),
    "Mapping[str, float]": st.dictionaries(
        TEXTS, st.floats(allow_nan=False, allow_infinity=False), max_size=4
    ),
    "Mapping[int, int]": st.dictionaries(NUMBERS, NUMBERS, max_size=4),
}


def values_of(kind: str) -> st.SearchStrategy:
    if kind.endswith(" | None"):
        return st.none() | values_of(kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        return st.lists(
            values_of(kind.removeprefix("tuple[").removesuffix(", ...]")), max_size=3
        ).map(tuple)
    if kind in NESTED_TYPES:
        return messages_of(NESTED_TYPES[kind])
    if kind.startswith("Literal["):
        return st.sampled_from(json.loads(kind.removeprefix("Literal").replace("'", '"')))
    return BY_KIND[kind]


def messages_of(cls: type[Record]) -> st.SearchStrategy[Record]:
    return st.fixed_dictionaries(
        {field: values_of(kind) for field, kind in fields_of(cls).items()}
    ).map(lambda values: cls(**values))


ANY_MESSAGE = st.sampled_from(TYPES["agent"]).flatmap(messages_of)


def decoder(side: str = "agent") -> Decoder:
    return Decoder(TYPES[side], m.REMOTE_NESTED_TYPES)


def frame(body: bytes | object, raw: bytes = b"") -> bytes:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack(">BII", codec.VERSION, len(body), len(raw)) + body + raw


def read(data: bytes) -> list:
    return list(decoder().feed(data))


def refused(data: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        read(data)
    return caught.value.message


# --- round trips


@pytest.mark.parametrize(
    ("side", "cls"), [(side, cls) for side, types in TYPES.items() for cls in types]
)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_every_message_can_be_encoded_and_decoded(side, cls, data):
    message = data.draw(messages_of(cls))
    [received] = decoder(side).feed(encode(message))
    assert received == message
    assert type(received) is cls


@given(messages=st.lists(ANY_MESSAGE, max_size=4), data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_frames_may_arrive_in_any_pieces(messages, data):
    stream = b"".join(map(encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    reader, received = decoder(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[begin:end])
    assert received == messages


def test_a_frame_may_be_split_at_every_byte():
    message = m.Input(data=bytes(range(256)))
    data = encode(message)
    for cut in range(len(data) + 1):
        reader = decoder()
        assert [*reader.feed(data[:cut]), *reader.feed(data[cut:])] == [message]
    reader = decoder()
    assert [one for byte in data for one in reader.feed(bytes([byte]))] == [message]


def test_environments_that_are_not_utf8_are_preserved():
    name, value = b"caf\xe9", b"\xff\x80 \xf0\x9f\x9a\x80"
    env = {os.fsdecode(name): os.fsdecode(value)}
    [received] = Decoder(spawner_messages.TO_SPAWNER, spawner_messages.NESTED_TYPES).feed(
        encode(spawner_messages.Setup(env=env, cwd="/", cookie="", nofile=1, signal_group=False))
    )
    assert {os.fsencode(key): os.fsencode(item) for key, item in received.env.items()} == {
        name: value
    }


def test_a_message_of_the_largest_size_is_accepted():
    message = m.Input(data=bytes(codec.MAX_RAW_BYTES))
    assert read(encode(message)) == [message]


def test_a_frame_is_ascii_followed_by_raw_bytes():
    data = encode(m.Input(data=b"\xff"))
    assert data == frame(b'{"t":"Input"}', b"\xff")


# --- what is refused


def stop(**changed) -> dict:
    return {"t": "Stop", "attempt": 1, "signum": 15, "grace_s": 2.5, **changed}


def test_the_message_that_the_other_tests_change_is_valid():
    assert read(frame(stop())) == [m.Stop(attempt=1, signum=15, grace_s=2.5)]


@pytest.mark.parametrize(
    "wrong",
    [
        stop(attempt="1"),
        stop(attempt=1.0),
        stop(attempt=True),
        stop(attempt=None),
        stop(attempt=[1]),
        stop(attempt={}),
        stop(grace_s="2"),
        stop(grace_s=True),
        stop(grace_s=None),
        stop(grace_s=float("nan")),
        stop(grace_s=float("inf")),
        stop(grace_s=float("-inf")),
        stop(grace_s=10**400),
        stop(grace_s=-(10**400)),
        stop(attempt=10**400),
        stop(signum=-(2**63) - 1),
        {"t": "Started", "attempt": 0, "pids": {"1": 2**63}},
        {"t": "Started", "attempt": 0, "pids": {str(2**63): 1}},
        {"t": "Pause", "paused": 1},
        {"t": "Pause", "paused": "yes"},
        {"t": "AgentFailed", "text": 5},
        {"t": "AgentFailed", "text": None},
        {"t": "AgentFailed", "text": ["x"]},
        {"t": "AttemptEnded", "attempt": 0, "left": 7},
        {"t": "AttemptEnded", "attempt": 0, "left": "12"},
        {"t": "AttemptEnded", "attempt": 0, "left": [1, "2"]},
        {"t": "AttemptEnded", "attempt": 0, "left": {"1": 2}},
        {"t": "Started", "attempt": 0, "pids": [1]},
        {"t": "Started", "attempt": 0, "pids": {"x": 1}},
        {"t": "Started", "attempt": 0, "pids": {"1": "2"}},
        {"t": "Started", "attempt": 0, "pids": {"1": True}},
        {"t": "Started", "attempt": 0, "pids": {"9" * 5000: 1}},
    ],
    ids=repr,
)
def test_values_of_a_wrong_type_are_refused(wrong):
    message = refused(frame(wrong))
    assert " is not " in message
    assert len(message) < 200


def test_seconds_become_floats():
    [message] = read(frame(stop(grace_s=2)))
    assert type(message.grace_s) is float


@pytest.mark.parametrize("field", ["attempt", "signum", "grace_s"])
def test_a_missing_field_is_refused(field):
    body = stop()
    del body[field]
    assert refused(frame(body)) == f"Stop lacks {field}"


def test_an_unknown_field_is_refused():
    assert mentions(refused(frame(stop(shell="rm"))), "Stop", "unknown fields")


def test_raw_bytes_that_no_field_takes_are_refused():
    assert mentions(refused(frame(stop(), b"x")), "Stop", "unknown fields")


def test_the_raw_field_cannot_be_in_the_object():
    refused(frame({"t": "Input", "data": "x"}, b"y"))


SPEC = {"rank": 0, "local_rank": 0, "argv": None, "env": {}, "cpus": None, "error_file": None}


@pytest.mark.parametrize(
    "worker",
    [
        7,
        None,
        "rank local_rank argv env cpus error_file",
        list(SPEC),
        [],
        {},
        {**SPEC, "more": 1},
        {**SPEC, "argv": "sh -c"},
        {**SPEC, "argv": [1]},
        {**SPEC, "env": {"A": 1}},
        {**SPEC, "env": []},
        {**SPEC, "cpus": [0.5]},
        {**SPEC, "error_file": 3},
    ],
    ids=repr,
)
def test_an_invalid_part_is_refused(worker):
    start = m.Start(
        attempt=0,
        argv=("x",),
        env={},
        cwd="/",
        workers=(),
        uses_gpus=False,
        signal_group=False,
        terminal=False,
        rows=1,
        columns=1,
        stdin_rank=None,
    )
    body = json.loads(encode(start)[9:])
    assert read(frame({**body, "workers": [SPEC]})) == [
        replace(start, workers=(m.WorkerSpec(**SPEC),))
    ]
    refused(frame({**body, "workers": [SPEC, worker]}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe\xfd",
        b"\x80",
        b"null",
        b"7",
        b'"Stop"',
        b"[]",
        b"{}",
        b'{"t":7}',
        b'{"t":null}',
        b'{"t":["Stop"]}',
        b'{"t":{}}',
        b'{"t":"Record"}',
        b'{"t":"WorkerSpec"}',
        b'{"t":"__class__"}',
        b'{"t":"Spawn"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"t":"AttemptEnded","attempt":0,"left":' + b"[" * 100_000,
        b"1" * 10_000,
    ],
    ids=lambda body: repr(body[:30]),
)
def test_invalid_bodies_are_refused(body):
    assert len(refused(frame(body))) < 200


@pytest.mark.parametrize(
    ("body", "raw"),
    [(codec.MAX_OBJECT_BYTES + 1, 0), (0, codec.MAX_RAW_BYTES + 1), (2**32 - 1, 2**32 - 1)],
)
def test_an_oversized_frame_is_refused_before_it_has_arrived(body, raw):
    assert mentions(refused(struct.pack(">BII", codec.VERSION, body, raw)), "allowed size")


def test_messages_before_invalid_data_are_returned():
    messages = decoder().feed(encode(m.ForwardSignal(signum=10)) + frame(b"nonsense"))
    assert next(messages) == m.ForwardSignal(signum=10)
    with pytest.raises(ProtocolError):
        next(messages)


@given(data=st.binary(max_size=200))
@settings(max_examples=examples(50), deadline=None)
def test_any_bytes_are_messages_or_a_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        assert all(isinstance(message, TYPES["agent"]) for message in read(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(data=st.data(), raw=st.binary(max_size=3))
@settings(max_examples=examples(60), deadline=None)
def test_any_json_in_any_field_is_a_message_or_a_protocol_error(data, raw):
    cls = data.draw(st.sampled_from(TYPES["agent"]))
    body = {
        "t": cls.__name__,
        **{field: data.draw(JSON) for field, kind in fields_of(cls).items() if kind != "bytes"},
    }
    try:
        [message] = read(frame(body, raw))
    except ProtocolError:
        return
    assert type(message) is cls
    assert [message] == read(encode(message))
