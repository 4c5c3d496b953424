from __future__ import annotations

import json
import struct

import pytest

from distlaunch.core.model.record import plain, replace
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import encode
from distlaunch.core.protocol.handshake import HandshakeError, RefusalReason
from tests.facts import mentions
from tests.unit.core.protocol.handshake_pair import (
    CALL,
    OPEN,
    SECRET,
    WEAK,
    WELCOME,
    WRONG_TOKEN,
    HandshakePair,
    answered,
    connecting,
    listener,
    messages,
)


@pytest.mark.parametrize(
    "job_identity", [OPEN, SECRET, WEAK], ids=["without a token", "128 bits", "a phrase"]
)
@pytest.mark.parametrize("size", [1, 2, 7, 9, 100, 1 << 20])
def test_a_handshake_succeeds_however_the_bytes_arrive(job_identity, size):
    pair = HandshakePair(job_identity, job_identity).run(size)
    assert pair.connecting.outcome == pair.listener.outcome == WELCOME
    assert pair.connecting.is_final
    [call] = pair.admitted
    assert (call.rank, call.host, call.instance, call.job_key) == (3, "n3", "i", "77")


@pytest.mark.parametrize("job_identity", [SECRET, WEAK])
def test_the_token_itself_is_never_sent(job_identity):
    pair = HandshakePair(job_identity, job_identity).run()
    assert job_identity.token not in b"".join(pair.sent + pair.answers)


def test_a_launcher_reads_no_byte_after_its_admission():
    pair = HandshakePair(OPEN, OPEN)
    challenge = pair.listener.feed(pair.connecting.begin())
    stream = bytearray(
        pair.listener.feed(answered(pair.connecting, challenge)) + b"what comes next"
    )
    while pair.connecting.outcome is None:
        taken = pair.connecting.missing
        assert taken > 0
        pair.connecting.feed(bytes(stream[:taken]))
        del stream[:taken]
    assert stream == b"what comes next"


@pytest.mark.parametrize(
    ("connecting", "listener"),
    [
        (SECRET, replace(OPEN, token=b"fedcba9876543210" * 2)),
        (WEAK, replace(OPEN, token=b"another phrase")),
        (SECRET, WEAK),
        (WEAK, SECRET),
        (SECRET, OPEN),
        (OPEN, SECRET),
    ],
    ids=[
        "another token",
        "another phrase",
        "a phrase",
        "no phrase",
        "only the connecting",
        "only the listener",
    ],
)
def test_a_wrong_token_is_reported_to_both_sides_and_nothing_else(connecting, listener):
    pair = HandshakePair(connecting, listener).run()
    for turned in (pair.connecting.outcome, pair.listener.outcome):
        assert isinstance(turned, p.Rejected)
        assert turned.text == WRONG_TOKEN
    assert not pair.connecting.is_final
    assert pair.listener.rejected_for is RefusalReason.TOKEN
    assert not pair.admitted


def test_the_listener_sends_no_proof_to_an_unproven_launcher():
    side = listener(SECRET)
    [challenge] = messages(side.feed(encode(CALL)))
    assert plain(challenge).keys() == {"nonce", "key_method", "salt"}
    [turned] = messages(side.feed(encode(p.Proof(proof="0" * 64))))
    assert (turned.text, turned.proof) == (WRONG_TOKEN, "")


@pytest.mark.parametrize("job_identity", [OPEN, SECRET])
@pytest.mark.parametrize("change", [{"release": "1.2.4"}, {"job_key": "78"}, {"job_key": ""}])
def test_another_release_or_job_is_rejected(job_identity, change):
    pair = HandshakePair(replace(job_identity, **change), job_identity).run()
    assert isinstance(pair.connecting.outcome, p.Rejected)
    assert pair.connecting.outcome.hint
    assert not pair.connecting.is_final
    assert pair.listener.rejected_for in (RefusalReason.OTHER_RELEASE, RefusalReason.OTHER_JOB)
    assert not pair.admitted


def test_without_a_secret_both_jobs_are_named():
    pair = HandshakePair(replace(OPEN, job_key="78"), OPEN).run()
    assert pair.listener.rejected_for is RefusalReason.OTHER_JOB
    assert pair.connecting.outcome.text == pair.listener.rejection
    assert mentions(pair.listener.rejection, "'77'", "n3", "'78'")


def test_with_a_secret_the_launcher_does_not_learn_the_job():
    pair = HandshakePair(replace(SECRET, job_key="78"), SECRET).run()
    assert mentions(pair.connecting.outcome.text, "'78'")
    assert mentions(pair.listener.rejection, "'77'", "n3", "'78'")
    assert b"77" not in b"".join(pair.answers)


def test_both_releases_are_named():
    pair = HandshakePair(replace(OPEN, release="1.2.4"), OPEN).run()
    assert mentions(pair.connecting.outcome.text, "1.2.3", "n3", "1.2.4")


def test_another_protocol_version_is_another_release():
    side = listener()
    side.feed(encode(replace(CALL, version=9, release="9.0")))
    assert mentions(side.outcome.text, "1.2.3", "n3", "9.0")


def test_a_call_with_unknown_fields_is_another_release():
    body = json.dumps({"t": "Call", "release": "9.0\x1b[2J", "colour": "green"}).encode()
    side = listener()
    [turned] = messages(side.feed(struct.pack(">BII", 1, len(body), 0) + body))
    assert mentions(turned.text, "1.2.3", "9.0\\x1b[2J")


@pytest.mark.parametrize(
    "known", [True, False], ids=["in our words", "in words that we do not know"]
)
def test_another_job_is_reported_before_another_release(known):
    other = replace(CALL, version=9, release="9.0", job_key="78")
    body = json.dumps(
        {"t": "Call", **plain(other), **({} if known else {"colour": "green"})}
    ).encode()
    side = listener()
    [turned] = messages(side.feed(struct.pack(">BII", 1, len(body), 0) + body))
    assert mentions(turned.text, "'77'")
    assert side.rejected_for is RefusalReason.OTHER_JOB


@pytest.mark.parametrize(
    "key", ["k" * 300, "k" * 100_000, "é" * 300, "\udc80" * 5000, "7" * 128, ""]
)
def test_job_keys_of_any_length_are_compared_completely(key):
    ours = replace(OPEN, job_key=key)
    assert HandshakePair(ours, ours).run().connecting.outcome == WELCOME
    other = HandshakePair(replace(OPEN, job_key=key + "x"), ours).run()
    assert other.listener.rejected_for is RefusalReason.OTHER_JOB


def test_another_frame_version_is_another_release_on_both_sides():
    for side in (listener(), connecting()):
        side.feed(b"\x02whatever")
        assert mentions(side.outcome.text, "another release")


@pytest.mark.parametrize("job_identity", [OPEN, SECRET, WEAK])
def test_a_proven_rejection_is_final(job_identity):
    turned = p.Rejected(text="node 3 is here already", hint=None, exit_code=2, again=True)
    pair = HandshakePair(job_identity, job_identity, answer=turned).run()
    assert pair.connecting.outcome == turned
    assert pair.connecting.is_final
    assert pair.listener.rejected_for is None


def test_a_listeners_text_and_exit_code_are_sanitized():
    side = connecting()
    side_says = p.Rejected(text="\x1b]0;x\x07" + "y" * 9000, hint="a\nb", exit_code=0, again=False)
    answered(side, encode(side_says))
    assert side.outcome.text.startswith(r"\x1b]0;x\x07y")
    assert len(side.outcome.text) < 5000
    assert (side.outcome.hint, side.outcome.exit_code) == ("a\nb", 2)


def test_a_token_is_never_shown_and_never_empty():
    assert SECRET.token.decode() not in repr(SECRET)
    with pytest.raises(ValueError):
        replace(OPEN, token=b"")


@pytest.mark.parametrize(
    "welcome",
    [
        {"folder": "../../evil"},
        {"folder": "/tmp/evil"},
        {"folder": ".."},
        {"folder": "a\0b"},
        {"folder": "x" * 300},
        {"folder": "a\ud800"},
        {"folder": "a\x1b[2J"},
        {"job_id": "a\ud800", "folder": "y"},
        {"job_id": "a\x9b", "folder": "y"},
        {"job_id": "../evil"},
        {"job_id": "."},
        {"job_id": "x" * 5000, "folder": "y"},
        {"rank": -1},
        {"rank": 1 << 40},
        {"job_id": ""},
        {"job_id": "latest"},
        {"folder": "latest"},
        {"folder": ".ssh"},
        {"folder": "-x"},
        {"job_id": "-x"},
    ],
)
def test_an_admission_with_a_path_or_an_impossible_rank_is_refused(welcome):
    with pytest.raises(HandshakeError):
        HandshakePair(OPEN, OPEN, answer=replace(WELCOME, **welcome)).run()


def test_a_job_with_any_id_may_name_its_run_directory():
    answer = replace(WELCOME, job_id="run/7 of é\u00a0\udcff", folder="run-7_ab12")
    assert HandshakePair(OPEN, OPEN, answer=answer).run().connecting.outcome == answer
