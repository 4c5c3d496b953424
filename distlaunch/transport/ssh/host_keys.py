"""Whether a host's key is taken, by known_hosts and ``--ssh-host-keys``."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable

from distlaunch.core.model.text import printable
from distlaunch.planning.train_options import HostKeys
from distlaunch.transport.connect_errors import Trouble
from distlaunch.transport.ssh.config import HostSettings
from distlaunch.transport.ssh.keyhints import changed, refused, scan, unknown
from distlaunch.transport.ssh.knownhosts import KnownHosts, KnownKey, hashed_name, judge, lookup_name, parse

_SALT_BYTES = 20
_BY_OPENSSH = "--ssh-command ssh connects by OpenSSH, which checks certificates of hosts"


class Unchecked:
    """Tells the user, once, that keys of hosts are taken as they come."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._first = threading.Lock()

    def say(self, why: str = "--ssh-host-keys off") -> None:
        """Tell it; from any thread."""
        if self._first.acquire(blocking=False):
            self._note(
                f"host keys are not checked ({why}): whoever answers at a node's address gets the job's environment"
            )


class HostKeyCheck:
    """Judges the keys of all hosts of a launcher; reads each file once."""

    def __init__(self, mode: HostKeys | None, unchecked: Unchecked | None = None) -> None:
        """``mode`` None: as StrictHostKeyChecking says, and strictly where that says nothing."""
        self._mode = mode
        self._unchecked = unchecked
        self._lock = threading.Lock()
        self._read: dict[tuple[str, ...], KnownHosts] = {}

    def mode(self, settings: HostSettings) -> HostKeys:
        """Give what holds for one host."""
        if self._mode is not None:
            return self._mode
        return {"no": "off", "off": "off", "accept-new": "accept-new"}.get(settings.check or "", "strict")  # type: ignore[return-value]

    def known_kinds(self, settings: HostSettings) -> list[str]:
        """Give the kinds of keys that a host is known by: it is to show one of these."""
        return list(dict.fromkeys(line.kind for line in self._lines(settings) if not line.marker))

    def _lines(self, settings: HostSettings) -> list[KnownKey]:
        hosts = self._hosts(settings)
        return hosts.of(_name(settings)) or hosts.of((settings.key_alias or settings.hostname).lower())

    def _hosts(self, settings: HostSettings) -> KnownHosts:
        files = (*settings.user_known_hosts, *settings.global_known_hosts)
        with self._lock:
            if files not in self._read:
                self._read[files] = KnownHosts(files)
            return self._read[files]

    def check(self, settings: HostSettings, kind: str, blob: bytes) -> None:
        """Take a key or not; a new one may be added to the user's known_hosts. Raises Trouble."""
        mode = self.mode(settings)
        if mode == "off":
            if self._unchecked is not None:
                self._unchecked.say(*() if self._mode else (f"StrictHostKeyChecking {settings.check} in ssh_config",))
            return
        key = base64.b64encode(blob).decode()
        name = _name(settings)
        hosts = self._hosts(settings)
        named = hosts.of(name)
        verdict, line = judge(named, kind, key)
        if verdict == "unknown" and name != (bare := (settings.key_alias or settings.hostname).lower()):
            # As OpenSSH: a key known for the host, without a port, will do. What differs there proves nothing.
            without_port, _ = judge(hosts.of(bare), kind, key)
            verdict = without_port if without_port in ("known", "revoked") else verdict
        if verdict == "known":
            return
        if verdict == "unknown" and mode == "accept-new":
            self._accept(settings, hosts, name, kind, key)
            return
        raise _refusal(settings, verdict, line, kind, blob)

    def _accept(self, settings: HostSettings, hosts: KnownHosts, name: str, kind: str, key: str) -> None:
        shown = hashed_name(name, os.urandom(_SALT_BYTES)) if settings.hash_names else name
        with self._lock:
            added = parse([f"{shown} {kind} {key}"], "this launcher")
            hosts.add(added)
            file = next(iter(settings.user_known_hosts), None)
            if file is not None and file != os.devnull:
                try:
                    _append(file, f"{shown} {kind} {key}\n")
                except OSError as exc:
                    raise Trouble(
                        "host key",
                        f"its new key cannot be added to {printable(file)}: {exc.strerror}",
                        passing=False,
                    ) from exc


def _append(file: str, line: str) -> None:
    """Add a line to a file that other programs may be adding to."""
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


def _name(settings: HostSettings) -> str:
    if settings.key_alias is not None:
        return settings.key_alias.lower()
    return lookup_name(settings.hostname, settings.port)


def fingerprint(blob: bytes) -> str:
    """Give a key's fingerprint as ssh prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _refusal(settings: HostSettings, verdict: str, line: KnownKey | None, kind: str, blob: bytes) -> Trouble:
    place = printable(line.place) if line is not None else ""
    shown = f"{printable(kind)} {fingerprint(blob)}"
    match verdict:
        case "changed":
            kind = printable(kind)
            what = f"{place} has another {kind} key than the one shown, {shown}"
            return changed(what, _name(settings), scan_hint(settings))
        case "revoked":
            return refused(f"its key is revoked by {place}: {shown}")
        case "certified":
            return refused(f"it is known by a certificate authority ({place}), not by {shown}", hint=_BY_OPENSSH)
        case "other types":
            return refused(
                f"it is known by another kind of key ({place}) than the one shown, {shown}",
                hint=f"to trust this one too: {scan_hint(settings)}",
            )
    return unknown(f"its key is not known: {shown}", scan_hint(settings))


def scan_hint(settings: HostSettings) -> str:
    """Write the command that adds a host's keys to known_hosts."""
    return scan(settings.hostname, settings.port, *settings.user_known_hosts[:1])
