"""Run one command line under one launcher and put down what it did, without what differs by
chance."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from comparelib.cases import Case

PROBE = Path(__file__).with_name("probe.py")
LIMIT_S = 120.0
_RANDOM = re.compile(r"^[0-9a-f]{8}-[0-9a-f-]{27}$|^\d{8}-\d{6}-[0-9a-f]{6}_[0-9a-f]{8}$")
_OURS = re.compile(r"^(?:\[\w+\]:|<[^>]*> )?(?:out|err) \d")


class Seen(NamedTuple):
    """The observed results of one command: ``workers`` by ``attempt-rank``, ``files`` by path in
    the job's folder."""

    exit_code: int
    workers: dict[str, dict[str, Any]]
    stdout: Counter[str]
    stderr: Counter[str]
    own_words: str
    files: dict[str, str]


def observe(case: Case, launcher: list[str]) -> Seen:
    """Run ``case`` in a fresh folder and environment."""
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        port = _free_port()
        _furnish(here)

        def put_in(text: str) -> str:
            return text.replace("{port}", port).replace("{here}", scratch)

        env = {
            "PATH": os.path.dirname(sys.executable) + ":" + os.environ.get("PATH", os.defpath),
            "HOME": scratch,
        }
        env |= {
            "LANG": "C.UTF-8",
            "TMPDIR": f"{scratch}/temporary",
            "PROBE_OUT": f"{scratch}/out",
            "PROBE_DO": case.do,
        }
        env |= {"XDG_STATE_HOME": f"{scratch}/state", "XDG_RUNTIME_DIR": scratch}
        env |= {name: put_in(value) for name, value in case.env.items()}
        done = subprocess.run(
            [*launcher, *map(put_in, case.words)],
            env=env,
            cwd=scratch,
            input=(case.stdin or "").encode(),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        workers = {
            path.stem: _worker(json.loads(path.read_text("utf-8")), scratch, port)
            for path in here.glob("out/*[0-9].json")
        }
        stdout, own_out = _lines(done.stdout)
        stderr, own_err = _lines(done.stderr)
        return Seen(
            done.returncode, workers, stdout, stderr, own_out + own_err, _files(here / "logs")
        )


def _furnish(here: Path) -> None:
    shutil.copy(PROBE, here / "probe.py")
    for name in ("pkg", "out", "temporary", "state"):
        (here / name).mkdir(mode=0o700)
    (here / "pkg" / "__init__.py").touch()
    shutil.copy(PROBE, here / "pkg" / "train.py")
    with zipfile.ZipFile(here / "my app.zip", "w") as archive:
        archive.write(PROBE, "__main__.py")


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _worker(seen: dict[str, Any], scratch: str, port: str) -> dict[str, Any]:
    env: dict[str, str] = seen["env"]
    for name, value in env.items():
        if name == "MASTER_PORT" and value != port:
            env[name] = "(a free port)"
        elif name in ("MASTER_PORT", "PET_MASTER_PORT"):
            env[name] = "(the port given)"
        elif _RANDOM.match(value):
            env[name] = "(a unique id)"
        elif name == "DISTLAUNCH_RUN_DIR":
            env[name] = value.replace(scratch, "{here}")
        elif name == "TORCHELASTIC_ERROR_FILE":
            base, _, rest = value.replace(scratch, "{here}").partition("/attempt_")
            base = base.rpartition("/")[0] if "logs" in base else "(somewhere)"
            env[name] = f"{base}/(id)_(random)/attempt_{rest}"
    for name in (
        "TMPDIR",
        "PROBE_OUT",
        "PROBE_DO",
        "XDG_STATE_HOME",
        "XDG_RUNTIME_DIR",
        "HOME",
        "PWD",
        "_",
        "SHLVL",
        "OLDPWD",
    ):
        env.pop(name, None)
    seen["argv"] = [word.replace(scratch, "{here}") for word in seen["argv"]]
    seen["cwd"] = seen["cwd"].replace(scratch, "{here}")
    return seen


def _lines(output: bytes) -> tuple[Counter[str], str]:
    """Part what workers wrote from what the launcher said: the probe's lines are known by their
    beginning."""
    lines = output.decode(errors="replace").splitlines()
    return Counter(line for line in lines if _OURS.match(line)), "\n".join(
        x for x in lines if not _OURS.match(x)
    )


def _files(logs: Path) -> dict[str, str]:
    """Return the contents of the files in the job's folder, which is named by its id and something
    random."""
    found = {}
    for path in sorted(logs.glob("*/**/*")) if logs.is_dir() else ():
        if path.is_file():
            text = path.read_text("utf-8", errors="replace")
            name = "/".join(path.relative_to(logs).parts[1:])
            if "filtered" in name:  # lines of several workers, in the order of their coming
                text = "".join(sorted(text.splitlines(keepends=True)))
            found[name] = "(an error)" if name.endswith("error.json") and text else text
    for run in logs.iterdir() if logs.is_dir() else ():
        if run.is_symlink():
            found[run.name] = ""
            continue
        stem = run.name[: -len("_01234567")]  # the random part of torchrun may have a _ too
        found[
            f"{stem if not _RANDOM.match(stem + '_00000000') and not _RANDOM.match(stem) else '(id)'}_(random)/"
        ] = ""
    return found
