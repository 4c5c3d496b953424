"""Environments for frameworks that the tests' own interpreter does not have: made once, and kept.

One is a virtual environment that sees all packages of the interpreter that runs the tests, so that
torch is there and not installed twice; only what is missing comes into it. It lies in
``$XDG_CACHE_HOME`` (or ``~/.cache``), under a name that changes with the requirements, the
interpreter and its torch. Two test sessions make it one after the other. As a program (``python -m
tests.environments PID NAME...``) it makes those that are named, at a low priority, and ends when the
process PID ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PATIENCE_S = 3600


def _folder() -> Path:
    """Return the directory of all environments."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distlaunch-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment(
    name: str,
    requirements: Sequence[str],
    *,
    pip: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Path:
    """Return the Python of an environment with these requirements; make it if it is not there.

    ``pip``: further words for ``pip install``; ``variables``: set while packages are built. Call it
    from a fixture of module or session scope: the tests' own environment variables do not lead to
    pip's index.
    """
    variables = variables or {}
    of = [
        sys.version,
        sys.prefix,
        version("torch"),
        *requirements,
        *pip,
        *map("=".join, sorted(variables.items())),
    ]
    digest = hashlib.sha256("\0".join(of).encode()).hexdigest()[:12]
    root = _folder() / f"{name}-{digest}"
    whole, python = root / "whole", root / "bin" / "python"
    with (_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(root, ignore_errors=True)
            # pip's cache does not know with which variables a wheel was built.
            no_cache = ["--no-cache-dir"] if variables else []
            _make(root, python, ["--no-build-isolation", *no_cache, *pip, *requirements], variables)
            whole.touch()
    return python


def deepspeed() -> Path:
    """Return the Python of an environment with DeepSpeed."""
    # The one extension that it would else compile in each home at the first collective.
    return environment(
        "deepspeed",
        ["deepspeed==0.19.8"],
        variables={"DS_BUILD_OPS": "0", "DS_BUILD_SHM_COMM": "1"},
    )


def ray() -> Path:
    """Return the Python of an environment with Ray and its client."""
    return environment("ray", ["ray[client]==2.60.0"])


def pyarrow() -> Path:
    """Return the Python of an environment with pyarrow and pandas, which imports it."""
    return environment("pyarrow", ["pyarrow==25.0.1", "pandas==3.1.1"])


def tensorflow() -> Path:
    """Return the Python of an environment with TensorFlow and its own Keras 2."""
    return environment("tensorflow", ["tensorflow-cpu==2.21.0", "tf_keras==2.21.0"])


HOROVOD = "0.28.1"
HOROVOD_BUILT_WITH = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # gloo's own files ask for older ones than CMake 4 knows
}
COMPILER = """\
#!/bin/bash
# torch's headers need C++20, and Horovod asks for C++17. Without -O3 and debug information the build takes less time.
args=()
for word in "$@"; do
    case $word in
        -std=*) word=-std=gnu++20 ;;
        -O3) word=-O2 ;;
        -g) continue ;;
    esac
    args+=("$word")
done
exec g++ "${args[@]}"
"""


def horovod() -> Path:
    """Return the Python of an environment with Horovod, which is compiled against the tests' torch if
    need be."""
    # What it imports beside torch; as named in its package, since the wheel itself comes without
    # these.
    needed = ["cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4.0"]
    return environment("horovod", [str(horovod_wheel()), *needed])


def horovod_wheel() -> Path:
    """Return Horovod's wheel. Builds it if it is not there, which needs torch and none of the
    tests' other packages."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-torch{version('torch').replace('+', '.')}"
    folder = _folder() / f"horovod-wheel-{HOROVOD}-{tag}"
    with (_folder() / "horovod-wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (wheels := list(folder.glob("*.whl"))):
            print(
                f"building Horovod {HOROVOD} for the tests, once: some minutes",
                file=sys.__stderr__,
                flush=True,
            )
            tools = environment(
                "horovod-build", ["setuptools<70", "wheel", "cmake", "packaging", "cffi>=1.4.0"]
            )
            scratch = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            compiler = scratch / "c++"
            compiler.write_text(COMPILER)
            compiler.chmod(0o755)
            path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
            words = [
                "wheel",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "--no-cache-dir",
                f"horovod=={HOROVOD}",
            ]
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "--python",
                str(tools),
            ]
            _run(
                [*pip, *words, "--wheel-dir", str(scratch)],
                **HOROVOD_BUILT_WITH,
                CXX=str(compiler),
                PATH=path,
            )
            scratch.rename(folder)
            wheels = list(folder.glob("*.whl"))
    return wheels[0]


FRAMEWORKS: Mapping[str, Callable[[], Path]] = {
    "pyarrow": pyarrow,
    "ray": ray,
    "deepspeed": deepspeed,
    "tensorflow": tensorflow,
    "horovod": horovod,
}
"""What makes each, or gives the one that is there; those that take longest come last."""
WHEEL = "horovod-wheel"
"""Names, beside those of frameworks, what takes longest and can be made first."""


def _make(root: Path, python: Path, words: Sequence[str], variables: Mapping[str, str]) -> None:
    _run([sys.executable, "-m", "venv", "--without-pip", str(root)])
    site = sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)})
    ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(site) / "packages_of_the_tests.pth").write_text(ours)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    # Few of the modules are ever imported, and Python compiles those by itself.
    _run([*pip, "install", "--quiet", "--no-compile", *words], **variables)


def _run(argv: Sequence[str], **variables: str) -> None:
    done = subprocess.run(
        argv,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    if done.returncode != 0:
        msg = f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        raise RuntimeError(msg)


def start_at_low_priority(names: Sequence[str], *, until_end_of: int) -> None:
    """Start this module as a program, in a session of its own.

    It is no child of this process, because a worker of xdist ends before the session does.
    """
    words = [sys.executable, "-m", "tests.environments", str(until_end_of), *names]
    subprocess.run(
        ["sh", "-c", '"$@" &', "sh", *words],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )


def _kill_with(pid: int) -> None:
    """Kill this process group as soon as another process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.killpg(0, signal.SIGKILL)
    else:
        select.select([descriptor], [], [])
        os.killpg(0, signal.SIGKILL)


def _make_at_low_priority(pid: int, names: Sequence[str]) -> None:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    threading.Thread(target=_kill_with, args=(pid,), daemon=True).start()
    os.nice(10)  # in idle time alone it would not be done when the first test needs it
    for name in names:
        try:
            horovod_wheel() if name == WHEEL else FRAMEWORKS[name]()
        except RuntimeError as exc:  # the test that needs it tries again, and fails by it
            print(f"{name}: {exc}", file=sys.stderr)


if __name__ == "__main__":
    _make_at_low_priority(int(sys.argv[1]), sys.argv[2:])
