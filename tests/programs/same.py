"""Print, as one line of JSON, all that a worker can see of how it was started: cold and warm must give the same.

``random``: what is to differ between ranks. ``--torch``: torch, numpy and their threads as well, after importing them.
"""

from __future__ import annotations

import sys

BEFORE = {  # as the script finds it, before it imports anything
    "modules": sorted(sys.modules),
    "path": list(sys.path),
    "importer_cache": sorted(sys.path_importer_cache),
    "meta_path": [repr(finder).partition(" at ")[0] for finder in sys.meta_path],
    "path_hooks": len(sys.path_hooks),
    "frames": [],
}
frame = sys._getframe()
while frame is not None:
    BEFORE["frames"].append(frame.f_code.co_filename.rpartition("/")[2])
    frame = frame.f_back

import gc
import io
import json
import os

GARBAGE = {
    "enabled": gc.isenabled(),
    "threshold": gc.get_threshold(),
    "debug": gc.get_debug(),
    "callbacks": len(gc.callbacks),
}
THREADS = len(os.listdir("/proc/self/task"))

import ctypes
import random
import resource
import signal
import threading
import uuid


def stream_facts(stream):
    raw = stream.buffer.raw if hasattr(stream.buffer, "raw") else stream.buffer
    return {
        "kinds": [type(stream).__name__, type(stream.buffer).__name__, type(raw).__name__],
        "names": [stream.name, str(stream.buffer.name), str(raw.name)],
        "text": [
            stream.encoding,
            stream.errors,
            stream.newlines,
            stream.line_buffering,
            stream.write_through,
            stream.mode,
        ],
        "raw": [raw.mode, raw.closefd, raw.isatty(), raw.seekable(), stream.fileno()],
        "is_original": stream is getattr(sys, f"__{stream.name.strip('<>')}__", None),
        "blksize": getattr(raw, "_blksize", None),
    }


def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        found[name] = [
            what.partition(":")[0] if what[0] != "/" else what,
            os.get_inheritable(int(name)),
            os.get_blocking(int(name)),
        ]
    return found


def status():
    wanted = (
        "Name",
        "Umask",
        "TracerPid",
        "Threads",
        "SigQ",
        "SigPnd",
        "ShdPnd",
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "NoNewPrivs",
        "Seccomp",
        "Cpus_allowed_list",
    )
    with open("/proc/self/status") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {name: fields.get(name) for name in wanted if name != "SigQ"}


def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def c_variables():
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return {
        name: os.fsdecode(getenv(os.fsencode(name)) or b"<none>")
        for name in [*os.environ, "DISTLAUNCH_BOOT", "DISTLAUNCH_WARM_FD"]
    }


def initial_variables():
    """Return the environment that ``ps e`` shows of this process, without our bootstrap's variables."""
    with open("/proc/self/environ", "rb") as file:
        items = [os.fsdecode(item).partition("=")[::2] for item in file.read().split(b"\0") if item]
    return {
        name: value
        for name, value in items
        if not name.startswith(("DISTLAUNCH_BOOT", "DISTLAUNCH_STACKS", "PYTHONPATH"))
    }


def read(path):
    with open(path, "rb") as file:
        return file.read().hex()


main = sys.modules["__main__"]
rank = os.environ["RANK"]
same = {
    **BEFORE,
    "garbage": GARBAGE,
    "threads": THREADS,
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "flags": str(sys.flags),
    "executable": sys.executable,
    "prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.pycache_prefix],
    "xoptions": sys._xoptions,
    "warnoptions": sys.warnoptions,
    "dont_write_bytecode": sys.dont_write_bytecode,
    "hooks": [
        sys.excepthook is sys.__excepthook__,
        sys.displayhook is sys.__displayhook__,
        sys.unraisablehook is sys.__unraisablehook__,
        sys.breakpointhook is sys.__breakpointhook__,
    ],
    "tracing": [sys.gettrace(), sys.getprofile(), hasattr(sys, "ps1"), hasattr(sys, "last_type")],
    "recursion": [sys.getrecursionlimit(), sys.getswitchinterval()],
    "encodings": [sys.getdefaultencoding(), sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
    "streams": {name: stream_facts(getattr(sys, name)) for name in ("stdin", "stdout", "stderr")},
    "main": {
        "name": __name__,
        "file": globals().get("__file__"),
        "spec": main.__spec__
        and [main.__spec__.name, main.__spec__.origin, main.__spec__.parent, main.__spec__.has_location],
        "loader": type(main.__loader__).__name__,
        "package": main.__package__,
        "cached": globals().get("__cached__"),
        "keys": sorted(key for key in vars(main) if key.startswith("__")),
    },
    "cwd": os.getcwd(),
    "handlers": {
        str(int(number)): getattr(signal.getsignal(number), "__name__", repr(signal.getsignal(number)))
        for number in signal.valid_signals()
    },
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "wakeup": signal.set_wakeup_fd(-1),
    "descriptors": descriptors(),
    "environment": dict(os.environ),
    "environment_bytes": len(os.environb),
    "c_variables": c_variables(),
    "initial_variables": initial_variables(),
    "limits": {
        name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
    },
    "umask": os.umask(0o22),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "parent": read(f"/proc/{os.getppid()}/comm"),
    "comm": read("/proc/self/comm"),
    "cmdline": read("/proc/self/cmdline"),
    "exe": os.readlink("/proc/self/exe"),
    "oom": read("/proc/self/oom_score_adj"),
    "cgroup": read("/proc/self/cgroup"),
    "nice": [os.nice(0), os.sched_getscheduler(0)],
    "affinity": sorted(os.sched_getaffinity(0)),
    "status": status(),
    "death_signal": death_signal(),
    "main_thread": [
        threading.current_thread() is threading.main_thread(),
        threading.main_thread().native_id == os.getpid(),
        threading.active_count(),
    ],
    "children": read(f"/proc/self/task/{os.getpid()}/children"),
}
differs = {
    "random": random.random(),
    "urandom": os.urandom(8).hex(),
    "uuid": uuid.uuid4().hex,
    "uuid1": uuid.uuid1().hex,
}
hashed = hash("distlaunch")
if "--torch" in sys.argv:
    import multiprocessing

    import numpy as np
    import threadpoolctl
    import torch

    libraries = sorted(
        (info["internal_api"], os.path.basename(info["filepath"]), info["num_threads"])
        for info in threadpoolctl.threadpool_info()
    )
    torch.ones(600, 600) @ torch.ones(600, 600)
    np.ones((600, 600)) @ np.ones((600, 600))
    same["torch"] = {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "after": len(os.listdir("/proc/self/task")),
        "libraries": libraries,
        "parallel": torch.__config__.parallel_info(),
        "seed": torch.initial_seed(),
        "draws": torch.rand(3).tolist(),
        "cuda": [torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "numpy_errors": str(np.geterr()),
    }
    differs["numpy"] = np.random.rand()
    differs["numpy_generator"] = np.random.default_rng().random()
    differs["authkey"] = bytes(multiprocessing.current_process().authkey).hex()
    same["environment_after_torch"] = dict(os.environ)
    same["modules"] = []  # torch was to be loaded
with io.open(f"same-{rank}.json", "w") as file:
    json.dump({"same": same, "differs": differs, "hash": hashed}, file)
