from __future__ import annotations

import os
import select
import signal
import time

from distlaunch.core.agent.node.survey import NodeSurvey, survey_node
from distlaunch.core.protocol import agent_messages as m

ORDER = m.Survey(
    serial=1, workdir="/", pythons=(), script="", program="", run_dir="", gpus=False, topology=False
)


def answer(survey: NodeSurvey, heard: list) -> m.Surveyed | m.AgentFailed:
    deadline = time.monotonic() + 30
    while not heard:
        assert time.monotonic() < deadline
        due = survey.deadline()
        assert due is not None
        select.select(list(survey.descriptors()), [], [], max(0.0, due - time.monotonic()))
        survey.on_ready()
    [found] = heard
    heard.clear()
    assert survey.descriptors() == {}
    assert survey.deadline() is None
    while survey._ended:
        survey.reap()
    return found


def survey(look, order: m.Survey = ORDER) -> m.Surveyed | m.AgentFailed:
    heard: list = []
    survey = NodeSurvey(heard.append, (), look)
    survey.begin(order)
    return answer(survey, heard)


def test_what_hangs_is_named_and_left_behind_with_what_it_has_started():
    reader, writer = os.pipe()

    def hangs(order, turn_to):
        fd = os.open(f"/proc/{os.getppid()}/fd/{writer}", os.O_WRONLY)
        turn_to("the directory /data", 0.3)
        if os.fork() == 0:
            signal.pause()
        os.write(fd, b"x")
        while True:
            signal.pause()

    found = survey(hangs)
    assert found.problem == "the directory /data does not answer within 0 s"
    assert found.hint == "a file server or a driver there does not answer"
    assert found.cpus.allowed
    os.close(writer)
    assert os.read(reader, 10) == b"x"
    assert os.read(reader, 10) == b"", "nobody has the pipe open any more"
    os.close(reader)


def test_each_step_has_its_time():
    def slow(order, turn_to):
        for _ in range(4):
            turn_to("a step", 5.0)
            time.sleep(0.05)
        return survey_node(order, turn_to)

    assert survey(slow).problem is None


def test_a_fault_of_ours_is_told_as_one():
    def fails(order, turn_to):
        raise ZeroDivisionError

    assert "ZeroDivisionError" in survey(fails).text


def test_a_child_that_dies_is_a_problem():
    def dies(order, turn_to):
        os.kill(os.getpid(), signal.SIGKILL)

    assert survey(dies).problem == "the survey of the node failed: its process ended"


def test_a_new_order_replaces_one_that_is_under_way():
    heard: list = []
    survey = NodeSurvey(
        heard.append,
        (),
        lambda order, turn_to: signal.pause() if order.serial == 1 else survey_node(order, turn_to),
    )
    survey.begin(ORDER)
    survey.begin(
        m.Survey(**{**{name: getattr(ORDER, name) for name in ORDER._fields}, "serial": 2})
    )
    assert answer(survey, heard).serial == 2


def test_the_child_has_none_of_our_descriptors_but_those_it_needs():
    reader, writer = os.pipe()

    def tells(order, turn_to):
        numbers = {int(name) for name in os.listdir("/proc/self/fd")}
        turn_to(str(sorted(numbers & {reader, writer})), 0.1)
        signal.pause()

    heard: list = []
    survey = NodeSurvey(heard.append, (writer,), tells)
    survey.begin(ORDER)
    found = answer(survey, heard)
    os.close(reader)
    os.close(writer)
    assert found.problem.startswith(f"[{writer}] does not answer")
