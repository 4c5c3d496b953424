"""Who gets in on the rendezvous port, and who cannot."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.model.record import plain, replace
from distlaunch.core.wire import peers as p
from distlaunch.core.wire.codec import Decoder, encode
from distlaunch.core.wire.handshake import (
    MOST_FROM_CALLER,
    CallerSide,
    ListenerSide,
    Party,
    Stranger,
    may_be_of_another_job,
)

OPEN = Party(release="1.2.3", job_key="77")
SECRET = replace(OPEN, token=b"secret")
CALL = p.Call(version=p.PEER_VERSION, release="1.2.3", job_key="77", rank=3, host="n3", instance="i", nonce="ab" * 32)
WELCOME = p.Welcome(job_id="job", rank=3)
WRONG_TOKEN = "the token is not the same"


class Meeting:
    """A caller and a listener, and all that went between them."""

    def __init__(self, caller: Party, listener: Party, *, answer=WELCOME, nonces=("c" * 64, "1" * 64)) -> None:
        self.admitted = []
        self.sent = []
        self.said = []

        def admit(call):
            self.admitted.append(call)
            return answer

        self.caller = CallerSide(caller, nonce=nonces[0], rank=3, host="n3", instance="i")
        self.listener = ListenerSide(listener, nonce=nonces[1], admit=admit)

    def run(self, size: int = 1 << 20) -> Meeting:
        out = self.caller.begin()
        while out:
            self.sent.append(out)
            answer = b"".join([self.listener.feed(out[at : at + size]) for at in range(0, len(out), size)])
            self.said.append(answer)
            out = b""
            while answer and not self.caller.outcome:
                part, answer = answer[: min(size, self.caller.missing)], answer[min(size, self.caller.missing) :]
                out += self.caller.feed(part)
            assert not answer or self.caller.outcome
        return self


def messages(data: bytes) -> list:
    return list(Decoder((p.Call, p.Challenge, p.Proof, p.Welcome, p.Turned)).feed(data))


@pytest.mark.parametrize("party", [OPEN, SECRET], ids=["without a token", "with a token"])
@pytest.mark.parametrize("size", [1, 2, 7, 9, 100, 1 << 20])
def test_both_sides_of_one_job_come_together_however_the_bytes_arrive(party, size):
    meeting = Meeting(party, party).run(size)
    assert meeting.caller.outcome == meeting.listener.outcome == WELCOME
    [call] = meeting.admitted
    assert (call.rank, call.host, call.instance, call.job_key) == (3, "n3", "i", "77")


def test_the_token_itself_is_never_sent():
    meeting = Meeting(SECRET, SECRET).run()
    assert b"secret" not in b"".join(meeting.sent + meeting.said)


def test_the_caller_reads_no_byte_that_follows_its_welcome():
    meeting = Meeting(OPEN, OPEN)
    challenge = meeting.listener.feed(meeting.caller.begin())
    stream = bytearray(meeting.listener.feed(answered(meeting.caller, challenge)) + b"what comes next")
    while meeting.caller.outcome is None:
        taken = meeting.caller.missing
        assert taken > 0
        meeting.caller.feed(bytes(stream[:taken]))
        del stream[:taken]
    assert stream == b"what comes next"


def answered(caller: CallerSide, data: bytes) -> bytes:
    out = b""
    while data:
        taken = caller.missing
        out += caller.feed(data[:taken])
        data = data[taken:]
    return out


@pytest.mark.parametrize(
    ("caller", "listener"),
    [(SECRET, replace(OPEN, token=b"other")), (SECRET, OPEN), (OPEN, SECRET)],
    ids=["another token", "only the caller has one", "only the listener has one"],
)
def test_a_wrong_token_is_told_to_both_and_nothing_more(caller, listener):
    meeting = Meeting(caller, listener).run()
    for turned in (meeting.caller.outcome, meeting.listener.outcome):
        assert isinstance(turned, p.Turned)
        assert (turned.text, turned.exit_code, turned.again) == (WRONG_TOKEN, 2, False)
    assert meeting.listener.turned_for == "token"
    assert not meeting.admitted


def test_a_caller_gives_nothing_made_of_its_token_to_a_listener_that_has_not_proved_itself():
    meeting = Meeting(SECRET, replace(OPEN, token=b"other"))
    meeting.run()
    [proof] = messages(meeting.sent[1])
    assert proof == p.Proof(proof="unproven")


@pytest.mark.parametrize("token", [None, b"secret"])
@pytest.mark.parametrize(
    ("change", "why", "words"),
    [
        ({"release": "1.2.4"}, "release", "the launcher that was called is distlaunch 1.2.3, n3 is distlaunch 1.2.4"),
        (
            {"job_key": "78"},
            "job",
            "the port belongs to another job: it is of job '77', and n3 called for job '78'",
        ),
        (
            {"job_key": ""},
            "job",
            "the port belongs to another job: it is of job '77', and n3 called for a job without an id",
        ),
    ],
)
def test_another_release_or_job_is_turned_away_with_both_named(token, change, why, words):
    listener = replace(OPEN, token=token)
    meeting = Meeting(replace(listener, **change), listener).run()
    assert meeting.caller.outcome == meeting.listener.outcome
    assert (meeting.caller.outcome.text, meeting.caller.outcome.exit_code) == (words, 2)
    assert meeting.caller.outcome.hint
    assert meeting.listener.turned_for == why
    assert may_be_of_another_job(meeting.caller.outcome) == (why == "job")
    assert not meeting.admitted


def listener(party: Party = OPEN, nonce: str = "1" * 64, admitted: list | None = None) -> ListenerSide:
    def admit(call):
        if admitted is not None:
            admitted.append(call)
        return WELCOME

    return ListenerSide(party, nonce=nonce, admit=admit)


def caller(party: Party = OPEN) -> CallerSide:
    return CallerSide(party, nonce="c" * 64, rank=None, host="n1", instance="i")


def test_another_version_of_the_words_is_another_release():
    side = listener()
    side.feed(encode(replace(CALL, version=2, release="9.0")))
    assert side.outcome.text == "the launcher that was called is distlaunch 1.2.3, n3 is distlaunch 9.0"


def test_a_call_with_fields_that_we_do_not_know_is_another_release():
    body = json.dumps({"t": "Call", "release": "9.0\x1b[2J", "colour": "green"}).encode()
    side = listener()
    [turned] = messages(side.feed(struct.pack(">BII", 1, len(body), 0) + body))
    text = r"the launcher that was called is distlaunch 1.2.3, the caller is distlaunch 9.0\x1b[2J"
    assert turned.text == f"the port belongs to another release: {text}"
    assert turned.exit_code == 2
    assert may_be_of_another_job(turned)


@pytest.mark.parametrize("known", [True, False], ids=["in our words", "in words that we do not know"])
def test_another_release_of_another_job_is_another_job_first(known):
    other = replace(CALL, version=2, release="9.0", job_key="78")
    body = json.dumps({"t": "Call", **plain(other), **({} if known else {"colour": "green"})}).encode()
    side = listener()
    [turned] = messages(side.feed(struct.pack(">BII", 1, len(body), 0) + body))
    assert turned.text.startswith("the port belongs to another job: it is of job '77', and ")
    assert side.turned_for == "job"


def test_another_release_of_our_own_job_is_found_nowhere_else():
    body = json.dumps({"t": "Call", "release": "9.0", "job_key": "77"}).encode()
    side = listener()
    [turned] = messages(side.feed(struct.pack(">BII", 1, len(body), 0) + body))
    assert turned.text == "the launcher that was called is distlaunch 1.2.3, the caller is distlaunch 9.0"
    assert not may_be_of_another_job(turned)


@pytest.mark.parametrize("key", ["k" * 300, "k" * 100_000, "é" * 300, "\udc80" * 5000, "7" * 128, ""])
def test_a_job_of_any_key_comes_together_and_another_that_begins_alike_does_not(key):
    ours = replace(OPEN, job_key=key)
    assert Meeting(ours, ours).run().caller.outcome == WELCOME
    other = Meeting(replace(OPEN, job_key=key + "x"), ours).run()
    assert other.listener.turned_for == "job"


def test_other_frames_are_another_release_on_both_sides():
    for side in (listener(), caller()):
        side.feed(b"\x02whatever")
        assert side.outcome.exit_code == 2
        assert "another release of distlaunch" in side.outcome.text
        assert may_be_of_another_job(side.outcome)


def test_what_the_job_says_to_a_caller_is_passed_on():
    turned = p.Turned(text="node 3 is here already", hint=None, exit_code=2, again=True)
    meeting = Meeting(OPEN, OPEN, answer=turned).run()
    assert meeting.caller.outcome == turned
    assert meeting.listener.turned_for == ""


def test_what_a_listener_says_is_made_fit_for_a_terminal_and_an_exit_code():
    side = caller()
    side_says = p.Turned(text="\x1b]0;x\x07" + "y" * 9000, hint="a\nb", exit_code=0, again=False)
    answered(side, encode(side_says))
    assert side.outcome.text.startswith(r"\x1b]0;x\x07y")
    assert len(side.outcome.text) < 5000
    assert (side.outcome.hint, side.outcome.exit_code) == ("a\nb", 2)


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


def test_a_token_is_never_shown_and_never_empty():
    assert "secret" not in repr(SECRET)
    with pytest.raises(ValueError):
        replace(OPEN, token=b"")


@pytest.mark.parametrize(
    "welcome",
    [
        {"folder": "../../evil"}, {"folder": "/tmp/evil"}, {"folder": ".."}, {"folder": "a\0b"}, {"folder": "x" * 300},
        {"folder": "a\ud800"}, {"folder": "a\x1b[2J"}, {"job_id": "a\ud800", "folder": "y"}, {"job_id": "a\x9b", "folder": "y"},
        {"job_id": "../evil"}, {"job_id": "."}, {"job_id": "x" * 5000, "folder": "y"}, {"rank": -1}, {"rank": 1 << 40},
    ],
)  # fmt: skip
def test_a_listener_cannot_name_a_path_or_a_rank_that_cannot_be(welcome):
    with pytest.raises(Stranger):
        Meeting(OPEN, OPEN, answer=replace(WELCOME, **welcome)).run()


def test_a_job_of_any_id_may_have_a_folder_of_its_own_name():
    answer = replace(WELCOME, job_id="run/7 of é\u00a0\udcff", folder="run-7_ab12")
    assert Meeting(OPEN, OPEN, answer=answer).run().caller.outcome == answer
