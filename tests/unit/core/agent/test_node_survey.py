from __future__ import annotations

import os
import select
import signal
import time

from distlaunch.core.agent.node.survey import NodeSurvey, survey_node
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions

ORDER = m.Survey(
    serial=1, workdir="/", pythons=(), script="", program="", run_dir="", gpus=False, topology=False
)


def answer(survey: NodeSurvey, received: list) -> m.Surveyed | m.AgentFailed:
    deadline = time.monotonic() + 30
    while not received:
        assert time.monotonic() < deadline
        due = survey.deadline()
        assert due is not None
        select.select(list(survey.descriptors()), [], [], max(0.0, due - time.monotonic()))
        survey.on_ready()
    [found] = received
    received.clear()
    assert survey.descriptors() == {}
    assert survey.deadline() is None
    while survey._ended:
        survey.reap()
    return found


def survey(look, order: m.Survey = ORDER) -> m.Surveyed | m.AgentFailed:
    received: list = []
    survey = NodeSurvey(received.append, (), look)
    survey.begin(order)
    return answer(survey, received)


def test_a_hanging_step_is_named_and_its_processes_are_killed():
    reader, writer = os.pipe()

    def hangs(order, begin_step):
        fd = os.open(f"/proc/{os.getppid()}/fd/{writer}", os.O_WRONLY)
        begin_step("the directory /data", 0.3)
        if os.fork() == 0:
            signal.pause()
        os.write(fd, b"x")
        while True:
            signal.pause()

    found = survey(hangs)
    assert mentions(found.problem, "/data", "0 s")
    assert mentions(found.hint, "file server", "driver")
    assert found.cpus.allowed
    os.close(writer)
    assert os.read(reader, 10) == b"x"
    assert os.read(reader, 10) == b"", "nobody has the pipe open any more"
    os.close(reader)


def test_each_step_has_a_timeout_of_its_own():
    def slow(order, begin_step):
        for _ in range(4):
            begin_step("a step", 5.0)
            time.sleep(0.05)
        return survey_node(order, begin_step)

    assert survey(slow).problem is None


def test_an_internal_error_of_the_survey_is_reported_as_one():
    def fails(order, begin_step):
        raise ZeroDivisionError

    assert "ZeroDivisionError" in survey(fails).text


def test_a_survey_process_that_dies_is_a_problem():
    def dies(order, begin_step):
        os.kill(os.getpid(), signal.SIGKILL)

    assert mentions(survey(dies).problem, "survey", "ended")


def test_a_new_survey_replaces_the_running_one():
    received: list = []
    survey = NodeSurvey(
        received.append,
        (),
        lambda order, begin_step: (
            signal.pause() if order.serial == 1 else survey_node(order, begin_step)
        ),
    )
    survey.begin(ORDER)
    survey.begin(
        m.Survey(**{**{name: getattr(ORDER, name) for name in ORDER._fields}, "serial": 2})
    )
    assert answer(survey, received).serial == 2


def test_the_survey_process_inherits_only_the_descriptors_it_needs():
    reader, writer = os.pipe()

    def answers(order, begin_step):
        numbers = {int(name) for name in os.listdir("/proc/self/fd")}
        begin_step(str(sorted(numbers & {reader, writer})), 0.1)
        signal.pause()

    received: list = []
    survey = NodeSurvey(received.append, (writer,), answers)
    survey.begin(ORDER)
    found = answer(survey, received)
    os.close(reader)
    os.close(writer)
    assert found.problem.startswith(f"[{writer}] ")
