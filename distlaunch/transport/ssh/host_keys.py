"""Check the key of a host against known_hosts, as ``--ssh-host-keys`` requires, and word the
errors.

``KnownHosts`` reads known_hosts, since paramiko's reader supports neither wildcards nor markers and
does not store the line of a key. ``changed``, ``unknown`` and ``refused`` make the errors, for
paramiko and OpenSSH alike.
"""

from __future__ import annotations

import base64
import fcntl
import fnmatch
import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import printable, quoted
from distlaunch.planning.train_options import HostKeys
from distlaunch.transport.connect_errors import SSH_PORT, ConnectStepError, KeyScan
from distlaunch.transport.ssh.config import HostSettings

_SALT_BYTES = 20


class Unchecked:
    """Warns the user, once, that host keys are accepted without a check."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._first = threading.Lock()

    def say(self, why: str | None = None) -> None:
        """Warn on the first call, with the reason. May be called from any thread."""
        if self._first.acquire(blocking=False):
            self._note(
                f"host keys are not checked ({why or Opt.SSH_HOST_KEYS('off')}): whoever answers "
                "at a node's address gets the "
                "job's environment"
            )


class HostKeyCheck:
    """Checks the keys of all hosts of a launcher. Reads each file once."""

    def __init__(self, mode: HostKeys | None, unchecked: Unchecked | None = None) -> None:
        """``mode`` is the value of --ssh-host-keys. None: StrictHostKeyChecking in ssh_config, else
        strict."""
        self._mode = mode
        self._unchecked = unchecked
        self._lock = threading.Lock()
        self._read: dict[tuple[str, ...], KnownHosts] = {}

    def mode(self, settings: HostSettings) -> HostKeys:
        """Return the mode that applies to one host."""
        if self._mode is not None:
            return self._mode
        return {"no": "off", "off": "off", "accept-new": "accept-new"}.get(
            settings.check or "", "strict"
        )  # type: ignore[return-value]

    def known_kinds(self, settings: HostSettings) -> list[str]:
        """Return the types of a host's known keys. The host is asked for a key of these types
        first."""
        return list(
            dict.fromkeys(line.kind for line in self._known_lines(settings) if not line.marker)
        )

    def _known_lines(self, settings: HostSettings) -> list[KnownKey]:
        hosts = self._known_hosts(settings)
        return hosts.of(_known_name(settings)) or hosts.of(
            (settings.key_alias or settings.hostname).lower()
        )

    def _known_hosts(self, settings: HostSettings) -> KnownHosts:
        files = (*settings.user_known_hosts, *settings.global_known_hosts)
        with self._lock:
            if files not in self._read:
                self._read[files] = KnownHosts(files)
            return self._read[files]

    def check(self, settings: HostSettings, kind: str, blob: bytes) -> None:
        """Check a host's key of type ``kind``.

        With ``accept-new``, an unknown key is added to the user's known_hosts. With ``off``, every
        key is accepted, with one warning. Raises ConnectStepError if the key is refused.
        """
        mode = self.mode(settings)
        if mode == "off":
            if self._unchecked is not None:
                self._unchecked.say(
                    *()
                    if self._mode
                    else (f"StrictHostKeyChecking {settings.check} in ssh_config",)
                )
            return
        key = base64.b64encode(blob).decode()
        name = _known_name(settings)
        hosts = self._known_hosts(settings)
        named = hosts.of(name)
        verdict, line = judge(named, kind, key)
        if verdict == "unknown" and name != (
            bare := (settings.key_alias or settings.hostname).lower()
        ):
            # As in OpenSSH, a key that is known without a port is accepted. A different key there
            # proves nothing.
            without_port, _ = judge(hosts.of(bare), kind, key)
            verdict = without_port if without_port in ("known", "revoked") else verdict
        if verdict == "known":
            return
        if verdict == "unknown" and mode == "accept-new":
            self._add_key(settings, hosts, name, kind, key)
            return
        raise _refusal(settings, verdict, line, kind, blob)

    def _add_key(
        self, settings: HostSettings, hosts: KnownHosts, name: str, kind: str, key: str
    ) -> None:
        shown = hashed_name(name, os.urandom(_SALT_BYTES)) if settings.hash_names else name
        with self._lock:
            added = parse([f"{shown} {kind} {key}"], "this launcher")
            hosts.add(added)
            file = next(iter(settings.user_known_hosts), None)
            if file is not None and file != os.devnull:
                try:
                    _append(file, f"{shown} {kind} {key}\n")
                except OSError as exc:
                    raise ConnectStepError(
                        "host key",
                        f"its new key cannot be added to {printable(file)}: {exc.strerror}",
                        passing=False,
                    ) from exc


def _append(file: str, line: str) -> None:
    """Add a line to a file that other programs may be adding to. Create its directory if needed."""
    os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = "\n" + line
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def _known_name(settings: HostSettings) -> str:
    if settings.key_alias is not None:
        return settings.key_alias.lower()
    return lookup_name(settings.hostname, settings.port)


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint in the format of ssh."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _refusal(
    settings: HostSettings, verdict: str, line: KnownKey | None, kind: str, blob: bytes
) -> ConnectStepError:
    """Return the error for a key with this verdict. ``line`` is the line of known_hosts that
    decides."""
    place = printable(line.place) if line is not None else ""
    shown = f"{printable(kind)} {fingerprint(blob)}"
    match verdict:
        case "changed":
            kind = printable(kind)
            what = f"{place} has another {kind} key than the one shown, {shown}"
            return changed(what, _known_name(settings), scan_of(settings))
        case "revoked":
            return refused(f"its key is revoked by {place}: {shown}")
        case "certified":
            return refused(
                f"it is known by a certificate authority ({place}), not by {shown}",
                hint=f"{Opt.SSH_COMMAND('ssh')} connects by OpenSSH, which checks certificates of "
                "hosts",
            )
        case "other types":
            return refused(
                f"it is known by another kind of key ({place}) than the one shown, {shown}",
                hint=f"to trust this one too: {scan_of(settings).command()}",
                scan=scan_of(settings),
            )
    return unknown(f"its key is not known: {shown}", scan_of(settings))


def scan_of(settings: HostSettings) -> KeyScan:
    """Return the command that adds a host's keys to known_hosts."""
    known = KeyScan(host=settings.hostname, port=settings.port)
    files = settings.user_known_hosts
    return replace(known, file=files[0]) if files else known


_HASHED_PARTS = 4
Verdict = Literal["known", "unknown", "changed", "other types", "revoked", "certified"]


class KnownKey(Record):
    """One line of known_hosts: a key, and the hosts that have it."""

    file: str
    line: int
    names: str
    """Names, patterns and hashes of hosts, separated by commas, as in the file."""
    marker: str
    """``@revoked``, ``@cert-authority`` or nothing."""
    kind: str
    """``ssh-ed25519``, ``ssh-rsa`` …"""
    key: str
    """Base64."""

    @property
    def place(self) -> str:
        """File and line of the key, for messages."""
        return f"{self.file}:{self.line}"


class KnownHosts:
    """All lines of some known_hosts files, found by the name of a host. Files that cannot be read
    are ignored."""

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
        """Add lines, such as a key that was accepted."""
        self._found.clear()
        for key in keys:
            hashed = _decode_hash(key.names)
            if hashed is not None:
                self._hashed.append((*hashed, key))
            elif any(char in key.names for char in "*?!|"):
                self._patterns.append(key)
            else:
                for name in key.names.lower().split(","):
                    self._plain.setdefault(name, []).append(key)

    def of(self, name: str) -> list[KnownKey]:
        """Return the lines for a name in the form of ``lookup_name``."""
        if name not in self._found:
            told = name.encode()
            self._found[name] = [
                *self._plain.get(name, []),
                *(
                    key
                    for salt, digest, key in self._hashed
                    if hmac.digest(salt, told, "sha1") == digest
                ),
                *(key for key in self._patterns if names_match(key.names, name)),
            ]
        return self._found[name]


def parse(lines: Iterable[str], file: str) -> Iterable[KnownKey]:
    """Yield the keys in the lines of a known_hosts file. Invalid lines are ignored, as in
    OpenSSH."""
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) >= 3:
            yield KnownKey(
                file=file, line=number, names=words[0], marker=marker, kind=words[1], key=words[2]
            )


def lookup_name(host: str, port: int) -> str:
    """Return the name under which known_hosts has a host: ``host`` or ``[host]:port``."""
    return host.lower() if port == SSH_PORT else f"[{host.lower()}]:{port}"


def names_match(names: str, name: str) -> bool:
    """Return whether the names, patterns and hashes of a line match a name. ``!pattern`` excludes
    names."""
    matched = False
    for pattern in names.split(","):
        if pattern.startswith("|1|"):
            matched = matched or _hashed_match(pattern, name)
        elif pattern.startswith("!"):
            if _matches_pattern(name, pattern[1:]):
                return False
        else:
            matched = matched or _matches_pattern(name, pattern)
    return matched


def _matches_pattern(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.lower().replace("[", "[[]"))


def _decode_hash(names: str) -> tuple[bytes, bytes] | None:
    """Return salt and digest of ``|1|salt|digest``; None for another form."""
    parts = names.split("|")
    if len(parts) != _HASHED_PARTS or parts[:2] != ["", "1"]:
        return None
    try:
        return base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except ValueError:
        return None


def _hashed_match(hashed: str, name: str) -> bool:
    decoded = _decode_hash(hashed)
    return decoded is not None and hmac.digest(decoded[0], name.encode(), "sha1") == decoded[1]


def hashed_name(name: str, salt: bytes) -> str:
    """Return a name in the hashed form of HashKnownHosts."""
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def judge(known: Sequence[KnownKey], kind: str, key: str) -> tuple[Verdict, KnownKey | None]:
    """Return the verdict on a host's key of type ``kind``, and the line of ``known`` that decides,
    if one does."""
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


def changed(what: str, name: str, scan: KeyScan) -> ConnectStepError:
    """Return the error that a host has another key than the known one.

    ``what`` describes the difference; ``name`` is the host's name in known_hosts.
    """
    return refused(
        f"ITS KEY HAS CHANGED: {what}. Someone may be posing as this host",
        hint=f"if it was installed anew: ssh-keygen -R {quoted(name)}, then {scan.command()}",
        scan=scan,
    )


def unknown(what: str, scan: KeyScan) -> ConnectStepError:
    """Return the error that a host's key is unknown. ``what`` is its text."""
    return refused(
        what,
        hint=f"to trust it: {scan.command()}; {Opt.SSH_HOST_KEYS} accept-new takes the keys of "
        "all new "
        "hosts",
        scan=scan,
    )


def refused(text: str, *, hint: str | None = None, scan: KeyScan | None = None) -> ConnectStepError:
    """Return the error ``text`` that a host's key is refused."""
    return ConnectStepError("host key", text, hint=hint, passing=False, scan=scan)
