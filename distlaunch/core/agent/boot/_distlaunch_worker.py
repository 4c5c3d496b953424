"""Make a process forked by the preload server equal to a worker started with exec.

This module imports only what the interpreter loads before any script, so that the script finds
nothing else in ``sys.modules``.
"""

import os
import sys

TYPE_CHECKING = False  # typing is not loaded: a script might see it
if TYPE_CHECKING:
    from typing import Any

    from _distlaunch_warm import Server  # type: ignore[import-not-found]

_SET_PDEATHSIG = 1
_KILL = 9
_CHOSEN_SEEDS = 1 << 32
"""Torch seeds itself with 64 random bits. A smaller seed was therefore set by the user's code."""
_NO_WORKER = 127
_REASON_CHARS = 200
_OPENMP = ("/libgomp", "/libiomp", "/libomp")
_OPENBLAS_SETTERS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


def tell(control: int, line: str) -> None:
    """Send a line to the spawner."""
    os.write(control, line.encode("utf-8", "replace"))


def rename(name: str) -> str:
    """Set the command name that ``ps`` shows. Return the previous name."""
    try:
        descriptor = os.open("/proc/self/comm", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return name
    before = os.read(descriptor, 64).decode("utf-8", "surrogateescape").rstrip("\n")
    os.write(descriptor, os.fsencode(name))
    os.close(descriptor)
    return before


class Worker:
    """The server's order to start one worker. The methods turn the forked process into the
    worker."""

    def __init__(
        self,
        server: "Server",
        descriptors: list[int],
        serial: int,
        spawner: int,
        changes: dict[str, str | None],
        cwd: str,
        numbers: tuple[int, ...],
        cpus: "tuple[int, ...] | None",
        terminal: bool,  # noqa: FBT001 - the last of a message's fields
    ) -> None:
        self.server = server
        self.all = descriptors
        self.serial = serial
        self.spawner = spawner
        self.changes = changes
        self.cwd = cwd
        self.numbers = numbers
        self.cpus = cpus
        self.terminal = terminal
        self.mask: set[int] = set()
        self.others: list[int] = []

    @property
    def is_whole(self) -> bool:
        """Whether all descriptors have arrived: the pipe to wait on and the worker's own."""
        return len(self.all) == 1 + len(self.numbers)

    def become(self) -> None:
        """Remove the server's descriptors and state, wait for the spawner, and return to the
        interpreter.

        On failure the process exits, and the spawner starts the worker without preloading.
        """
        server = self.server
        step = "setup"
        try:
            os.setsid()
            for descriptor in self.others:
                os.close(descriptor)
            go = self._outside(self.all[0])
            self._place_descriptors(self.all[1:])
            if self.terminal:
                server.fcntl.ioctl(0, server.termios.TIOCSCTTY, 0)
            rename(server.comm)
            self._take_environment()
            _renew_streams()
            _renew_random()
            self._set_threads()
            for name in server.modules:
                sys.modules.pop(name, None)
            for path in server.cached:
                sys.path_importer_cache.pop(path, None)
            step = "place"
            if self.cpus is not None:
                os.sched_setaffinity(0, self.cpus)
            os.chdir(self.cwd)
            step = ""
            tell(server.control, f"up {self.serial}")
            reply = os.read(go, 1)
        except BaseException as exc:  # noqa: BLE001 - a signal handler of a module may raise anything
            # A missing CPU or directory also fails without preloading.
            why = "" if step == "place" else f" {type(exc).__name__}: {exc}"[:_REASON_CHARS]
            try:
                tell(server.control, f"broken {self.serial}{why}")
            finally:
                os._exit(_NO_WORKER)
        if reply != b"!":  # the order was cancelled, or the spawner is gone
            os._exit(_NO_WORKER)
        server.libc.prctl(_SET_PDEATHSIG, _KILL, 0, 0, 0)
        if os.getppid() != self.spawner:  # it was killed before prctl took effect
            os._exit(_NO_WORKER)
        os.close(go)
        server.orders.close()
        try:
            server.signal.pthread_sigmask(server.signal.SIG_SETMASK, self.mask)
        except KeyboardInterrupt:
            server.signal.signal(server.signal.SIGINT, server.signal.SIG_DFL)
            os.kill(os.getpid(), server.signal.SIGINT)

    def _place_descriptors(self, descriptors: list[int]) -> None:
        """Move the descriptors to their numbers in the worker, and close the reserved ones."""
        for descriptor, number in zip(
            [self._outside(each) for each in descriptors], self.numbers, strict=True
        ):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for number in self.server.reserved:
            if number not in self.numbers:
                os.close(number)

    def _outside(self, descriptor: int) -> int:
        """Return the descriptor, moved away from the numbers of the worker's descriptors if
        necessary."""
        while descriptor in self.numbers:
            descriptor = os.dup(descriptor)
        return descriptor

    def _take_environment(self) -> None:
        """Set the variables for Python, for C and for ``/proc``, as exec would have."""
        environ: Any = self.server.environ
        data = environ._data  # noqa: SLF001 - one putenv for each variable would take too long
        for name, value in self.changes.items():
            if value is None:
                data.pop(os.fsencode(name), None)
            else:
                data[os.fsencode(name)] = os.fsencode(value)
        if os.environ is not environ:  # a module has replaced it
            for name, value in self.changes.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        ctypes, libc = self.server.ctypes, self.server.libc
        libc.malloc.restype = ctypes.c_void_p
        strings = [b"%b=%b\0" % item for item in data.items()]
        room = self.server.env_end - self.server.env_start
        if sum(map(len, strings)) > room:  # show at least the variables that differ between workers
            changed = tuple(os.fsencode(name) + b"=" for name in self.changes)
            strings.sort(key=lambda string: not string.startswith(changed))
        block = bytearray()
        pointers = (ctypes.c_void_p * (len(strings) + 1))()
        for at, string in enumerate(strings):
            if len(block) + len(string) <= room:
                pointers[at] = self.server.env_start + len(block)
                block += string
            else:
                pointers[at] = libc.malloc(ctypes.c_size_t(len(string)))
                ctypes.memmove(pointers[at], string, len(string))
        if room > 0:
            ctypes.memmove(self.server.env_start, bytes(block.ljust(room, b"\0")), room)
        table = libc.malloc(ctypes.c_size_t(ctypes.sizeof(pointers)))
        ctypes.memmove(table, pointers, ctypes.sizeof(pointers))
        ctypes.c_void_p.in_dll(libc, "environ").value = table

    def _set_threads(self) -> None:
        """Set the number of threads that libraries read on import."""
        count = self.changes.get("OMP_NUM_THREADS") or ""
        if not count.isdecimal():
            return
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(int(count))
        with open("/proc/self/maps", errors="replace") as file:
            paths = {line.rstrip("\n").partition("/")[2] for line in file if ".so" in line}
        for path in paths:
            name = "/" + path.rpartition("/")[2]
            setters: tuple[str, ...] = ()
            if name.startswith(_OPENMP):
                setters = ("omp_set_num_threads",)
            elif "openblas" in name and not os.environ.get("OPENBLAS_NUM_THREADS"):
                setters = _OPENBLAS_SETTERS
            library = self.server.ctypes.CDLL("/" + path) if setters else None
            for setter in setters:
                if hasattr(library, setter):
                    getattr(library, setter)(int(count))


def _renew_streams() -> None:
    """Initialise the standard streams again, for the worker's descriptors."""
    import io

    streams: Any = ((0, "r", sys.__stdin__), (1, "w", sys.__stdout__), (2, "w", sys.__stderr__))
    wrapper: Any = io.TextIOWrapper
    for number, mode, stream in streams:
        if type(stream) is not wrapper or _has_no_descriptor(stream):
            continue
        unbuffered = stream.write_through
        binary: Any = io.open(number, mode + "b", 0 if unbuffered and number else -1, closefd=False)  # noqa: SIM115, UP020
        raw = binary if unbuffered and number else binary.raw
        raw.name = stream.name
        by_line = not unbuffered and (number == 2 or raw.isatty())
        stream.__init__(
            binary,
            stream.encoding,
            stream.errors,
            "\n",
            line_buffering=by_line,
            write_through=unbuffered,
        )
        stream.mode = mode


def _has_no_descriptor(stream: "Any") -> bool:
    try:
        stream.fileno()
    except ValueError:
        return True
    return False


def _renew_random() -> None:
    """Reseed random numbers and secrets, so that they differ between ranks, unless a module has set
    the seed.

    Python itself seeds ``random`` in every forked process.
    """
    numpy: Any = sys.modules.get("numpy.random.mtrand")
    if numpy is not None and getattr(numpy._rand._bit_generator, "seed_seq", 0) is not None:  # noqa: SLF001 - no other way
        numpy.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.default_generator.initial_seed() >= _CHOSEN_SEEDS:
        torch.default_generator.seed()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    threading: Any = sys.modules.get("threading")
    if threading is not None:
        set_native_id = getattr(threading.main_thread(), "_set_native_id", None)
        if set_native_id is not None:
            set_native_id()
