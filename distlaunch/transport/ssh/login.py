"""Log in to an SSH server with keys of an ssh-agent and of key files, without a prompt."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable
from distlaunch.transport.connect_errors import SSH_PORT, ConnectStepError
from distlaunch.transport.ssh.config import HostSettings

if TYPE_CHECKING:
    import paramiko

LOGIN_S = 20.0
_AGENT_S = 5.0
_TOO_MANY = (
    "most servers allow 6 attempts: set IdentitiesOnly yes and IdentityFile in "
    "~/.ssh/config to try one key only"
)
_OTHER_WAYS = {"hostbased", "gssapi-with-mic", "gssapi-keyex"}
_LONGEST = 80
_FORMAT = b"openssh-key-v1\0"
_BEGIN, _END = b"-----BEGIN OPENSSH PRIVATE KEY-----", b"-----END OPENSSH PRIVATE KEY-----"


def log_in(
    transport: paramiko.Transport, settings: HostSettings, ring: KeyRing, *, until: float
) -> None:
    """Try keys until a login succeeds: the agent's keys that have a key file, its other keys, key
    files.

    ``IdentitiesOnly`` leaves out the second group. Raises ConnectStepError if none is accepted
    before the monotonic time ``until``.
    """
    import paramiko

    files = ring.files(settings.key_files)
    tried = 0
    agent = _Agent(settings.agent, until)
    try:
        if settings.named_key is not None:
            _require_named_key(ring.files((settings.named_key,))[0], agent)
        for key in _keys_in_order(agent.keys, files, only_files=settings.only_key_files):
            transport.auth_timeout = max(0.1, until - time.monotonic())
            tried += 1
            try:
                further = transport.auth_publickey(settings.user, key)
            except paramiko.BadAuthenticationType as exc:
                raise _refused_error(settings, files, agent, tried - 1, exc.allowed_types) from exc
            except (paramiko.SSHException, EOFError, OSError) as exc:
                if not transport.is_active():
                    raise _closed_by_server_error(tried) from exc
                if time.monotonic() > until:
                    raise ConnectStepError("login", "the server did not answer in time") from exc
                continue
            if further:
                raise _needs_more_error(further)
            return
        raise _refused_error(
            settings, files, agent, tried, _login_methods(transport, settings.user, until)
        )
    finally:
        agent.close()


def _require_named_key(named: KeyFile, agent: _Agent) -> None:
    """Raise ConnectStepError if the key of the command line can be used neither from its file nor
    from the agent."""
    if named.problem is None or named.public in agent.held:
        return
    locked = named.is_locked
    raise ConnectStepError(
        "login",
        f"{printable(named.path)} ({Opt.SSH_KEY}) {named.problem}",
        hint=_unlock_hint(named, agent) if locked else None,
        passing=False,
    )


def _unlock_hint(file: KeyFile, agent: _Agent) -> str:
    return f"ssh-add {printable(file.path)}" + (
        "" if agent.there else ", in an ssh-agent: eval $(ssh-agent)"
    )


def _keys_in_order(held: list[Any], files: list[KeyFile], *, only_files: bool) -> Iterator[Any]:
    """Yield the keys to try, in order: keys of the agent (``held``) that are named by files, other
    keys of the agent, keys of files that the agent lacks.

    ``only_files`` (IdentitiesOnly) leaves out the second kind.
    """
    named = {file.public for file in files if file.public is not None}
    yield from (key for key in held if key.asbytes() in named)
    if not only_files:
        yield from (key for key in held if key.asbytes() not in named)
    in_agent = {key.asbytes() for key in held}
    yield from (file.key for file in files if file.key is not None and file.public not in in_agent)


def _login_methods(transport: paramiko.Transport, user: str, until: float) -> list[str]:
    """Ask the server for its login methods. Return [] if it does not answer, or needs no proof."""
    import paramiko

    transport.auth_timeout = max(0.1, until - time.monotonic())
    try:
        transport.auth_none(user)
    except paramiko.BadAuthenticationType as exc:
        return list(exc.allowed_types)
    except (paramiko.SSHException, EOFError, OSError):
        return []
    return []


def _closed_by_server_error(tried: int) -> ConnectStepError:
    return ConnectStepError(
        "login",
        f"the server closed the connection after {tried} key{'s' if tried > 1 else ''}",
        hint=_TOO_MANY if tried > 1 else None,
    )


def _needs_more_error(further: list[str]) -> ConnectStepError:
    return ConnectStepError(
        "login",
        f"the server accepts the key, but also requires {printable(', '.join(further))}",
        hint="distlaunch cannot ask for a password: the server must allow a login by key alone",
        passing=False,
    )


def _refused_error(
    settings: HostSettings, files: list[KeyFile], agent: _Agent, tried: int, ways: list[str]
) -> ConnectStepError:
    text = (
        f"the server accepted no key ({tried} tried)" if tried else "there is no key to log in with"
    )
    if ways and "publickey" not in ways:
        text = f"the server accepts no keys, only {printable(', '.join(ways))}"
    locked = [file for file in files if file.is_locked and file.public not in agent.held]
    others = sorted(set(ways) & _OTHER_WAYS)
    if locked:
        text += f"; {printable(locked[0].path)} has a passphrase"
        hint = _unlock_hint(locked[0], agent)
    elif others and ("publickey" not in ways or tried == 0):
        hint = f"{Opt.SSH_COMMAND} ssh uses OpenSSH, which can log in by {', '.join(others)}"
    else:
        port = "" if settings.port == SSH_PORT else f"-p {settings.port} "
        hint = f"is {printable(settings.user)} the user there ({Opt.SSH_USER})? else: ssh-copy-id "
        hint += f"{port}{printable(settings.user)}@{printable(settings.hostname)}"
    if tried == 0 and not locked and len(files) == 1 and files[0].problem:
        text += f"; {printable(files[0].path)} {files[0].problem}"
    if agent.problem:
        text += f"; {agent.problem}"
    return ConnectStepError("login", text, hint=hint, passing=False)


class _Agent:
    """A connection to an ssh-agent, with a time limit. Without an agent it has no keys."""

    def __init__(self, path: str | None, until: float) -> None:
        self.there = path is not None
        self.keys: list[Any] = []
        self.problem: str | None = None
        self._client: Any = None
        if path is None:
            return
        from paramiko.agent import AgentSSH

        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(max(0.1, min(_AGENT_S, until - time.monotonic())))
        try:
            sock.connect(path)
            self._client = AgentSSH()
            self._client._connect(sock)  # noqa: SLF001 - paramiko's own Agent knows SSH_AUTH_SOCK only
            self.keys = list(self._client.get_keys())
            sock.settimeout(LOGIN_S)  # a key may have to be touched
        except Exception as exc:  # noqa: BLE001 - a broken agent is no reason to leave the files untried
            self._client = None
            sock.close()
            self.problem = f"the ssh-agent does not answer ({printable(str(exc))})"

    @property
    def held(self) -> set[bytes]:
        return {key.asbytes() for key in self.keys}

    def close(self) -> None:
        if self._client is not None:
            self._client._close()  # noqa: SLF001 - see above


class KeyRing:
    """The key files of a launcher, each read once, unless reading fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, KeyFile] = {}

    def files(self, paths: tuple[str, ...]) -> list[KeyFile]:
        """Return the key file at each path, in order.

        One without a usable key has ``key`` None, and is read again in the next call.
        """
        with self._lock:
            files = [self._files.get(path) or KeyFile(path) for path in paths]
            self._files.update({file.path: file for file in files if file.key is not None})
            return files


class KeyFile:
    """The content of a key file when it was read."""

    def __init__(self, path: str) -> None:
        import paramiko

        self.path = path
        self.key: Any = None
        self.public: bytes | None = None

        self.problem: str | None = None
        # A clause that follows the file's name.
        self.is_locked = False
        # The file cannot be used because of its passphrase.
        try:
            self.key = paramiko.PKey.from_path(path)
            self.public = self.key.asbytes()
        except FileNotFoundError:
            self.problem = "does not exist"
        except OSError as exc:
            self.problem = f"cannot be read ({exc.strerror})"
        except Exception as exc:  # noqa: BLE001 - whatever a broken file makes of several parsers
            lines = str(exc).splitlines() or [type(exc).__name__]
            self.problem = f"is not a key that paramiko can read ({printable(lines[0])[:_LONGEST]})"
        if self.key is None:
            self._explain_problem()

    def _explain_problem(self) -> None:
        """Find the public key of a key file that cannot be used, and whether a passphrase is the
        reason."""
        self.public = _read_public_key(self.path)
        try:
            with open(self.path, "rb") as file:
                data = file.read(1 << 16)
        except OSError:
            return
        cipher, public = parse_private_key(data)
        self.public = self.public or public
        if cipher is not None:
            self.is_locked, self.problem = True, "has a passphrase"


def parse_private_key(data: bytes) -> tuple[bytes | None, bytes | None]:
    """Return a private key's cipher (None: not encrypted) and public key, as far as its format
    shows them. No I/O."""
    if _BEGIN not in data:
        return (b"PEM" if b"ENCRYPTED" in data else None), None
    try:
        body = base64.b64decode(data.partition(_BEGIN)[2].partition(_END)[0])
    except ValueError:
        return None, None
    if not body.startswith(_FORMAT):
        return None, None
    cipher, rest = _split_string(body[len(_FORMAT) :])
    for _ in range(2):  # skip the key derivation's name and options
        _, rest = _split_string(rest)
    public, _ = _split_string(rest[4:])  # skip the number of keys, which is 1
    return (None if cipher == b"none" else cipher), public or None


def _split_string(data: bytes) -> tuple[bytes, bytes]:
    """Return the string with a 4-byte length at the beginning of ``data``, and the rest."""
    end = 4 + int.from_bytes(data[:4], "big")
    return data[4:end], data[end:]


def _read_public_key(path: str) -> bytes | None:
    """Return the public key in ``path.pub``, or in the file itself; None if it cannot be read."""
    try:
        with open(path if path.endswith(".pub") else path + ".pub", encoding="ascii") as file:
            return base64.b64decode(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
