"""Layer surroundings: reads what may name other nodes, once; ``launch`` loads it only where something hints at any."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import quoted
from distlaunch.core.probe.interfaces import probe_addresses
from distlaunch.resolve import select
from distlaunch.resolve.facts import Surroundings
from distlaunch.resolve.identity import Identity, names_in
from distlaunch.resolve.location import check_lists
from distlaunch.resolve.options import TrainOptions

DISCOVER_S = 60.0
"""How long the command of --discover may take."""
_HOSTS_FILE = "/etc/hosts"
_MOST_BYTES = 64 << 20
_CHUNK = 1 << 16
_LOOK_S = 0.02
"""How long the end of the command may go unnoticed."""


def read_surroundings(options: TrainOptions, environ: Mapping[str, str]) -> Surroundings:
    """Read host file, the systems' own files, this machine's names, and what --discover prints.

    Raises ConfigError for lists that exclude each other, and for a host file or a command that fails; a system's file
    that cannot be read is None.
    """
    texts: dict[str, str | None] = {}
    by_user = check_lists(options)
    if options.hostfile is not None:
        texts[options.hostfile] = _host_file(options.hostfile)
    if by_user is None:
        paths = select.files(environ, wanted=options.source)
        texts.update((path, _system_file(path)) for path in paths)
    return Surroundings(
        texts=texts,
        discovered=None if options.discover is None else run_discover(options.discover, environ),
        identity=own_identity(socket.gethostname(), _system_file(_HOSTS_FILE) or "", probe_addresses()),
    )


def own_identity(hostname: str, hosts_file: str, addresses: tuple[str, ...]) -> Identity:
    """Say what this machine is called by the kernel and by /etc/hosts; a name server, which may hang, is not asked."""
    aliases = names_in(hosts_file, addresses)
    full = next((name for name in aliases if name.startswith(f"{hostname.lower()}.")), None)
    return Identity(hostname=hostname, fqdn=full, addresses=addresses, aliases=aliases)


def _host_file(path: str) -> str:
    """Read the user's file, which may also be a pipe: ``--hostfile <(my-hosts)``."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as exc:
        raise ConfigError(
            f"--hostfile {quoted(path)}: {os.strerror(exc.errno or 0)}",
            hint="without --hostfile, and outside of a scheduler, the workers run on this machine alone",
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"--hostfile {quoted(path)}: a name of a file has no NUL") from exc
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"--hostfile {quoted(path)}: over 64 MiB, which is no list of hosts")
    return data.decode(errors="surrogateescape")


def _system_file(path: str) -> str | None:
    """Read a file that a variable names: plain files alone, since a pipe could keep us waiting."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        with open(fd, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES).decode(errors="surrogateescape")
    except OSError:
        return None
    finally:
        os.close(fd)


def run_discover(command: str, environ: Mapping[str, str], *, patience_s: float = DISCOVER_S) -> str:
    """Run the command as Horovod does, by a shell; return what it printed.

    Raises ConfigError, with the command's own words, if it fails or takes longer than ``patience_s`` seconds.
    """
    where = f"--discover {quoted(command)}"
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            start_new_session=True,
        )
    except (OSError, ValueError) as exc:
        why = os.strerror(exc.errno or 0) if isinstance(exc, OSError) else str(exc)
        raise ConfigError(f"{where}: cannot be run: {why}") from exc
    with process:
        try:
            output, errors, problem = _collect(process, patience_s)
        finally:
            # Its whole group, for a shell may leave others behind. It is not reaped yet, so the number is its own.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    words = errors.decode(errors="surrogateescape").split("\n")
    last = next((line.strip() for line in reversed(words) if line.strip()), None)
    said = "" if last is None else f"; it said {quoted(last)}"
    if problem:
        raise ConfigError(f"{where}: {problem}{said}", hint="it has to print a line for each host, HOST:SLOTS, and end")
    if code:
        how = f"exit code {code}" if code > 0 else f"signal {_signal_name(-code)}"
        raise ConfigError(f"{where}: the command ended with {how}{said}", hint="run it by itself: it has to end with 0")
    return output.decode(errors="surrogateescape")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def _collect(process: subprocess.Popen[bytes], patience_s: float) -> tuple[bytes, bytes, str]:
    """Read stdout and stderr until the process has ended; with them, what is wrong if it does not, or says too much.

    What it left running in the background may hold the pipes open for ever: its own end counts, not theirs.
    """
    deadline_s = time.monotonic() + patience_s
    read: dict[int, bytearray] = {}
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                read[pipe.fileno()] = bytearray()
                selector.register(pipe, selectors.EVENT_READ)
        output, errors = read.values()
        while True:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            ready = selector.select(0.0 if ended else _LOOK_S) if selector.get_map() else []
            for key, _ in ready:
                chunk = os.read(key.fd, _CHUNK)
                read[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fileobj)
            if sum(map(len, read.values())) > _MOST_BYTES:
                return bytes(output), bytes(errors), f"the command printed over {_MOST_BYTES >> 20} MiB"
            if ended and not ready:
                return bytes(output), bytes(errors), ""
            if time.monotonic() > deadline_s:
                return bytes(output), bytes(errors), f"the command did not end in {patience_s:g} s"
            if not ended and not selector.get_map():
                time.sleep(_LOOK_S)
