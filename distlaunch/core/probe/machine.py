"""Check on a node what its workers need: directory, programs, script, host name.

Each call may block on a file server, so the survey makes them in a child process.
"""

from __future__ import annotations

import errno
import os
import queue
import stat
from collections.abc import Callable, Iterable, Mapping

from distlaunch.core.model.launcher_process import boot_id
from distlaunch.core.model.variables import DEVICE_MASKS
from distlaunch.core.probe.network import Address, resolve_in_thread

NAME_S = 1.0
"""How long the resolver may take to resolve this machine's host name."""
_PIECE_BYTES = 1 << 20
_BEAT_PIECES = 64

DEVICE_VARIABLES = DEVICE_MASKS | {
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "SLURM_STEP_GPUS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
}
"""Variables that decide which devices a node's workers see, in which order, and which network
interface they use."""


def device_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a node's environment that a plan depends on."""
    return {name: value for name, value in environ.items() if name in DEVICE_VARIABLES}


def machine_id() -> str:
    """Return an id of this machine that does not depend on its name; empty if unreadable.

    It consists of the boot id and the PID, network and mount namespaces: two containers on one host
    are two machines.
    """
    try:
        spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "net", "mnt")]
    except OSError:
        return ""
    started = boot_id()
    return " ".join((started, *spaces)) if started else ""


def enter_directory(path: str) -> str | None:
    """Make a directory the working directory. Return why workers cannot run in it, as a clause;
    None if they can."""
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return f"{path} is no directory"
        os.chdir(path)
    except OSError as exc:
        if exc.errno in {errno.ENOENT, errno.ENOTDIR}:
            return f"there is no directory {path}"
        return f"the directory {path} cannot be entered: {os.strerror(exc.errno or 0)}"
    except ValueError:
        return f"{path!r} is no path"
    return None


def find_program(names: Iterable[str], workdir: str, path: str | None) -> str | None:
    """Return the first of these programs that can be executed, if any.

    A name with a slash is relative to ``workdir`` and returned as it is; others are searched on
    ``path`` and returned as a path.
    """
    for name in names:
        if "/" in name:
            place = os.path.join(workdir, name)
            if os.path.isfile(place) and os.access(place, os.X_OK):
                return name
        elif name:
            import shutil  # 2 ms: it imports all compression modules

            if (found := shutil.which(name, path=path)) is not None:
                return found
    return None


def script_digest(path: str, beat: Callable[[], None]) -> tuple[str | None, str | None]:
    """Return the SHA-256 of a script (of a directory's ``__main__.py``), and why it cannot be read.

    Both are None if it does not exist. ``beat`` is called every 64 MiB.
    """
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        gone = exc.errno in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
        return None, None if gone else f"{path} cannot be read: {os.strerror(exc.errno or 0)}"
    except ValueError:
        return None, None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None, f"{path} is no plain file"
        import hashlib

        read = hashlib.sha256(usedforsecurity=False)
        pieces = 0
        while piece := os.read(descriptor, _PIECE_BYTES):
            read.update(piece)
            pieces += 1
            if pieces % _BEAT_PIECES == 0:
                beat()
        return read.hexdigest(), None
    except OSError as exc:
        if exc.errno == errno.ESTALE:
            return None, None
        return None, f"{path} cannot be read: {os.strerror(exc.errno or 0)}"
    finally:
        os.close(descriptor)


def resolve_own_name(name: str, within_s: float = NAME_S) -> tuple[str, ...]:
    """Return the addresses of this machine's host name in the resolver's order; none if it does not
    answer in time."""
    answer: queue.SimpleQueue[list[Address] | OSError | UnicodeError] = queue.SimpleQueue()
    try:
        resolve_in_thread(name, 0, answer.put)
        found = answer.get(timeout=within_s)
    except (RuntimeError, queue.Empty):
        return ()
    return (
        tuple(dict.fromkeys(str(to[0]).partition("%")[0] for _, to in found))
        if isinstance(found, list)
        else ()
    )
