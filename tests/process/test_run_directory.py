"""The run directory: its layout, its privacy, and how long it stays."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest


def script(distlaunch, source: str) -> str:
    (distlaunch.work / "train.py").write_text(source)
    return "train.py"


FAILS_ONCE = """
import json, os, sys
rank, attempt = os.environ["RANK"], os.environ["DISTLAUNCH_ATTEMPT"]
print("attempt", attempt, "rank", rank)
if attempt == "0" and rank == "1":
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "RuntimeError: recorded", "extraInfo": {"py_callstack": "none", "timestamp": "1"}}}, file)
    raise RuntimeError("recorded")
"""


def test_the_layout_of_a_job_with_a_restart(distlaunch):
    words = [
        "--num-procs",
        "2",
        "--max-restarts",
        "1",
        "--job-id",
        "the-job",
        script(distlaunch, FAILS_ONCE),
    ]
    result = distlaunch.train(*words)
    assert result.returncode == 0, result.stderr
    assert result.run_dir == distlaunch.jobs / "the-job"
    files = {
        str(path.relative_to(result.run_dir))
        for path in result.run_dir.rglob("*")
        if path.is_file()
    }
    assert files == {
        ".distlaunch-run",
        "events.jsonl",
        "plan-0.json",
        "plan-1.json",
        "attempt-0/rank-0.log",
        "attempt-0/rank-1.log",
        "times-0.index",
        "attempt-0/rank-1.error.json",
        "attempt-1/rank-0.log",
        "attempt-1/rank-1.log",
        "times-1.index",
    }
    for attempt in (0, 1):
        record = json.loads((result.run_dir / f"plan-{attempt}.json").read_text())
        assert record["attempt"] == attempt
        assert record["master_port"] > 0
        for rank in (0, 1):
            log = (result.run_dir / f"attempt-{attempt}" / f"rank-{rank}.log").read_text()
            assert log.startswith(f"attempt {attempt} rank {rank}\n")


def test_the_pid_of_the_launcher_is_there_while_the_job_runs(distlaunch):
    running = distlaunch.start(
        ["train", "--num-procs", "1", script(distlaunch, "import os; os.read(0, 1)")],
        stdin=subprocess.PIPE,
    )
    running.wait_workers(1)
    path = running.run_dir / "launcher.pid"
    assert path.read_text() == f"{running.process.pid}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    running.process.stdin.close()
    result = running.wait()
    assert not (result.run_dir / "launcher.pid").exists()


def test_everything_is_the_users_own(distlaunch):
    result = distlaunch.train(
        "--num-procs", "2", script(distlaunch, "import os; os.umask(0); raise SystemExit(1)")
    )
    paths = [result.run_dir, *result.run_dir.rglob("*")]
    assert {path.name for path in paths} >= {
        "attempt-0",
        "report.txt",
        "report.json",
        "events.jsonl",
        "plan-0.json",
    }
    assert result.run_dir.stat().st_mode & 0o777 == 0o700
    for path in paths:
        assert path.stat().st_uid == os.getuid()
        if path.is_dir():
            assert path.stat().st_mode & 0o777 == 0o700, path


UMASK = """
import os, time
with open("checkpoint", "w"):
    pass
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"):
    pass
folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
while not all(os.path.exists(f"{folder}/rank-{rank}.error.json") for rank in (0, 1)):
    time.sleep(0.01)
raise SystemExit(1)
"""


@pytest.mark.parametrize("umask", [0o000, 0o177], ids=["000", "177"])
@pytest.mark.parametrize(
    "words", [["--preload", "json"], ["--hosts", "localhost:2"]], ids=["warm", "as a node"]
)
def test_only_the_user_can_read_the_launchers_files_under_any_umask(distlaunch, umask, words):
    shutil.rmtree(distlaunch.tmp_path / "state")
    name = script(distlaunch, UMASK)
    running = distlaunch.start(
        ["train", "--num-procs", "2", *words, name], preexec_fn=lambda: os.umask(umask)
    )
    result = running.wait()
    assert result.returncode == 1, result.stderr
    state = distlaunch.tmp_path / "state"
    made = {path for path in (state, *state.rglob("*")) if not path.is_symlink()}
    theirs = {path for path in made if path.name.endswith(".error.json")}
    modes = {path: path.stat().st_mode & 0o777 for path in made - theirs}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in modes}
    assert len(theirs) == 2
    assert {path.stat().st_mode & 0o777 for path in (*theirs, distlaunch.work / "checkpoint")} == {
        0o666 & ~umask
    }
    runtime = distlaunch.tmp_path / "run"
    assert all(path.stat().st_mode & 0o077 == 0 for path in runtime.rglob("*"))


def test_a_temporary_directory_that_another_user_has_taken_is_left_to_them(distlaunch):
    """Without a home the logs go to the temporary directory, where names can be guessed."""
    temporary = distlaunch.tmp_path / "tmp"
    temporary.mkdir()
    taken = [
        temporary / f"distlaunch-jobs-{os.getuid()}",
        temporary / f"distlaunch-jobs-{os.getuid()}-2",
    ]
    taken[0].symlink_to(distlaunch.work)
    taken[1].mkdir(mode=0o777)
    taken[1].chmod(0o777)
    env = {"TMPDIR": str(temporary), "XDG_STATE_HOME": "/proc/nowhere"}
    for _ in range(2):
        result = distlaunch.train("--num-procs", "1", script(distlaunch, "pass"), env=env)
        assert result.returncode == 0, result.stderr
    jobs = temporary / f"distlaunch-jobs-{os.getuid()}-3"
    assert len([path for path in jobs.iterdir() if not path.is_symlink()]) == 2
    assert jobs.stat().st_mode & 0o777 == 0o700
    assert not list(taken[1].iterdir())


def test_each_event_is_a_line_of_json_with_time_and_type_in_order(distlaunch):
    before = time.time()
    result = distlaunch.train(
        "--num-procs",
        "2",
        script(distlaunch, "import os; raise SystemExit(int(os.environ['RANK']))"),
    )
    lines = (result.run_dir / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    times = [event["time"] for event in events]
    assert times == sorted(times)
    assert before - 1 < times[0] <= times[-1] < time.time() + 1
    kinds = [event["type"] for event in events]
    assert kinds[0] == "job_started"
    assert [event.get("schema") for event in result.events] == [1] + [None] * (len(kinds) - 1)
    assert kinds[-1] == "job_ended"
    for kind in ("attempt_started", "workers_started", "worker_exited", "failure"):
        assert kind in kinds
    exits = {event["rank"]: event for event in events if event["type"] == "worker_exited"}
    assert exits[1]["returncode"] == 1
    assert set(exits) == {0, 1}
    assert events[-1]["exit_code"] == 1


def test_the_report_is_what_was_last_on_screen(distlaunch):
    result = distlaunch.train(
        "--num-procs", "2", script(distlaunch, "import os\nif os.environ['RANK'] == '1': 1 / 0")
    )
    assert result.returncode == 1
    report = (result.run_dir / "report.txt").read_text()
    assert "ZeroDivisionError" in report
    assert re.search(r"rank 1\b", report)
    assert str(result.run_dir / "attempt-0" / "rank-1.log") in report
    assert result.stderr.endswith(report)
    [failure] = result.of_type("failure")
    assert failure["final"] is True
    assert "ZeroDivisionError" in json.dumps(failure["diagnosis"])


def test_a_job_that_ends_well_has_no_report(distlaunch):
    result = distlaunch.train("--num-procs", "1", script(distlaunch, "pass"))
    assert not (result.run_dir / "report.txt").exists()


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "null", '{"message": 7}', "\\ud800", "\0" * 100, "[" * 100_000],
    ids=lambda text: text[:20],
)
def test_a_malformed_error_file_hurts_nobody(distlaunch, content):
    (distlaunch.work / "content").write_text(content)
    source = "import os, shutil\nshutil.copy('content', os.environ['TORCHELASTIC_ERROR_FILE'])\nraise ValueError('the cause')"
    result = distlaunch.train("--num-procs", "1", script(distlaunch, source))
    assert result.returncode == 1
    assert "ValueError" in result.stderr
    assert "the cause" in result.stderr
    assert "internal error" not in result.stderr


def test_latest_links_the_last_job(distlaunch):
    name = script(distlaunch, "pass")
    for job in ("one", "two"):
        assert distlaunch.train("--num-procs", "1", "--job-id", job, name).returncode == 0
        assert os.readlink(distlaunch.jobs / "latest") == job
    assert [
        path.name
        for path in distlaunch.jobs.iterdir()
        if not path.name.startswith(("one", "two", "latest"))
    ] == []


def test_a_file_called_latest_is_left_alone(distlaunch):
    (distlaunch.work / "logs").mkdir()
    (distlaunch.work / "logs" / "latest").write_text("mine")
    result = distlaunch.train("--num-procs", "1", "--log-dir", "logs", script(distlaunch, "pass"))
    assert result.returncode == 0
    assert (distlaunch.work / "logs" / "latest").read_text() == "mine"


def test_the_same_job_id_again_overwrites_nothing(distlaunch):
    for word in ("first", "second", "third"):
        name = script(distlaunch, f"print({word!r})")
        result = distlaunch.train("--num-procs", "1", "--job-id", "same", name)
        assert result.returncode == 0
    logs = [
        (distlaunch.jobs / name / "attempt-0" / "rank-0.log").read_text()
        for name in ("same", "same-2", "same-3")
    ]
    assert logs == ["first\n", "second\n", "third\n"]
    plan = json.loads((distlaunch.jobs / "same-2" / "plan-0.json").read_text())
    assert plan["run_dir"] == str(distlaunch.jobs / "same-2")
    assert plan["nodes"][0]["workers"][0]["env"]["TORCHELASTIC_ERROR_FILE"].startswith(
        plan["run_dir"] + "/"
    )
    assert plan["env"]["DISTLAUNCH_RUN_DIR"] == plan["run_dir"]


def old_runs(jobs, count: int) -> None:
    for number in range(count):
        directory = jobs / f"old-{number:02}"
        (directory / "attempt-0").mkdir(parents=True)
        for name in (".distlaunch-run", "plan-0.json", "attempt-0/rank-0.log"):
            (directory / name).touch()
        (directory / "events.jsonl").write_text(
            '{"time": 1.0, "type": "job_ended", "exit_code": 0}\n'
        )
        last_event(directory, 1_000_000 + number)


def last_event(directory, when: float) -> None:
    """Write the last event of a job at this time, in a folder that is older than all others."""
    os.utime(directory / "events.jsonl", (when, when))
    os.utime(directory, (1, 1))


def test_runs_are_kept_by_the_time_of_their_last_event(distlaunch):
    """A job of days that ends after 50 short ones is the newest."""
    old_runs(distlaunch.jobs, 60)
    last_event(distlaunch.jobs / "old-00", 2_000_000)
    assert distlaunch.train("--num-procs", "1", script(distlaunch, "pass")).returncode == 0
    left = {path.name for path in distlaunch.jobs.glob("old-*")}
    assert left == {"old-00", *(f"old-{number:02}" for number in range(12, 60))}


@pytest.mark.parametrize(
    "event", [{"host": "elsewhere"}, {}], ids=["another host", "a host that is not told"]
)
def test_a_job_of_another_host_that_has_filed_no_end_is_not_pruned_while_it_writes(
    distlaunch, event
):
    """With a shared home, the locks of other hosts may be invisible."""
    old_runs(distlaunch.jobs, 60)
    for name in ("old-00", "old-01", "old-02"):
        (distlaunch.jobs / name / "events.jsonl").write_text(
            json.dumps({"time": 1.0, "type": "job_started", **event}) + "\n"
        )
        last_event(distlaunch.jobs / name, 1_000_000)
    for path in (distlaunch.jobs / "old-01").rglob("*"):
        os.utime(path, (1_000_000, 1_000_000))  # nothing has changed for years
    ours = {"time": 1.0, "type": "job_started", "host": os.uname().nodename}
    (distlaunch.jobs / "old-02" / "events.jsonl").write_text(json.dumps(ours) + "\n")
    last_event(distlaunch.jobs / "old-02", 1_000_000)
    assert distlaunch.train("--num-procs", "1", script(distlaunch, "pass")).returncode == 0
    assert [(distlaunch.jobs / name).exists() for name in ("old-00", "old-01", "old-02")] == [
        True,
        False,
        False,
    ]


def test_the_newest_50_runs_are_kept_and_what_is_no_run_stays(distlaunch):
    old_runs(distlaunch.jobs, 55)
    (distlaunch.jobs / "notes").mkdir()
    (distlaunch.jobs / "notes" / "mine.txt").touch()
    os.utime(distlaunch.jobs / "notes", (1, 1))
    (
        distlaunch.jobs / "old-00" / ".distlaunch-run"
    ).unlink()  # another tool's folder that has an events.jsonl
    (
        distlaunch.jobs / "old-01" / "attempt-0" / "model.pt"
    ).touch()  # what a worker keeps in its run directory
    last_event(distlaunch.jobs / "old-01", 1_000_001)
    result = distlaunch.train("--num-procs", "1", script(distlaunch, "pass"))
    assert result.returncode == 0
    left = {path.name for path in distlaunch.jobs.iterdir() if not path.is_symlink()}
    kept = {"old-00", "old-01", *(f"old-{number:02}" for number in range(6, 55))}
    assert left == {result.run_dir.name, "notes", *kept}
    assert (distlaunch.jobs / "old-00" / "plan-0.json").exists()
    assert (distlaunch.jobs / "old-01" / "attempt-0" / "model.pt").exists()


def test_a_log_directory_of_ones_own_is_never_pruned(distlaunch):
    old_runs(distlaunch.work / "mine", 60)
    assert (
        distlaunch.train(
            "--num-procs", "1", "--log-dir", "mine", script(distlaunch, "pass")
        ).returncode
        == 0
    )
    assert (
        len([path for path in (distlaunch.work / "mine").iterdir() if not path.is_symlink()]) == 61
    )


def test_a_job_that_still_runs_is_never_pruned(distlaunch):
    name = script(
        distlaunch,
        "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)",
    )
    first = distlaunch.start(["train", "--num-procs", "1", "--job-id", "running", name])
    first.wait_stdout("up")
    old_runs(distlaunch.jobs, 60)
    last_event(distlaunch.jobs / "running", 1)
    (distlaunch.work / "quick.py").write_text("pass")
    assert distlaunch.train("--num-procs", "1", "--job-id", "second", "quick.py").returncode == 0
    assert not (distlaunch.jobs / "old-00").exists(), "the second job has pruned"
    running_there = (distlaunch.jobs / "running" / "events.jsonl").exists()
    (distlaunch.work / "go").touch()
    assert first.wait().returncode == 0
    assert running_there


def test_a_launcher_that_was_killed_leaves_a_directory_that_can_be_pruned(distlaunch):
    name = script(distlaunch, "import time\nprint('up', flush=True)\ntime.sleep(600)")
    killed = distlaunch.start(
        ["train", "--num-procs", "1", "--failure-grace", "1", "--job-id", "killed", name]
    )
    killed.wait_stdout("up")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    while distlaunch.survivors():
        time.sleep(0.01)
    old_runs(distlaunch.jobs, 60)
    last_event(distlaunch.jobs / "killed", 1)
    (distlaunch.work / "quick.py").write_text("pass")
    assert distlaunch.train("--num-procs", "1", "quick.py").returncode == 0
    assert not (distlaunch.jobs / "killed").exists()


def test_a_log_directory_of_ones_own_holds_the_runs(distlaunch):
    result = distlaunch.train(
        "--num-procs", "1", "--log-dir", "my/logs", "--job-id", "j", script(distlaunch, "print(1)")
    )
    assert result.returncode == 0
    assert (distlaunch.work / "my" / "logs" / "j" / "attempt-0" / "rank-0.log").read_text() == "1\n"
    assert os.readlink(distlaunch.work / "my" / "logs" / "latest") == "j"
    assert not distlaunch.jobs.exists()


def test_jobs_that_start_at_the_same_moment_have_directories_of_their_own(distlaunch):
    name = script(distlaunch, "import os\nprint(os.environ['DISTLAUNCH_RUN_DIR'])")
    jobs = [
        distlaunch.start(["train", "--num-procs", "1", "--job-id", "same", name]) for _ in range(6)
    ]
    assert [job.wait().returncode for job in jobs] == [0] * 6
    runs = [path for path in distlaunch.jobs.iterdir() if not path.is_symlink()]
    assert len(runs) == 6
    for run in runs:
        assert (run / "attempt-0" / "rank-0.log").read_text() == f"{run}\n"
