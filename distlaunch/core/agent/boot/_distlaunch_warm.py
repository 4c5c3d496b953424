"""Preload server: imports modules once, so that workers start fast.

For each order of the spawner, the server forks a worker. The server runs while the workers'
interpreter imports ``sitecustomize``. In a forked worker this import returns, and the interpreter
continues with the script, ``sys.argv``, ``__main__`` and exit codes. Everything else must be as in
a worker started with exec: environment, streams, random numbers, descriptors, modules. The only
exception is the seed of string hashes (PYTHONHASHSEED), which all ranks share.

Before the modules, the server imports only what the interpreter loads before any script. Changes
that the modules make to the process (variables, signal handlers, open files) remain in the workers.
Only ``sitecustomize`` imports this file.
"""

import os
import sys
from marshal import loads

from _distlaunch_worker import Worker, rename, tell  # type: ignore[import-not-found]

TYPE_CHECKING = False  # typing is not loaded: a script might see it
if TYPE_CHECKING:
    from typing import Any

_NAME = "dl-warm"
_MOST_AT_ONCE = 8
"""Largest number of workers that one intermediate process forks. They run only after its end."""
_DESCRIPTORS_PER_ORDER = 8
_MESSAGE_BYTES = 1 << 18
_REASON_CHARS = 2000
_NOT_INITIALISED = 3
_STUB = 34
"""CUDA's error code of a stub library without a driver. As with ``_NOT_INITIALISED``, no module has
started CUDA."""
_ENV_START = 47  # in /proc/self/stat, counted after the name: fields 50 and 51


def serve(control: int) -> None:
    """Import the modules, then fork a worker for each order. Returns only in the workers."""
    names = os.environ.pop("DISTLAUNCH_WARM_MODULES").split(",")
    reserved = [int(number) for number in os.environ.pop("DISTLAUNCH_WARM_RESERVED").split(",")]
    os.environ.pop("DISTLAUNCH_WARM_ROOM", None)
    environ = os.environ
    os.set_inheritable(control, False)  # noqa: FBT003 - positional-only in the standard library
    comm = rename(_NAME)
    _move_environment()
    threads = _import(control, names)
    tell(control, "imported")
    server = Server(control, comm, environ, reserved)
    problem = server.problem(names, threads)
    if problem:
        _fail(control, *problem)
    server.settle_down()
    tell(control, "ready")
    worker = None
    while worker is None:
        worker = server.serve()
    worker.become()


def _fail(control: int, reason: str, module: str = "") -> None:
    """Report the failure and exit. Another server can then import the modules without
    ``module``."""
    tell(control, (f"spoiled {module} " if module else "failed ") + reason[:_REASON_CHARS])
    os._exit(1)


def _move_environment() -> None:
    """Copy all variables to new memory, so that the old memory, which ``ps e`` shows, can be
    overwritten."""
    for name, value in os.environ.items():
        os.putenv(name, value)


# --- the imports


def _first_path() -> str | None:
    """Return the script's first entry of ``sys.path``; None if Python adds none (``-I``,
    ``-P``)."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return None
    script = sys.argv[0]
    if script in {"-m", "-c"}:
        return os.getcwd()
    if os.path.isdir(script):
        return script
    from zipimport import ZipImportError, zipimporter

    try:
        zipimporter(script)
    except ZipImportError:
        return os.path.dirname(os.path.realpath(script))
    return script


def _import(control: int, names: list[str]) -> "dict[str, str]":
    """Import the modules as the script would; exit if one cannot be imported.

    Return thread id -> the module after whose import the thread was first seen.
    """
    first = _first_path()
    path = sys.path
    if first is not None:
        path.insert(0, first)
    had_gc = "gc" in sys.modules
    import gc

    if not had_gc:
        del sys.modules["gc"]
    threshold = gc.get_threshold()
    gc.set_threshold(0)  # collections during imports find little and take a tenth of the time
    threads: dict[str, str] = {}
    for name in names:
        tell(control, "importing " + name)
        try:
            __import__(name)
        except BaseException as exc:  # noqa: BLE001 - also SystemExit and KeyboardInterrupt: no worker's end
            _fail(control, f"importing {name} failed: {_exception_line(exc)}", name)
        for thread in os.listdir("/proc/self/task"):
            threads.setdefault(thread, name)
        # If ctypes is not loaded, nothing can have started CUDA from Python.
        if "ctypes" in sys.modules and _device_has_started(sys.modules["ctypes"]):
            _fail(
                control,
                f"importing {name} has started CUDA, which no forked process could use",
                name,
            )
    if gc.get_threshold()[0] == 0:
        gc.set_threshold(*threshold)
    if first is not None:
        if first in path:
            path.remove(first)
        sys.path_importer_cache.pop(first, None)
    return threads


def _exception_line(exc: BaseException) -> str:
    """Return an exception as one line."""
    try:
        lines = str(exc).strip().splitlines()
    except Exception:  # noqa: BLE001 - a module's own exception class
        lines = []
    return type(exc).__name__ + (": " + lines[-1] if lines else "")


def _device_has_started(ctypes: "Any") -> bool:
    """Return whether this process has initialised CUDA. True if that cannot be found out."""
    with open("/proc/self/maps", errors="replace") as file:
        if "/libcuda.so" not in file.read():
            return False
    try:
        count = ctypes.c_int()
        answer = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return True
    return answer not in {_NOT_INITIALISED, _STUB}


# --- forking


class Server:
    """Forks workers after the imports. Workers remove the modules that only this class has
    imported."""

    def __init__(
        self, control: int, comm: str, environ: "os._Environ[str]", reserved: list[int]
    ) -> None:
        known, cached = set(sys.modules), set(sys.path_importer_cache)
        import _signal  # type: ignore[import-not-found]
        import _socket
        import ctypes
        import fcntl
        import gc
        import termios
        import warnings

        self.modules = set(sys.modules) - known
        self.cached = set(sys.path_importer_cache) - cached
        self.ctypes, self.fcntl, self.gc, self.termios = ctypes, fcntl, gc, termios
        self.signal, self.socket, self.warnings = _signal, _socket, warnings
        self.control = control
        self.environ = environ  # os.environ before the imports
        # numbers kept open, so that no module's file gets the number of a worker's descriptor
        self.reserved = reserved
        self.orders = _socket.socket(fileno=control)
        self.orders.settimeout(None)  # a module may have set a default
        self.libc = ctypes.CDLL(None)
        self.comm = comm
        self.most = 1
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self.env_start, self.env_end = int(fields[_ENV_START]), int(fields[_ENV_START + 1])

    def problem(self, names: list[str], threads_by: "dict[str, str]") -> "tuple[str, str] | None":
        """Return why this process cannot fork workers, and the module that caused it (empty if
        unknown)."""
        with self.warnings.catch_warnings():
            self.warnings.simplefilter("ignore")  # Python's warning about threads
            pid = (
                os.fork()
            )  # some libraries stop their threads before a fork and restart them on demand
        if pid == 0:
            os._exit(0)
        self._wait(pid)
        threads = [thread for thread in os.listdir("/proc/self/task") if thread != str(os.getpid())]
        if threads:
            # Threads of further modules are found by the next server.
            first = next(
                name
                for name in names
                if name in {threads_by.get(thread, names[-1]) for thread in threads}
            )
            threads = [thread for thread in threads if threads_by.get(thread, names[-1]) == first]
            some = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
            called = ", ".join(sorted(_names_of(threads)))
            reason = (
                f"importing {first} left {some} running{called and f' ({called})'}, which no "
                "forked process would have"
            )
            return reason, first
        if _device_has_started(self.ctypes):
            reason = (
                f"importing {', '.join(names)} has started CUDA, which no forked process could use"
            )
            return reason, names[0] if len(names) == 1 else ""
        return None

    def settle_down(self) -> None:
        """Flush all buffers, and freeze Python objects so that their memory remains shared after
        forks."""
        for stream in {
            id(each): each for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        }.values():
            try:
                stream.flush()  # type: ignore[union-attr]
            except Exception:  # noqa: BLE001 - None, closed, detached, or an object of a module without flush
                pass
        self.libc.fflush(None)
        # Workers stay frozen: a collection over the modules' objects would copy all of their
        # memory.
        self.gc.freeze()
        free = os.sysconf("SC_OPEN_MAX") - len(os.listdir("/proc/self/fd"))
        self.most = max(1, min(_MOST_AT_ONCE, free // _DESCRIPTORS_PER_ORDER - 1))

    def serve(self) -> "Worker | None":
        """Fork workers for orders. Return the worker in its process, and None in the server."""
        orders = self._receive()
        read, write = os.pipe()
        before = self.signal.pthread_sigmask(self.signal.SIG_BLOCK, self.signal.valid_signals())
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            worker = self._fork_each(orders, write)
            worker.mask = before
            worker.others = [
                read,
                write,
                *(each for other in orders if other is not worker for each in other.all),
            ]
            return worker
        if pid > 0:
            self._wait(pid)
        self.signal.pthread_sigmask(self.signal.SIG_SETMASK, before)
        os.set_blocking(read, False)
        try:
            pairs = dict(pair.split(":") for pair in os.read(read, 4096).decode().split())
        except BlockingIOError:
            pairs = {}
        tell(
            self.control,
            "forked "
            + " ".join(f"{order.serial}:{pairs.get(str(order.serial), -1)}" for order in orders),
        )
        for descriptor in (read, write, *(each for order in orders for each in order.all)):
            os.close(descriptor)
        return None

    @staticmethod
    def _fork_each(orders: "list[Worker]", write: int) -> "Worker":
        """Fork the workers, then exit, so that the spawner becomes their parent. Returns only in
        workers."""
        for order in orders:
            try:
                pid = os.fork()
            except OSError:
                pid = -1
            if pid == 0:
                return order
            os.write(write, b"%d:%d " % (order.serial, pid))
        os._exit(0)

    def _receive(self) -> "list[Worker]":
        """Wait for an order. Return it and the orders that have arrived by then. Exits if the
        spawner is gone."""
        orders: list[Worker] = []
        space = self.socket.CMSG_SPACE(4 * 16)
        flags = self.socket.MSG_CMSG_CLOEXEC
        while len(orders) < self.most:
            try:
                data, rights, _, _ = self.orders.recvmsg(_MESSAGE_BYTES, space, flags)
            except BlockingIOError:
                break
            if not data:
                os._exit(0)
            descriptors = [
                int.from_bytes(payload[at : at + 4], sys.byteorder)
                for _, _, payload in rights
                for at in range(0, len(payload) - 3, 4)
            ]
            order = Worker(self, descriptors, *loads(data))  # noqa: S302 - from the spawner
            if order.is_whole:
                orders.append(order)
                flags |= self.socket.MSG_DONTWAIT
            else:  # the limit of open files was reached
                for descriptor in descriptors:
                    os.close(descriptor)
                tell(self.control, f"forked {order.serial}:-1")
        return orders

    @staticmethod
    def _wait(pid: int) -> None:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass  # a module ignores SIGCHLD, so the child is gone


def _names_of(threads: list[str]) -> set[str]:
    """Return the names of threads, without names that only repeat the process's name."""
    found = set()
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/comm", errors="replace") as file:
                found.add(file.read().strip())
        except OSError:
            continue
    threading = sys.modules.get("threading")
    if threading is not None:
        found |= {
            thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
        }
    return found - {_NAME}
