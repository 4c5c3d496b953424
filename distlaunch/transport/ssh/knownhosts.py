"""The lines of known_hosts, and what they say of a host's key. Pure but for reading the files.

paramiko's own reading knows neither wildcards nor markers, and forgets which line said what.
"""

from __future__ import annotations

import base64
import fnmatch
import hmac
from collections.abc import Iterable, Sequence
from typing import Literal

from distlaunch.core.model.record import Record

SSH_PORT = 22
_HASHED_PARTS = 4
Verdict = Literal["known", "unknown", "changed", "other types", "revoked", "certified"]


class KnownKey(Record):
    """One line: a key of the hosts that it names."""

    file: str
    line: int
    names: str
    """As written: names, patterns and hashes, with commas between them."""
    marker: str
    """``@revoked``, ``@cert-authority`` or nothing."""
    kind: str
    """``ssh-ed25519``, ``ssh-rsa`` …"""
    key: str
    """Base64."""

    @property
    def place(self) -> str:
        """Say where it stands."""
        return f"{self.file}:{self.line}"


class KnownHosts:
    """All lines of some files, found by name; the files are read once."""

    def __init__(self, files: Iterable[str]) -> None:
        self._plain: dict[str, list[KnownKey]] = {}
        self._hashed: list[tuple[bytes, bytes, KnownKey]] = []
        self._patterns: list[KnownKey] = []
        self._found: dict[str, list[KnownKey]] = {}
        for file in files:
            try:
                with open(file, encoding="utf-8", errors="replace") as lines:
                    self.add(parse(lines, file))
            except OSError:
                continue  # most of them are not there

    def add(self, keys: Iterable[KnownKey]) -> None:
        """Add lines."""
        self._found.clear()
        for key in keys:
            hashed = _decoded(key.names)
            if hashed is not None:
                self._hashed.append((*hashed, key))
            elif any(char in key.names for char in "*?!|"):
                self._patterns.append(key)
            else:
                for name in key.names.lower().split(","):
                    self._plain.setdefault(name, []).append(key)

    def of(self, name: str) -> list[KnownKey]:
        """Give the lines for a name, as ``lookup_name`` makes it."""
        if name not in self._found:
            told = name.encode()
            self._found[name] = [
                *self._plain.get(name, []),
                *(key for salt, digest, key in self._hashed if hmac.digest(salt, told, "sha1") == digest),
                *(key for key in self._patterns if names_match(key.names, name)),
            ]
        return self._found[name]


def parse(lines: Iterable[str], file: str) -> Iterable[KnownKey]:
    """Read known_hosts; what is no line of it is passed over, as OpenSSH does."""
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) >= 3:
            yield KnownKey(file=file, line=number, names=words[0], marker=marker, kind=words[1], key=words[2])


def lookup_name(host: str, port: int) -> str:
    """Give the name under which a host is known."""
    return host.lower() if port == SSH_PORT else f"[{host.lower()}]:{port}"


def names_match(names: str, name: str) -> bool:
    """Tell whether a line's names, patterns and hashes mean this name; ``!pattern`` excludes it."""
    matched = False
    for pattern in names.split(","):
        if pattern.startswith("|1|"):
            matched = matched or _hashed_match(pattern, name)
        elif pattern.startswith("!"):
            if _like(name, pattern[1:]):
                return False
        else:
            matched = matched or _like(name, pattern)
    return matched


def _like(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.lower().replace("[", "[[]"))


def _decoded(names: str) -> tuple[bytes, bytes] | None:
    """Give salt and digest of ``|1|salt|digest``; None if that is not what it is."""
    parts = names.split("|")
    if len(parts) != _HASHED_PARTS or parts[:2] != ["", "1"]:
        return None
    try:
        return base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except ValueError:
        return None


def _hashed_match(hashed: str, name: str) -> bool:
    decoded = _decoded(hashed)
    return decoded is not None and hmac.digest(decoded[0], name.encode(), "sha1") == decoded[1]


def hashed_name(name: str, salt: bytes) -> str:
    """Write a name as HashKnownHosts has it."""
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def judge(known: Sequence[KnownKey], kind: str, key: str) -> tuple[Verdict, KnownKey | None]:
    """Say what the lines for a host make of the key that it has shown, and which line says so."""
    same = [line for line in known if line.kind == kind and line.key == key]
    for line in same:
        if line.marker == "@revoked":
            return "revoked", line
    for line in same:
        if not line.marker:
            return "known", line
    plain = [line for line in known if not line.marker]
    for line in plain:
        if line.kind == kind:
            return "changed", line
    for line in known:
        if line.marker == "@cert-authority":
            return "certified", line
    return ("other types", plain[0]) if plain else ("unknown", None)
