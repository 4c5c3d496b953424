from __future__ import annotations

from distlaunch.core.model.record import replace
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import Decoder
from distlaunch.core.protocol.handshake import CallerHandshake, JobIdentity, ListenerHandshake
from distlaunch.core.protocol.token_keys import CallerSecret, ListenerSecret

OPEN = JobIdentity(release="1.2.3", job_key="77")
SECRET = replace(OPEN, token=b"0123456789abcdef" * 2)
"""128 bits, so that no key is derived."""
WEAK = replace(OPEN, token=b"correct horse battery")
CALL = p.Call(
    version=p.PROTOCOL_VERSION,
    release="1.2.3",
    job_key="77",
    rank=3,
    host="n3",
    instance="i",
    nonce="ab" * 32,
)
WELCOME = p.Welcome(job_id="job", rank=3)
WRONG_TOKEN = "the token is not the same"


class HandshakePair:
    """Both sides of a handshake, and everything sent between them."""

    def __init__(
        self,
        connecting: JobIdentity,
        listener: JobIdentity,
        *,
        answer=WELCOME,
        nonces=("c" * 64, "1" * 64),
    ) -> None:
        self.admitted = []
        self.sent = []
        self.answers = []

        def admit(call):
            self.admitted.append(call)
            return answer

        secret = CallerSecret(connecting.token, connecting.munge)
        self.connecting = CallerHandshake(
            connecting, secret=secret, nonce=nonces[0], rank=3, host="n3", instance="i"
        )
        self.secret = ListenerSecret(listener.token, listener.munge)
        self.listener = ListenerHandshake(
            listener, secret=self.secret, nonce=nonces[1], admit=admit
        )

    def run(self, size: int = 1 << 20) -> HandshakePair:
        out = self.connecting.begin()
        while out:
            self.sent.append(out)
            answer = b"".join(
                [self.listener.feed(out[at : at + size]) for at in range(0, len(out), size)]
            )
            self.answers.append(answer)
            out = b""
            while answer and not self.connecting.outcome:
                part, answer = (
                    answer[: min(size, self.connecting.missing)],
                    answer[min(size, self.connecting.missing) :],
                )
                out += self.connecting.feed(part)
            assert not answer or self.connecting.outcome
        return self


def messages(data: bytes) -> list:
    return list(Decoder((p.Call, p.Challenge, p.Proof, p.Welcome, p.Rejected)).feed(data))


def answered(connecting: CallerHandshake, data: bytes) -> bytes:
    out = b""
    while data:
        taken = connecting.missing
        out += connecting.feed(data[:taken])
        data = data[taken:]
    return out


def listener(
    job_identity: JobIdentity = OPEN, nonce: str = "1" * 64, admitted: list | None = None
) -> ListenerHandshake:
    def admit(call):
        if admitted is not None:
            admitted.append(call)
        return WELCOME

    return ListenerHandshake(
        job_identity,
        secret=ListenerSecret(job_identity.token, job_identity.munge),
        nonce=nonce,
        admit=admit,
    )


def connecting(job_identity: JobIdentity = OPEN, *, nonce: str = "c" * 64) -> CallerHandshake:
    secret = CallerSecret(job_identity.token, job_identity.munge)
    return CallerHandshake(
        job_identity, secret=secret, nonce=nonce, rank=None, host="n1", instance="i"
    )
