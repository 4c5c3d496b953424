"""Tab in the real shells, by the scripts that ``distlaunch completion`` prints."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pages import ROOT

PROGRAM = f"""#!/bin/sh
case $1 in
completion) exec {sys.executable} -m distlaunch "$@" ;;
esac
exec {sys.executable} -c 'import json, sys; open("typed", "w").write(json.dumps(sys.argv[1:]))' "$@"
"""
"""Answers the completion as distlaunch does, and writes the words of any other command line."""
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
CASES = {
    "command, option and file": (
        "distlaunch tra\t --num-pr\t 2 --quie\t tr\t",
        ["train", "--num-procs", "2", "--quiet", "train.py"],
    ),
    "choice and backend": (
        "distlaunch plan --bind nu\t --backend deeps\t",
        ["plan", "--bind", "numa", "--backend", "deepspeed"],
    ),
    "values behind an equals sign": (
        "distlaunch plan --bind=nu\t --backend=deeps\t --ssh-host-keys=stri\t",
        ["plan", "--bind=numa", "--backend=deepspeed", "--ssh-host-keys=strict"],
    ),
    "files and directories": (
        "distlaunch train --log-dir lo\t --hostfile=ho\t --env-file ho\t",
        ["train", "--log-dir", "logs", "--hostfile=hosts", "--env-file", "hosts"],
    ),
    "option of a backend": (
        "distlaunch train --backend deepspeed -o pass-c\ttrue",
        ["train", "--backend", "deepspeed", "-o", "pass-config=true"],
    ),
    "host list, and the script's words": (
        "distlaunch train --hosts a:4,b:4 tr\t ho\t",
        ["train", "--hosts", "a:4,b:4", "train.py", "hosts"],
    ),
    "command of two words": (
        "distlaunch render slu\t --num-node\t 2:4 --partitio\t gpu",
        ["render", "slurm", "--num-nodes", "2:4", "--partition", "gpu"],
    ),
    "another launcher's spelling": (
        "distlaunch torchrun --nproc_per_no\t gp\t tr\t",
        ["torchrun", "--nproc_per_node", "gpu", "train.py"],
    ),
}


@pytest.fixture
def work(tmp_path: Path, clean_env: dict[str, str]) -> Path:
    work = tmp_path / "work"
    (work / "logs").mkdir(parents=True)
    (work / "train.py").write_text("")
    (work / "hosts").write_text("")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "distlaunch").write_text(PROGRAM)
    (programs / "distlaunch").chmod(0o755)
    return work


def type_into(shell: str, line: str, work: Path, environ: dict[str, str]) -> list[str]:
    """Type a line with tabs into a shell that has read the script; return the words it runs."""
    script = work.parent / f"completion.{shell}"
    environ = {
        **environ,
        "PATH": f"{work.parent / 'bin'}:{environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(work.parent),
        "TERM": "dumb",
        "PS1": "$ ",
    }
    text = subprocess.run(
        ["distlaunch", "completion", shell],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    script.write_text(text)
    program = shutil.which(SHELLS[shell][0])
    assert program is not None, f"{shell} is not installed"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(work)
        os.execve(program, SHELLS[shell], environ)
    shown = b""
    try:
        os.write(terminal, f" source {script}\r {line}\r exit\r".encode())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1)[0]:
                continue
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # the shell has ended
                break
            if not chunk:
                break
            shown += chunk
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    typed = work / "typed"
    assert typed.exists(), shown.decode(errors="replace")
    words: list[str] = json.loads(typed.read_text())
    return words


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("line", "words"), CASES.values(), ids=CASES)
def test_tab_completes(shell, line, words, work, clean_env):
    typed = type_into(shell, line, work, clean_env)
    # zsh takes the slash of a directory back at the next space.
    assert [word.rstrip("/") for word in typed] == words
