from __future__ import annotations

import threading

import pytest

from distlaunch.transport import cleanup
from distlaunch.transport.cleanup import run_in_background
from distlaunch.transport.ssh.client import SshConnection

BOUND_S = 30.0


class Stuck:
    """A transport whose thread ends only on request, and the stream below."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.done: list[str] = []
        self.freed = threading.Event()

    def is_alive(self) -> bool:
        return True

    def join(self, within_s: float) -> None:
        assert self.may.wait(BOUND_S)
        self.done.append("joined")

    def free(self) -> None:
        self.done.append("free")
        self.freed.set()

    def close(self) -> None:
        self.done.append("close")


def gone() -> None:
    for thread in threading.enumerate():
        if thread.name == "dl-cleanup":
            thread.join(BOUND_S)


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    gone()


def test_closing_soon_waits_for_no_thread():
    stuck = Stuck()
    SshConnection(stuck, stuck).close_soon()
    assert stuck.done == ["close"]
    stuck.may.set()
    assert stuck.freed.wait(BOUND_S)
    assert stuck.done == ["close", "joined", "close", "free"]


def test_cleanup_runs_in_order_in_one_thread_that_ends():
    may, done = threading.Event(), []
    run_in_background(lambda: may.wait(BOUND_S))
    for number in range(100):
        run_in_background(
            lambda number=number: done.append((number, threading.current_thread().name))
        )
    assert not done
    may.set()
    gone()
    assert done == [(number, "dl-cleanup") for number in range(100)]
    assert cleanup._thread is None


def test_a_failed_task_does_not_stop_later_ones():
    done = threading.Event()
    run_in_background(lambda: 1 // 0)
    run_in_background(done.set)
    assert done.wait(BOUND_S)


def test_without_a_thread_it_is_done_at_once(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    done = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    run_in_background(lambda: done.append(threading.current_thread().name))
    assert done == ["MainThread"]
