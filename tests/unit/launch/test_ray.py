from __future__ import annotations

import sys
import threading

import pytest

from distlaunch.backends.base import Requirement
from distlaunch.backends.ray import Ray
from distlaunch.core.errors import ConfigError
from distlaunch.launch.ray import check_own_python, notice_if_slow
from tests.facts import mentions

BOUND_S = 60.0


@pytest.mark.parametrize("python", [None, "/opt/ray/bin/python"])
def test_without_ray_it_is_reported_that_distlaunch_itself_needs_it_and_how_to_start_it_where_ray_is(
    monkeypatch, python
):
    monkeypatch.setattr(
        Ray, "requires", (Requirement(module="gossipd", package="gossip", at_least="2.9"),)
    )
    with pytest.raises(ConfigError) as caught:
        check_own_python(python)
    ours = f"--backend ray: {sys.executable} has no module gossipd: distlaunch itself runs there and uses it"
    assert caught.value.message.startswith(ours)
    assert mentions(caught.value.message, "--python")
    pip = f"{sys.executable} -m pip install 'gossip>=2.9'"
    there = (
        ""
        if python is None
        else "/opt/ray/bin/python -m distlaunch train ..., if distlaunch is installed there, or "
    )
    assert caught.value.hint == there + pip


def test_a_slow_step_is_reported_while_it_lasts():
    shown = threading.Event()
    messages = []

    def say(text: str) -> None:
        messages.append(text)
        shown.set()

    with notice_if_slow(say, "starting Ray here", after_s=0.0):
        assert shown.wait(BOUND_S)
    assert messages == ["starting Ray here"]


def test_a_step_that_ends_in_time_is_not_reported_and_leaves_no_thread():
    messages = []
    with notice_if_slow(messages.append, "starting Ray here", after_s=BOUND_S):
        during = threading.active_count()
    assert messages == []
    assert threading.active_count() == during - 1


def test_a_finished_step_is_not_reported_while_others_run():
    messages = []
    with notice_if_slow(messages.append, "connecting to Ray", after_s=BOUND_S) as done:
        [timer] = [
            thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)
        ]
        done()
        timer.join(BOUND_S / 2)
        assert not timer.is_alive()
    assert messages == []


def test_a_reader_who_has_stopped_holds_nothing_up():
    begun, read_on = threading.Event(), threading.Event()

    def say(_: str) -> None:
        begun.set()
        read_on.wait(BOUND_S)

    with notice_if_slow(say, "starting Ray here", after_s=0.0):
        assert begun.wait(BOUND_S)
        [timer] = [
            thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)
        ]
    is_held = timer.is_alive()
    read_on.set()
    timer.join(BOUND_S)
    assert is_held
