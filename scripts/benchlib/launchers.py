"""The launchers that are compared, all with the same interpreter, in an environment made for this
run.

distlaunch is measured as a user has it: built as a wheel from this checkout and installed. An
editable installation would add the cost of its import hook; a venv of its own without packages
could not run torch. So the environment is a fresh venv whose path names the packages of the current
one: a path entry runs no .pth file of that place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORKERS = os.path.join(ROOT, "scripts", "bench_workers")

TORCHRUN_SCRIPT = """#!{python}
import sys
from torch.distributed.run import main
if __name__ == "__main__":
    sys.exit(main())
"""


def _run(argv: Sequence[str], **kwargs: str) -> None:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **kwargs
    )  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"bench: error: {' '.join(argv)} failed\n{done.stdout}{done.stderr}")


def prepare(directory: str) -> str:
    """Make the environment under ``directory`` and return its ``bin``."""
    source, wheels, venv = (os.path.join(directory, name) for name in ("source", "wheels", "venv"))
    os.mkdir(source)
    shutil.copytree(
        f"{ROOT}/distlaunch", f"{source}/distlaunch", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(f"{ROOT}/man", f"{source}/man")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(f"{ROOT}/{name}", source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    isolation = ["--no-build-isolation"] if _has_setuptools() else []
    _run(
        [*pip, "wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", wheels, "."], cwd=source
    )
    _run([sys.executable, "-m", "venv", "--without-pip", venv])
    python = f"{venv}/bin/python"
    (wheel,) = os.listdir(wheels)
    _run(
        [
            *pip,
            "--python",
            python,
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            f"{wheels}/{wheel}",
        ]
    )
    major, minor = sys.version_info[:2]
    packages = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    with open(
        f"{venv}/lib/python{major}.{minor}/site-packages/bench.pth", "w", encoding="utf-8"
    ) as file:
        file.writelines(f"{path}\n" for path in packages)
    torchrun = f"{venv}/bin/torchrun"
    with open(torchrun, "w", encoding="utf-8") as file:
        file.write(TORCHRUN_SCRIPT.format(python=python))
    os.chmod(torchrun, 0o755)
    return f"{venv}/bin"


def _has_setuptools() -> bool:
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How one launcher is told to do what a row measures."""

    name: str
    bin: str

    def command(
        self,
        workers: int,
        worker: Sequence[str],
        directory: str,
        *,
        restarts: int = 0,
        lines: bool = False,
        options: Sequence[str] = (),
    ) -> tuple[list[str], dict[str, str]]:
        """Return argv and environment; ``worker`` is a script of bench_workers with its arguments,
        or a program.

        ``options`` are distlaunch's own; the others do without.
        """
        program = worker[0].startswith("/")
        words = list(worker) if program else [f"{WORKERS}/{worker[0]}", *worker[1:]]
        env = {
            "PATH": f"{self.bin}:{os.environ.get('PATH', os.defpath)}",
            "HOME": directory,
            "LANG": "C.UTF-8",
            # the same for all three: torch workers otherwise differ by who sets it
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        head = {"distlaunch": self._distlaunch, "torchrun": self._torchrun, "mpirun": self._mpirun}[
            self.name
        ](workers, directory, program=program, restarts=restarts, lines=lines)
        return [*head, *(options if self.name == "distlaunch" else ()), *words], env

    def _distlaunch(
        self, workers: int, directory: str, *, program: bool, restarts: int, lines: bool
    ) -> list[str]:
        head = [
            f"{self.bin}/distlaunch",
            "train",
            "--num-procs",
            str(workers),
            "--log-dir",
            f"{directory}/logs",
        ]
        if restarts:
            head += ["--max-restarts", str(restarts), "--min-uptime", "0"]
        return [*head, "--no-python"] if program else head

    def _torchrun(
        self, workers: int, directory: str, *, program: bool, restarts: int, lines: bool
    ) -> list[str]:
        head = [f"{self.bin}/torchrun", "--nproc-per-node", str(workers)]
        if restarts:
            head += ["--max-restarts", str(restarts)]
        if lines:
            head += ["--tee", "3", "--log-dir", f"{directory}/logs"]
        return [*head, "--no-python"] if program else head

    def _mpirun(
        self, workers: int, directory: str, *, program: bool, restarts: int, lines: bool
    ) -> list[str]:
        head = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(workers)]
        if os.geteuid() == 0:
            head.insert(1, "--allow-run-as-root")
        if lines:
            head.append("--tag-output")
        return head if program else [*head, f"{self.bin}/python"]

    def help(self) -> tuple[list[str], dict[str, str]]:
        """Return argv and environment of ``--help``."""
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/", "LANG": "C.UTF-8"}
        return [f"{self.bin}/{self.name}", "--help"], env
