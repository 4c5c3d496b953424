"""What a node is asked before workers are sent to it: folders, programs, the script.

Each of these may wait for a file server that does not answer; whoever calls does so in a child.
"""

from __future__ import annotations

import errno
import os
import queue
import stat
from collections.abc import Callable, Iterable, Mapping

from distlaunch.core.model.variables import DEVICE_MASKS
from distlaunch.core.probe.network import Address, look_up

NAME_S = 1.0
"""How long the resolver may take to say what the own host name stands for."""
_PIECE_BYTES = 1 << 20
_BEAT_PIECES = 64

OF_THE_NODE = DEVICE_MASKS | {
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "SLURM_STEP_GPUS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
}
"""Variables of a node that decide which devices a worker there sees, in what order, and by which
interface it talks."""


def telling(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep what a plan must know of a node's own environment."""
    return {name: value for name, value in environ.items() if name in OF_THE_NODE}


def machine_id() -> str:
    """Return what tells this machine from others under any name; empty if the kernel does not tell.

    Of the system's start, and of the namespaces of processes, network and mounts: two containers
    on one host are two machines.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            started = file.read().strip()
        spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "net", "mnt")]
    except OSError:
        return ""
    return " ".join((started, *spaces))


def problem_of_folder(path: str) -> str | None:
    """Say why workers cannot run in a folder, as a clause; enters it to see."""
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


def first_program(names: Iterable[str], workdir: str, path: str | None) -> str | None:
    """Find the first of these programs that may be run: a path, from ``workdir`` on, or a word to
    be found on PATH."""
    for name in names:
        if "/" in name:
            place = os.path.join(workdir, name)
            if os.path.isfile(place) and os.access(place, os.X_OK):
                return name
        elif name:
            import shutil  # 2 ms: it loads every module of compression

            if (found := shutil.which(name, path=path)) is not None:
                return found
    return None


def digest(path: str, beat: Callable[[], None]) -> tuple[str | None, str | None]:
    """Return the SHA-256 of a script (of a folder's ``__main__.py``), or, if it is there, why it
    cannot be read.

    Neither if there is none. ``beat`` is called now and then.
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


def addresses_of_own_name(name: str) -> tuple[str, ...]:
    """Ask the resolver, for a bounded time, what the own host name stands for; in its order."""
    answer: queue.SimpleQueue[list[Address] | OSError | UnicodeError] = queue.SimpleQueue()
    try:
        look_up(name, 0, answer.put)
        found = answer.get(timeout=NAME_S)
    except (RuntimeError, queue.Empty):
        return ()
    return (
        tuple(dict.fromkeys(str(to[0]).partition("%")[0] for _, to in found))
        if isinstance(found, list)
        else ()
    )
