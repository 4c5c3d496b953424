"""The command of ``--on-event``, with short limits: the processes are real."""

from __future__ import annotations

import os
import threading

import pytest

from distlaunch.coordinator.runtime import event_command
from distlaunch.coordinator.runtime.event_command import EventCommand


@pytest.fixture
def command(tmp_path):
    said: list[str] = []

    def make(script: str, *, run_dir=tmp_path, **limits: float) -> EventCommand:
        made = EventCommand(
            ["/bin/sh", "-c", script],
            job_id="exp",
            run_dir=str(run_dir),
            environ={"PATH": os.environ["PATH"], "HERE": str(tmp_path)},
            say=said.append,
            **limits,
        )
        made.said = said
        return made

    return make


def test_a_command_that_takes_too_long_is_killed_and_the_next_event_follows(command, tmp_path):
    made = command(
        'echo $DISTLAUNCH_EVENT >> "$HERE/seen"; [ $DISTLAUNCH_EVENT = job_ended ] || sleep 600',
        command_s=0.3,
    )
    made.observe({"type": "job_started"})
    made.observe({"type": "progress"})
    made.observe({"type": "job_ended"})
    made.finish()
    assert (tmp_path / "seen").read_text().split() == ["job_started", "job_ended"]
    assert len(made.said) == 1


def test_the_wait_at_the_end_is_bounded(command):
    made = command("sleep 600", end_s=0.3)
    for _ in range(3):
        made.observe({"type": "failure"})
    made.finish()
    assert made.said[-1].startswith("3 events ")
    made.observe({"type": "job_ended"})  # comes too late, and is dropped
    made.finish()


def test_what_the_command_leaves_in_its_group_is_ended(command, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    made = command('exec 9> "$HERE/fifo"; sleep 600 & echo started >&9')
    made.observe({"type": "job_ended"})
    made.finish()
    os.set_blocking(reader, True)
    with open(reader, "rb") as file:
        assert file.read() == b"started\n"  # the end of file comes when nobody has it open
    assert made.said == []


def test_only_a_thousand_events_wait_but_the_last_is_kept(command, tmp_path):
    go = tmp_path / "go"
    made = command('while [ ! -e "$HERE/go" ]; do sleep 0.05; done; cat >> "$HERE/seen"')
    thread = threading.Thread(
        target=lambda: [made.observe({"type": "node_lost", "node": n}) for n in range(1010)]
    )
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert len(made.said) == 1
    made.observe({"type": "job_ended"})
    assert len(made._waiting) in (1000, 1001)
    assert made._waiting[-1]["type"] == "job_ended"
    go.touch()
    made.finish(lambda: True)


def test_a_run_directory_that_is_gone_does_not_stop_the_command(command, tmp_path):
    made = command('cat >> "$HERE/seen"; exit 3', run_dir=tmp_path / "gone")
    made.observe({"type": "job_ended"})
    made.finish()
    assert "job_ended" in (tmp_path / "seen").read_text()
    assert len(made.said) == 1


def test_a_full_log_is_kept_and_a_new_one_is_begun(command, tmp_path, monkeypatch):
    monkeypatch.setattr(event_command, "MOST_LOG_BYTES", 10)
    made = command("echo $DISTLAUNCH_EVENT", command_s=60.0)
    for kind in ("job_started", "failure", "job_ended"):
        made.observe({"type": kind})
    made.finish()
    assert (tmp_path / "on-event.log.1").read_text() == "job_started\n"
    assert (tmp_path / "on-event.log").read_text() == "failure\njob_ended\n"
    assert made.said == []


def test_output_of_one_command_beyond_twice_the_limit_is_dropped(command, tmp_path, monkeypatch):
    monkeypatch.setattr(event_command, "MOST_LOG_BYTES", 1000)
    log = tmp_path / "on-event.log"
    script = 'head -c 5000 /dev/zero; until [ $(stat -c %s "$HERE/on-event.log") = 2000 ]; do sleep 0.05; done'
    made = command(script, command_s=60.0, end_s=60.0)
    made.observe({"type": "job_ended"})
    made.finish()
    assert log.stat().st_size == 2000
    assert made.said == []
