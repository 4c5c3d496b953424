"""The key by which caller and listener of a rendezvous prove that they belong to one job.

A token with 128 bits is the key itself. From any other the key is derived, so slowly that a
recorded proof is of little use to somebody who guesses: once per listener, whose salt it needs.
Without a token munge may carry a random key to the same user's processes on the nodes of a cluster.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Protocol

NONE, KEY, SCRYPT, PBKDF2, MUNGE = "none", "key", "scrypt", "pbkdf2", "munge"
"""How the key is made; none: there is no secret."""
_SALT_BYTES = 16
_SALT = re.compile(r"[0-9a-f]{16,128}")
_STRONG = re.compile(rb"[0-9a-fA-F]{32,}")
_LEAST_VARIED = 8
"""Random 32 digits have fewer different ones once in 10 million times, and are only treated as weak
then."""
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "maxmem": 64 << 20, "dklen": 32}
"""16 MB and some 50 ms (RFC 7914)."""
_PBKDF2_ROUNDS = 600_000
"""Of HMAC-SHA256, as OWASP's cheat sheet on storing passwords has it."""


class Munge(Protocol):
    """Carries a key to the same user's processes on other nodes."""

    def seal(self, key: str) -> str:
        """Return a credential that only the same user can open. Raises OSError."""

    def open(self, credential: str) -> str:
        """Return the key of a credential that the same user has sealed. Raises OSError."""


class NoKeyError(Exception):
    """The key cannot be made: the other side has another secret, or none. ``text`` is a clause."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint


def is_strong(token: bytes) -> bool:
    """Return whether a token has 128 bits: 32 hexadecimal digits that look random."""
    return _STRONG.fullmatch(token) is not None and len(set(token.lower())) >= _LEAST_VARIED


class ListenerSecret:
    """The keys of one listener. Each is derived once, whoever calls. Raises OSError if munge
    fails."""

    def __init__(self, token: bytes | None, munge: Munge | None) -> None:
        self._token = token
        self._salt = os.urandom(_SALT_BYTES).hex()
        self._keys: dict[str, bytes | None] = {NONE: None}
        self._credential = ""
        if token is None and munge is not None:
            key = os.urandom(32).hex()
            self._keys[MUNGE] = key.encode()
            self._credential = munge.seal(key)

    def offer(self, *, scrypt: bool) -> tuple[str, str]:
        """Return way and salt for a caller; ``scrypt``: its Python has that."""
        if self._credential:
            return MUNGE, self._credential
        if self._token is None:
            return NONE, ""
        if is_strong(self._token):
            return KEY, ""
        return (SCRYPT if scrypt and has_scrypt() else PBKDF2), self._salt

    def key(self, way: str) -> bytes | None:
        """Return the key of a way that was offered; None without a secret."""
        if way not in self._keys:
            self._keys[way] = _derived(self._token or b"", way, self._salt)
        return self._keys[way]


class CallerSecret:
    """The keys of one caller, by what a listener has offered. The same offer is derived once."""

    def __init__(self, token: bytes | None, munge: Munge | None) -> None:
        self._token = token
        self._munge = munge
        self._keys: dict[tuple[str, str], bytes | None] = {}

    def key(self, way: str, salt: str) -> bytes | None:
        """Return the key; None if neither side has a secret. Raises NoKeyError."""
        known = self._keys.get((way, salt), b"")
        if known == b"":
            known = self._made(way, salt)
            self._keys = {(way, salt): known}
        return known

    def _made(self, way: str, salt: str) -> bytes | None:
        token = self._token
        if token is None:
            return self._without_token(way, salt)
        fits = way == KEY if is_strong(token) else way in (SCRYPT, PBKDF2) and _SALT.fullmatch(salt)
        if not fits or (way == SCRYPT and not has_scrypt()):
            raise NoKeyError(WRONG_TOKEN, TOKEN_HINT)
        try:
            return _derived(token, way, salt)
        except ValueError as exc:
            raise NoKeyError(f"this Python cannot compute {way}: {exc}", _NOT_DERIVED_HINT) from exc

    def _without_token(self, way: str, salt: str) -> bytes | None:
        if way == MUNGE and self._munge is not None:
            try:
                return self._munge.open(salt).encode()
            except OSError as exc:
                raise NoKeyError(
                    f"munge does not open its credential: {exc.strerror or exc}", _MUNGE_HINT
                ) from exc
        if way == MUNGE:
            raise NoKeyError("it asks for a proof by munge, which cannot be used here", _MUNGE_HINT)
        if self._munge is not None:
            raise NoKeyError(
                "it does not prove itself by munge, which this launcher uses", _MUNGE_HINT
            )
        if way != NONE:
            raise NoKeyError(WRONG_TOKEN, TOKEN_HINT)
        return None


WRONG_TOKEN = "the token is not the same"  # noqa: S105 - a text
TOKEN = "DISTLAUNCH_TOKEN"  # noqa: S105 - a variable's name
"""The variable with the secret that all launchers of a job have."""
TOKEN_HINT = (
    "DISTLAUNCH_TOKEN or --token-file has to give the same token to all launchers of the job"  # noqa: S105 - a hint
)
_NOT_DERIVED_HINT = (
    "a token of 32 random hexadecimal digits needs no such function: openssl rand -hex 32"
)
_MUNGE_HINT = "the same DISTLAUNCH_TOKEN for all launchers of the job is used instead of munge"


@cache
def has_scrypt() -> bool:
    """Return whether this Python can compute scrypt.

    Its OpenSSL may lack the function, or refuse it when called, as in FIPS mode.
    """
    import hashlib

    try:
        hashlib.scrypt(b"token", salt=b"salt", n=2, r=1, p=1, dklen=16)
    except (AttributeError, ValueError):
        return False
    return True


def _derived(token: bytes, way: str, salt: str) -> bytes:
    import hashlib

    match way:
        case "key":
            return token
        case "scrypt":
            return hashlib.scrypt(token, salt=salt.encode(), **_SCRYPT)
        case _:
            return hashlib.pbkdf2_hmac("sha256", token, salt.encode(), _PBKDF2_ROUNDS)


def proof_of(key: bytes | None, side: str, nonce: str, other: str) -> str:
    """Return the proof of one side; empty without a key."""
    if key is None:
        return ""
    import hmac

    return hmac.new(key, f"{side} {nonce} {other}".encode(), "sha256").hexdigest()


def is_same(told: str, expected: str) -> bool:
    """Compare two proofs in a time that tells nothing of them."""
    if not expected:
        return not told
    import hmac

    return hmac.compare_digest(told.encode("utf-8", "surrogatepass"), expected.encode())
