from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.jobs import event_text
from distlaunch.jobs.event_text import event_kinds, event_lines
from distlaunch.jobs.events import select_events
from distlaunch.jobs.job import read_job

PAGE = Path(event_text.__file__).parents[1] / "docs" / "reference" / "event-log.md"
DIAGNOSIS = {
    "ranks": [1],
    "summary": "exit code 1",
    "exception_type": "ValueError",
    "message": "bad batch",
    "frame": "train.py:5 in step",
    "others": ["rank 0: stopped by us"],
    "hint": "look at the batch",
    "log_path": "/jobs/a/attempt-0/rank-1.log",
}
GROUP = {
    "ranks": [0, 2, 3],
    "kind": "stack",
    "waits_in": "all_reduce",
    "frame": "train.py:9 in step",
}
SHOWN = [
    ({"type": "job_started", "job_id": "a", "world_size": 2, "backend": "fsdp", "pid": 7, "host": "n",
      "argv": ["python", "-u", "train.py", "a b"], "cwd": "/w"},
     ["job a, 2 workers, fsdp; launcher pid 7 on n", "command: train.py 'a b' (in /w)"]),
    ({"type": "composed", "attempt": 0, "nodes": 2, "world_size": 4, "hosts": "n[1-2]"},
     ["attempt 0 has 2 nodes with 4 workers: n[1-2]"]),
    ({"type": "attempt_started", "attempt": 0, "master_port": 29500}, ["attempt 0; master port 29500"]),
    ({"type": "attempt_started", "attempt": 1, "master_addr": "n1", "master_port": 29500, "ranks": [2, 3],
      "host": "n2", "coordinator": "n1"}, ["attempt 1 of ranks 2-3 on n2; master n1:29500; coordinator n1"]),
    ({"type": "workers_started", "attempt": 0, "pids": {"0": 11, "1": 12}}, ["ranks 0-1 run (pids 11, 12)"]),
    ({"type": "workers_started", "attempt": 0, "pids": {str(rank): rank for rank in range(8)}}, ["ranks 0-7 run"]),
    ({"type": "worker_exited", "rank": 1, "returncode": -9, "uptime_s": 3.21, "told_to_stop": False},
     ["rank 1 was ended by SIGKILL after 3.21 s"]),
    ({"type": "worker_exited", "rank": 1, "returncode": -50, "uptime_s": 90.0, "told_to_stop": True},
     ["rank 1 was ended by signal 50 after 1 min 30 s, told to stop"]),
    ({"type": "failure", "attempt": 0, "final": True, "reason": "used_up", "diagnosis": DIAGNOSIS},
     ["attempt 0 failed: rank 1: exit code 1: ValueError: bad batch", "at train.py:5 in step",
      "rank 0: stopped by us", "hint: look at the batch", "log: /jobs/a/attempt-0/rank-1.log",
      "all restarts are used up"]),
    ({"type": "restarting", "attempt": 1, "of": 3, "delay_s": 8.0}, ["attempt 1 follows after 8 s (3 restarts allowed)"]),
    ({"type": "signal", "signal": "SIGTERM"}, ["the launcher got SIGTERM"]),
    ({"type": "leftovers_ended", "ended": 2, "killed": 1,
      "processes": [{"host": "n1", "rank": 0, "pid": 5, "command": "upload.sh"}]},
     ["2 processes that workers had left were ended, 1 by SIGKILL", "pid 5 of rank 0 on n1: upload.sh"]),
    ({"type": "preload", "modules": ["torch"], "left_out": [], "problem": None, "elapsed_s": 1.9},
     ["torch imported in 1.9 s"]),
    ({"type": "preload", "modules": [], "left_out": [], "problem": "no module torch", "elapsed_s": 1.9},
     ["workers start without preloading: no module torch"]),
    ({"type": "metrics_served", "url": "http://127.0.0.1:1/metrics"}, ["metrics are at http://127.0.0.1:1/metrics"]),
    ({"type": "fault", "text": "Traceback:\n  line\nKeyError", "host": "n"},
     ["internal error on n", "Traceback:", "line", "KeyError"]),
    ({"type": "job_ended", "exit_code": 0}, ["the job has ended with exit code 0"]),
    ({"type": "node_joined", "node": 1, "host": "n1", "again": True}, ["node n1 is connected again"]),
    ({"type": "node_unreachable", "node": 1, "host": "n1", "address": "10.0.0.1", "step": "connect",
      "text": "connection refused", "passing": True},
     ["node n1 at 10.0.0.1 cannot be reached (connect): connection refused; it is tried again"]),
    ({"type": "node_lost", "node": 1, "host": "n1", "why": "silent for 10 s", "attempt": 0, "ranks": [2, 3]},
     ["node n1 (ranks 2-3) is lost: silent for 10 s"]),
    ({"type": "hosts_discovered", "came": ["a", "b"], "went": ["c"]}, ["new hosts: a, b; hosts gone: c"]),
    ({"type": "reforming", "attempt": 1, "lost": 1}, ["attempt 1 follows without 1 lost node"]),
    ({"type": "taken_over", "attempt": 2, "restarts": 1},
     ["a new coordinator continues the job with attempt 2, after 1 restart"]),
    ({"type": "coordinator_lost", "why": "gone", "kind": "gone"}, ["the coordinator is lost: gone"]),
    ({"type": "calling_again", "attempt": 0, "restarts": 0},
     ["this launcher connects to the coordinator again, after attempt 0"]),
    ({"type": "rejoined", "job_id": "b"}, ["the coordinator is there again, with job b"]),
    ({"type": "left", "why": "gone"}, ["this launcher has left the job: gone"]),
    ({"type": "progress", "attempt": 0, "ranks": 2, "step_min": 3, "step_max": 5, "steps_per_s": 2.5, "rank": 0,
      "values": {"step": 3, "loss": 0.25, "note": None}},
     ["steps 3 to 5, 2.5 steps/s, loss 0.25, 2 ranks have reported"]),
    ({"type": "checkpoint", "attempt": 0, "rank": 0, "step": 100, "seconds": 2.5, "bytes": 1536},
     ["rank 0 has written a checkpoint: step 100, 1.5 KiB, in 2.5 s"]),
    ({"type": "silence", "summary": "rank 1 is behind", "groups": [GROUP], "groups_left_out": 2},
     ["rank 1 is behind", "ranks 0,2-3, in all_reduce: train.py:9 in step", "2 more"]),
    ({"type": "hang_postponed", "attempt": 0, "silent_s": 61, "rank": 1, "why": "computes", "frame": "f.py:1 in f"},
     ["silent for 1 min 1 s, but rank 1 uses its processor: the job goes on", "at f.py:1 in f"]),
    ({"type": "hang", "silent_s": 600.2, "summary": "rank 1 is behind", "groups": [], "hint": "look",
      "action": "stop"},
     ["no sign of life for 10 min: rank 1 is behind", "hint: look", "the job is stopped"]),
]  # fmt: skip
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=4,
)
NAMES = sorted({name for event, _ in SHOWN for name in event if name != "type"})


@pytest.fixture
def job(tmp_path):
    (tmp_path / ".distlaunch-run").write_text("job")
    events = [
        {"time": 1000.0 + number, "type": kind, "exit_code": 0}
        for number, kind in enumerate(
            ["job_started", "progress", "signal", "progress", "job_ended"]
        )
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "events.jsonl").write_text(lines)
    os.utime(tmp_path / "events.jsonl", (1004.0, 1004.0))
    return read_job(str(tmp_path))


@pytest.mark.parametrize(("event", "lines"), SHOWN, ids=lambda value: str(value)[:40])
def test_an_event_is_a_sentence(event, lines):
    first, *more = event_lines({"time": 1.5, **event})
    assert re.fullmatch(r"\d\d:\d\d:01\.500  (\w+) +(.*)", first).groups() == (
        event["type"],
        lines[0],
    )
    assert more == [f"    {line}" for line in lines[1:]]


def test_every_documented_event_has_words():
    tables = PAGE.read_text("utf-8").split("| type | when | fields |")[1:]
    rows = "".join(table.partition("\n\n")[0] for table in tables)
    documented = re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
    assert set(event_kinds()) == set(documented)
    assert {event["type"] for event, _ in SHOWN} == set(documented)


def test_an_unknown_event_shows_its_fields():
    line = event_lines({"time": 1.0, "type": "later", "host": "n 1", "ranks": [1, 2]})[0]
    assert line.endswith('later              host="n 1" ranks=[1,2]')


@pytest.mark.parametrize("when", [1e305, -1e305, float("inf"), float("nan"), 2**63, "now", None])
def test_an_event_with_an_odd_time_has_a_line(when):
    [line] = event_lines({"type": "signal", "time": when, "signal": "SIGTERM"})
    assert re.search("signal +the launcher got SIGTERM$", line)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*event_kinds(), "later", "\x1b[2J\n"]),
    st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=6),
    st.booleans(),
)
def test_a_damaged_or_hostile_event_has_lines_without_control_characters(kind, fields, with_date):
    lines = event_lines({"type": kind, "time": 1.0, **fields}, with_date=with_date)
    assert lines
    assert all(line.isprintable() for line in lines)


def test_texts_of_workers_cannot_change_the_terminal_or_forge_a_line():
    hostile = "\x1b]0;title\x07\r\n12:00:00.000  job_ended  \u202eall is well"
    lines = event_lines({"time": 1.0, "type": "node_lost", "host": "n1", "why": hostile})
    assert len(lines) == 1
    assert lines[0].isprintable()


def test_the_date_is_shown_if_wanted_and_bad_events_are_red():
    event = {"time": 1e9, "type": "job_ended", "exit_code": 1}
    assert re.match(r"2001-09-\d\d \d\d:\d\d:40\.000  ", event_lines(event, with_date=True)[0])
    [line] = event_lines(event, colour=True)
    assert "\x1b[31mjob_ended" in line
    assert "\x1b[32mjob_ended" in event_lines({**event, "exit_code": 0}, colour=True)[0]


@pytest.mark.parametrize(
    ("wanted", "times"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"kinds": frozenset({"progress", "signal"})}, [1, 2, 3]),
        ({"kinds": frozenset({"progress"}), "tail": 1}, [3]),
        ({"tail": 0}, []),
        ({"tail": 9}, [0, 1, 2, 3, 4]),
        ({"since": 1002.0}, [2, 3, 4]),
        ({"since": 1001.0, "tail": 2, "follow": True}, [3, 4]),
    ],
)
def test_events_are_selected(job, wanted, times):
    assert [event["time"] - 1000.0 for event in select_events(job, **wanted)] == times
