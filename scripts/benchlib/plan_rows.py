"""Measurements of planning over many nodes: `scripts/bench plan`."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence

from .launchers import Launcher
from .process import BenchError
from .rows import Measurement, Row, Sample, Scale

HOSTS = "n[00001-16384]:8"
LINES = 100_000
NODE_LIST = "rack[000-255]node[000-255]"


def _plan(launcher: Launcher, key: str, *words: str) -> Sample:
    """Time one `plan` command, and weigh it at its largest."""
    with tempfile.TemporaryDirectory(prefix="distlaunch-bench-") as directory:
        script, errors = os.path.join(directory, "train.py"), os.path.join(directory, "errors")
        with open(script, "w", encoding="utf-8"):
            pass
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": directory, "LANG": "C.UTF-8"}
        argv = [f"{launcher.bin}/distlaunch", "plan", *words, script]
        with open(os.devnull, "wb") as nothing, open(errors, "wb") as message:
            began = time.monotonic()
            process = subprocess.Popen(argv, env=env, cwd=directory, stdout=nothing, stderr=message)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            with open(errors, encoding="utf-8") as message_text:
                raise BenchError(message_text.read()[-1500:])
    return {
        key: seconds,
        f"{key}_memory": usage.ru_maxrss * 1024 / 1e6,
        f"{key}_cpu": usage.ru_utime + usage.ru_stime,
    }


def as_json(launcher: Launcher, scale: Scale) -> Sample:
    return _plan(launcher, "plan_json", "--hosts", HOSTS, "--format", "json")


def as_table(launcher: Launcher, scale: Scale) -> Sample:
    return _plan(launcher, "plan_table", "--hosts", HOSTS)


def _timed(launcher: Launcher, key: str, program: str, *words: str) -> Sample:
    """Time one call within an interpreter that has loaded what it needs."""
    argv: Sequence[str] = [f"{launcher.bin}/python", "-c", program, *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise BenchError(done.stderr[-1500:])
    return {key: float(done.stdout)}


def host_file(launcher: Launcher, scale: Scale) -> Sample:
    program = (
        "import time\n"
        "from distlaunch.planning.hosts.hostfile import read_hostfile\n"
        "text = ''.join(f'node{number:06d} slots=8  # rack {number % 40}\\n' for number in "
        f"range({LINES}))\n"
        "began = time.perf_counter()\n"
        f"assert len(read_hostfile(text, 'hosts')) == {LINES}\n"
        "print(time.perf_counter() - began)\n"
    )
    return _timed(launcher, "host_file", program)


def node_list(launcher: Launcher, scale: Scale) -> Sample:
    program = (
        "import sys, time\n"
        "from distlaunch.core.model.host_list import expand_nodelist\n"
        "began = time.perf_counter()\n"
        "assert len(expand_nodelist(sys.argv[1], where='list')) == 65536\n"
        "print(time.perf_counter() - began)\n"
    )
    return _timed(launcher, "node_list", program, NODE_LIST)


def _plan_rows(key: str, title: str) -> tuple[Row, ...]:
    return (
        Row(
            key=key, title=title, unit="s", goal="< 3 s", reached=lambda row: row["distlaunch"] < 3
        ),
        Row(
            key=f"{key}_memory",
            title=f"{title}: largest memory",
            unit="MB",
            goal="< 600 MB",
            reached=lambda row: row["distlaunch"] < 600,
        ),
    )


PLAN = (
    Measurement(
        name="plan_json",
        run=as_json,
        launchers=("distlaunch",),
        rows=_plan_rows("plan_json", "`plan --format json` of 16,384 nodes x 8 workers"),
    ),
    Measurement(
        name="plan_table",
        run=as_table,
        launchers=("distlaunch",),
        rows=_plan_rows("plan_table", "`plan` of 16,384 nodes x 8 workers, as a table"),
    ),
    Measurement(
        name="host_file",
        run=host_file,
        launchers=("distlaunch",),
        rows=(
            Row(
                key="host_file",
                title="reading a host file of 100,000 lines",
                unit="s",
                goal="< 1 s",
                reached=lambda row: row["distlaunch"] < 1,
            ),
        ),
    ),
    Measurement(
        name="node_list",
        run=node_list,
        launchers=("distlaunch",),
        rows=(
            Row(
                key="node_list",
                title="expanding a node list of 65,536 hosts",
                unit="s",
                goal="< 0.2 s",
                reached=lambda row: row["distlaunch"] < 0.2,
            ),
        ),
    ),
)
