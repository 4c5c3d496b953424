from __future__ import annotations

import hashlib

import pytest

from distlaunch.core.protocol import token_keys
from distlaunch.core.protocol.token_keys import CallerSecret, ListenerSecret, NoKeyError, is_strong
from tests.unit.core.protocol.handshake_pair import WEAK, WELCOME, HandshakePair, messages

PHRASE = b"correct horse battery"
RANDOM = b"8f14e45fceea167a5a36dedd4bea2543"


@pytest.fixture
def derived(monkeypatch):
    """Count derivations."""
    done = []
    token_keys.has_scrypt()  # computes scrypt once per process
    real = hashlib.scrypt
    monkeypatch.setattr(
        hashlib, "scrypt", lambda *args, **kwargs: done.append(kwargs) or real(*args, **kwargs)
    )
    return done


@pytest.mark.parametrize(
    ("token", "strong"),
    [
        (RANDOM, True),
        (RANDOM.upper(), True),
        (RANDOM * 2, True),
        (RANDOM[:-1], False),
        (PHRASE, False),
        (b"0" * 32, False),
        (b"x" * 64, False),
    ],
)
def test_a_token_of_128_bits_is_recognised_by_its_digits(token, strong):
    assert is_strong(token) is strong


def test_a_listener_derives_its_key_once_for_all_launchers(derived):
    secret = ListenerSecret(PHRASE, None)
    for _ in range(5):
        key_method, salt = secret.offer(scrypt=True)
        assert secret.key(key_method) == secret.key(key_method)
    assert (key_method, len(derived)) == ("scrypt", 1)
    assert len(salt) == 32


def test_a_launcher_derives_its_key_once_for_each_listener(derived):
    key_method, salt = ListenerSecret(PHRASE, None).offer(scrypt=True)
    secret = CallerSecret(PHRASE, None)
    assert secret.key(key_method, salt) == secret.key(key_method, salt)
    assert len(derived) == 1
    assert secret.key(key_method, "ab" * 16) != secret.key(key_method, salt)


def test_a_token_of_128_bits_is_never_derived(derived):
    secret = ListenerSecret(RANDOM, None)
    assert secret.offer(scrypt=True) == ("key", "")
    assert secret.key("key") == CallerSecret(RANDOM, None).key("key", "") == RANDOM
    assert derived == []


@pytest.mark.parametrize("lacks", ["the launcher", "the listener"])
def test_without_scrypt_on_one_side_both_use_pbkdf2(lacks):
    listener = ListenerSecret(PHRASE, None, scrypt=lacks != "the listener")
    key_method, salt = listener.offer(scrypt=lacks == "the listener")
    assert key_method == "pbkdf2"
    assert listener.key(key_method) == CallerSecret(PHRASE, None).key(key_method, salt)


@pytest.fixture
def fips(monkeypatch):
    """Make hashlib refuse scrypt when it is called, as OpenSSL does in FIPS mode."""

    def refuse(*args, **kwargs):
        raise ValueError("[digital envelope routines] unsupported")

    monkeypatch.setattr(hashlib, "scrypt", refuse)
    cached = token_keys.has_scrypt
    cached.cache_clear()
    yield
    cached.cache_clear()


def test_where_openssl_refuses_scrypt_both_sides_use_pbkdf2(fips):
    pair = HandshakePair(WEAK, WEAK).run()
    assert messages(pair.answers[0])[0].key_method == "pbkdf2"
    assert pair.connecting.outcome == WELCOME
    assert ListenerSecret(PHRASE, None).offer(scrypt=True)[0] == "pbkdf2"


def test_a_launcher_that_cannot_derive_its_key_names_the_missing_function(fips):
    with pytest.raises(NoKeyError, match=r"scrypt: .*unsupported"):
        CallerSecret(PHRASE, None, scrypt=True).key("scrypt", "ab" * 16)


@pytest.mark.parametrize(
    ("token", "key_method", "salt"),
    [
        (PHRASE, "key", ""),
        (PHRASE, "none", ""),
        (PHRASE, "scrypt", ""),
        (PHRASE, "scrypt", "xyz"),
        (PHRASE, "munge", "m"),
        (RANDOM, "scrypt", "ab" * 16),
        (RANDOM, "none", ""),
        (None, "key", ""),
        (None, "munge", "x"),
        (None, "other", ""),
    ],
)
def test_a_listener_cannot_choose_a_weaker_key_method(token, key_method, salt):
    with pytest.raises(NoKeyError):
        CallerSecret(token, None).key(key_method, salt)


class Munge:
    """A munge of one user."""

    def __init__(self) -> None:
        self.sealed = {}

    def seal(self, key):
        self.sealed[f"MUNGE:{len(self.sealed)}:"] = key
        return [*self.sealed][-1]

    def open(self, credential):
        if credential not in self.sealed:
            raise OSError("Invalid credential")
        return self.sealed[credential]


def test_munge_carries_a_random_key():
    munge = Munge()
    first, second = ListenerSecret(None, munge), ListenerSecret(None, munge)
    key_method, credential = first.offer(scrypt=True)
    assert key_method == "munge"
    key = CallerSecret(None, munge).key(key_method, credential)
    assert key == first.key("munge") != second.key("munge")
    assert len(key) == 64
    with pytest.raises(NoKeyError, match="Invalid credential"):
        CallerSecret(None, munge).key("munge", "forged")


def test_a_launcher_with_munge_refuses_a_listener_without_it():
    with pytest.raises(NoKeyError, match="munge"):
        CallerSecret(None, Munge()).key("none", "")


def test_a_token_is_used_instead_of_munge():
    secret = ListenerSecret(RANDOM, Munge())
    assert secret.offer(scrypt=True) == ("key", "")
