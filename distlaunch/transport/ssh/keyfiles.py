"""Private keys in files, and what can be told of those that have a passphrase."""

from __future__ import annotations

import base64
import threading
from typing import Any

from distlaunch.core.model.text import printable

LOCKED = "has a passphrase"
_LONGEST = 80
_FORMAT = b"openssh-key-v1\0"
_BEGIN, _END = b"-----BEGIN OPENSSH PRIVATE KEY-----", b"-----END OPENSSH PRIVATE KEY-----"


class KeyFile:
    """One file, as it is now."""

    def __init__(self, path: str) -> None:
        import paramiko

        self.path = path
        self.key: Any = None
        self.public: bytes | None = None
        """The public half: it tells which key of the agent is the same."""
        self.problem: str | None = None
        """Why the file cannot be used, as a clause that follows its name."""
        try:
            self.key = paramiko.PKey.from_path(path)
            self.public = self.key.asbytes()
        except FileNotFoundError:
            self.problem = "is not there"
        except OSError as exc:
            self.problem = f"cannot be read ({exc.strerror})"
        except Exception as exc:  # noqa: BLE001 - whatever a broken file makes of several parsers
            lines = str(exc).splitlines() or [type(exc).__name__]
            self.problem = f"is no key that paramiko can read ({printable(lines[0])[:_LONGEST]})"
        if self.key is None:
            self._look_closer()

    def _look_closer(self) -> None:
        self.public = _beside(self.path)
        try:
            with open(self.path, "rb") as file:
                data = file.read(1 << 16)
        except OSError:
            return
        cipher, public = understood(data)
        self.public = self.public or public
        if cipher is not None:
            self.problem = LOCKED


def understood(data: bytes) -> tuple[bytes | None, bytes | None]:
    """Find a private key's cipher (None: it has none) and public half, as far as the file's format shows them; pure."""
    if _BEGIN not in data:
        return (b"PEM" if b"ENCRYPTED" in data else None), None
    try:
        body = base64.b64decode(data.partition(_BEGIN)[2].partition(_END)[0])
    except ValueError:
        return None, None
    if not body.startswith(_FORMAT):
        return None, None
    cipher, rest = _string(body[len(_FORMAT) :])
    for _ in range(2):  # how the passphrase makes a key, and with what
        _, rest = _string(rest)
    public, _ = _string(rest[4:])  # after the number of keys: one
    return (None if cipher == b"none" else cipher), public or None


def _string(data: bytes) -> tuple[bytes, bytes]:
    end = 4 + int.from_bytes(data[:4], "big")
    return data[4:end], data[end:]


def _beside(path: str) -> bytes | None:
    """Give the public half that lies beside a key, or is the file itself."""
    try:
        with open(path if path.endswith(".pub") else path + ".pub", encoding="ascii") as file:
            return base64.b64decode(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None


class KeyRing:
    """The key files of a launcher; one that could be read is not read again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, KeyFile] = {}

    def files(self, paths: tuple[str, ...]) -> list[KeyFile]:
        """Give the files, in order."""
        with self._lock:
            files = [self._files.get(path) or KeyFile(path) for path in paths]
            self._files.update({file.path: file for file in files if file.key is not None})
            return files
