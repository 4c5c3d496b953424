"""Read the ssh_config settings of a host, with OpenSSH if it is installed, else with paramiko.

``ssh -G`` takes 8 ms per host and supports Include, Match and the site's defaults, paramiko only
some of them.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable
from distlaunch.transport.child_process import run_command
from distlaunch.transport.connect_errors import ConnectStepError

_COMMAND_S = 10.0
_KEY_NAMES = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
_GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_NOTHING = ("", "none")


class HostSettings(Record):
    """The settings for one host. Paths are absolute, and tokens (``%h``) are replaced."""

    host: str
    """The host as the caller named it."""
    hostname: str
    port: int
    user: str
    key_files: tuple[str, ...]
    named_key: str | None = None
    """The key file of the command line, which must exist."""
    agent: str | None
    """Socket of the ssh-agent; None if no agent is used."""
    only_key_files: bool = False
    """IdentitiesOnly: of the agent's keys, use only those with a key file on this machine."""
    jumps: str | None = None
    """ProxyJump, as ``user@host:port,...``."""
    command: str | None = None
    """ProxyCommand, to be run by a shell."""
    check: str | None = None
    """StrictHostKeyChecking: ``yes``, ``accept-new``, ``no`` …"""
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    key_alias: str | None = None
    """The name of its key in known_hosts."""
    hash_names: bool = False
    connect_timeout_s: float | None = None
    compression: bool = False
    bind_address: str | None = None
    family: socket.AddressFamily = socket.AF_UNSPEC
    algorithms: Mapping[str, tuple[str, ...]] = {}
    """Allowed algorithms by ``ciphers``, ``macs``, ``kex`` and ``keys``, if configured."""


class SshOptions(Record):
    """Command-line options for all hosts. They win over configuration files."""

    user: str | None = None
    port: int | None = None
    key: str | None = None
    config: str | None = None


def read_settings(
    host: str,
    *,
    user: str | None,
    port: int | None,
    options: SshOptions,
    environ: Mapping[str, str],
) -> HostSettings:
    """Return the settings of one host. ``user`` and ``port`` win over all other sources.

    Raises ConnectStepError if the configuration cannot be read or is invalid.
    """
    user, port = user or options.user, port or options.port
    if host.startswith("-"):
        raise ConnectStepError(
            "resolve", "the name of a host cannot begin with a dash", passing=False
        )
    home = home_of(environ)
    if options.config is not None and not os.access(options.config, os.R_OK):
        raise ConnectStepError(
            "resolve",
            f"{printable(options.config)} ({Opt.SSH_CONFIG}) cannot be read",
            passing=False,
        )
    ssh = shutil.which("ssh", path=environ.get("PATH"))
    if ssh is None:
        config_values = _read_by_paramiko(host, options.config, home)
    else:
        config_values = _read_by_openssh(ssh, host, user, port, options, home, environ)
    return settings_of(
        host, config_values, user=user, port=port, key=options.key, home=home, environ=environ
    )


def home_of(environ: Mapping[str, str]) -> str:
    """Return the directory that has ``.ssh``: HOME if it has one, else the account's home.

    OpenSSH itself ignores HOME.
    """
    account = _account_name_and_home()[1]
    home = environ.get("HOME", "")
    return home if home and home != account and os.path.isdir(f"{home}/.ssh") else account


def _account_name_and_home() -> tuple[str, str]:
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return str(os.getuid()), "/"
    return entry.pw_name, entry.pw_dir


# --- reading


def _read_by_openssh(
    ssh: str,
    host: str,
    user: str | None,
    port: int | None,
    options: SshOptions,
    home: str,
    environ: Mapping[str, str],
) -> dict[str, list[str]]:
    """Return the configuration of ``ssh -G``. Raise ConnectStepError."""
    argv = [ssh, "-G", *config_words(options.config, home)]
    argv += ["-l", user] if user else []
    argv += ["-p", str(port)] if port else []
    try:
        code, printed, errors = run_command([*argv, "--", host], environ, within_s=_COMMAND_S)
    except TimeoutError as exc:
        raise ConnectStepError(
            "resolve", f"ssh -G did not answer within {_COMMAND_S:.0f} s"
        ) from exc
    except OSError as exc:
        raise ConnectStepError(
            "resolve", f"{printable(ssh)} cannot be run: {exc.strerror}", passing=False
        ) from exc
    if code != 0:
        lines = errors.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), f"it ended with {code}")
        raise ConnectStepError(
            "resolve",
            f"ssh rejects its configuration: {printable(last.strip())}",
            passing=False,
        )
    settings = parse(printed.decode(errors="surrogateescape"))
    account = _account_name_and_home()[1]
    if home != account:
        files = settings.get("userknownhostsfile", [])
        settings["userknownhostsfile"] = [
            text.replace(f"{account}/.ssh/", f"{home}/.ssh/") for text in files
        ]
    return settings


def config_words(config: str | None, home: str) -> list[str]:
    """Return ssh's options for the configuration file to read. They are empty if ssh finds it
    itself."""
    if config is not None:
        return ["-F", config]
    if home == _account_name_and_home()[1]:
        return []
    own = f"{home}/.ssh/config"
    return ["-F", own if os.path.exists(own) else "none"]


def parse(text: str) -> dict[str, list[str]]:
    """Return the values in the output of ``ssh -G``, by keyword in lower case. A keyword may have
    several values."""
    config_values: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.partition(" ")
        config_values.setdefault(keyword.lower(), []).append(value)
    return config_values


def _read_by_paramiko(host: str, config: str | None, home: str) -> dict[str, list[str]]:
    """Return the configuration of the user's and the system's file. Raise ConnectStepError."""
    import paramiko

    config_values: dict[str, list[str]] = {}
    for path in (f"{home}/.ssh/config", "/etc/ssh/ssh_config") if config is None else (config,):
        try:
            found = paramiko.SSHConfig.from_path(path).lookup(host)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, paramiko.ConfigParseError) as exc:
            raise ConnectStepError(
                "resolve", f"{printable(path)}: {printable(str(exc))}", passing=False
            ) from exc
        values: dict[str, Any] = dict(found)
        for keyword, value in values.items():
            config_values.setdefault(keyword, value if isinstance(value, list) else [value])
    return config_values


# --- settings


def settings_of(
    host: str,
    config_values: Mapping[str, Sequence[str]],
    *,
    user: str | None,
    port: int | None,
    key: str | None,
    home: str,
    environ: Mapping[str, str],
) -> HostSettings:
    """Return the settings for the values of a configuration. Raises ConnectStepError for an invalid
    value."""

    def one(keyword: str) -> str | None:
        value = next(iter(config_values.get(keyword, ())), "")
        return None if value.lower() in _NOTHING else value

    local_user = _account_name_and_home()[0]
    name = one("hostname") or host
    number = port or _parse_number(one("port"), "Port") or 22
    login = user or one("user") or local_user
    alias = one("hostkeyalias")
    tokens = {
        "%": "%", "h": name, "n": host, "p": str(number), "r": login, "u": local_user, "d": home,
        "i": str(os.getuid()), "k": alias or host, "j": one("proxyjump") or "", "l": socket.gethostname(),
        "L": socket.gethostname().partition(".")[0],
    }  # fmt: skip

    def files(keyword: str, defaults: Sequence[str]) -> tuple[str, ...]:
        values = [
            word for value in config_values.get(keyword, defaults) for word in words(keyword, value)
        ]
        return tuple(
            _absolute_path(value, tokens, home, environ)
            for value in values
            if value.lower() not in _NOTHING
        )

    def words(keyword: str, value: str) -> list[str]:
        return [value] if keyword == "identityfile" else value.split()

    key_files = files("identityfile", [f"~/.ssh/{name}" for name in _KEY_NAMES])
    named_key = None if key is None else _absolute_path(key, {}, home, environ)
    return HostSettings(
        host=host,
        hostname=name,
        port=number,
        user=login,
        key_files=key_files if named_key is None else (named_key, *key_files),
        named_key=named_key,
        agent=_agent_socket(config_values, tokens, home, environ),
        only_key_files=one("identitiesonly") == "yes",
        jumps=one("proxyjump"),
        command=None
        if one("proxyjump")
        else with_tokens(one("proxycommand") or "", tokens) or None,
        check=one("stricthostkeychecking"),
        user_known_hosts=files("userknownhostsfile", ["~/.ssh/known_hosts ~/.ssh/known_hosts2"]),
        global_known_hosts=files("globalknownhostsfile", [" ".join(_GLOBAL_KNOWN_HOSTS)]),
        key_alias=alias,
        hash_names=one("hashknownhosts") == "yes",
        connect_timeout_s=_parse_number(one("connecttimeout"), "ConnectTimeout"),
        compression=one("compression") == "yes",
        bind_address=one("bindaddress"),
        family={"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(
            one("addressfamily") or "", socket.AF_UNSPEC
        ),
        algorithms={
            kind: tuple(value.split(","))
            for kind, keyword in _ALGORITHMS.items()
            if (value := one(keyword)) is not None and not value.startswith(("+", "-", "^"))
        },
    )


_ALGORITHMS = {
    "ciphers": "ciphers",
    "macs": "macs",
    "kex": "kexalgorithms",
    "keys": "hostkeyalgorithms",
}


def _parse_number(text: str | None, keyword: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConnectStepError(
            "resolve",
            f"{keyword} {printable(text)} in the ssh configuration is not a number",
            passing=False,
        )
    return int(text)


def _agent_socket(
    config_values: Mapping[str, Sequence[str]],
    tokens: Mapping[str, str],
    home: str,
    environ: Mapping[str, str],
) -> str | None:
    named = next(iter(config_values.get("identityagent", ())), "SSH_AUTH_SOCK")
    if named.lower() in _NOTHING:
        return None
    if named == "SSH_AUTH_SOCK":
        return environ.get("SSH_AUTH_SOCK") or None
    if named.startswith("$"):
        return environ.get(named[1:].strip("{}")) or None
    return _absolute_path(named, tokens, home, environ)


def with_tokens(text: str, tokens: Mapping[str, str]) -> str:
    """Return ``text`` with tokens such as ``%h`` replaced by their values. Unknown tokens stay;
    ``%%`` becomes ``%``."""
    parts = text.split("%")
    shown = [parts[0]]
    rest = iter(parts[1:])
    for part in rest:
        if part:
            shown.append(tokens.get(part[0], "%" + part[0]) + part[1:])
        else:  # %%
            shown.append("%" + next(rest, ""))
    return "".join(shown)


def _absolute_path(
    text: str, tokens: Mapping[str, str], home: str, environ: Mapping[str, str]
) -> str:
    """Return an absolute path, with ``~``, ``${VARIABLE}`` and tokens replaced."""
    path = with_tokens(text.strip('"'), tokens)
    path = re.sub(r"\$\{(\w+)\}", lambda found: environ.get(found[1], ""), path)
    if path == "~" or path.startswith("~/"):
        return home + path[1:]
    return os.path.abspath(os.path.expanduser(path))
