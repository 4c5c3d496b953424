"""The answers of distlaunch: its own commands run, and their output or their workers are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REFUSED = "refused"
EXIT_USAGE = 2
LIMIT_S = 120.0
PROBE = "import json, os; print('PROBE ' + json.dumps(dict(os.environ)))\n"
_PLACE = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_HOSTNAME",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
)
"""Where a worker is and how it meets the others: no settings."""


PYTHONS = {"horovod": sys.executable, "deepspeed": sys.executable}
"""Interpreters of workers that need these packages; compare-peers sets them."""


class FailedError(Exception):
    """A command of ours ended in a way that is no answer."""


def _run(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}",
        "HOME": str(folder),
    }
    env |= {"LANG": "C.UTF-8", "XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "distlaunch", *words],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def _answer(words: Sequence[str], read: Callable[[str], Any], **files: str) -> Any:
    """Run a command in a folder with these files; return what it says, or that it is refused."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in {"train.py": PROBE, **files}.items():
            (folder / file).write_text(text, "utf-8")
        done = _run(words, folder)
    if done.returncode == EXIT_USAGE:
        return REFUSED
    if done.returncode:
        raise FailedError(f"exit code {done.returncode}: {done.stderr.strip()}")
    return read(done.stdout)


def _plan(*words: str, read: Callable[[dict[str, Any]], Any], **files: str) -> Any:
    # Host files and filters are about machines that are not this one: their GPUs are not looked at.
    return _answer(
        ["plan", "--format", "json", *words, "train.py"], lambda out: read(json.loads(out)), **files
    )


def _slots(plan: dict[str, Any]) -> list[list[Any]]:
    return [[node["host"], node["slots"]] for node in plan["nodes"]]


def _environment(out: str) -> dict[str, str]:
    line = next(line for line in out.splitlines() if "PROBE " in line)
    found: dict[str, str] = json.loads(line.partition("PROBE ")[2])
    return found


def deepspeed_hostfile(text: str) -> Any:
    """Return the slots by host."""
    return _plan(
        "--hostfile", "hostfile", read=lambda plan: dict(map(tuple, _slots(plan))), hostfile=text
    )


def deepspeed_filter(pool: str, include: str, exclude: str) -> Any:
    """Return the chosen slots by host."""

    def read(plan: dict[str, Any]) -> dict[str, list[int]]:
        return {
            node["host"]: node.get("chosen") or list(range(node["slots"])) for node in plan["nodes"]
        }

    chosen = [
        *(("--include", include) if include else ()),
        *(("--exclude", exclude) if exclude else ()),
    ]
    return _plan("--hosts", pool, *chosen, read=read)


def deepspeed_refuses(words: str) -> Any:
    """Return whether the launcher goes on to start anything."""
    return _answer(["deepspeed", *words.split(), "train.py"], lambda _: "started")


def horovod_hosts(text: str) -> Any:
    """Return hosts and slots, in order."""
    return _plan("--hosts", text, read=_slots)


def horovod_hostfile(text: str) -> Any:
    """Return hosts and slots, in order."""
    return _plan("--hostfile", "hostfile", read=_slots, hostfile=text)


def horovod_assignments(hosts: str, number: str) -> Any:
    """Return host, rank, local rank, size, local size, cross rank and cross size of each worker."""

    def read(plan: dict[str, Any]) -> list[list[Any]]:
        found = []
        for node in plan["nodes"]:
            for worker in node["workers"]:
                env = {**plan["env"], **worker["env"]}
                names = ("LOCAL_RANK", "SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
                found.append(
                    [node["host"], worker["rank"], *(int(env[f"HOROVOD_{name}"]) for name in names)]
                )
        return found

    return _plan("--backend", "horovod", "--hosts", hosts, "--num-procs", number, read=read)


def horovod_settings(words: str) -> Any:
    """Return the variables of Horovod that a worker has, less those of its place."""

    def read(out: str) -> dict[str, str]:
        env = _environment(out)
        return {
            name: value
            for name, value in env.items()
            if name.startswith("HOROVOD_") and name not in _PLACE
        }

    from peerslib.cases import FILES

    files = {name: text for name, text in FILES.items() if f"{{{name}}}" in words}
    words = words.format(**{name: name for name in FILES})
    return _answer(
        ["horovodrun", "-np", "1", *words.split(), PYTHONS["horovod"], "train.py"], read, **files
    )


def _torchrun(*words: str) -> Any:
    return _answer(["torchrun", *words, "train.py"], lambda _: "accepted")


def torchrun_nnodes(text: str) -> Any:
    """Return whether the value is taken."""
    return _torchrun(f"--nnodes={text}")


def torchrun_rdzv_conf(text: str) -> Any:
    """Return whether the value is taken."""
    return _torchrun(f"--rdzv-conf={text}")


def torchrun_rdzv_endpoint(text: str) -> Any:
    """Return whether the value is taken."""
    return _torchrun("--rdzv-backend=c10d", f"--rdzv-endpoint={text}")


def torchrun_std(text: str) -> Any:
    """Return whether the value is taken for --redirects."""
    return _torchrun(f"--redirects={text}")


def slurm_nodelist(text: str) -> Any:
    """Return the names in a node list."""
    return _plan("--hosts", text, read=lambda plan: [node["host"] for node in plan["nodes"]])


def accelerate_settings(words: str) -> Any:
    """Return the variables that a worker has for Accelerate's library."""

    def read(out: str) -> dict[str, str]:
        env = {n: v for n, v in _environment(out).items() if n.startswith(("ACCELERATE_", "FSDP_"))}
        if "--cpu" not in words:
            env.pop(
                "ACCELERATE_USE_CPU", None
            )  # set where no GPU is found, whatever the command line says
        return env

    python = PYTHONS["deepspeed"] if "deepspeed" in words else sys.executable
    launcher = ["accelerate", "launch", "--python", python, "--main_process_port", "0"]
    return _answer([*launcher, *words.split(), "train.py"], read)
