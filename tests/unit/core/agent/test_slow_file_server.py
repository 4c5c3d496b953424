"""Directories on a file server that does not answer do not block the agent."""

from __future__ import annotations

import os
import threading

import pytest

from distlaunch.core.agent import remote_agent
from distlaunch.core.agent.remote_agent import RemoteNodeResources
from distlaunch.core.agent.workers.deadline import run_with_timeout
from distlaunch.core.agent.workers.preload_log import PreloadReport
from distlaunch.core.agent.workers.stdin import StdinPipe
from distlaunch.core.protocol import agent_messages as m


@pytest.fixture
def stands_still():
    """Return a function that blocks until the test is over."""
    over = threading.Event()
    started: list[threading.Thread] = []

    def wait(*_args, **_options) -> int:
        started.append(threading.current_thread())
        assert over.wait(60)
        return -1

    yield wait
    over.set()
    for thread in started:
        assert thread is not threading.main_thread()
        thread.join(60)


def start(path: str, **more) -> m.Start:
    spec = m.WorkerSpec(
        rank=0,
        local_rank=0,
        argv=None,
        env={},
        cpus=None,
        error_file=f"{path}/attempt-0/rank-0.json",
    )
    values = {
        "is_remote": True,
        "preload_log": f"{path}/attempt-0/preload.log",
        "preload": ("json",),
        **more,
    }
    return m.Start(
        attempt=0,
        argv=("true",),
        env={},
        cwd="/",
        workers=(spec,),
        uses_gpus=False,
        signal_group=False,
        terminal=False,
        rows=0,
        columns=0,
        stdin_rank=None,
        **values,
    )


def test_within_returns_results_and_raises_errors_and_timeouts():
    assert run_with_timeout(60, lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        run_with_timeout(60, lambda: os.stat("/nothing/here"))


def test_a_start_does_not_wait_for_directories_on_a_hanging_file_server(
    tmp_path, monkeypatch, stands_still
):
    monkeypatch.setattr(remote_agent, "FILES_S", 0.05)
    monkeypatch.setattr(os, "makedirs", stands_still)
    sent: list[object] = []
    resources = RemoteNodeResources(
        send=sent.append, stdin_pipe=StdinPipe(sent.append), wake=lambda: None, keep=()
    )
    resources.survey.shares_run_dir = True
    assert resources.adapt_start(start(str(tmp_path))).attempt == 0
    resources.close()
    assert not sent


def test_a_start_does_not_wait_for_a_preload_log_on_a_hanging_file_server(
    tmp_path, monkeypatch, stands_still
):
    monkeypatch.setattr("distlaunch.core.agent.workers.preload_log.FILES_S", 0.05)
    monkeypatch.setattr("distlaunch.core.agent.workers.preload_log.os.open", stands_still)
    report = PreloadReport(lambda _: None, lambda: 0.0)
    order, output = report.begin(start(str(tmp_path)))
    os.close(output)
    report.close()
    assert order.modules == ("json",)
