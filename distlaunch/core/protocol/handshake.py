"""The handshake by which a launcher joins a job. Input and output are bytes.

The caller is a launcher, or an agent started by srun, that connects to the rendezvous port. The
listener is the coordinator. The messages are ``Call``, ``Challenge``, ``Proof``, and ``Welcome`` or
``Rejected``. The listener may reject the caller at any step.

The caller proves first that it knows the secret. So a stranger gets neither the listener's proof,
which comes with ``Welcome``, nor the job's id. A proof is HMAC-SHA256 over the name of the side
(caller or listener) and both nonces, so a replayed or reflected proof is wrong. ``token_keys``
makes the key. Without a secret both proofs are empty.

Security: without a secret, anybody who reaches the port can join. With a secret, an attacker who
can change packets on the network can still join.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from enum import Enum

from distlaunch.core.errors import EXIT_USAGE, ProtocolError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import VERSION, Decoder, encode
from distlaunch.core.protocol.token_keys import (
    WRONG_TOKEN,
    CallerSecret,
    ListenerSecret,
    Munge,
    NoKeyError,
    has_scrypt,
    is_same_proof,
    make_proof,
    token_hint,
)

MOST_FROM_CALLER = 8 << 10
"""Largest number of bytes from a caller before its admission."""
NONCE_BYTES = 32

_MOST_FROM_LISTENER = 64 << 10
_HEADER = struct.Struct(">BII")  # of a frame, see ``codec``
_LINE_ENDS = b"\r\n\r\n"
"""White space in JSON that ends a request for a web server."""
_NEWEST_FRAMES = 15
"""A larger first byte is no frame of any release."""
_NONCE = re.compile(r"[0-9a-f]{32,128}")
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")
"""Characters that are refused in text for the terminal, in path components, and in environment
variables."""
_LONGEST_FIELD = 300
_LONGEST_NAME = 200
"""Largest number of bytes of a directory's name."""
_NO_NAMES = ("", "latest")
"""Names that a run directory may not have: ``latest`` links to the newest one."""
_LONGEST_TEXT = 4000
_MOST_RANKS = 1 << 24
_LONGEST_KEY = 128
_UNPROVEN = "unproven"
"""Sent in place of a proof by a caller that cannot make the key."""
_OTHERS = "the port belongs to another "
_RELEASE_HINT = "install the same release of distlaunch on all nodes"


class JobIdentity(Record, hide=("token",)):
    """Values that must be the same in caller and listener.

    ``job_key`` may have any length. A long key is sent in abbreviated form.
    """

    release: str
    job_key: str
    token: bytes | None = None
    munge: Munge | None = None
    """Proves the identity if no token is set."""

    @property
    def has_secret(self) -> bool:
        """Whether launchers without the job's secret are rejected."""
        return self.token is not None or self.munge is not None

    def __post_init__(self) -> None:
        """Raise ValueError for an empty token."""
        if self.token is not None and not self.token:
            raise ValueError("an empty token")


class RefusalReason(Enum):
    """Why a caller or a listener ends the handshake."""

    OTHER_RELEASE = "another release of distlaunch"
    OTHER_JOB = "another job"
    TOKEN = "it does not know the secret of the job"  # noqa: S105 - a reason
    INVALID = "it sends no valid message of distlaunch"
    TOO_LONG = "it sends more data than a request to join has"
    HTTP = "it speaks HTTP"
    SSH = "it speaks SSH"
    TLS = "it speaks TLS"
    SILENT = "it sent nothing"
    TIMED_OUT = "it did not finish its call"
    DISCONNECTED = "it left in the middle of the call"
    TOO_MANY_CONNECTIONS = "too many connections are open"
    TOO_MANY_FILES = "no more files can be open"


class HandshakeError(Exception):
    """The other side is no launcher of this job. ``text`` describes it as a clause."""

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text


class ListenerHandshake:
    """The listener's side of one handshake.

    Pass received bytes to ``feed`` and send the bytes that it returns, until ``outcome`` is set.
    """

    def __init__(
        self,
        job_identity: JobIdentity,
        *,
        secret: ListenerSecret,
        nonce: str,
        admit: Callable[[p.Call], p.Welcome | p.Rejected],
    ) -> None:
        self.call: p.Call | None = None
        """The caller's request, proved once ``outcome`` is a ``Welcome``."""
        self.outcome: p.Welcome | p.Rejected | None = None
        self.rejected_for: RefusalReason | None = None
        """Why the handshake rejected the caller; None if ``admit`` did."""
        self.rejection = ""
        """The reason for this launcher's user, who may learn more than the caller."""
        self._job_identity = job_identity
        self._secret = secret
        self._key_method = ""
        self._nonce = nonce
        self._admit = admit
        self._reader = _Reader((p.Call, p.Proof), most=MOST_FROM_CALLER)
        self._received = 0

    def feed(self, data: bytes) -> bytes:
        """Process received bytes and return the bytes to send.

        Raises HandshakeError if the caller is no launcher of this job. Then close the connection
        without an answer.
        """
        self._received += len(data)
        if self._received > MOST_FROM_CALLER:
            raise HandshakeError(
                RefusalReason.TOO_LONG, "it sends more data than a request to join has"
            )
        try:
            message = self._reader.feed(data)
        except _OtherRelease as exc:
            if exc.job_key is not None and exc.job_key != _short_key(self._job_identity.job_key):
                return self._reject_other_job(exc.job_key, "the caller")
            return self._reject(
                RefusalReason.OTHER_RELEASE,
                self._describe_other_release(exc.release),
                _RELEASE_HINT,
            )
        if message is None:
            return b""
        if self._reader.has_more:
            raise HandshakeError(RefusalReason.INVALID, "it does not wait for an answer")
        if self.call is None and isinstance(message, p.Call):
            return self._on_call(message)
        if self.call is not None and isinstance(message, p.Proof):
            return self._on_proof(self.call, message)
        raise HandshakeError(RefusalReason.INVALID, "it sends messages out of order")

    def _on_call(self, call: p.Call) -> bytes:
        _check_call(call)
        self.call = call
        own = self._job_identity
        if call.job_key != _short_key(own.job_key):
            return self._reject_other_job(call.job_key, _name_host(call.host))
        if call.version != p.PROTOCOL_VERSION or call.release != own.release:
            return self._reject(
                RefusalReason.OTHER_RELEASE,
                self._describe_other_release(call.release, call.host),
                _RELEASE_HINT,
            )
        self._key_method, salt = self._secret.offer(scrypt=call.scrypt)
        return encode(p.Challenge(nonce=self._nonce, key_method=self._key_method, salt=salt))

    def _on_proof(self, call: p.Call, message: p.Proof) -> bytes:
        key = self._secret.key(self._key_method)
        if not is_same_proof(message.proof, make_proof(key, "caller", self._nonce, call.nonce)):
            return self._reject(RefusalReason.TOKEN, WRONG_TOKEN, token_hint())
        self.outcome = self._admit(call)
        return encode(
            replace(self.outcome, proof=make_proof(key, "listener", call.nonce, self._nonce))
        )

    def _reject_other_job(self, job_key: str, who: str) -> bytes:
        own, theirs = _name_job(self._job_identity.job_key), f"{who} asked for {_name_job(job_key)}"
        shown = f"{_OTHERS}job than {_name_job(job_key)}" if self._job_identity.has_secret else ""
        hint = (
            f"give all launchers of a job the same {Opt.JOB_ID}, and each job its own port in "
            f"{Opt.RENDEZVOUS_PORT}"
        )
        return self._reject(
            RefusalReason.OTHER_JOB,
            f"{_OTHERS}job: it serves {own}, and {theirs}",
            hint,
            shown=shown,
        )

    def _describe_other_release(self, release: str, host: str = "") -> str:
        theirs = (
            f"distlaunch {_printable_name(release)}" if release else "another release of distlaunch"
        )
        who = _name_host(host) if host else "the caller"
        return (
            f"the listening launcher is distlaunch {self._job_identity.release}, {who} is {theirs}"
        )

    def _reject(self, why: RefusalReason, text: str, hint: str, *, shown: str = "") -> bytes:
        self.rejected_for, self.rejection = why, text
        self.outcome = p.Rejected(text=shown or text, hint=hint, exit_code=EXIT_USAGE, again=False)
        return encode(self.outcome)


class CallerHandshake:
    """The caller's side of one handshake.

    Send ``begin()``. Then read at most ``missing`` bytes, pass them to ``feed`` and send the bytes
    that it returns, until ``outcome`` is set.
    """

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
        """Whether the outcome is from a listener of this job, which has proved that it knows the
        secret, if there is one."""
        self._job_identity = job_identity
        self._secret = secret
        self._expected: str | None = None
        """The proof that the listener must send, once ``Proof`` is sent."""
        self._call = p.Call(
            version=p.PROTOCOL_VERSION,
            release=job_identity.release,
            job_key=_short_key(job_identity.job_key),
            rank=rank,
            host=host,
            instance=instance,
            nonce=nonce,
            scrypt=has_scrypt() if job_identity.token is not None else True,
        )
        self._reader = _Reader((p.Challenge, p.Welcome, p.Rejected), most=_MOST_FROM_LISTENER)

    def begin(self) -> bytes:
        """Return the first bytes to send.

        They end with an empty line, so that a web server answers and can be recognised.
        """
        frame = encode(self._call)
        version, body, raw = _HEADER.unpack_from(frame)
        return (
            _HEADER.pack(version, body + len(_LINE_ENDS), raw) + frame[_HEADER.size :] + _LINE_ENDS
        )

    @property
    def missing(self) -> int:
        """The largest number of bytes to read. Later bytes do not belong to the
        handshake."""
        return self._reader.missing

    def feed(self, data: bytes) -> bytes:
        """Process received bytes and return the bytes to send, even if ``outcome`` is set.

        Raises HandshakeError if the listener is no launcher of this job.
        """
        try:
            message = self._reader.feed(data)
        except _OtherRelease as exc:
            theirs = (
                f"distlaunch {_printable_name(exc.release)}"
                if exc.release
                else "another release of distlaunch"
            )
            text = (
                f"{_OTHERS}release: the listening launcher is {theirs}, this is "
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
                return self._on_challenge(message)
            case p.Welcome() if self._expected is not None:
                if not is_same_proof(message.proof, self._expected):
                    raise HandshakeError(
                        RefusalReason.TOKEN, "it does not know the secret of the job"
                    )
                if not _is_valid_welcome(message):
                    raise HandshakeError(
                        RefusalReason.INVALID, "it names an invalid run directory or rank"
                    )
                self.is_final = True
                self.outcome = replace(message, proof="")
            case p.Rejected():
                self.is_final = self._expected is not None and is_same_proof(
                    message.proof, self._expected
                )
                self.outcome = _sanitize(message)
            case _:
                raise HandshakeError(RefusalReason.INVALID, "it sends messages out of order")
        return b""

    def _on_challenge(self, challenge: p.Challenge) -> bytes:
        nonce = self._call.nonce
        if not _NONCE.fullmatch(challenge.nonce) or challenge.nonce == nonce:
            raise HandshakeError(RefusalReason.INVALID, "it sends invalid messages")
        try:
            key = self._secret.key(challenge.key_method, challenge.salt)
        except NoKeyError as exc:
            self.outcome = p.Rejected(
                text=exc.text, hint=exc.hint, exit_code=EXIT_USAGE, again=False
            )
            return encode(p.Proof(proof=_UNPROVEN))
        self._expected = make_proof(key, "listener", nonce, challenge.nonce)
        return encode(p.Proof(proof=make_proof(key, "caller", challenge.nonce, nonce)))


# --- frames


class _OtherRelease(Exception):  # noqa: N818 - an outcome
    """The other side is of another release, and perhaps of another job. ``release`` may be
    empty."""

    def __init__(self, release: str, job_key: str | None = None) -> None:
        super().__init__(release)
        self.release = release
        self.job_key = job_key


class _Reader:
    """Reads single frames from an untrusted stream. Never buffers more than ``most`` bytes."""

    def __init__(self, types: tuple[type[Record], ...], *, most: int) -> None:
        self._types = types
        self._most = most
        self._buffer = bytearray()
        self._size = _HEADER.size

    @property
    def missing(self) -> int:
        """How many bytes the current frame lacks, as far as known."""
        return self._size - len(self._buffer)

    @property
    def has_more(self) -> bool:
        return bool(self._buffer)

    def feed(self, data: bytes) -> Record | None:
        self._buffer += data
        if not self._buffer:
            return None
        if self._buffer[0] != VERSION:
            raise _wrong_protocol_error(bytes(self._buffer[:16]))
        if len(self._buffer) < _HEADER.size:
            return None
        _, body, raw = _HEADER.unpack_from(self._buffer)
        if raw or body > self._most - _HEADER.size:
            raise HandshakeError(
                RefusalReason.INVALID, "it sends data that is no message of distlaunch"
            )
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
                other := _other_release_of(
                    frame[_HEADER.size :], {cls.__name__ for cls in self._types}
                )
            ) is not None:
                raise other from None
            raise HandshakeError(
                RefusalReason.INVALID, "it sends data that is no message of distlaunch"
            ) from None
        return message


def _wrong_protocol_error(start: bytes) -> Exception:
    if start[0] and start[0] <= _NEWEST_FRAMES:
        return _OtherRelease("")
    for begin, kind, text in _KNOWN:
        if start[: len(begin)] == begin[: len(start)]:
            return HandshakeError(kind, text)
    return HandshakeError(RefusalReason.INVALID, "it sends data that is no message of distlaunch")


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


def _other_release_of(body: bytes, names: set[str]) -> _OtherRelease | None:
    """Return release and job of a message with other fields than in this release; None for other
    data."""
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


# --- fields


def _check_call(call: p.Call) -> None:
    fields = (call.release, call.job_key, call.host, call.instance)
    good = (
        _NONCE.fullmatch(call.nonce)
        and all(len(field) <= _LONGEST_FIELD for field in fields)
        and 0 <= call.version < 1 << 16
        and (call.rank is None or 0 <= call.rank < _MOST_RANKS)
    )
    if not good:
        raise HandshakeError(RefusalReason.INVALID, "it sends invalid messages")


def _is_valid_welcome(welcome: p.Welcome) -> bool:
    name = welcome.folder or welcome.job_id
    one_name = name not in _NO_NAMES and name[0] not in ".-" and "/" not in name
    one_name = one_name and len(name.encode("utf-8", "replace")) <= _LONGEST_NAME
    whole = welcome.job_id + welcome.folder
    return (
        one_name
        and not _UNFIT.search(whole)
        and len(whole) <= _LONGEST_TEXT
        and 0 <= welcome.rank < _MOST_RANKS
    )


def _sanitize(rejection: p.Rejected) -> p.Rejected:
    """Return the rejection with printable, shortened text and an exit code between 1 and 255."""
    code = rejection.exit_code if 0 < rejection.exit_code < 256 else EXIT_USAGE
    hint = None if rejection.hint is None else printable(rejection.hint[:_LONGEST_TEXT], keep="\n")
    text = printable(rejection.text[:_LONGEST_TEXT], keep="\n")
    return p.Rejected(text=text, hint=hint, exit_code=code, again=rejection.again)


def _short_key(job_key: str) -> str:
    """Return the job key as it is sent: a long one (such as a long --job-id) as its beginning and
    hash."""
    if len(job_key) <= _LONGEST_KEY:
        return job_key
    import hashlib

    return f"{job_key[: _LONGEST_FIELD // 3]}...{hashlib.sha256(job_key.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _name_job(key: str) -> str:
    return f"job {quoted(key)}" if key else "a job without an id"


def _name_host(name: str) -> str:
    return _printable_name(name) or "a host without a name"


def _printable_name(text: str) -> str:
    return printable(text[:80])
