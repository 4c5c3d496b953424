"""The commands on the pages of documentation run as printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import DOCS, PAGES, Block, blocks, name

FILES = {
    "train.py": """\
import os
import sys

assert sys.argv[1:] in ([], ["--lr", "0.1"]), sys.argv
print("rank", os.environ["RANK"])
""",
    "my/__init__.py": "",
    "my/trainer.py": "import train\n",
    "hosts": "localhost slots=4\n",
    "hosts.sh": "#!/bin/sh\necho localhost:4\n",
}


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.is_run_here]


@pytest.fixture
def work(tmp_path: Path, clean_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with the files that the pages name. ``distlaunch`` is on the PATH."""
    for path, text in FILES.items():
        file = tmp_path / "work" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "work" / "hosts.sh").chmod(0o755)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "distlaunch").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m distlaunch "$@"\n', "utf-8"
    )
    (programs / "distlaunch").chmod(0o755)
    root = str(DOCS.parents[1])
    monkeypatch.setenv("PATH", f"{programs}:{os.path.dirname(sys.executable)}:{clean_env['PATH']}")
    monkeypatch.setenv("PYTHONPATH", root)
    return tmp_path / "work"


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name)
def test_the_commands_of_a_page_run_as_printed(work, page):
    for block in runnable(page):
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert result.returncode == 0, f"{block.text}\n{result.stdout}\n{result.stderr}"


def test_the_kill_of_the_quickstart_stops_the_job_with_sigterm(work):
    block = next(
        block
        for block in blocks(DOCS / "quickstart.md")
        if block.mark == "run: tests/process/test_pages.py"
    )
    (work / "waits.py").write_text("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    job = subprocess.Popen(
        ["distlaunch", "train", "--num-procs", "2", "waits.py"],
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "[0-1] up\n"
        subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], cwd=work, check=True)
        assert job.wait(60) == 128 + signal.SIGTERM
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()
        job.stdout.close()
    assert not list(work.parent.rglob("launcher.pid"))


def test_every_variable_of_a_worker_is_documented(distlaunch):
    result = distlaunch.train("--num-procs", "1", "--no-python", "env")
    assert result.returncode == 0, result.stderr
    names = {line.partition("=")[0] for line in result.lines_of(0)}
    page = (DOCS / "reference" / "environment.md").read_text("utf-8")
    known = set(re.findall(r"`([A-Z][A-Z_]+)`", page.partition("## Variables of options")[0]))
    inherited = {*os.environ, *distlaunch.env, "_", "PWD", "SHLVL", "OLDPWD", "PYTHONPATH"}
    assert names - inherited - known == set()
