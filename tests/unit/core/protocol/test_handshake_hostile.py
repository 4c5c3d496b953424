"""Attackers are not admitted on the rendezvous port, and not trusted as its listener."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.model.record import replace
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import encode
from distlaunch.core.protocol.handshake import MOST_FROM_CALLER, HandshakeError
from tests.unit.core.protocol.handshake_pair import (
    CALL,
    OPEN,
    SECRET,
    WELCOME,
    WRONG_TOKEN,
    HandshakePair,
    answered,
    connecting,
    listener,
    messages,
)

# --- attacks


def test_a_replayed_call_and_proof_are_rejected():
    recorded = HandshakePair(SECRET, SECRET).run()
    admitted = []
    side = listener(SECRET, nonce="2" * 64, admitted=admitted)
    for data in recorded.sent:
        side.feed(data)
    assert side.outcome.text == WRONG_TOKEN
    assert not admitted


def test_a_replayed_challenge_and_admission_are_refused():
    recorded = HandshakePair(SECRET, SECRET).run()
    side = connecting(SECRET, nonce="d" * 64)
    asked, welcome = recorded.answers
    answered_until_outcome(side, asked)
    with pytest.raises(HandshakeError, match="secret"):
        answered_until_outcome(side, welcome)
    assert side.outcome is None


def answered_until_outcome(side, data: bytes) -> bytes:
    out = b""
    while data and side.outcome is None:
        taken = side.missing
        out += side.feed(data[:taken])
        data = data[taken:]
    return out


def test_a_listener_is_no_oracle_for_another_one():
    first = listener(SECRET, nonce="1" * 64)
    [asked] = messages(first.feed(encode(CALL)))
    second = listener(
        SECRET, nonce=CALL.nonce
    )  # as bad as it can get: even its nonce is what the attacker wants
    second.feed(encode(replace(CALL, nonce=asked.nonce)))
    [turned] = messages(second.feed(encode(p.Proof(proof="0" * 64))))
    first.feed(encode(p.Proof(proof=turned.proof)))
    assert first.outcome.text == WRONG_TOKEN


def test_a_reflected_proof_is_refused():
    side = connecting(SECRET)
    [proof] = messages(answered_until_outcome(side, encode(challenge())))
    with pytest.raises(HandshakeError, match="secret"):
        answered(side, encode(replace(WELCOME, proof=proof.proof)))


def test_a_launcher_refuses_its_own_nonce_as_challenge():
    side = connecting(SECRET)
    with pytest.raises(HandshakeError):
        answered(side, encode(challenge(nonce="c" * 64)))


def test_an_admission_without_a_challenge_is_refused():
    with pytest.raises(HandshakeError):
        answered(connecting(SECRET), encode(WELCOME))


def test_a_listener_without_a_secret_gets_no_proof():
    side = connecting(SECRET)
    [proof] = messages(answered_until_outcome(side, encode(challenge(key_method="none"))))
    assert proof == p.Proof(proof="unproven")
    assert (side.outcome.text, side.is_final) == (WRONG_TOKEN, False)


@pytest.mark.parametrize("job_identity", [OPEN, SECRET])
def test_a_refusal_before_any_proof_is_not_final(job_identity):
    side = connecting(job_identity)
    answered(side, encode(TURNED))
    assert not side.is_final


def test_a_refusal_without_a_proof_is_not_final():
    side = connecting(SECRET)
    answered_until_outcome(side, encode(challenge()))
    answered(side, encode(TURNED))
    assert not side.is_final


TURNED = p.Rejected(text="no", hint=None, exit_code=2, again=False)


def challenge(*, nonce="1" * 64, key_method="key", salt=""):
    return p.Challenge(nonce=nonce, key_method=key_method, salt=salt)


# --- strangers


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "http"),
        (b"P", "http"),
        (b"\x16\x03\x01\x02\x00", "tls"),
        (b"SSH-2.0-OpenSSH_9\r\n", "ssh"),
        (b"\0" * 40, "invalid"),
        (b"\xff" * 9000, "too_long"),
        (b"\x01\xff\xff\xff\xff\0\0\0\0", "invalid"),
        (b"\x01\0\0\0\x02\0\0\0\x01{}x", "invalid"),
        (b"\x01\0\0\0\x02\0\0\0\0{}", "invalid"),
        (b"\x01\0\0\0\x00\0\0\0\0", "invalid"),
        (encode(p.Proof(proof="")), "invalid"),
        (encode(CALL) + encode(p.Proof(proof="")), "invalid"),
        (encode(replace(CALL, nonce="")), "invalid"),
        (encode(replace(CALL, nonce="AB" * 32)), "invalid"),
        (encode(replace(CALL, nonce="ab " * 20)), "invalid"),
        (encode(replace(CALL, rank=-1)), "invalid"),
        (encode(replace(CALL, rank=10**9)), "invalid"),
        (encode(replace(CALL, host="n" * 301)), "invalid"),
        (encode(replace(CALL, version=10**6)), "invalid"),
        (encode(replace(CALL, host="n" * MOST_FROM_CALLER)), "too_long"),
    ],
)
def test_other_protocols_are_recognised_and_get_no_answer(data, kind):
    admitted = []
    side = listener(admitted=admitted)
    with pytest.raises(HandshakeError) as found:
        side.feed(data)
    assert found.value.reason.name.lower() == kind
    assert found.value.text.startswith("it ")
    assert not admitted


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "it speaks HTTP"),
        (b"SSH-2.0-x", "it speaks SSH"),
        (b"\x15\x03\x01", "TLS"),
    ],
)
def test_a_launcher_names_the_protocol_of_a_foreign_listener(data, words):
    side = connecting()
    with pytest.raises(HandshakeError, match=words):
        side.feed(data[: side.missing])


def test_an_incomplete_call_is_waited_for():
    whole = encode(CALL)
    for end in range(len(whole)):
        side = listener()
        assert side.feed(whole[:end]) == b""
        assert side.outcome is None
        assert side.call is None


def test_buffered_bytes_are_limited():
    side = listener()
    frame = struct.pack(">BII", 1, MOST_FROM_CALLER - 9, 0) + b"{" * MOST_FROM_CALLER
    for at in range(MOST_FROM_CALLER - 1):
        side.feed(frame[at : at + 1])
    with pytest.raises(HandshakeError):
        side.feed(b"{")


FRAMES = st.sampled_from(
    [
        encode(CALL),
        encode(replace(CALL, nonce="cd" * 16)),
        encode(p.Proof(proof="")),
        encode(p.Proof(proof="unproven")),
        encode(p.Proof(proof="0" * 64)),
        encode(p.Proof(proof="\udc80")),
        encode(challenge()),
        encode(challenge(key_method="none")),
        encode(challenge(key_method="scrypt", salt="ab" * 16)),
        encode(WELCOME),
        encode(p.Rejected(text="no", hint=None, exit_code=2, again=False)),
    ]
)


@settings(deadline=None)
@given(st.lists(st.one_of(FRAMES, st.binary(max_size=40)), max_size=6))
def test_nobody_without_the_token_is_admitted_whatever_they_send(parts):
    admitted = []
    side = listener(SECRET, admitted=admitted)
    try:
        for part in parts:
            side.feed(part)
    except HandshakeError:
        pass
    assert not admitted
    assert not isinstance(side.outcome, p.Welcome)


@settings(deadline=None)
@given(st.lists(st.one_of(FRAMES, st.binary(max_size=40)), max_size=6))
def test_no_listener_without_the_token_is_trusted_whatever_it_sends(parts):
    side = connecting(SECRET)
    try:
        for part in parts:
            answered_until_outcome(side, part)
    except HandshakeError:
        pass
    assert not isinstance(side.outcome, p.Welcome)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_within_a_handshake_do_no_harm(noise, at):
    whole = encode(CALL)
    side = listener(SECRET)
    try:
        side.feed(whole[:at] + noise + whole[at:])
    except HandshakeError:
        pass
    assert not isinstance(side.outcome, p.Welcome)
