"""How a caller and the listener on the rendezvous port come to trust each other; bytes in, bytes
out.

Always in this order: ``Call``, ``Challenge``, ``Proof``, then ``Welcome`` or ``Rejected``; the
listener may turn a caller away sooner. The caller proves itself first: whoever only reaches the
port gets no proof, and not the job's id. The listener's own proof comes with its answer. Without a
secret both proofs are empty. A proof is HMAC-SHA256 over its maker's side and both nonces: one that
is replayed, or reflected from the other side, is wrong; ``keys`` makes the key.

Without a token anybody who reaches the port can take part; with one, who can change packets on the
way still can.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from enum import Enum

from distlaunch.core.errors import EXIT_USAGE, ProtocolError
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import VERSION, Decoder, encode
from distlaunch.core.protocol.token_keys import (
    TOKEN_HINT,
    WRONG_TOKEN,
    CallerSecret,
    ListenerSecret,
    Munge,
    NoKeyError,
    has_scrypt,
    is_same,
    proof_of,
)

MOST_FROM_CALLER = 8 << 10
"""Bytes that a caller may send until it is welcome."""
NONCE_BYTES = 32

_MOST_FROM_LISTENER = 64 << 10
_HEADER = struct.Struct(">BII")  # of a frame, see ``codec``
_LINE_ENDS = b"\r\n\r\n"
"""White space, to JSON."""
_NEWEST_FRAMES = 15
"""A first byte up to this may be a frame of another release; above there are no more than other
protocols."""
_NONCE = re.compile(r"[0-9a-f]{32,128}")
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")
"""In what goes to the terminal, and becomes bytes of a path or the environment."""
_LONGEST_WORD = 300
_LONGEST_NAME = 200
"""Bytes of a folder's name."""
_NO_NAMES = ("", "latest")
"""What no job's folder is called: ``latest`` is the link to the newest."""
_LONGEST_TEXT = 4000
_MOST_MEMBERS = 1 << 24
_LONGEST_KEY = 128
_UNPROVEN = "unproven"
"""Instead of a proof: the caller cannot make the key."""
_OTHERS = "the port belongs to another "
_RELEASE_HINT = "install the same release of distlaunch on all nodes"


class JobIdentity(Record, hide=("token",)):
    """What both sides have to agree in. A ``job_key`` may be of any length: a long one is shortened
    on the way."""

    release: str
    job_key: str
    token: bytes | None = None
    munge: Munge | None = None
    """What proves who we are if there is no token."""

    @property
    def has_secret(self) -> bool:
        """Return whether strangers are kept out."""
        return self.token is not None or self.munge is not None

    def __post_init__(self) -> None:
        """Refuse a token that protects nothing."""
        if self.token is not None and not self.token:
            raise ValueError("an empty token")


class RefusalReason(Enum):
    """Why one side of a call wants nothing of the other."""

    RELEASE = "another release of distlaunch"
    JOB = "another job"
    TOKEN = "it does not know the secret of the job"  # noqa: S105 - a reason
    GARBAGE = "it sends no message of distlaunch, or one that makes no sense"
    LONG = "it sends more than a call takes"
    HTTP = "it speaks HTTP"
    SSH = "it speaks SSH"
    TLS = "it speaks TLS"
    SILENT = "it said nothing"
    SLOW = "it did not finish its call"
    LEFT = "it left in the middle of the call"
    CROWD = "too many connections are open"
    DESCRIPTORS = "no more files can be open"


class HandshakeError(Exception):
    """What came is nothing that a launcher says. ``text`` is a clause about the other side."""

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text


class ListenerHandshake:
    """One call, as the listener has it. ``feed`` what has come until ``outcome`` is there; send
    what it gives."""

    def __init__(
        self,
        job_identity: JobIdentity,
        *,
        secret: ListenerSecret,
        nonce: str,
        admit: Callable[[p.Call], p.Welcome | p.Rejected],
    ) -> None:
        self.call: p.Call | None = None
        """What the caller says of itself; proven once there is a ``Welcome``."""
        self.outcome: p.Welcome | p.Rejected | None = None
        self.rejected_for: RefusalReason | None = None
        """Why it was turned away here; None if ``admit`` did."""
        self.rejection = ""
        """The same in words for our own user, who may know more than the caller."""
        self._job_identity = job_identity
        self._secret = secret
        self._way = ""
        self._nonce = nonce
        self._admit = admit
        self._reader = _Reader((p.Call, p.Proof), most=MOST_FROM_CALLER)
        self._heard = 0

    def feed(self, data: bytes) -> bytes:
        """Process received bytes and return the answer to send.

        Raises HandshakeError; send nothing then.
        """
        self._heard += len(data)
        if self._heard > MOST_FROM_CALLER:
            raise HandshakeError(RefusalReason.LONG, "it sends more than a call takes")
        try:
            message = self._reader.feed(data)
        except _OtherRelease as exc:
            if exc.job_key is not None and exc.job_key != _short(self._job_identity.job_key):
                return self._other_job(exc.job_key, "the caller")
            return self._turn(
                RefusalReason.RELEASE, self._other_release(exc.release), _RELEASE_HINT
            )
        if message is None:
            return b""
        if self._reader.has_more:
            raise HandshakeError(RefusalReason.GARBAGE, "it does not wait for an answer")
        if self.call is None and isinstance(message, p.Call):
            return self._answer(message)
        if self.call is not None and isinstance(message, p.Proof):
            return self._judge(self.call, message)
        raise HandshakeError(RefusalReason.GARBAGE, "it sends messages out of order")

    def _answer(self, call: p.Call) -> bytes:
        _check_call(call)
        self.call = call
        own = self._job_identity
        if call.job_key != _short(own.job_key):
            return self._other_job(call.job_key, _host(call.host))
        if call.version != p.PROTOCOL_VERSION or call.release != own.release:
            return self._turn(
                RefusalReason.RELEASE, self._other_release(call.release, call.host), _RELEASE_HINT
            )
        self._way, salt = self._secret.offer(scrypt=call.scrypt)
        return encode(p.Challenge(nonce=self._nonce, way=self._way, salt=salt))

    def _judge(self, call: p.Call, message: p.Proof) -> bytes:
        key = self._secret.key(self._way)
        if not is_same(message.proof, proof_of(key, "caller", self._nonce, call.nonce)):
            return self._turn(RefusalReason.TOKEN, WRONG_TOKEN, TOKEN_HINT)
        self.outcome = self._admit(call)
        return encode(
            replace(self.outcome, proof=proof_of(key, "listener", call.nonce, self._nonce))
        )

    def _other_job(self, job_key: str, who: str) -> bytes:
        own, theirs = _job(self._job_identity.job_key), f"{who} called for {_job(job_key)}"
        told = f"{_OTHERS}job than {_job(job_key)}" if self._job_identity.has_secret else ""
        hint = "all launchers of a job have the same --job-id, --rendezvous names its own port"
        return self._turn(
            RefusalReason.JOB, f"{_OTHERS}job: it is of {own}, and {theirs}", hint, told=told
        )

    def _other_release(self, release: str, host: str = "") -> str:
        theirs = f"distlaunch {_word(release)}" if release else "another release of distlaunch"
        who = _host(host) if host else "the caller"
        return (
            f"the launcher that was called is distlaunch {self._job_identity.release}, {who} is "
            f"{theirs}"
        )

    def _turn(self, why: RefusalReason, text: str, hint: str, *, told: str = "") -> bytes:
        self.rejected_for, self.rejection = why, text
        self.outcome = p.Rejected(text=told or text, hint=hint, exit_code=EXIT_USAGE, again=False)
        return encode(self.outcome)


class CallerHandshake:
    """One call, as the caller has it. Send ``begin()``; ``feed`` up to ``missing`` bytes until
    ``outcome`` is there."""

    def __init__(
        self,
        job_identity: JobIdentity,
        *,
        secret: CallerSecret,
        nonce: str,
        rank: int | None,
        host: str,
        instance: str,
    ) -> None:
        self.outcome: p.Welcome | p.Rejected | None = None
        self.is_final = False
        """The outcome is the word of a listener of our job: with a secret, one that has proved
        it."""
        self._job_identity = job_identity
        self._secret = secret
        self._expected: str | None = None
        """The proof that the listener has to give; None: it has not had ours."""
        self._call = p.Call(
            version=p.PROTOCOL_VERSION,
            release=job_identity.release,
            job_key=_short(job_identity.job_key),
            rank=rank,
            host=host,
            instance=instance,
            nonce=nonce,
            scrypt=has_scrypt() if job_identity.token is not None else True,
        )
        self._reader = _Reader((p.Challenge, p.Welcome, p.Rejected), most=_MOST_FROM_LISTENER)

    def begin(self) -> bytes:
        """Return the first thing to send. It ends with an empty line: a web server answers, and is
        known by that."""
        frame = encode(self._call)
        version, body, raw = _HEADER.unpack_from(frame)
        return (
            _HEADER.pack(version, body + len(_LINE_ENDS), raw) + frame[_HEADER.size :] + _LINE_ENDS
        )

    @property
    def missing(self) -> int:
        """How many bytes to read at most: those after the last one are no business of the
        handshake."""
        return self._reader.missing

    def feed(self, data: bytes) -> bytes:
        """Take what has come and give what to send, even if ``outcome`` is there. Raises
        HandshakeError."""
        try:
            message = self._reader.feed(data)
        except _OtherRelease as exc:
            theirs = (
                f"distlaunch {_word(exc.release)}"
                if exc.release
                else "another release of distlaunch"
            )
            text = (
                f"{_OTHERS}release: the launcher that was called is {theirs}, this is "
                f"{self._job_identity.release}"
            )
            self.outcome = p.Rejected(
                text=text, hint=_RELEASE_HINT, exit_code=EXIT_USAGE, again=False
            )
            return b""
        match message:
            case None:
                return b""
            case p.Challenge() if self._expected is None:
                return self._answer(message)
            case p.Welcome() if self._expected is not None:
                if not is_same(message.proof, self._expected):
                    raise HandshakeError(
                        RefusalReason.TOKEN, "it does not know the secret of the job"
                    )
                if not _is_fit(message):
                    raise HandshakeError(
                        RefusalReason.GARBAGE, "it names a job's folder or a rank that cannot be"
                    )
                self.is_final = True
                self.outcome = replace(message, proof="")
            case p.Rejected():
                self.is_final = self._expected is not None and is_same(
                    message.proof, self._expected
                )
                self.outcome = _tame(message)
            case _:
                raise HandshakeError(RefusalReason.GARBAGE, "it sends messages out of order")
        return b""

    def _answer(self, challenge: p.Challenge) -> bytes:
        nonce = self._call.nonce
        if not _NONCE.fullmatch(challenge.nonce) or challenge.nonce == nonce:
            raise HandshakeError(RefusalReason.GARBAGE, "it sends messages that make no sense")
        try:
            key = self._secret.key(challenge.way, challenge.salt)
        except NoKeyError as exc:
            self.outcome = p.Rejected(
                text=exc.text, hint=exc.hint, exit_code=EXIT_USAGE, again=False
            )
            return encode(p.Proof(proof=_UNPROVEN))
        self._expected = proof_of(key, "listener", nonce, challenge.nonce)
        return encode(p.Proof(proof=proof_of(key, "caller", challenge.nonce, nonce)))


# --- frames


class _OtherRelease(Exception):  # noqa: N818 - an outcome
    """The peer is a launcher, but not of this release (empty where it does not say which), maybe of
    another job."""

    def __init__(self, release: str, job_key: str | None = None) -> None:
        super().__init__(release)
        self.release = release
        self.job_key = job_key


class _Reader:
    """Cuts single frames out of a stream that must not be believed, and never holds more than it
    may."""

    def __init__(self, types: tuple[type[Record], ...], *, most: int) -> None:
        self._types = types
        self._most = most
        self._buffer = bytearray()
        self._size = _HEADER.size

    @property
    def missing(self) -> int:
        """Bytes that the frame still lacks, as far as that is known."""
        return self._size - len(self._buffer)

    @property
    def has_more(self) -> bool:
        return bool(self._buffer)

    def feed(self, data: bytes) -> Record | None:
        self._buffer += data
        if not self._buffer:
            return None
        if self._buffer[0] != VERSION:
            raise _recognised(bytes(self._buffer[:16]))
        if len(self._buffer) < _HEADER.size:
            return None
        _, body, raw = _HEADER.unpack_from(self._buffer)
        if raw or body > self._most - _HEADER.size:
            raise HandshakeError(RefusalReason.GARBAGE, "it sends what is no message of distlaunch")
        self._size = _HEADER.size + body
        if len(self._buffer) < self._size:
            return None
        frame = bytes(self._buffer[: self._size])
        del self._buffer[: self._size]
        self._size = _HEADER.size
        try:
            (message,) = Decoder[Record](self._types).feed(frame)
        except ProtocolError:
            if (
                other := _other_in(frame[_HEADER.size :], {cls.__name__ for cls in self._types})
            ) is not None:
                raise other from None
            raise HandshakeError(
                RefusalReason.GARBAGE, "it sends what is no message of distlaunch"
            ) from None
        return message


def _recognised(start: bytes) -> Exception:
    if start[0] and start[0] <= _NEWEST_FRAMES:
        return _OtherRelease("")
    for begin, kind, text in _KNOWN:
        if start[: len(begin)] == begin[: len(start)]:
            return HandshakeError(kind, text)
    return HandshakeError(RefusalReason.GARBAGE, "it sends what is no message of distlaunch")


_KNOWN = (
    *(
        (verb, RefusalReason.HTTP, "it speaks HTTP")
        for verb in (
            b"GET ",
            b"POST",
            b"HEAD",
            b"PUT ",
            b"OPTI",
            b"CONN",
            b"PRI ",
            b"HTTP",
            b"<!DOC",
            b"<html",
        )
    ),
    (b"SSH-", RefusalReason.SSH, "it speaks SSH"),
    (b"\x16\x03", RefusalReason.TLS, "it speaks TLS"),
    (b"\x15\x03", RefusalReason.TLS, "it speaks TLS"),
)


def _other_in(body: bytes, names: set[str]) -> _OtherRelease | None:
    """Return what a message of ours with other fields says of its release and job; None if it is no
    message."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = record.get("t") if isinstance(record, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    release, job_key = record.get("release"), record.get("job_key")
    return _OtherRelease(
        release if isinstance(release, str) else "", job_key if isinstance(job_key, str) else None
    )


# --- what is in them


def _check_call(call: p.Call) -> None:
    words = (call.release, call.job_key, call.host, call.instance)
    good = (
        _NONCE.fullmatch(call.nonce)
        and all(len(word) <= _LONGEST_WORD for word in words)
        and 0 <= call.version < 1 << 16
        and (call.rank is None or 0 <= call.rank < _MOST_MEMBERS)
    )
    if not good:
        raise HandshakeError(RefusalReason.GARBAGE, "it sends messages that make no sense")


def _is_fit(welcome: p.Welcome) -> bool:
    """Return whether what names our folder is one name and no path, whoever the listener is."""
    name = welcome.folder or welcome.job_id
    one_name = name not in _NO_NAMES and name[0] not in ".-" and "/" not in name
    one_name = one_name and len(name.encode("utf-8", "replace")) <= _LONGEST_NAME
    whole = welcome.job_id + welcome.folder
    return (
        one_name
        and not _UNFIT.search(whole)
        and len(whole) <= _LONGEST_TEXT
        and 0 <= welcome.rank < _MOST_MEMBERS
    )


def _tame(turned: p.Rejected) -> p.Rejected:
    """Make what a listener says fit for a user's terminal and an exit code."""
    code = turned.exit_code if 0 < turned.exit_code < 256 else EXIT_USAGE
    hint = None if turned.hint is None else printable(turned.hint[:_LONGEST_TEXT], keep="\n")
    text = printable(turned.text[:_LONGEST_TEXT], keep="\n")
    return p.Rejected(text=text, hint=hint, exit_code=code, again=turned.again)


def _short(job_key: str) -> str:
    """Return what stands for a job on the wire: a key that is long, as --job-id may be, by its
    beginning and its hash."""
    if len(job_key) <= _LONGEST_KEY:
        return job_key
    import hashlib

    return f"{job_key[: _LONGEST_WORD // 3]}...{hashlib.sha256(job_key.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _job(key: str) -> str:
    return f"job {quoted(key)}" if key else "a job without an id"


def _host(name: str) -> str:
    return _word(name) or "a host without a name"


def _word(text: str) -> str:
    return printable(text[:80])
