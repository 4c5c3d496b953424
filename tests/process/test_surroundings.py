"""The state in which a worker starts: signals, descriptors, session, limits, arguments, variables,
CPUs."""

from __future__ import annotations

import json
import os
import resource
import signal

import pytest


def reported(job, rank: int = 0) -> dict:
    return json.loads(job.sign(f"process-{rank}"))


def status_of_worker(result, rank: int = 0) -> dict[str, str]:
    """Return the /proc/self/status that a ``cat`` as worker has printed, unchanged by Python."""
    lines = (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_no_signal_is_blocked_or_ignored_in_a_worker(job):
    result = job.run("--no-python", "/bin/cat", "/proc/self/status")
    for rank in (0, 1):
        status = status_of_worker(result, rank)
        assert {
            status[name].strip("0") for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
        } == {""}


@pytest.mark.parametrize("how", [signal.SIG_BLOCK, "ignored"], ids=["blocked", "ignored"])
def test_a_launcher_whose_parent_has_shut_out_child_signals_works_all_the_same(job, how):
    def shut_out() -> None:
        if how == "ignored":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        else:
            signal.pthread_sigmask(how, {signal.SIGCHLD, signal.SIGUSR1})

    result = job.run("--no-python", "/bin/cat", "/proc/self/status", preexec=shut_out)
    assert result.returncode == 0, result.stderr
    status = status_of_worker(result)
    assert status["SigBlk"].strip("0") == ""
    assert status["SigIgn"].strip("0") == ""


def test_a_launcher_started_with_term_blocked_can_be_asked_to_stop(job, distlaunch):
    running = job.start(
        "waits.py", preexec=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    )
    job.await_ready(running)
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    distlaunch.assert_no_survivors()


def test_workers_go_on_ignoring_what_the_launcher_was_started_with_ignored(job):
    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    result = job.run("--no-python", "/bin/cat", "/proc/self/status", preexec=nohup)
    assert int(status_of_worker(result)["SigIgn"], 16) == 1 << (signal.SIGHUP - 1)


def test_a_worker_has_the_descriptors_0_to_2_and_those_for_progress_and_its_stacks_and_no_other(
    job,
):
    end, other = os.pipe()
    try:
        job.run("process_state.py", procs=3, pass_fds=[other])
    finally:
        os.close(end)
        os.close(other)
    for rank in range(3):
        descriptors = reported(job, rank)["descriptors"]
        assert set(descriptors) == {"0", "1", "2", "100", "101"}
        assert descriptors["101"].startswith("/memfd:stacks")
        assert descriptors["0"] == "/dev/null"
        assert descriptors["1"].startswith("pipe:")
        assert descriptors["1"] != descriptors["2"]


def test_rank_0_reads_our_stdin_and_nobody_else_does(job, tmp_path):
    text = tmp_path / "text"
    text.write_text("a question\n")
    with text.open() as stdin:
        result = job.run("--no-python", "/bin/cat", procs=3, stdin=stdin)
    logs = [(result.run_dir / "attempt-0" / f"rank-{rank}.log") for rank in range(3)]
    assert [log.read_text() if log.exists() else "" for log in logs] == ["a question\n", "", ""]


def test_every_worker_leads_a_session_and_a_group_of_its_own(job):
    job.run("process_state.py", procs=3)
    for rank in range(3):
        assert (
            reported(job, rank)["session"]
            == reported(job, rank)["group"]
            == reported(job, rank)["pid"]
        )


def test_64_workers_run_under_a_soft_limit_of_256_open_files_and_have_that_limit_themselves(job):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    result = job.run(
        "--no-python",
        "/bin/sh",
        "-c",
        "ulimit -Sn; ulimit -Hn",
        procs=64,
        preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
    )
    assert result.returncode == 0, result.stderr
    for rank in range(64):
        log = (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text()
        assert log == f"256\n{'unlimited' if hard == resource.RLIM_INFINITY else hard}\n"


def test_a_hard_limit_that_is_too_low_is_reported_before_anything_starts(job):
    result = job.run(
        "--no-python",
        "/bin/true",
        procs=64,
        preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
    )
    assert result.returncode == 2, result.stderr
    assert "open files" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.run_dir is None


def test_words_reach_the_script_byte_for_byte(job):
    words = [
        b"",
        b" ",
        b"a\nb",
        b"\xff\xfe\x80",
        "ü€😀".encode(),
        b"$HOME `id` \\ \"'",
        b"-x",
        b"--",
        b"--num-procs=9",
        b"*",
        b"",
    ]
    result = job.run("process_state.py", *map(os.fsdecode, words))
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert [bytes.fromhex(word) for word in reported(job, rank)["argv"]] == words
        assert bytes.fromhex(reported(job, rank)["cmdline"]).endswith(
            b"\0" + b"\0".join(words) + b"\0"
        )


def test_words_that_only_look_like_ours_are_the_scripts(job):
    job.run("process_state.py", "--dry-run", "--help", "-m", "--max-restarts", "3")
    assert [bytes.fromhex(word) for word in reported(job)["argv"]] == [
        b"--dry-run",
        b"--help",
        b"-m",
        b"--max-restarts",
        b"3",
    ]


def test_a_worker_starts_in_the_launchers_directory_or_in_the_one_given(job, tmp_path):
    job.run("process_state.py")
    assert reported(job)["cwd"] == str(job.work)
    other = tmp_path / "other\udcff directory"
    other.mkdir()
    job.run("process_state.py", options=["--workdir", str(other)])
    assert os.fsencode(json.loads((other / "process-1").read_text())["cwd"]) == os.fsencode(
        str(other)
    )


def test_variables_of_any_bytes_reach_the_workers(job):
    value = os.fsdecode(b"\xff\n=\x01 ")
    job.run(
        "process_state.py",
        env={"GIVEN": value, "EMPTY": ""},
        options=["--env", "MORE=" + value, "-x", "RANKS=none"],
    )
    env = reported(job, 1)["env"]
    assert bytes.fromhex(env["GIVEN"]) == bytes.fromhex(env["MORE"]) == b"\xff\n=\x01 "
    assert env["EMPTY"] == ""
    assert bytes.fromhex(env["RANKS"]) == b"none"


def test_setup_runs_before_the_worker_which_keeps_its_words_and_is_its_process(job):
    words = [b"", b"a\nb", b"\xff", b"$HOME"]
    options = [
        "--setup",
        "set -euo pipefail; export FROM_SETUP='set up'",
    ]  # as careful scripts begin
    result = job.run("process_state.py", *map(os.fsdecode, words), options=options)
    assert result.returncode == 0, result.stderr
    assert bytes.fromhex(reported(job, 1)["env"]["FROM_SETUP"]) == b"set up"
    assert [bytes.fromhex(word) for word in reported(job, 1)["argv"]] == words
    pids = result.of_type("worker_exited")
    assert {event["rank"]: event["pid"] for event in pids} == {
        rank: reported(job, rank)["pid"] for rank in (0, 1)
    }


def test_a_setup_that_ends_the_shell_ends_the_job_with_its_code(job):
    result = job.run("process_state.py", options=["--setup", "echo no-such-module >&2; exit 9"])
    assert result.returncode == 9
    assert "no-such-module" in result.stderr


@pytest.mark.parametrize("procs", [1, 2])
def test_bind_cores_shares_our_processors_out(job, procs):
    ours = os.sched_getaffinity(0)
    result = job.run("process_state.py", procs=procs, options=["--bind", "cores"])
    assert result.returncode == 0, result.stderr
    shares = [set(reported(job, rank)["affinity"]) for rank in range(procs)]
    assert all(share and share <= ours for share in shares)
    if len(ours) >= procs:
        assert sum(map(len, shares)) == len(set().union(*shares)), "nobody shares a processor"


def test_without_binding_a_worker_may_use_all_our_processors(job):
    job.run("process_state.py")
    assert set(reported(job, 1)["affinity"]) == os.sched_getaffinity(0)
