"""Authenticate processes of one user on the nodes of a cluster to each other, by munge.

Sources: munge(1), unmunge(1), and munge 0.5.15. Of a credential that was decoded before or has
expired, unmunge prints the content and returns a special exit code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

_COMMAND_S = 5.0
_OPENED = (0, 15, 17)
"""Exit codes of unmunge: success, expired, replayed. The content is a key, so all are accepted."""
_SOCKET = re.compile(
    r"^\s*AuthInfo\s*=\s*(?:[^#\n]*,)?\s*socket=([^\s,#]+)", re.IGNORECASE | re.MULTILINE
)
_CONF = "/etc/slurm/slurm.conf"
_MOST_CONF = 1 << 20
_REAL_UID = re.compile(rb"^UID:\s+(\d+)\s*$", re.MULTILINE)


class MungeCommand:
    """The commands munge and unmunge. ``socket`` is the daemon's, if it is not the default."""

    def __init__(self, environ: Mapping[str, str], socket: str | None) -> None:
        self._environ = dict(environ)
        self._socket = [] if socket is None else ["--socket", socket]

    def seal(self, key: str) -> str:
        """Return a credential with the key, which only this user can open. Raises OSError."""
        argv = ["munge", *self._socket, "--restrict-uid", str(os.geteuid())]
        code, output, errors = self._run(argv, key.encode())
        if code:
            raise OSError(_last_line(errors) or f"munge ended with {code}")
        return output.decode("ascii", "replace").strip()

    def open(self, credential: str) -> str:
        """Return the key in a credential of this user. Raises OSError."""
        argv = ["unmunge", *self._socket, "--keys", "STATUS,UID", "--numeric"]
        code, output, errors = self._run(argv, credential.encode("ascii", "replace"))
        about, _, key = output.partition(b"\n\n")
        if code not in _OPENED:
            raise OSError(_last_line(errors) or f"unmunge ended with {code}")
        owner = _REAL_UID.search(about)
        if owner is None or int(owner[1]) != os.geteuid():
            raise OSError("the credential is another user's")
        return key.decode("ascii", "replace")

    def works(self) -> bool:
        """Return whether the commands exist and the daemon answers. Waits for ``munge``, up to 5
        s."""
        if any(
            shutil.which(name, path=self._environ.get("PATH")) is None
            for name in ("munge", "unmunge")
        ):
            return False
        try:
            self.seal("0")
        except OSError:
            return False
        return True

    def _run(self, argv: Sequence[str], data: bytes) -> tuple[int, bytes, bytes]:
        try:
            done = subprocess.run(
                list(argv),
                input=data,
                capture_output=True,
                env=self._environ,
                timeout=_COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise OSError(f"{argv[0]} did not answer within {_COMMAND_S:.0f} s") from exc
        return done.returncode, done.stdout, done.stderr


def find_munge(environ: Mapping[str, str]) -> MungeCommand | None:
    """Return munge as configured for Slurm; None if it cannot be used."""
    munge = MungeCommand(environ, _socket_in_slurm_conf(environ))
    return munge if munge.works() else None


def _socket_in_slurm_conf(environ: Mapping[str, str]) -> str | None:
    try:
        with open(environ.get("SLURM_CONF") or _CONF, encoding="utf-8", errors="replace") as file:
            found = _SOCKET.search(file.read(_MOST_CONF))
    except OSError:
        return None
    return None if found is None else found[1]


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""
