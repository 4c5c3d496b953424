"""Jobs seen from another shell: ``ps``, ``status``, ``logs``, ``events``, ``wait``, ``stop`` and
``rm``."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from distlaunch.jobs import control, stop
from distlaunch.jobs.job import read_job
from tests.facts import mentions
from tests.launcher import PROGRAMS
from tests.process.conftest import until
from tests.process.terminal.conftest import Screen

LONG_S = 60.0


def start(
    distlaunch, *words: str, program: str = "prints_and_waits.py", args=("3",), ranks: int = 2
):
    running = distlaunch.start(
        ["train", "--num-procs", str(ranks), *words, PROGRAMS / program, *args]
    )
    running.wait_for(
        lambda: all((distlaunch.work / f"printed-0-{rank}").exists() for rank in range(ranks)),
        "lines of all ranks",
        timeout=LONG_S,
    )
    return running


def put(distlaunch, name: str = "go") -> None:
    (distlaunch.work / name).touch()


def ask(distlaunch, *words: str):
    return json.loads(distlaunch.run([*words, "--format", "json"]).stdout)


@pytest.fixture
def terminal():
    screen = Screen()
    yield screen
    screen.close()


@pytest.fixture
def ended(distlaunch):
    """Return the run directory of a job that has succeeded."""
    put(distlaunch)
    result = distlaunch.train("--num-procs", "2", PROGRAMS / "prints_and_waits.py", "3")
    assert result.returncode == 0, result.stderr
    return result.run_dir


def test_ps_lists_a_job_while_it_runs_and_with_all_afterwards(distlaunch):
    running = start(distlaunch)
    [job] = ask(distlaunch, "ps")
    assert (job["state"], job["world_size"], job["pid"]) == ("running", 2, running.pid)
    assert job["run_dir"] == str(running.run_dir)
    assert job["job_id"] in distlaunch.run(["ps"]).stdout
    put(distlaunch)
    assert running.wait(LONG_S).returncode == 0
    assert ask(distlaunch, "ps") == []
    [job] = ask(distlaunch, "ps", "--all")
    assert (job["state"], job["exit_code"]) == ("succeeded", 0)


def test_status_has_the_workers_and_how_they_ended(distlaunch):
    running = start(distlaunch, args=("3", "5"))
    status = ask(distlaunch, "status", "latest")
    assert [(worker["rank"], worker["returncode"]) for worker in status["workers"]] == [
        (0, None),
        (1, None),
    ]
    pids = [int((distlaunch.work / f"printed-0-{rank}").read_text()) for rank in (0, 1)]
    assert [worker["pid"] for worker in status["workers"]] == pids
    put(distlaunch)
    assert running.wait(LONG_S).returncode == 5
    status = ask(distlaunch, "status", "latest")
    assert (status["state"], status["exit_code"]) == ("failed", 5)
    assert 5 in [worker["returncode"] for worker in status["workers"]]
    assert os.path.samefile(status["report"], running.run_dir / "report.txt")
    assert status["failure"]


def test_logs_have_every_line_of_the_ranks_that_are_asked_for(distlaunch, ended):
    whole = distlaunch.run(["logs", "latest"]).stdout.splitlines()
    expected = [
        f"[{rank}] attempt 0 rank {rank} {text}"
        for rank in (0, 1)
        for text in ("line 0", "line 1", "line 2", "ends")
    ]
    assert sorted(whole) == sorted(expected)
    one = distlaunch.run(["logs", ended, "--rank", "1"]).stdout.splitlines()
    assert one == [line.removeprefix("[1] ") for line in expected[4:]]
    assert distlaunch.run(["logs", "latest", "--rank", "0", "--tail", "2"]).stdout.splitlines() == [
        "attempt 0 rank 0 line 2",
        "attempt 0 rank 0 ends",
    ]
    found = distlaunch.run(["logs", "latest", "--grep", "line [12]$", "-n", "100"]).stdout
    assert sorted(found.splitlines()) == sorted(
        line for line in expected if line.endswith(("line 1", "line 2"))
    )


def test_logs_follow_through_a_restart_to_the_end_of_the_job(distlaunch):
    running = start(distlaunch, "--max-restarts", "1", args=("1", "5"))
    follower = distlaunch.start(["logs", "latest", "--follow", "--tail", "10"])
    follower.wait_stdout("attempt 0 rank 1 line 0")
    put(distlaunch)
    follower.wait_stdout("attempt 1 rank 1 line 0", timeout=LONG_S)
    put(distlaunch, "go-1")
    assert running.wait(LONG_S).returncode == 0
    shown = follower.wait(LONG_S)
    assert shown.returncode == 0
    for rank in (0, 1):
        assert f"[{rank}] attempt 1 rank {rank} ends" in shown.stdout


def test_logs_of_torchruns_directories_have_both_streams(distlaunch):
    (distlaunch.work / "both.py").write_text(
        "import sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\n"
    )
    result = distlaunch.run(
        ["torchrun", "--nproc-per-node", "1", "--log-dir", "logs", "--redirects", "3", "both.py"]
    )
    assert result.returncode == 0, result.stderr
    [job] = ask(distlaunch, "ps", "--all")
    shown = distlaunch.run(["logs", job["run_dir"], "--rank", "0"]).stdout
    assert sorted(shown.splitlines()) == ["to stderr", "to stdout"]


def test_events_end_with_the_exit_code(distlaunch, ended):
    events = distlaunch.run(["events", "latest", "--format", "json"]).stdout
    records = [json.loads(line) for line in events.splitlines()]
    assert records == [
        json.loads(line) for line in (ended / "events.jsonl").read_text().splitlines()
    ]
    shown = distlaunch.run(["events", "latest"]).stdout.splitlines()
    assert len([line for line in shown if not line.startswith(" ")]) == len(records)
    assert mentions(shown[-1], "job_ended", "exit code 0")


def test_a_strange_log_directory_is_shown_in_one_line_and_its_job_is_found(distlaunch):
    put(distlaunch)
    words = ["--log-dir", "new\nline \x1b[31m", "--job-id", "odd"]
    result = distlaunch.train("--num-procs", "1", *words, PROGRAMS / "prints_and_waits.py", "1")
    assert mentions(result.stderr, "job odd", r"new\nline \x1b[31m/odd")
    status = distlaunch.run(["status", "odd"])
    assert (status.returncode, "\x1b" in status.stdout) == (0, False)
    assert mentions(status.stdout, "logs", r"new\nline \x1b[31m/odd")
    assert distlaunch.run(["rm", "odd"]).returncode == 0


def test_events_are_chosen_by_type_and_number(distlaunch, ended):
    result = distlaunch.run(["events", "latest", "--type", "job-started,worker_exited", "-n", "2"])
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["worker_exited"] * 2
    wrong = distlaunch.run(["events", "latest", "--type", "worker"])
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert mentions(wrong.stderr, "near", "worker_exited", "workers_started")


def test_events_have_colours_on_a_terminal_only(distlaunch, ended, terminal):
    assert "\x1b" not in distlaunch.run(["events", "latest"]).stdout
    shown = distlaunch.start(["events", "latest"], **terminal.streams())
    assert terminal.read_until_end(shown).returncode == 0
    assert b"\x1b[32mjob_ended" in terminal.seen


def test_wait_returns_the_exit_code_of_the_job(distlaunch):
    running = start(distlaunch, args=("1", "7"))
    waiting = distlaunch.start(["wait", "latest"])
    put(distlaunch)
    assert waiting.wait(LONG_S).returncode == running.wait(LONG_S).returncode == 7
    assert distlaunch.run(["wait", "latest"]).returncode == 7


def test_a_launcher_that_is_killed_is_shown_as_killed(distlaunch):
    running = start(distlaunch)
    waiting = distlaunch.start(["wait", "latest"])
    running.send_signal(signal.SIGKILL)
    assert waiting.wait(LONG_S).returncode == 137
    assert ask(distlaunch, "status", "latest")["state"] == "killed"
    assert distlaunch.run(["stop", "latest"]).returncode == 2


def test_stop_ends_the_job_and_waits_for_it(distlaunch):
    running = start(distlaunch)
    assert distlaunch.run(["stop", "latest"]).returncode == 0
    assert running.wait(LONG_S).returncode == 128 + signal.SIGTERM
    assert ask(distlaunch, "status", "latest")["state"] == "stopped"


@pytest.mark.parametrize(("command", "code"), [("stop", 0), ("wait", 128 + signal.SIGTERM)])
def test_a_sigterm_after_the_end_of_the_job_changes_no_exit_code(distlaunch, command, code):
    running = start(distlaunch)
    other = distlaunch.start([command, "latest"])
    until(lambda: _catches_sigterm(other.pid), "the handler")
    if command == "wait":
        running.send_signal(signal.SIGTERM)
    else:
        running.wait_event("signal")
    other.send_signal(signal.SIGSTOP)
    running.wait(LONG_S)
    other.send_signal(signal.SIGTERM)
    other.send_signal(signal.SIGCONT)
    assert other.wait(LONG_S).returncode == code


def test_a_sigterm_before_the_end_of_the_job_ends_wait(distlaunch):
    running = start(distlaunch)
    other = distlaunch.start(["wait", "latest"])
    until(lambda: _catches_sigterm(other.pid), "the handler")
    other.send_signal(signal.SIGTERM)
    assert other.wait(LONG_S).returncode == -signal.SIGTERM
    running.send_signal(signal.SIGTERM)
    running.wait(LONG_S)


def _catches_sigterm(pid: int) -> bool:
    [caught] = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_stop_now_does_not_wait_for_workers_that_ignore_signals(distlaunch):
    running = distlaunch.start(
        [
            "train",
            "--num-procs",
            "1",
            "--grace",
            "600",
            PROGRAMS / "waits.py",
            "--ignore",
            "TERM,INT",
        ]
    )
    running.wait_workers(1)
    assert distlaunch.run(["stop", "latest", "--now"], LONG_S).returncode == 0
    assert running.wait(LONG_S).returncode > 128


def test_stop_now_sends_signals_if_the_launcher_has_only_accepted_the_request(
    distlaunch, monkeypatch
):
    words = ["--num-procs", "1", "--grace", "600", PROGRAMS / "waits.py", "--ignore", "TERM,INT"]
    running = distlaunch.start(["train", *words])
    running.wait_workers(1)
    monkeypatch.setattr(stop, "_ask_to_kill", lambda _: True)
    monkeypatch.setattr(stop, "_KILLS_S", 0.1)
    job = read_job(str(running.run_dir))
    assert stop.stop_job(job, now=True).state.has_ended
    assert running.wait(LONG_S).returncode > 128


def test_a_job_is_found_by_id_beginning_path_and_job_id(distlaunch):
    put(distlaunch)
    for _ in range(2):
        result = distlaunch.train(
            "--num-procs", "1", "--job-id", "exp", PROGRAMS / "prints_and_waits.py", "1"
        )
        assert result.returncode == 0, result.stderr
    other = distlaunch.train("--num-procs", "1", PROGRAMS / "prints_and_waits.py", "1")
    names = {
        "exp": "exp",  # the name in ps comes before the job id
        "exp-2": "exp-2",
        "ex": "exp-2",
        "latest": other.run_dir.name,
        other.run_dir.name[:12]: other.run_dir.name,
        f"{other.run_dir.parent}/exp": "exp",
        str(other.run_dir): other.run_dir.name,
    }
    for word, name in names.items():
        assert ask(distlaunch, "status", word)["name"] == name, word
    assert mentions(distlaunch.run(["status", "exp"]).stderr, "exp-2")
    for command in ("stop", "rm"):
        refused = distlaunch.run([command, "ex"])
        assert refused.returncode == 2
        assert mentions(refused.stderr, f"{other.run_dir.parent}/exp-2")
    assert distlaunch.run(["rm", "exp"]).returncode == 0
    assert ask(distlaunch, "status", "exp")["name"] == "exp-2"
    assert mentions(distlaunch.run(["status", "EXP"]).stderr, "near: exp")


def test_stop_and_rm_name_the_latest_job_and_refuse_one_of_another_directory(distlaunch):
    put(distlaunch)
    elsewhere = distlaunch.work / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "go").touch()
    for name, cwd in (("first", None), ("second", elsewhere)):
        program = PROGRAMS / "prints_and_waits.py"
        job = ["train", "--job-id", name, "--num-procs", "1", program, "1"]
        assert distlaunch.start(job, cwd=cwd).wait(LONG_S).returncode == 0
    refused = distlaunch.run(["rm", "latest"])
    assert refused.returncode == 2
    assert mentions(refused.stderr, "second", elsewhere, "first")
    assert mentions(distlaunch.run(["ps", "--all"]).stdout, "elsewhere")
    removed = distlaunch.start(["rm", "latest"], cwd=elsewhere).wait(LONG_S)
    assert (removed.returncode, mentions(removed.stderr, "second", "prints_and_waits.py")) == (
        0,
        True,
    )
    removed = distlaunch.run(["rm", "latest"])
    assert (removed.returncode, mentions(removed.stderr, "first")) == (0, True)


def test_logs_say_that_a_rank_has_written_nothing(distlaunch):
    program = distlaunch.work / "one_prints.py"
    program.write_text("import os\nif os.environ['RANK'] == '0': print('here')\n")
    assert distlaunch.train("--num-procs", "2", program).returncode == 0
    shown = distlaunch.run(["logs", "latest", "--rank", "1"])
    assert (shown.returncode, shown.stdout) == (0, "")
    assert mentions(shown.stderr, "rank 1", "no output")
    assert distlaunch.run(["logs", "latest", "--rank", "0"]).stderr == ""


def test_a_job_of_a_taken_id_is_called_by_its_directory(distlaunch):
    put(distlaunch)
    words = ["--num-procs", "1", "--job-id", "exp", PROGRAMS / "prints_and_waits.py", "1", "3"]
    assert distlaunch.train(*words).returncode == 3
    planned = distlaunch.run(["train", "--dry-run", *words])
    assert mentions(planned.stdout + planned.stderr, "jobs/exp-2")
    result = distlaunch.train(*words)
    lines = [
        line
        for line in result.stderr.splitlines()
        if line.lstrip().startswith(("distlaunch: job exp", "job exp"))
    ]
    assert len(lines) >= 2
    assert all("job exp-2" in line for line in lines)
    assert "exp-2" in distlaunch.run(["status", "latest"]).stdout.splitlines()[0]


def test_stop_again_waits_and_ctrl_c_leaves_the_stop_going_on(distlaunch):
    (distlaunch.work / "ignores.py").write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open('ready-' + os.environ['RANK'], 'w').close()\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    running = distlaunch.start(
        ["train", "--num-procs", "2", "--job-id", "exp", "--grace", "10min", "ignores.py"]
    )
    running.wait_workers(2)
    running.wait_for(
        lambda: all((distlaunch.work / f"ready-{rank}").exists() for rank in (0, 1)),
        "both ranks",
        timeout=LONG_S,
    )
    first = distlaunch.start(["stop", "exp"])
    first.wait_for(
        lambda: ask(distlaunch, "status", "exp")["stop_signal"], "a stop", timeout=LONG_S
    )
    shown = distlaunch.run(["status", "exp"]).stdout
    assert mentions(shown, "stopping", "10m", "SIGTERM")
    assert mentions(distlaunch.run(["ps"]).stdout, "stopping")
    first.send_signal(signal.SIGINT)
    result = first.wait(LONG_S)
    assert (result.returncode, mentions(result.stderr, "distlaunch wait exp")) == (130, True)
    second = distlaunch.start(["stop", "exp"])
    second.wait_stderr("already", timeout=LONG_S)
    third = distlaunch.run(["stop", "exp", "--now"], LONG_S)
    assert (third.returncode, mentions(third.stderr, "2 workers")) == (0, True)
    assert second.wait(LONG_S).returncode == 0
    assert running.wait(LONG_S).returncode == 128 + signal.SIGTERM
    signals = [
        event
        for event in distlaunch.run(["events", "exp"]).stdout.splitlines()
        if " signal " in event
    ]
    assert len(signals) == 2
    assert mentions(distlaunch.run(["status", "exp"]).stdout, "stopped by SIGTERM")


def test_status_has_the_exception_of_each_failure_and_the_script_after_setup(distlaunch):
    (distlaunch.work / "fails.py").write_text("raise ValueError('bad sample at step 15')\n")
    result = distlaunch.train(
        "--num-procs",
        "1",
        "--max-restarts",
        "1",
        "--min-uptime",
        "0",
        "--setup",
        "true",
        "fails.py",
    )
    assert result.returncode == 1
    status = ask(distlaunch, "status", "latest")
    assert status["failures"]
    for failure in status["failures"]:
        assert failure["exception"] == "ValueError: bad sample at step 15"
        assert failure["frame"].startswith("fails.py:1")
    text = distlaunch.run(["status", "latest"]).stdout
    assert text.count("bad sample at step 15") == len(status["failures"])
    for table in (text, distlaunch.run(["ps", "--all"]).stdout):
        assert mentions(table, "fails.py")
        assert "eval" not in table


@pytest.mark.parametrize("word", ["nothing", "", "/dev/null", "no/such/directory", "\udc80"])
@pytest.mark.parametrize("command", ["status", "logs", "events", "wait", "stop", "rm"])
def test_a_job_that_does_not_exist_is_refused(distlaunch, command, word):
    result = distlaunch.run([command, word])
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("distlaunch: error: ")


def test_ps_has_the_last_step_of_a_job_that_has_ended(distlaunch):
    (distlaunch.work / "beats.py").write_text(
        "import os\n"
        "for step in range(1230, 1235):\n"
        "    os.write(int(os.environ['DISTLAUNCH_PROGRESS_FD']), b'{\"step\": %d}\\n' % step)\n"
    )
    assert distlaunch.train("--num-procs", "1", "beats.py").returncode == 0
    assert mentions(distlaunch.run(["ps", "--all"]).stdout, "succeeded", "1", "1234")
    assert mentions(distlaunch.run(["logs", "latest", "--lines", "3"]).stderr, "--tail")
    assert mentions(distlaunch.run(["ps", "latest"]).stderr, "distlaunch status latest")


def test_a_beginning_of_two_jobs_names_both(distlaunch):
    put(distlaunch)
    for name in ("run-a", "run-b"):
        distlaunch.train(
            "--num-procs", "1", "--job-id", name, PROGRAMS / "prints_and_waits.py", "1"
        )
    result = distlaunch.run(["status", "run"])
    assert result.returncode == 2
    assert "run-a" in result.stderr
    assert "run-b" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["status", "latest", "more"],
        ["ps", "latest"],
        ["logs", "latest", "--rank", "3-1"],
        ["logs", "latest", "--rank", "x"],
        ["logs", "latest", "--rank", "2"],
        ["logs", "latest", "--grep", "("],
        ["logs", "latest", "--tail", "-1"],
        ["logs", "latest", "--attempt", "9"],
        ["logs", "latest", "--attempt", "9", "--follow"],
        ["logs", "latest", "--since", "yesterday"],
        ["logs", "latest", "--format", "xml"],
        ["stop", "latest", "--hard"],
        ["top", "latest", "--interval", "0"],
        ["rm", "latest", "nothing"],
        ["rm", "latest", "--log-dir", "elsewhere"],
    ],
    ids=" ".join,
)
def test_wrong_words_are_refused(distlaunch, ended, words):
    result = distlaunch.run(words)
    assert (result.returncode, result.stdout) == (2, "")
    assert ended.exists()


def test_a_job_with_its_own_log_directory_is_found(distlaunch):
    put(distlaunch)
    result = distlaunch.train(
        "--num-procs", "1", "--log-dir", "logs", PROGRAMS / "prints_and_waits.py", "1"
    )
    [job] = ask(distlaunch, "ps", "--all")
    assert job["run_dir"] == str(result.run_dir)
    assert ask(distlaunch, "ps", "--all", "--log-dir", "logs") == [job]
    shutil.rmtree(result.run_dir)
    assert ask(distlaunch, "ps", "--all") == []


def test_rm_removes_a_job_that_has_ended_and_keeps_foreign_files(distlaunch):
    running = start(distlaunch)
    assert distlaunch.run(["rm", "latest"]).returncode == 2
    (running.run_dir / "model.pt").write_text("weights")
    put(distlaunch)
    assert running.wait(LONG_S).returncode == 0
    removed = distlaunch.run(["rm", "latest"])
    assert (removed.returncode, mentions(removed.stderr, "1 file")) == (0, True)
    assert sorted(os.listdir(running.run_dir)) == [".distlaunch-run", "model.pt"]
    (running.run_dir / "model.pt").unlink()
    other = distlaunch.train("--num-procs", "1", PROGRAMS / "prints_and_waits.py", "1").run_dir
    assert distlaunch.run(["rm", running.run_dir, other.name]).returncode == 0
    assert not running.run_dir.exists()
    assert not other.exists()


def test_rm_refuses_a_job_whose_launcher_runs_without_event_file(distlaunch):
    running = start(distlaunch)
    (running.run_dir / "events.jsonl").unlink()
    result = distlaunch.run(["rm", "latest"])
    assert result.returncode == 2
    assert mentions(result.stderr, "distlaunch stop")
    assert (running.run_dir / "launcher.pid").exists()
    put(distlaunch)
    assert running.wait(LONG_S).returncode == 0


def test_rm_refuses_while_the_launcher_runs_after_the_end_of_the_job(distlaunch):
    held = "sh -c 'while ! test -e released; do sleep 0.05; done'"
    running = start(distlaunch, "--on-event", held)
    stopped = distlaunch.run(["stop", "latest"], LONG_S)
    assert stopped.returncode == 0
    assert mentions(stopped.stderr, f"pid {running.pid}", "--on-event")
    refused = distlaunch.run(["rm", "latest"])
    assert refused.returncode == 2
    assert mentions(refused.stderr, f"pid {running.pid}")
    put(distlaunch, "released")
    running.wait(LONG_S)
    assert distlaunch.run(["rm", "latest"]).returncode == 0
    assert not running.run_dir.exists()


def test_stop_says_how_to_continue_a_suspended_launcher(distlaunch):
    running = start(distlaunch)
    running.send_signal(signal.SIGSTOP)
    stopping = distlaunch.start(["stop", "latest", "--now"])
    stopping.wait_stderr(f"kill -CONT {running.pid}", timeout=LONG_S)
    running.send_signal(signal.SIGCONT)
    assert stopping.wait(LONG_S).returncode == 0
    running.wait(LONG_S)


def test_a_terminal_gets_no_harmful_sequences_of_logs_and_a_pipe_gets_each_byte(
    distlaunch, terminal
):
    put(distlaunch)
    line = "\x1b[2J\x1b]52;c;QQ==\x07\x1b[31mred\x1b[0m end"
    (distlaunch.work / "harmful.py").write_text(f"print({line!r})\n")
    assert distlaunch.train("--num-procs", "1", "harmful.py").returncode == 0
    assert distlaunch.run(["logs", "latest", "--rank", "0"]).stdout == f"{line}\n"
    shown = distlaunch.start(["logs", "latest"], **terminal.streams())
    assert terminal.read_until_end(shown).returncode == 0
    seen = terminal.seen.decode()
    assert "\x1b[31mred" in seen
    assert "\x1b[2J" not in seen
    assert "\x1b]52" not in seen


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user")
def test_a_job_of_another_user_is_not_touched(distlaunch, ended):
    os.chown(ended, 65534, 65534)
    assert ask(distlaunch, "ps", "--all") == []
    assert distlaunch.run(["rm", ended]).returncode == 2
    assert (ended / "events.jsonl").exists()


def test_a_job_of_another_host_names_the_command_to_run_there(distlaunch, ended):
    lines = (ended / "events.jsonl").read_text().splitlines()
    started = {**json.loads(lines[0]), "host": "far.example"}
    (ended / "events.jsonl").write_text(json.dumps(started) + "\n")
    assert ask(distlaunch, "status", "latest")["state"] == "unknown"
    result = distlaunch.run(["stop", "latest"])
    assert result.returncode == 2
    assert f"ssh far.example distlaunch stop {ended}" in result.stderr


def test_a_reader_that_leaves_ends_the_command_quietly(distlaunch, ended):
    log = ended / "attempt-0" / "rank-0.log"
    log.write_bytes(b"a line\n" * 200_000)
    read_end, write_end = os.pipe()
    running = distlaunch.start(["logs", "latest", "--rank", "0"], stdout=write_end)
    os.close(write_end)
    os.read(read_end, 100)
    os.close(read_end)
    result = running.wait(LONG_S)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_run_directory_that_vanishes_ends_the_wait(distlaunch):
    running = start(distlaunch)
    waiting = distlaunch.start(["wait", "latest"])
    followers = [
        distlaunch.start([*words, "latest", "--follow"]) for words in (["logs", "-n1"], ["events"])
    ]
    for follower, text in zip(followers, ("line", "job_started"), strict=True):
        follower.wait_stdout(text)
    until(lambda: waiting.process.poll() is None, "the command runs")
    shutil.rmtree(running.run_dir)
    assert waiting.wait(LONG_S).returncode == 2
    assert [each.wait(LONG_S).returncode for each in followers] == [0, 0]
    put(distlaunch)
    assert running.wait(LONG_S).returncode == 0


def test_the_launcher_answers_at_its_control_socket_while_the_job_runs(distlaunch):
    running = start(distlaunch)
    run_dir = str(running.run_dir)

    def answer():
        try:
            return control.ask(run_dir, "snapshot", timeout_s=LONG_S)
        except control.NoControlError:
            return None

    snapshot = running.wait_for(answer, "an answer", timeout=LONG_S)
    pids = [int((distlaunch.work / f"printed-0-{rank}").read_text()) for rank in (0, 1)]
    assert [(worker["pid"], worker["state"]) for worker in snapshot["workers"]] == [
        (pid, "running") for pid in pids
    ]
    assert (snapshot["phase"], snapshot["workers_up"]) == ("running", 2)
    control.ask(run_dir, "stop", timeout_s=LONG_S, now=True)
    assert running.wait(LONG_S).returncode == 128 + signal.SIGTERM
    with pytest.raises(control.NoControlError):
        control.ask(run_dir, "snapshot")


def test_status_and_ps_show_what_the_launcher_knows(distlaunch):
    (distlaunch.work / "beats.py").write_text(
        "import os, time\n"
        "pipe = int(os.environ['DISTLAUNCH_PROGRESS_FD'])\n"
        "for step in range(100_000):\n"
        "    os.write(pipe, b'{\"step\": %d}\\n' % (step + 5 * int(os.environ['RANK'])))\n"
        "    time.sleep(0.02)\n"
    )
    running = distlaunch.start(["train", "--num-procs", "2", "beats.py"])
    running.wait_workers(2)

    def status():
        found = ask(distlaunch, "status", "latest")
        steps = [worker["step"] for worker in found["workers"]]
        return found if found["phase"] == "running" and steps and None not in steps else None

    found = running.wait_for(status, "steps of both ranks", timeout=LONG_S)
    assert [(worker["rank"], worker["state"]) for worker in found["workers"]] == [
        (0, "running"),
        (1, "running"),
    ]
    assert found["progress"]["step_min"] == min(worker["step"] for worker in found["workers"])
    assert found["last_sign"] >= found["started"]
    assert mentions(distlaunch.run(["status", "latest"]).stdout, "last sign of life")
    assert "2/2" in distlaunch.run(["ps"]).stdout


def test_a_suspended_launcher_delays_status_a_little_and_the_events_are_shown(distlaunch):
    running = start(distlaunch)
    running.wait_for(
        lambda: ask(distlaunch, "status", "latest")["phase"], "an answer", timeout=LONG_S
    )
    running.send_signal(signal.SIGSTOP)
    status = ask(distlaunch, "status", "latest")
    assert (status["state"], status["phase"]) == ("running", None)
    assert status["launcher_suspended"]
    assert mentions(distlaunch.run(["status", "latest"]).stdout, running.pid, "suspended")
    assert "suspended" in distlaunch.run(["ps"]).stdout.split()
    assert [worker["returncode"] for worker in status["workers"]] == [None, None]
    running.send_signal(signal.SIGCONT)
    put(distlaunch)
    assert running.wait(LONG_S).returncode == 0


def test_garbage_many_connections_and_a_slow_reader_do_not_disturb_the_job(distlaunch):
    running = start(distlaunch)
    run_dir = str(running.run_dir)
    running.wait_for(
        lambda: ask(distlaunch, "status", "latest")["phase"], "an answer", timeout=LONG_S
    )
    clients = []
    try:
        for number in range(1000):
            client = control.connect(run_dir, timeout_s=LONG_S)
            clients.append(client)
            with suppress(OSError):  # the launcher closes what came first
                client.sendall(
                    [b"", b"\xff\0\n", b'{"schema": 1, "request": "snapshot"}\n'][number % 3]
                )
        assert control.ask(run_dir, "snapshot", timeout_s=LONG_S)["workers_up"] == 2
        put(distlaunch)
        assert running.wait(LONG_S).returncode == 0
    finally:
        for client in clients:
            client.close()
