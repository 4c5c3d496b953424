from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.model.launcher_process import process_from, this_process
from distlaunch.jobs.event_text import event_lines
from distlaunch.jobs.events import read_events, read_events_but_old_progress
from distlaunch.jobs.find import find_jobs
from distlaunch.jobs.job import State, read_job
from distlaunch.jobs.report.job_report import build_report, report_record
from distlaunch.jobs.report.report_page import page_of
from distlaunch.jobs.report.report_text import markdown_of
from distlaunch.jobs.show import jobs_table, status_lines
from distlaunch.jobs.status import fold_events, read_status, with_snapshot

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=4,
)
TYPES = [
    "job_started",
    "composed",
    "attempt_started",
    "workers_started",
    "worker_exited",
    "restarting",
    "failure",
    "hang",
    "node_lost",
    "progress",
    "job_ended",
    "signal",
    "checkpoint",
]
FIELDS = [
    "time",
    "attempt",
    "hosts",
    "pids",
    "rank",
    "returncode",
    "pid",
    "told_to_stop",
    "of",
    "diagnosis",
    "summary",
    "ranks",
    "step_min",
    "step_max",
    "steps_per_s",
    "exit_code",
    "host",
    "boot_id",
    "start_ticks",
    "argv",
    "cwd",
    "world_size",
    "step",
]
EVENTS = st.builds(
    lambda kind, fields: {"type": kind, **fields},
    st.sampled_from(TYPES),
    st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=6),
)


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "job"
    path.mkdir()
    (path / ".distlaunch-run").write_text("job")
    return path


def write(run_dir, events) -> None:
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_events_of_any_content_are_read(run_dir):
    @settings(max_examples=60, deadline=None)
    @given(st.lists(EVENTS, max_size=8))
    def reads(events):
        write(run_dir, events)
        job = read_job(str(run_dir))
        status = read_status(job)
        whole = fold_events(job, read_events(job.events))
        assert json.dumps(status.record()) == json.dumps(whole.record())
        status_lines(status, 0.0)
        jobs_table([job], {job.path: status}, 0.0)
        assert len(list(read_events(job.events))) == len(events)

    reads()


def test_of_progress_events_in_a_row_only_the_last_is_read(run_dir):
    events = [
        {"time": 1.0, "type": kind, "attempt": 0, "step_min": step}
        for step, kind in enumerate(["attempt_started", *["progress"] * 5, "signal", "progress"])
    ]
    write(run_dir, events)
    read = list(read_events_but_old_progress(str(run_dir / "events.jsonl")))
    assert [event["step_min"] for event in read] == [0, 5, 6, 7]


@pytest.mark.parametrize(
    "data", [b"", b"\n\n", b"{", b"[]\n1\nnull\n", b"\xff\xfe\n", b'{"type": 3}\n', b"\0" * 70_000]
)
def test_lines_that_are_no_events_are_passed_over(run_dir, data):
    (run_dir / "events.jsonl").write_bytes(data)
    job = read_job(str(run_dir))
    assert (job.exit_code, job.started, list(read_events(job.events))) == (None, None, [])


def test_an_event_that_is_not_complete_is_left_out(run_dir):
    write(run_dir, [{"type": "job_started", "time": 1.0, "host": "a"}])
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"type": "job_ended", "exit_code": 0')
    assert read_job(str(run_dir)).exit_code is None


def test_a_launcher_that_runs_is_known_by_its_process_alone(run_dir):
    own = this_process()
    write(run_dir, [{"type": "job_started", "time": 1.0, **own.fields()}])
    assert read_job(str(run_dir)).state is State.RUNNING
    write(
        run_dir,
        [{"type": "job_started", "time": 1.0, **own.fields(), "start_ticks": own.start_ticks + 1}],
    )
    assert read_job(str(run_dir)).state is State.KILLED
    write(run_dir, [{"type": "job_started", "time": 1.0, **own.fields(), "boot_id": "before"}])
    assert read_job(str(run_dir)).state is State.KILLED


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([{"type": "job_ended", "exit_code": 0}], State.SUCCEEDED),
        ([{"type": "job_ended", "exit_code": 3}], State.FAILED),
        ([{"type": "job_ended", "exit_code": 137}], State.FAILED),
        ([{"type": "signal"}, {"type": "job_ended", "exit_code": 143}], State.STOPPED),
        ([{"type": "signal"}, {"type": "job_ended", "exit_code": 0}], State.SUCCEEDED),
    ],
)
def test_the_state_follows_from_the_last_events(run_dir, events, state):
    write(run_dir, [{"type": "job_started", "time": 1.0, "host": "a"}, *events])
    assert read_job(str(run_dir)).state is state


def test_a_launcher_without_event_file_is_known_by_its_pid_file(run_dir):
    (run_dir / "events.jsonl").unlink(missing_ok=True)
    pid_file = run_dir / "launcher.pid"
    pid_file.write_text(f"{os.getpid()}\n")
    job = read_job(str(run_dir))
    assert (job.state, job.launcher) == (State.RUNNING, this_process())
    os.utime(pid_file, (1.0, 1.0))  # written before this process had its id
    assert read_job(str(run_dir)).state is State.KILLED


def test_status_is_that_of_the_newest_attempt(run_dir):
    write(run_dir, [{"type": "job_started", "time": 1.0, "host": "a"}])
    status = fold_events(
        read_job(str(run_dir)),
        [
            {"type": "attempt_started", "attempt": 0},
            {"type": "workers_started", "pids": {"0": 10, "1": 11}},
            {"type": "worker_exited", "rank": 1, "pid": 11, "returncode": -9},
            {"type": "failure", "diagnosis": {"summary": "killed by signal 9", "ranks": [1]}},
            {"type": "restarting", "attempt": 1, "of": 3},
            {"type": "attempt_started", "attempt": 1},
            {"type": "workers_started", "pids": {"0": 20}},
            {"type": "progress", "step_min": 4},
        ],
    )
    assert (status.attempt, status.restarts, status.max_restarts, status.running) == (1, 1, 3, 1)
    assert [worker.pid for worker in status.workers] == [20]
    assert status.progress["step_min"] == 4
    assert [each.line() for each in status.failures] == ["attempt 0: rank 1: killed by signal 9"]


def test_a_process_is_known_only_with_all_its_fields():
    own = this_process()
    assert process_from(own.fields()) == own
    assert own.is_alive()
    for name in own.fields():
        assert process_from({**own.fields(), name: None}) is None


NOW = 1000.0


def worker(rank: int, **more):
    known = {"rank": rank, "node": 0, "host": "n0", "pid": 10 + rank, "state": "running"}
    unknown = dict.fromkeys(("returncode", "step", "step_s", "loss", "samples", "last_sign_age_s"))
    return {**known, **unknown, **more}


def snapshot(*workers, **more):
    job = {"phase": "running", "attempt": 1, "restarts": 1, "node_losses": 2}
    return {**job, "workers": list(workers), **more}


@pytest.fixture
def status(tmp_path):
    (tmp_path / ".distlaunch-run").write_text("j")
    events = [
        {"type": "attempt_started", "attempt": 0},
        {"type": "workers_started", "pids": {"0": 1}},
        {"type": "worker_exited", "rank": 0, "returncode": -15, "told_to_stop": True},
    ]
    return fold_events(read_job(str(tmp_path)), events)


def test_the_launcher_knows_more_than_the_events(status):
    live = with_snapshot(
        status,
        snapshot(
            worker(0, step=7.0, step_s=0.5, last_sign_age_s=3.0),
            worker(1, step=9.0, last_sign_age_s=40.0),
            worker(2, state="lost"),
            worker(3, state="starting", pid=None),
        ),
        NOW,
    )
    assert [(each.rank, each.pid, each.state) for each in live.workers] == [
        (0, 10, "running"),
        (1, 11, "running"),
        (2, 12, "lost"),
    ]
    assert (live.running, live.attempt, live.restarts, live.lost_nodes) == (2, 1, 1, 2)
    assert (live.progress["step_min"], live.progress["step_max"]) == (7.0, 9.0)
    assert live.last_sign == NOW - 3.0
    [silent] = [line for line in status_lines(live, NOW) if line.startswith("last sign of life")]
    assert silent.endswith("3s ago; rank 1: 40s ago")
    assert live.record()["workers"][1]["last_sign"] == NOW - 40.0


def test_before_the_first_attempt_the_events_stay(status):
    live = with_snapshot(status, snapshot(worker(0, state="starting"), phase="connecting"), NOW)
    assert (live.phase, live.attempt, live.workers) == ("connecting", 0, ())
    assert live.last_sign is None


def test_status_of_an_ended_job_has_its_length_and_how_each_rank_ended(run_dir):
    write(
        run_dir,
        [
            {
                "time": NOW - 90,
                "type": "job_started",
                "job_id": "job",
                "world_size": 3,
                "argv": ["python", "train.py"],
                **this_process().fields(),
            },
            {"time": NOW - 89, "type": "attempt_started", "attempt": 0},
            *(
                {"time": NOW - 2, "type": "worker_exited", "rank": rank, "returncode": code}
                for rank, code in enumerate((1, -15, -15))
            ),
            {"time": NOW - 1, "type": "job_ended", "exit_code": 1},
        ],
    )
    os.utime(run_dir / "events.jsonl", (NOW - 1, NOW - 1))
    lines = status_lines(read_status(read_job(str(run_dir))), NOW)
    rows = dict(line.split(maxsplit=1) for line in lines)
    assert rows["ended"].endswith("(1s ago), after 1m 29s")
    assert rows["workers"] == "3 workers; ranks 1-2: SIGTERM; rank 0: exit code 1"
    assert rows["launcher"].startswith("was pid ")


@pytest.mark.parametrize(("columns", "length"), [(None, 60), (200, 60), (80, None), (20, 12)])
def test_the_table_of_jobs_cuts_commands_to_the_terminal(run_dir, columns, length):
    write(run_dir, [{"time": NOW - 90, "type": "job_started", "argv": ["python", "x" * 100]}])
    job = read_job(str(run_dir))
    [head, row] = jobs_table([job], {}, NOW, columns=columns)
    cut = row[head.index("COMMAND") :]
    assert cut.endswith("x...")
    assert len(row) == columns if length is None else len(cut) == length


ODD_NUMBERS = [
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "1e18",
    "-1e18",
    "9" * 400,
    "9" * 19,
    "9" * 5000,
]
DEEP = b'{"type": "job_started", "argv": ' + b"[" * 20_000 + b"]" * 20_000 + b"}\n"


@pytest.mark.parametrize("number", ODD_NUMBERS, ids=lambda number: number[:20])
def test_a_job_with_odd_numbers_is_shown_and_hides_no_other(tmp_path, run_dir, number):
    lines = [
        '{"type": "job_started", "time": N, "host": "a", "world_size": N, "log_max_size": N}',
        '{"type": "composed", "time": N, "hosts": "a", "world_size": N}',
        '{"type": "attempt_started", "time": N, "attempt": N}',
        '{"type": "workers_started", "time": 5, "pids": {"N": N, "0": N}}',
        '{"type": "progress", "time": N, "step_min": N, "step_max": N, "steps_per_s": N}',
        '{"type": "worker_exited", "time": N, "rank": N, "returncode": N}',
    ]
    text = "".join(line.replace("N", number) + "\n" for line in lines)
    (run_dir / "events.jsonl").write_bytes(DEEP + text.encode())
    other = tmp_path / "other"
    other.mkdir()
    (other / ".distlaunch-run").write_text("other")
    found = find_jobs(str(tmp_path), {})
    assert {job.name for job in found} == {"job", "other"}
    job = read_job(str(run_dir))
    status = read_status(job)
    json.dumps(status.record(), allow_nan=False)
    assert status_lines(status, NOW)
    assert jobs_table(found, {job.path: status}, NOW)
    events = list(read_events(job.events))
    assert len(events) == len(lines)
    json.dumps(events, allow_nan=False)
    assert all(map(event_lines, events))
    report = build_report(job, now=NOW)
    assert page_of(report)
    assert markdown_of(report)
    json.dumps(report_record(report), allow_nan=False)


def test_workers_that_have_not_started_count_in_the_total(run_dir):
    write(
        run_dir, [{"type": "job_started", "time": 1.0, **this_process().fields(), "world_size": 4}]
    )
    job = read_job(str(run_dir))
    events = [
        {"type": "attempt_started", "attempt": 1},
        {"type": "workers_started", "pids": {"0": 20}},
    ]
    status = fold_events(job, events)
    assert (status.running, status.world_size) == (1, 4)
    [line] = [each for each in status_lines(status, NOW) if each.startswith("workers")]
    assert "1 of 4" in line
    smaller = {"type": "composed", "hosts": "a", "world_size": 2}
    assert fold_events(job, [smaller, *events]).world_size == 2


def test_an_ended_job_has_its_last_step_without_a_rate_and_its_last_checkpoint(run_dir):
    progress = {"type": "progress", "time": 108.0, "step_min": 225, "step_max": 225}
    events = [
        {"type": "job_started", "time": 100.0, "cwd": "/work/exp", "argv": ["python", "train.py"]},
        {**progress, "steps_per_s": 0.658},
        {"type": "checkpoint", "time": 109.0, "attempt": 0, "rank": 0, "step": 220},
        {"type": "job_ended", "time": 110.0, "exit_code": 143},
    ]
    write(run_dir, events)
    status = read_status(read_job(str(run_dir)))
    lines = dict(line.split(maxsplit=1) for line in status_lines(status, 120.0))
    assert lines["step"] == "225"
    assert lines["checkpoint"].startswith("step 220")
    assert lines["directory"] == "/work/exp"
    assert status.record()["checkpoint"] == {"step": 220, "time": 109.0}
    assert "/work/exp" in jobs_table([status.job], {}, 120.0)[1]
