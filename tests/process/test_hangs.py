"""Jobs that hang: found, explained and ended, or restarted; and jobs that only look like it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.facts import mentions
from tests.launcher import PROGRAMS

QUICK = ("--hang-timeout", "1.5", "--failure-grace", "1")
RESTARTS = ("--max-restarts", "5", "--hang-action", "restart")
LONGER_S = 3.0
"""Than the timeout, and what it would take till a hang is told."""


def hang_of(result) -> dict:
    [hang] = result.of_type("hang")
    return hang


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("sleep", "time.sleep(600)"),
        ("lock", "lock.acquire()"),
        ("loop", "pass"),
        ("poll", "time.sleep(0.02)"),
        ("child", "subprocess.run"),
        ("ignores_term", "time.sleep(600)"),
    ],
)
def test_the_stuck_rank_and_its_function_are_named_and_the_job_ends_with_124(
    job, distlaunch, how, line
):
    result = job.run("hangs.py", how, procs=3, options=QUICK)
    assert result.returncode == 124, result.stderr
    assert hang_of(result)["behind"] == [1]
    assert "in stuck" in hang_of(result)["frame"]
    assert "in others_wait" in result.stderr
    report = (result.run_dir / "report.txt").read_text()
    assert "rank 1" in report
    assert result.stderr.rstrip().endswith(report.rstrip().splitlines()[-1])
    stacks = result.run_dir / "attempt-0" / "rank-1.stacks.txt"
    assert "in stuck" in stacks.read_text()
    assert oct(stacks.stat().st_mode & 0o777) == "0o600"
    seen = [
        event["frame"]
        for event in result.of_type("hang_postponed")
        if "in stuck" in (event["frame"] or "")
    ]
    if how == "loop":  # it computes: that is ended for its silence alone
        assert seen
        assert hang_of(result)["silent_s"] >= 10 * 1.5
        notices = [line for line in result.stderr.splitlines() if mentions(line, "15 s")]
        assert len(notices) == 1
    else:
        assert seen == []
    if how == "ignores_term":
        assert mentions(result.stderr, "rank 1", "killed", "1 s", "--failure-grace")
    distlaunch.assert_no_survivors()


def test_a_rank_that_computes_in_silence_while_others_wait_is_no_hang(job, distlaunch):
    running = job.start("hangs.py", "work", procs=3, options=QUICK)
    job.await_signs(running, "stuck")
    running.wait_for(
        lambda: any(
            "in stuck" in (event["frame"] or "")
            for event in running.events
            if event["type"] == "hang_postponed"
        ),
        "verdict that was postponed for rank 1",
    )
    job.put_sign("enough")
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert result.of_type("hang") == []


def test_a_rank_that_somebody_has_stopped_is_named_as_such_and_ended(job, distlaunch):
    result = job.run("hangs.py", "stop", procs=3, options=QUICK)
    assert result.returncode == 124, result.stderr
    assert hang_of(result)["behind"] == [1]
    assert "SIGSTOP" in hang_of(result)["summary"]
    distlaunch.assert_no_survivors()


def test_a_program_without_python_is_ended_as_well_and_not_killed_by_our_question(job, distlaunch):
    script = distlaunch.work / "train.sh"
    script.write_text(
        "#!/bin/sh\ntrap 'echo ended >&2; exit 9' TERM\nwhile :; do sleep 0.1; done\n"
    )
    script.chmod(0o755)
    result = job.run(script, options=[*QUICK, "--no-python"])
    assert result.returncode == 124, result.stderr
    codes = {event["rank"]: event["returncode"] for event in result.of_type("worker_exited")}
    assert codes == {0: 9, 1: 9}


def test_a_hang_is_restarted_and_ends_early_if_it_repeats_without_progress(job, distlaunch):
    result = job.run("hangs.py", "sleep", options=[*QUICK, *RESTARTS])
    assert result.returncode == 124
    assert [event["attempt"] for event in result.of_type("hang")] == [0, 1]
    assert "attempt 0 hung; restart 1 of 5" in result.stderr
    assert mentions(result.stderr, "same failure", "progress")
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("options", [(), RESTARTS])
def test_heartbeats_without_output_raise_no_alarm(job, distlaunch, options):
    running = job.start("reports.py", "--beat", options=[*QUICK, *options])
    job.await_signs(running, "reported-0", "reported-1")
    time.sleep(LONGER_S)  # not a wait for anything
    job.put_sign("enough")
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert result.of_type("hang") == []


def test_output_without_heartbeats_raises_no_alarm(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        f"import time\nfor _ in range({LONGER_S * 10:.0f}):\n    print('.', end='', flush=True)\n    time.sleep(0.1)\n"
    )
    result = job.run(script, options=QUICK)
    assert result.returncode == 0, result.stderr


def test_a_job_whose_output_does_not_count_gets_a_notice(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import time\nfrom distlaunch.toolkit import heartbeat\nheartbeat(step=1)\n"
        "while True:\n    print('evaluating', flush=True)\n    time.sleep(0.2)\n"
    )
    result = job.run(script, options=QUICK)
    assert result.returncode == 124
    assert hang_of(result)["output_came"] is True
    assert "hang: no heartbeat from any of 2 workers for" in result.stderr
    assert mentions(hang_of(result)["hint"], "heartbeat", "evaluation")


def test_a_file_that_a_worker_opened_over_our_descriptor_is_not_written_to(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import os, time\nos.closerange(3, 256)\n"
        "file = os.open('model-' + os.environ['RANK'], os.O_WRONLY | os.O_CREAT)\n"
        "for number in range(90, 130):\n    os.dup2(file, number)\n"
        "os.write(file, b'MODEL')\ntime.sleep(600)\n"
    )
    result = job.run(script, options=QUICK)
    assert result.returncode == 124
    assert [(distlaunch.work / f"model-{rank}").read_bytes() for rank in (0, 1)] == [b"MODEL"] * 2
    assert "no stack (state S)" in result.stderr


NOTICE_S = 4.0
NOTICE = ("--hang-notice", str(NOTICE_S), "--grace", "1")


@pytest.mark.parametrize(("how", "state"), [("lock", ""), ("loop", "; it works"), ("stop", "")])
def test_without_the_option_one_notice_names_the_ranks_behind_and_ctrl_c_shows_each_stack(
    job, distlaunch, how, state
):
    running = job.start("hangs.py", how, procs=3, options=NOTICE)
    job.await_signs(running, "stuck")
    event = running.wait_event("silence")
    assert event["behind"] == [1]
    running.wait_stderr("--hang-timeout")
    [notice] = [line for line in running.stderr.splitlines() if "--hang-timeout" in line]
    assert mentions(notice, "rank 1", state)
    assert running.process.poll() is None
    running.send_signal(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 130, result.stderr
    assert [event["when"] for event in result.of_type("silence")] == ["notice", "stop"]
    reported = result.stderr.partition("SIGINT")[2]
    assert "ranks 0,2:\n      hangs.py:" in reported
    assert "in others_wait" in reported
    assert "in stuck" in reported or how == "stop"
    assert result.stderr.count("--hang-timeout") == 1
    assert (result.run_dir / "attempt-0" / "rank-0.stacks.txt").read_text().count(
        "in others_wait"
    ) == 2
    distlaunch.assert_no_survivors()


def test_output_puts_the_notice_off_and_heartbeats_do(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import os, time\nfrom distlaunch.toolkit import heartbeat\n"
        f"for step in range({(NOTICE_S + 2) * 10:.0f}):\n"
        "    print('.', end='', flush=True) if os.environ['RANK'] == '1' else heartbeat(step=step)\n    time.sleep(0.1)\n"
    )
    result = job.run(script, options=NOTICE)
    assert result.returncode == 0, result.stderr
    assert result.of_type("silence") == []


def test_a_worker_that_is_alone_may_be_silent(job, distlaunch):
    running = job.start("hangs.py", "sleep", procs=1, options=NOTICE)
    running.wait_workers(1)
    time.sleep(NOTICE_S + 2)  # not a wait for anything
    assert not [event for event in running.events if event["type"] == "silence"]
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    distlaunch.assert_no_survivors()


def test_torchruns_command_gives_the_notice_too(distlaunch):
    words = ["torchrun", "--nproc-per-node", "3", PROGRAMS / "hangs.py", "lock"]
    running = distlaunch.start(words, env={"DISTLAUNCH_HANG_NOTICE": str(NOTICE_S)})
    running.wait_stderr("DISTLAUNCH_HANG_TIMEOUT ends jobs that hang\n")
    assert "rank 1 is behind" in running.stderr
    running.send_signal(signal.SIGINT)
    result = running.wait()
    assert [event["when"] for event in result.of_type("silence")][-1] == "stop"
    distlaunch.assert_no_survivors()


def test_workers_that_wait_for_whoever_reads_our_output_do_not_hang(job, distlaunch):
    """Nobody reads the launcher's output for longer than the timeout; then all of it comes, and the
    job goes well."""
    script = distlaunch.work / "train.py"
    script.write_text("for _ in range(40):\n    print('x' * 99_999)\nprint('done')\n" * 5)
    reader, writer = os.pipe()
    running = job.start(script, options=QUICK, stdout=writer)
    os.close(writer)
    time.sleep(LONGER_S)  # not a wait for anything
    assert running.process.poll() is None
    data = bytearray()
    while chunk := os.read(reader, 1 << 20):
        data += chunk
    os.close(reader)
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert data.count(b"done") >= 5
    assert result.of_type("hang") == []


def test_a_worker_that_fails_meanwhile_is_the_cause_and_one_that_never_exits_is_ended_by_the_grace(
    job, distlaunch
):
    options = ["--hang-timeout", "60", "--failure-grace", "1"]
    result = job.run("ends.py", "--ignore", "3", options=options)
    assert result.returncode == 3
    assert result.of_type("hang") == []
    assert {event["rank"]: event["returncode"] for event in result.of_type("worker_exited")}[
        1
    ] == -signal.SIGKILL
    distlaunch.assert_no_survivors()


def test_ctrl_c_during_a_hang_ends_the_job_as_ever(job, distlaunch):
    running = job.start(
        "hangs.py", "stop", procs=3, options=["--hang-timeout", "60", "--grace", "1"]
    )
    job.await_signs(running, "stuck")
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode in (130, 143)
    distlaunch.assert_no_survivors()


def test_the_scripts_own_site_customisation_and_arguments_are_untouched(job, distlaunch):
    (distlaunch.work / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 1\n")
    script = distlaunch.work / "train.py"
    script.write_text(
        "import os, sys\n"
        "assert mine == 1\n"
        "assert sys.modules['sitecustomize'].__file__ == os.path.abspath('sitecustomize.py')\n"
        "print(sorted(name for name in os.environ if 'BOOT' in name or 'STACKS' in name))\n"
        "print(os.environ.get('PYTHONPATH'))\n"
    )
    result = job.run(script, procs=1, options=QUICK, env={"PYTHONPATH": str(distlaunch.work)})
    assert result.returncode == 0, result.stderr
    assert "[]" in result.stdout
    assert str(distlaunch.work) in result.stdout


def test_dead_thread_that_should_have_filled_a_queue_is_in_the_report(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import os, queue, threading\n"
        "batches = queue.Queue()\n"
        "def fill():\n    raise KeyError('label')\n"
        "if os.environ['RANK'] == '1':\n    threading.Thread(target=fill).start()\n"
        "batches.get()\n"
    )
    result = job.run(script, options=QUICK)
    assert result.returncode == 124
    report = (result.run_dir / "report.txt").read_text()
    assert mentions(report, "rank 1", "thread", "KeyError: 'label'", "train.py:4 in fill")


# --- some ranks hang, and others do not fall silent


def test_a_rank_that_others_wait_for_is_found_though_they_report_and_write(job, distlaunch):
    result = job.run("collective.py", "sleeps", procs=3, options=QUICK)
    assert result.returncode == 124, result.stderr
    event = hang_of(result)
    assert (event["behind"], event["by_steps"], event["action"]) == ([1], True, "stop")
    assert "in stuck" in event["frame"]
    distlaunch.assert_no_survivors()


def test_workers_that_wait_for_one_that_has_ended_with_0_are_reported_at_once(job, distlaunch):
    running = job.start("collective.py", "ends", procs=3, options=["--grace", "1"])
    event = running.wait_event("silence", timeout=30.0)
    assert (event["when"], event["behind"], event["ended"]) == ("end", [1], [1])
    running.wait_stderr("--hang-timeout")
    assert mentions(running.stderr, "rank 1", "exit code 0", "wait")
    assert running.process.poll() is None
    running.send_signal(signal.SIGTERM)
    running.wait()
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("how", ["sleeps", "ends"])
def test_a_hang_is_restarted_if_that_is_wanted(job, distlaunch, how):
    result = job.run("collective.py", how, procs=3, options=[*QUICK, *RESTARTS], timeout=200)
    assert result.returncode == 0, result.stderr
    assert hang_of(result)["action"] == "restart"
    assert len(result.of_type("restarting")) == 1
    distlaunch.assert_no_survivors()


def test_restarts_do_not_concern_a_hang_unless_that_is_wanted(job, distlaunch):
    options = [*QUICK, "--max-restarts", "3", "--min-uptime", "0"]
    result = job.run("collective.py", "sleeps", procs=2, options=options)
    assert result.returncode == 124
    assert result.of_type("restarting") == []
    assert mentions((result.run_dir / "report.txt").read_text(), "not restarted", "--hang-action")


def test_a_hang_is_only_reported_if_that_is_wanted(job, distlaunch):
    options = [*QUICK, "--hang-action", "report", "--grace", "1"]
    running = job.start("collective.py", "sleeps", procs=3, options=options)
    assert running.wait_event("hang")["action"] == "report"
    running.wait_stderr("--hang-action report")
    assert "rank 1 is behind" in running.stderr
    assert "in stuck" in running.stderr
    assert running.process.poll() is None
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert not (result.run_dir / "report.txt").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hang-action", "report"], ("--hang-action report", "--hang-timeout")),
        (
            ["--hang-action", "restart", "--hang-timeout", "5"],
            ("--hang-action restart", "--max-restarts"),
        ),
    ],
)
def test_an_action_that_would_never_be_taken_is_refused(distlaunch, options, words):
    result = distlaunch.run(["train", "--num-procs", "2", *options, PROGRAMS / "collective.py"])
    assert result.returncode == 2
    for word in words:
        assert word in result.stderr
