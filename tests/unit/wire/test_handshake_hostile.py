"""Who cannot get in on the rendezvous port, nor be taken for its listener: attackers, strangers, whatever they send."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.model.record import replace
from distlaunch.core.wire import peers as p
from distlaunch.core.wire.codec import encode
from distlaunch.core.wire.handshake import MOST_FROM_CALLER, CallerSide, Stranger
from tests.unit.wire.handshaking import (
    CALL,
    SECRET,
    WELCOME,
    WRONG_TOKEN,
    Meeting,
    answered,
    caller,
    listener,
    messages,
)

# --- attacks


def test_a_replayed_call_and_proof_are_worth_nothing():
    recorded = Meeting(SECRET, SECRET).run()
    admitted = []
    side = listener(SECRET, nonce="2" * 64, admitted=admitted)
    for data in recorded.sent:
        side.feed(data)
    assert side.outcome.text == WRONG_TOKEN
    assert not admitted


def test_a_replayed_challenge_and_welcome_are_worth_nothing():
    recorded = Meeting(SECRET, SECRET).run()
    side = CallerSide(SECRET, nonce="d" * 64, rank=3, host="n3", instance="i")
    for data in recorded.said:
        answered_until_outcome(side, data)
    assert side.outcome.text == WRONG_TOKEN


def answered_until_outcome(side: CallerSide, data: bytes) -> None:
    while data and side.outcome is None:
        taken = side.missing
        side.feed(data[:taken])
        data = data[taken:]


def test_the_listeners_own_proof_sent_back_to_it_is_no_proof():
    side = listener(SECRET)
    [challenge] = messages(side.feed(encode(CALL)))
    side.feed(encode(p.Proof(proof=challenge.proof)))
    assert side.outcome.text == WRONG_TOKEN


def test_a_proof_had_from_a_second_connection_with_the_nonces_swapped_is_no_proof():
    first = listener(SECRET, nonce="1" * 64)
    [challenge] = messages(first.feed(encode(CALL)))
    second = listener(SECRET, nonce=CALL.nonce)  # as bad as it can get: even its nonce is what the attacker wants
    [reflected] = messages(second.feed(encode(replace(CALL, nonce=challenge.nonce))))
    first.feed(encode(p.Proof(proof=reflected.proof)))
    assert first.outcome.text == WRONG_TOKEN


def test_a_caller_is_no_oracle_for_another_one():
    victim = caller(SECRET)
    [call] = messages(victim.begin())
    other = CallerSide(SECRET, nonce=call.nonce, rank=3, host="n3", instance="i")
    answered_until_outcome(other, encode(p.Challenge(nonce=call.nonce, proof="", wants_proof=True)))
    assert other.outcome.text == WRONG_TOKEN
    answered_until_outcome(victim, encode(p.Challenge(nonce="e" * 64, proof=call.nonce, wants_proof=True)))
    assert victim.outcome.text == WRONG_TOKEN


def test_a_welcome_without_a_challenge_is_not_believed():
    with pytest.raises(Stranger):
        answered(caller(SECRET), encode(WELCOME))


def test_a_listener_that_wants_no_proof_does_not_get_round_its_own():
    side = caller(SECRET)
    answered_until_outcome(side, encode(p.Challenge(nonce="1" * 64, proof="", wants_proof=False)))
    assert side.outcome.text == WRONG_TOKEN


# --- strangers


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "http"),
        (b"P", "http"),
        (b"\x16\x03\x01\x02\x00", "tls"),
        (b"SSH-2.0-OpenSSH_9\r\n", "ssh"),
        (b"\0" * 40, "garbage"),
        (b"\xff" * 9000, "long"),
        (b"\x01\xff\xff\xff\xff\0\0\0\0", "garbage"),
        (b"\x01\0\0\0\x02\0\0\0\x01{}x", "garbage"),
        (b"\x01\0\0\0\x02\0\0\0\0{}", "garbage"),
        (b"\x01\0\0\0\x00\0\0\0\0", "garbage"),
        (encode(p.Proof(proof="")), "garbage"),
        (encode(CALL) + encode(p.Proof(proof="")), "garbage"),
        (encode(replace(CALL, nonce="")), "garbage"),
        (encode(replace(CALL, nonce="AB" * 32)), "garbage"),
        (encode(replace(CALL, nonce="ab " * 20)), "garbage"),
        (encode(replace(CALL, rank=-1)), "garbage"),
        (encode(replace(CALL, rank=10**9)), "garbage"),
        (encode(replace(CALL, host="n" * 301)), "garbage"),
        (encode(replace(CALL, version=10**6)), "garbage"),
        (encode(replace(CALL, host="n" * MOST_FROM_CALLER)), "long"),
    ],
)
def test_what_is_no_call_is_recognised_and_gets_no_answer(data, kind):
    admitted = []
    side = listener(admitted=admitted)
    with pytest.raises(Stranger) as found:
        side.feed(data)
    assert found.value.kind == kind
    assert found.value.text.startswith("it ")
    assert not admitted


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"HTTP/1.1 400 Bad Request\r\n", "it speaks HTTP"), (b"SSH-2.0-x", "it speaks SSH"), (b"\x15\x03\x01", "TLS")],
)
def test_a_caller_names_what_listens_instead(data, words):
    side = caller()
    with pytest.raises(Stranger, match=words):
        side.feed(data[: side.missing])


def test_a_call_cut_short_anywhere_is_waited_for():
    whole = encode(CALL)
    for end in range(len(whole)):
        side = listener()
        assert side.feed(whole[:end]) == b""
        assert side.outcome is None
        assert side.call is None


def test_drops_of_bytes_are_held_up_to_a_bound():
    side = listener()
    frame = struct.pack(">BII", 1, MOST_FROM_CALLER - 9, 0) + b"{" * MOST_FROM_CALLER
    for at in range(MOST_FROM_CALLER - 1):
        side.feed(frame[at : at + 1])
    with pytest.raises(Stranger):
        side.feed(b"{")


FRAMES = st.sampled_from(
    [
        encode(CALL),
        encode(replace(CALL, nonce="cd" * 16)),
        encode(p.Proof(proof="")),
        encode(p.Proof(proof="unproven")),
        encode(p.Proof(proof="0" * 64)),
        encode(p.Proof(proof="\udc80")),
        encode(p.Challenge(nonce="1" * 64, proof="", wants_proof=False)),
        encode(p.Challenge(nonce="1" * 64, proof="", wants_proof=True)),
        encode(p.Challenge(nonce="1" * 64, proof="0" * 64, wants_proof=True)),
        encode(WELCOME),
        encode(p.Turned(text="no", hint=None, exit_code=2, again=False)),
    ]
)


@given(st.lists(st.one_of(FRAMES, st.binary(max_size=40)), max_size=6))
def test_nobody_without_the_token_is_admitted_whatever_they_send(parts):
    admitted = []
    side = listener(SECRET, admitted=admitted)
    try:
        for part in parts:
            side.feed(part)
    except Stranger:
        pass
    assert not admitted
    assert not isinstance(side.outcome, p.Welcome)


@given(st.lists(st.one_of(FRAMES, st.binary(max_size=40)), max_size=6))
def test_no_listener_without_the_token_is_believed_whatever_it_sends(parts):
    side = caller(SECRET)
    try:
        for part in parts:
            answered_until_outcome(side, part)
    except Stranger:
        pass
    assert not isinstance(side.outcome, p.Welcome)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_in_the_middle_of_a_call_do_no_harm(noise, at):
    whole = encode(CALL)
    side = listener(SECRET)
    try:
        side.feed(whole[:at] + noise + whole[at:])
    except Stranger:
        pass
    assert not isinstance(side.outcome, p.Welcome)
