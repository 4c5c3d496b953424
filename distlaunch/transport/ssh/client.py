"""One authenticated paramiko connection, to a node or to a jump host."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable
from distlaunch.transport.cleanup import run_in_background
from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.ssh.config import HostSettings
from distlaunch.transport.ssh.exec_channel import PACKET, WINDOW, ByteStream
from distlaunch.transport.ssh.host_keys import HostKeyCheck, scan_of
from distlaunch.transport.ssh.login import LOGIN_S, KeyRing, log_in

if TYPE_CHECKING:
    import paramiko

VERSION_S = 15.0
"""Time for the server to send its version and to agree on keys. A busy server is slow."""
_JOIN_S = 1.0
_loading = threading.Lock()

# Cheap algorithms first: cipher and digest in one call, 32-byte curves.
_CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "aes128-ctr",
    "aes192-ctr",
    "aes256-ctr",
)
_MACS = (
    "hmac-sha2-256-etm@openssh.com",
    "hmac-sha2-256",
    "hmac-sha2-512-etm@openssh.com",
    "hmac-sha2-512",
)
_KEX = (
    "curve25519-sha256@libssh.org",
    "ecdh-sha2-nistp256",
    "ecdh-sha2-nistp384",
    "ecdh-sha2-nistp521",
)
_KEYS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
_RSA = ("rsa-sha2-512", "rsa-sha2-256")
_ALIASES = {"curve25519-sha256@libssh.org": "curve25519-sha256"}


class SshConnection:
    """A paramiko transport and the stream below it."""

    def __init__(self, transport: paramiko.Transport, stream: ByteStream) -> None:
        self.transport = transport
        self.stream = stream

    def close(self) -> None:
        """Close transport and stream. May wait for paramiko's thread, up to 1 s."""
        self.stream.close()
        self._free()

    def close_soon(self) -> None:
        """Close without waiting. Another thread frees the rest."""
        self.stream.close()
        run_in_background(self._free)

    def _free(self) -> None:
        if self.transport.is_alive():
            self.transport.join(_JOIN_S)
        self.transport.close()
        self.stream.free()


def connect(
    stream: ByteStream, settings: HostSettings, *, check: HostKeyCheck, ring: KeyRing, until: float
) -> SshConnection:
    """Negotiate keys, check the host's key and log in, before the monotonic time ``until``.

    On failure, closes the stream and raises ConnectStepError.
    """
    try:
        transport = _make_transport(stream, settings, check)
    except BaseException:
        stream.close()
        stream.free()
        raise
    connection = SshConnection(transport, stream)
    try:
        _negotiate(connection, min(until, time.monotonic() + VERSION_S), settings)
        key = transport.get_remote_server_key()
        check.check(settings, key.get_name(), key.asbytes())
        log_in(transport, settings, ring, until=min(until, time.monotonic() + LOGIN_S))
    except BaseException:
        connection.close()
        raise
    return connection


def _make_transport(
    stream: ByteStream, settings: HostSettings, check: HostKeyCheck
) -> paramiko.Transport:
    from paramiko import Transport

    from distlaunch.transport.ssh.packets import Packets

    transport = Transport(
        stream.sock,
        default_window_size=WINDOW,
        default_max_packet_size=PACKET,
        packetizer_class=Packets,
    )
    transport.daemon = True
    options = transport.get_security_options()
    for kind, preferred in (("ciphers", _CIPHERS), ("digests", _MACS), ("kex", _KEX)):
        allowed = settings.algorithms.get({"digests": "macs"}.get(kind, kind))
        setattr(options, kind, _allowed(getattr(options, kind), preferred, allowed))
    keys = _allowed(options.key_types, _KEYS, settings.algorithms.get("keys"))
    if check.mode(settings) != "off":
        known = [
            name
            for kind in check.known_kinds(settings)
            for name in (_RSA if kind == "ssh-rsa" else (kind,))
        ]
        keys = tuple(
            sorted(keys, key=lambda name: name not in known)
        )  # prefer kinds of keys that known_hosts can check
    options.key_types = keys
    if settings.compression:
        transport.use_compression(compress=True)
    # paramiko's thread needs no timeout, because closing the stream wakes it.
    stream.sock.settimeout(None)
    return transport


def _allowed(
    has: Any, preferred: tuple[str, ...], allowed: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Return paramiko's algorithms that the configuration allows, fast ones first.

    If it allows none of them, return all.
    """
    ordered = [name for name in preferred if name in has] + [
        name for name in has if name not in preferred
    ]
    if allowed is None:
        return tuple(ordered)
    kept = tuple(name for name in ordered if name in allowed or _ALIASES.get(name) in allowed)
    return kept or tuple(ordered)


def load_paramiko(*, whole: bool) -> None:
    """Import paramiko and silence its log, unless the program has set it up.

    Unless ``whole``, without invoke, which takes 45 % of the time and is only used for ``Match
    exec`` in an ssh_config.
    """
    with _loading:
        logger = logging.getLogger("paramiko")
        if not logger.handlers:  # else the program that imports us has set it up
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
            logger.setLevel(logging.CRITICAL + 1)
        if "paramiko" in sys.modules:
            return
        left_out = not whole and "invoke" not in sys.modules
        if left_out:
            sys.modules["invoke"] = None  # type: ignore[assignment]  # paramiko copes with its absence
        try:
            import paramiko  # noqa: F401 - to be in sys.modules
        finally:
            if left_out:
                del sys.modules["invoke"]


def _negotiate(connection: SshConnection, until: float, settings: HostSettings) -> None:
    """Exchange versions and keys with the server, or raise ConnectStepError."""
    import paramiko

    transport = connection.transport
    done = threading.Event()
    transport.start_client(event=done)
    done.wait(max(0.1, until - time.monotonic()))
    if done.is_set() and transport.is_active():
        return
    reason = connection.stream.why_closed()
    if not done.is_set():
        what = "agree on keys" if transport.remote_version else "send an SSH version"
        raise ConnectStepError(
            "connect", reason or f"connected, but the host did not {what} in time"
        )
    error = transport.get_exception()
    if not transport.remote_version:
        if "Indecipherable" in str(error):
            raise ConnectStepError(
                "connect",
                f"the server there is not an SSH server: {printable(str(error))[-80:]}",
                passing=False,
            )
        raise ConnectStepError(
            "connect",
            reason or "the server closed the connection at once",
            hint=None
            if reason
            else f"too many logins at once exceed its MaxStartups: {Opt.SSH_FANOUT} N limits them",
        )
    if isinstance(error, paramiko.SSHException) and "no acceptable" in str(error):
        what = str(error).partition("(")[2].rstrip(")")
        raise ConnectStepError(
            "connect",
            f"{printable(what)} in common with the server",
            hint=f"{Opt.SSH_COMMAND} ssh uses OpenSSH, which has more algorithms",
            passing=False,
        )
    text = (
        printable(str(error))
        if error is not None and str(error)
        else "the server closed the connection"
    )
    scan = scan_of(settings) if "Signature verification" in text else None
    hint = None if scan is None else scan.command()
    raise ConnectStepError("connect", f"{text} during the key exchange", hint=hint, scan=scan)
