"""Features that need our code in the workers' interpreters, while the agent runs from a zip."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from distlaunch.core.protocol import agent_messages as m

VERSIONS = sorted(
    str(path)
    for folder, pattern in (
        ("/usr/bin", "python3.1[0-9]"),
        ("/usr/local/bin", "python3.1[0-9]"),
        (os.environ.get("PYENV_ROOT", "/nowhere"), "versions/3.1[0-9].*/bin/python3"),
    )
    for path in Path(folder).glob(pattern)
)
PYTHONS = list(dict.fromkeys([sys.executable, *VERSIONS]))


@pytest.fixture(params=PYTHONS, ids=lambda path: "own" if path == sys.executable else path)
def python(request) -> str:
    return request.param


def test_modules_are_preloaded_and_workers_forked(make_agent, worker_spec, python):
    agent = make_agent(python=python)
    assert agent.survey(pythons=(python,)).python == python
    script = "import sys, os; print('decimal' in sys.modules, os.environ.get('PYTHONPATH'), os.environ.get('DISTLAUNCH_BOOT'))"
    argv = (python, "-c", script)
    for attempt in (0, 1):
        agent.prepare(0, attempt=attempt)
        workers = [worker_spec(rank, None) for rank in range(3)]
        agent.start(
            *workers,
            argv=argv,
            attempt=attempt,
            preload=("decimal",),
            preload_log="/not there/attempt-0/preload.log",
            bootstrap="direct",
            is_remote=True,
            env={**agent.env, "DISTLAUNCH_RUN_DIR": "/not there"},
        )
        agent.until(m.AttemptEnded, attempt + 1)
    [ended] = agent.of(m.PreloadEnded)
    assert ended.problem is None
    assert {bytes(agent.taken[rank, 1]) for rank in range(3)} == {b"True None None\n" * 2}
    assert not agent.of(m.AgentNotice)
    assert agent.leave() == 0


def test_stacks_are_shown_when_they_are_asked_for(make_agent, worker_spec, python):
    agent = make_agent(python=python)
    script = "import time\ndef stands_here():\n    print('up', flush=True)\n    time.sleep(1000)\nstands_here()\n"
    agent.start(worker_spec(0, [python, "-c", script]), watch=True, bootstrap="direct")
    agent.until_taken(0, b"up")
    agent.send(m.CollectStacks(attempt=0, serial=4))
    [stacks] = agent.until(m.Stacks)
    assert stacks.serial == 4
    assert "in stands_here" in stacks.stacks[0].text
    agent.send(m.Stop(attempt=0, signum=signal.SIGTERM, grace_s=20.0))
    agent.until(m.AttemptEnded)
    assert agent.of(m.Alive)


def test_the_usage_of_node_and_workers_is_read_when_it_is_asked_for(make_agent, worker_spec):
    agent, python = make_agent(), sys.executable
    script = "import time\nprint('up', flush=True)\ntime.sleep(1000)\n"
    specs = [worker_spec(rank, [python, "-c", script]) for rank in range(2)]
    agent.start(*specs, uses_gpus=True)
    for rank in range(2):
        agent.until_taken(rank, b"up")
    agent.send(m.ReadUsage(attempt=0, serial=6))
    [usage] = agent.until(m.Usage)
    pids = {rank: pid for each in agent.of(m.Started) for rank, pid in each.pids.items()}
    assert usage.serial == 6
    assert {each.rank: each.pid for each in usage.workers} == pids
    assert all(each.rss_bytes > 0 for each in usage.workers)
    assert usage.agent_cpu_s > 0
    agent.send(m.Stop(attempt=0, signum=signal.SIGTERM, grace_s=20.0))
    agent.until(m.AttemptEnded)
    assert agent.leave() == 0


def test_output_of_imports_is_stored_on_the_node(make_agent, worker_spec, tmp_path):
    (tmp_path / "loud.py").write_text("print('loud words')\n")
    agent = make_agent()
    env = {**agent.env, "DISTLAUNCH_RUN_DIR": "/not there", "PYTHONPATH": str(tmp_path)}
    agent.start(
        worker_spec(0, None),
        argv=(sys.executable, "-c", "pass"),
        preload=("loud",),
        preload_log="/not there/attempt-0/preload.log",
        bootstrap="direct",
        is_remote=True,
        env=env,
    )
    agent.until(m.AttemptEnded)
    assert agent.of(m.PreloadEnded)[0].problem is None
    assert [one.text for one in agent.of(m.AgentNotice)] == ["while preloading: loud words"]
    [log] = make_agent.tmp.glob("*/job/attempt-0/preload.log")
    assert log.read_text() == "loud words\n"


def test_where_the_usual_place_is_not_writable_another_is_found_and_left_clean(
    make_agent, worker_spec
):
    agent = make_agent(TMPDIR="/proc")
    argv = (sys.executable, "-c", "import os; print(os.environ['DISTLAUNCH_RUN_DIR'])")
    env = {**agent.env, "DISTLAUNCH_RUN_DIR": "/not there"}
    agent.start(
        worker_spec(0, None), argv=argv, bootstrap="direct", is_remote=True, watch=True, env=env
    )
    agent.until(m.AttemptEnded)
    folder = Path(bytes(agent.taken[0, 1]).decode().strip())
    assert folder.is_dir()
    assert not str(folder).startswith("/proc")
    assert agent.leave() == 0
    assert not folder.parent.exists()
