"""Make the key by which launchers prove in the handshake that they belong to one job.

A token with 128 bits is the key. From any other token the key is derived slowly, with the
listener's salt, so that a recorded proof does not help in guessing the token. Without a token,
munge can carry a random key to processes of the same user on the nodes of a cluster.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Protocol

from distlaunch.core.model.option_names import Opt

NONE, KEY, SCRYPT, PBKDF2, MUNGE = "none", "key", "scrypt", "pbkdf2", "munge"
"""Methods of making the key. With ``none`` there is no secret."""
_SALT_BYTES = 16
_SALT = re.compile(r"[0-9a-f]{16,128}")
_STRONG = re.compile(rb"[0-9a-fA-F]{32,}")
_LEAST_VARIED = 8
"""Least number of different digits. A token with fewer counts as weak; of ten million random tokens
of 32 digits, one has fewer."""
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "maxmem": 64 << 20, "dklen": 32}
"""Parameters that need 16 MB and about 50 ms (RFC 7914)."""
_PBKDF2_ROUNDS = 600_000
"""Rounds for HMAC-SHA256, by OWASP's cheat sheet on password storage."""


class Munge(Protocol):
    """Carries a key to processes of the same user on other nodes."""

    def seal(self, key: str) -> str:
        """Return a credential with the key that only the same user can open. Raises OSError."""

    def open(self, credential: str) -> str:
        """Return the key in a credential of the same user. Raises OSError."""


class NoKeyError(Exception):
    """No key can be made: the other side has another secret or none. ``text`` is a clause."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint


def is_strong(token: bytes) -> bool:
    """Return whether a token has 128 bits: at least 32 hexadecimal digits that appear random."""
    return _STRONG.fullmatch(token) is not None and len(set(token.lower())) >= _LEAST_VARIED


class ListenerSecret:
    """Makes the keys of a listener, each only once. The constructor raises OSError if munge
    fails."""

    def __init__(
        self, token: bytes | None, munge: Munge | None, *, scrypt: bool | None = None
    ) -> None:
        """``scrypt``: whether scrypt can be computed here; None: try it when it is needed."""
        self._token = token
        self._scrypt = scrypt
        self._salt = os.urandom(_SALT_BYTES).hex()
        self._keys: dict[str, bytes | None] = {NONE: None}
        self._credential = ""
        if token is None and munge is not None:
            key = os.urandom(32).hex()
            self._keys[MUNGE] = key.encode()
            self._credential = munge.seal(key)

    def offer(self, *, scrypt: bool) -> tuple[str, str]:
        """Return method and salt for a caller. ``scrypt``: the caller's Python can compute
        scrypt."""
        if self._credential:
            return MUNGE, self._credential
        if self._token is None:
            return NONE, ""
        if is_strong(self._token):
            return KEY, ""
        if scrypt and (has_scrypt() if self._scrypt is None else self._scrypt):
            return SCRYPT, self._salt
        return PBKDF2, self._salt

    def key(self, key_method: str) -> bytes | None:
        """Return the key for an offered method; None without a secret."""
        if key_method not in self._keys:
            self._keys[key_method] = _derive_key(self._token or b"", key_method, self._salt)
        return self._keys[key_method]


class CallerSecret:
    """Makes the keys of a caller. A repeated offer costs no second derivation."""

    def __init__(
        self, token: bytes | None, munge: Munge | None, *, scrypt: bool | None = None
    ) -> None:
        """``scrypt``: whether scrypt can be computed here; None: try it when it is needed."""
        self._token = token
        self._munge = munge
        self._scrypt = scrypt
        self._keys: dict[tuple[str, str], bytes | None] = {}

    def key(self, key_method: str, salt: str) -> bytes | None:
        """Return the key for a listener's offer; None if neither side has a secret.

        Raises NoKeyError if only one side has a secret, or the method cannot be used here.
        """
        known = self._keys.get((key_method, salt), b"")
        if known == b"":
            known = self._make_key(key_method, salt)
            self._keys = {(key_method, salt): known}
        return known

    def _make_key(self, key_method: str, salt: str) -> bytes | None:
        token = self._token
        if token is None:
            return self._make_key_without_token(key_method, salt)
        fits = (
            key_method == KEY
            if is_strong(token)
            else key_method in (SCRYPT, PBKDF2) and _SALT.fullmatch(salt)
        )
        if key_method == SCRYPT:
            fits = fits and (has_scrypt() if self._scrypt is None else self._scrypt)
        if not fits:
            raise NoKeyError(WRONG_TOKEN, token_hint())
        try:
            return _derive_key(token, key_method, salt)
        except ValueError as exc:
            raise NoKeyError(
                f"this Python cannot compute {key_method}: {exc}", _NOT_DERIVED_HINT
            ) from exc

    def _make_key_without_token(self, key_method: str, salt: str) -> bytes | None:
        if key_method == MUNGE and self._munge is not None:
            try:
                return self._munge.open(salt).encode()
            except OSError as exc:
                raise NoKeyError(
                    f"munge cannot open its credential: {exc.strerror or exc}", _MUNGE_HINT
                ) from exc
        if key_method == MUNGE:
            raise NoKeyError("it requires munge, which cannot be used here", _MUNGE_HINT)
        if self._munge is not None:
            raise NoKeyError("it does not use munge, but this launcher does", _MUNGE_HINT)
        if key_method != NONE:
            raise NoKeyError(WRONG_TOKEN, token_hint())
        return None


WRONG_TOKEN = "the token is not the same"  # noqa: S105 - a text
TOKEN = "DISTLAUNCH_TOKEN"  # noqa: S105 - a variable's name
"""Variable with the secret that all launchers of a job share."""


def token_hint() -> str:
    """Return what to do if launchers have different tokens."""
    return f"give all launchers of the job the same token, by DISTLAUNCH_TOKEN or {Opt.TOKEN_FILE}"


_NOT_DERIVED_HINT = "a token of 32 random hexadecimal digits does not need it: openssl rand -hex 32"
_MUNGE_HINT = "to do without munge, set the same DISTLAUNCH_TOKEN for all launchers of the job"


@cache
def has_scrypt() -> bool:
    """Return whether this Python can compute scrypt. OpenSSL may lack it, or refuse it, as in FIPS
    mode."""
    import hashlib

    try:
        hashlib.scrypt(b"token", salt=b"salt", n=2, r=1, p=1, dklen=16)
    except (AttributeError, ValueError):
        return False
    return True


def _derive_key(token: bytes, key_method: str, salt: str) -> bytes:
    import hashlib

    match key_method:
        case "key":
            return token
        case "scrypt":
            return hashlib.scrypt(token, salt=salt.encode(), **_SCRYPT)
        case _:
            return hashlib.pbkdf2_hmac("sha256", token, salt.encode(), _PBKDF2_ROUNDS)


def make_proof(key: bytes | None, side: str, nonce: str, other: str) -> str:
    """Return the proof of one side in hexadecimal; empty without a key.

    ``side`` is "caller" or "listener". ``nonce`` is the verifying side's random value, ``other``
    the proving side's own.
    """
    if key is None:
        return ""
    import hmac

    return hmac.new(key, f"{side} {nonce} {other}".encode(), "sha256").hexdigest()


def is_same_proof(given: str, expected: str) -> bool:
    """Return whether the received proof equals the expected one, in constant time."""
    if not expected:
        return not given
    import hmac

    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode())
