"""The coordinator's own node: surveys and attempts to reach addresses."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distlaunch.coordinator.joined.local_node import _SurveyThreads
from distlaunch.core.model.topology import CpuInventory, GpuInventory
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol import agent_messages as m
from tests.contract.conftest import OneNode
from tests.facts import mentions

CPUS = CpuInventory(allowed=(0,), online=1)
SURVEY = m.Survey(
    serial=7,
    workdir="/",
    pythons=(sys.executable,),
    script="",
    program="",
    run_dir="",
    gpus=True,
    topology=True,
)
BOUND_S = 60.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def own(open_coordinator, monkeypatch):
    monkeypatch.chdir(ROOT)  # which a survey leaves for the folder of the workers
    return open_coordinator(OneNode)


def test_a_survey_is_answered_with_the_devices_that_planning_has_found(own):
    own.send(SURVEY)
    [found] = own.until(m.Surveyed)
    assert (found.serial, found.python, found.problem) == (7, sys.executable, None)
    assert (found.cpus, found.gpus) == (CPUS, GpuInventory())
    assert found.hostname == socket.gethostname()


def test_of_two_surveys_the_later_one_is_answered(own):
    own.send(SURVEY)
    own.send(
        m.Survey(**{**{field: getattr(SURVEY, field) for field in SURVEY.__slots__}, "serial": 8})
    )
    own.until(m.Surveyed)
    assert own.prepare().problem is None
    assert [found.serial for found in own.of(m.Surveyed)] == [8]


def test_workers_start_and_end_while_a_survey_is_under_way(own):
    own.start("print('hello')")
    own.send(SURVEY)
    own.until(m.AttemptEnded)
    own.until(m.Surveyed)


def test_addresses_are_tried_and_the_one_that_has_the_token_is_the_way(own):
    with socket.create_server(("127.0.0.1", 0)) as right:

        def say() -> None:
            connection, _ = right.accept()
            with connection:
                connection.sendall(b"secret\n")

        speaker = threading.Thread(target=say)
        speaker.start()
        port = right.getsockname()[1]
        own.send(
            m.Reach(attempt=0, addresses=("127.0.0.1",), port=port, token="secret", bound_s=10.0)
        )
        [reached] = own.until(m.Reached)
        speaker.join(BOUND_S)
    assert [route.address for route in reached.routes] == ["127.0.0.1"]


def test_a_spawner_that_has_vanished_is_a_fault_and_the_node_is_broken(own):
    own.start("import signal; print('up', flush=True); signal.pause()")
    own.until(m.Started)
    node = own.transport._own
    assert not node.is_broken
    os.kill(node._agent._spawner, signal.SIGKILL)
    own.until(m.AgentFailed)
    assert node.is_broken


# --- looking around


class Looks:
    """Surveys by ``look``."""

    def __init__(self, look) -> None:
        self.received = []
        self.nudged = threading.Event()
        self.looking = _SurveyThreads(
            self.received.append, self.nudged.set, gpus=GpuInventory(), cpus=CPUS, look=look
        )


def test_a_hanging_step_is_reported_and_abandoned():
    release = threading.Event()

    def hangs(order, turn_to):
        turn_to("the directory /data", 0.0)
        turned.set()
        release.wait(BOUND_S)
        raise AssertionError

    turned = threading.Event()
    looks = Looks(hangs)
    looks.looking.begin(SURVEY)
    assert turned.wait(BOUND_S)
    looks.looking.on_ready()
    [found] = looks.received
    assert found.serial == 7
    assert mentions(found.problem, "/data", "0 s")
    assert found.cpus == CPUS
    assert looks.looking.deadline() is None
    release.set()
    assert looks.nudged.wait(BOUND_S)
    looks.looking.on_ready()
    assert looks.received == [found], "what comes after all is nobody's"


def test_however_often_a_node_is_asked_that_hangs_few_threads_are_left_behind():
    release, begun = threading.Event(), []

    def hangs(order, turn_to):
        begun.append(order.serial)
        release.wait(BOUND_S)
        raise AssertionError

    looks = Looks(hangs)
    for _ in range(100):
        looks.looking.begin(SURVEY)
    assert len(begun) <= len(looks.looking._threads) == 16
    assert mentions(looks.received[-1].problem, "16 times")
    release.set()
    for thread in looks.looking._threads:
        thread.join(BOUND_S)
    looks.received.clear()
    looks.nudged.clear()
    looks.looking.begin(SURVEY)
    assert looks.nudged.wait(BOUND_S)
    looks.looking.on_ready()
    assert isinstance(looks.received[-1], m.AgentFailed)


def test_a_fault_of_ours_is_reported_with_its_traceback():
    def fails(order, turn_to):
        raise RuntimeError("odd")

    looks = Looks(fails)
    looks.looking.begin(SURVEY)
    assert looks.nudged.wait(BOUND_S)
    looks.looking.on_ready()
    [fault] = looks.received
    assert isinstance(fault, m.AgentFailed)
    assert "RuntimeError: odd" in fault.text


def test_the_survey_reports_that_no_thread_can_be_started(monkeypatch):
    def cannot(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    looks = Looks(lambda order, turn_to: None)
    looks.looking.begin(SURVEY)
    [found] = looks.received
    assert mentions(found.problem, "no thread")
    assert found.hint == explain_refusal()


# --- limits

LIMITED = """
import resource, sys, time
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.transport.tcp_listener import Listener
from tests.contract.conftest import Coordinator, OneNode
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
job_identity = JobIdentity(release="1", job_key="")
listener = Listener("127.0.0.1", [0], job_identity=job_identity, owner="j", admit=None, log=print, expected_callers=8)
ours = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
node = Coordinator(OneNode)
node.start("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
node.until(m.AttemptEnded)
node.close()
listener.close()
print(ours, node.taken.written[0, 1].decode().strip())
"""


def test_workers_of_our_own_node_have_the_users_limit_of_files_though_we_listen(
    clean_env, tmp_path
):
    environ = {**clean_env, "XDG_RUNTIME_DIR": str(tmp_path)}
    words = [sys.executable, "-c", LIMITED]
    done = subprocess.run(
        words, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stderr
    ours, workers = map(int, done.stdout.split())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert ours == hard or ours > 1000
    assert workers == 200
