from __future__ import annotations

import hashlib
import os
import socket
import sys

import pytest

from distlaunch.core.model.run_files import MARKER
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions


@pytest.fixture
def work_dir(tmp_path):
    folder = tmp_path / "work dir \N{SNAKE}"
    folder.mkdir()
    (folder / "train.py").write_bytes(b"print('hello')\n" * 100_000)
    return folder


def test_a_node_that_has_everything_reports_its_facts(make_agent, work_dir):
    agent = make_agent(
        CUDA_VISIBLE_DEVICES="0,1",
        NVIDIA_VISIBLE_DEVICES="all",
        GLOO_SOCKET_IFNAME="eth7",
        UNRELATED="x",
    )
    found = agent.survey(workdir=str(work_dir), script="train.py", topology=True)
    assert found.hostname == socket.gethostname()
    assert found.environ == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "GLOO_SOCKET_IFNAME": "eth7",
    }
    assert found.python == sys.executable
    assert found.script_sha256 == hashlib.sha256((work_dir / "train.py").read_bytes()).hexdigest()
    assert (found.problem, found.hint, found.shares_run_dir) == (None, None, False)
    assert set(found.cpus.allowed) == os.sched_getaffinity(0)
    assert found.cpus.siblings
    assert all(not each.address.startswith("127.") for each in found.interfaces)


def test_it_may_be_asked_again_and_sees_what_has_changed(agent, work_dir, tmp_path):
    assert agent.survey(workdir=str(work_dir), script="later.py").script_sha256 is None
    (work_dir / "later.py").write_text("pass")
    run_dir = tmp_path / "job"
    run_dir.mkdir()
    agent.start("print(1)")  # by now there are threads
    agent.until(m.AttemptEnded)
    (run_dir / MARKER).touch()
    found = agent.survey(workdir=str(work_dir), script="later.py", run_dir=str(run_dir))
    assert found.script_sha256 == hashlib.sha256(b"pass").hexdigest()
    assert found.shares_run_dir


@pytest.mark.parametrize(
    ("order", "problem", "part"),
    [
        ({"workdir": "/not there"}, "there is no directory /not there", "directory"),
        ({"workdir": "/etc/passwd"}, "/etc/passwd is no directory", "directory"),
        ({"workdir": "/etc/passwd/x"}, "there is no directory /etc/passwd/x", "directory"),
        (
            {"pythons": ("/no/python", "no-such-python")},
            "there is no Python for the workers: no /no/python and no no-such-python",
            "python",
        ),
        (
            {"pythons": (), "program": "no-such-program"},
            "there is no program no-such-program",
            "script",
        ),
        ({"pythons": (), "program": "./here"}, "there is no program ./here", "script"),
        ({"script": "/dev/null"}, "/dev/null is no plain file", "script"),
    ],
)
def test_an_obstacle_is_reported_as_a_clause(agent, order, problem, part):
    found = agent.survey(**order)
    assert found.problem == problem
    assert found.problem_part == part


@pytest.mark.parametrize(
    ("order", "python"),
    [
        ({"pythons": ("/no/python", "/etc/passwd", sys.executable)}, sys.executable),
        ({"pythons": ("no-such-python", "sh")}, "sh"),
        ({"pythons": ("no-such-python",), "program": "sh"}, None),
        ({"pythons": (), "program": "sh"}, None),
        ({"pythons": ("bin/python",), "workdir": sys.prefix}, "bin/python"),
    ],
)
def test_the_first_interpreter_that_can_be_run_counts(agent, order, python):
    found = agent.survey(**order)
    assert found.problem is None
    assert found.python == python or (python == "sh" and found.python.endswith("/sh"))


def test_a_fifo_for_a_script_keeps_nobody(agent, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert mentions(agent.survey(script=str(tmp_path / "fifo")).problem, "plain file")


def test_a_folder_is_known_by_its_main_file(agent, tmp_path):
    (tmp_path / "package").mkdir()
    assert agent.survey(script=str(tmp_path / "package")).script_sha256 is None
    (tmp_path / "package" / "__main__.py").write_text("pass")
    assert (
        agent.survey(script=str(tmp_path / "package")).script_sha256
        == hashlib.sha256(b"pass").hexdigest()
    )


def test_pings_are_answered_and_the_agent_ends_while_something_hangs(agent, tmp_path, count_marked):
    from contextlib import suppress

    agent.send(
        m.Survey(
            serial=1,
            workdir="/",
            pythons=(),
            script="",
            program="",
            run_dir="",
            gpus=True,
            topology=True,
        )
    )
    stopped = False
    while not stopped and not agent.of(m.Surveyed):  # as if a file server kept it
        for pid in count_marked():
            with suppress(ProcessLookupError, FileNotFoundError):
                if (
                    pid != agent.process.pid
                    and os.stat(f"/proc/{pid}").st_uid == os.getuid()
                    and _is_agents(pid, agent)
                ):
                    os.kill(pid, 19)
                    stopped = True
        agent.read(0)
    agent.send(m.Ping(serial=1))
    agent.until(m.Pong)
    assert agent.leave() == 0


def _is_agents(pid: int, agent) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            text = file.read()
    except OSError:
        return False
    return int(text.rpartition(")")[2].split()[1]) == agent.process.pid and "dl-watcher" not in text
