"""Launchers that cannot be one job: all of them report the reason, with the right exit code and
without a long wait."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest

from distlaunch.core.agent.workers.process_tree import descendants_of, stat_of
from tests.facts import mentions
from tests.ports import free_port
from tests.process.conftest import spawner_below, until
from tests.process.loopback import LoopbackLaunchers

RIGHT = "correct horse battery"
"""A token that is no 128 bits."""


@pytest.fixture
def launchers(distlaunch):
    return LoopbackLaunchers(distlaunch)


def test_two_launchers_with_the_same_rank_are_named(launchers):
    launchers.start(0, size=3)
    launchers.start(1, size=3)
    first = launchers.by_rank[1]
    first.wait_stderr("joined")
    second = launchers.start(1, size=3)
    assert second.wait().returncode == 2
    assert mentions(second.stderr, "two launchers", "rank 1")
    launchers.by_rank[0].wait_stderr("two launchers")
    launchers.by_rank[1] = first
    launchers.start(2, size=3)
    launchers.wait_ready(0, 1, 2)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys(range(3), 0)


@pytest.mark.parametrize(
    ("words", "size", "message"),
    [
        (["--job-id", "x"], 2, "belongs to another job"),
        ([], 3, "for 3 nodes"),
    ],
)
def test_launchers_with_different_options_report_that(launchers, words, size, message):
    for rank, more in ((0, []), (1, words)):
        launchers.start(rank, "--join-timeout", "8", *more, size=size if rank else 2)
    codes = launchers.exit_codes()
    assert codes[1] == (69 if "job" in message else 2)
    assert codes[0] in (2, 69)
    assert message in launchers.stderr_of(1)
    assert message in launchers.stderr_of(0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "deepspeed"], "has --backend 'deepspeed'"),
        (["-o", "bucket-mb=3"], "has other options of --backend pytorch-ddp"),
    ],
)
def test_launchers_with_different_backends_report_it(launchers, words, message):
    launchers.start(
        0, "--no-python", program=sys.executable
    )  # which nobody has to have a framework for
    launchers.start(1, "--no-python", *words, program=sys.executable)
    assert launchers.exit_codes() == {0: 2, 1: 2}
    for node in (0, 1):
        assert message in launchers.stderr_of(node)


def test_launchers_that_run_different_commands_report_it(launchers):
    launchers.start(0)
    launchers.start(1, job=["--lr", "0.1"])
    assert launchers.exit_codes() == {0: 2, 1: 2}
    for node in (0, 1):
        assert "another command" in launchers.stderr_of(node)


@pytest.mark.parametrize(
    ("words", "program", "why"),
    [
        ([], "missing.py", "no such file"),
        (["--backend", "nope"], "waits_for_signs.py", "nope"),
        (["--workdir", "/nowhere"], "waits_for_signs.py", "no such directory"),
        (["--log-dir", "/dev/null/logs"], "waits_for_signs.py", "Not a directory"),
    ],
)
def test_a_launcher_that_cannot_take_part_is_named_on_all_nodes(launchers, words, program, why):
    launchers.start(0, size=3)
    launchers.start(1, size=3).wait_stderr("joined")
    launchers.start(2, *words, size=3, program=program)
    assert launchers.exit_codes() == dict.fromkeys(range(3), 2)
    assert why in launchers.stderr_of(2)
    for node in (0, 1):
        assert mentions(launchers.stderr_of(node), "node rank 2", "cannot take")
        assert why in launchers.stderr_of(node)


@pytest.mark.parametrize(
    ("words", "program", "why"),
    [
        (["--log-dir", "/dev/null/logs"], "waits_for_signs.py", "Not a directory"),
        ([], "missing.py", "no such file"),
    ],
)
def test_a_coordinator_that_cannot_start_sends_the_reason_to_the_others(
    launchers, words, program, why
):
    for rank in (1, 2):
        launchers.start(rank, size=3)
    launchers.wait_for_connections(2)
    launchers.start(0, *words, size=3, program=program)
    assert launchers.exit_codes() == dict.fromkeys(range(3), 2)
    for node in range(3):
        assert why in launchers.stderr_of(node)
        assert node == 0 or mentions(launchers.stderr_of(node), "cannot start", why)


def test_scripts_that_differ_are_named_on_all_nodes(launchers, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.py").write_text(f"print({name!r})\n")
    launchers.start(0, program=str(tmp_path / "a" / "t.py"))
    launchers.start(1, program=str(tmp_path / "b" / "t.py"))
    assert launchers.exit_codes() == {0: 2, 1: 2}
    for node in (0, 1):
        assert mentions(launchers.stderr_of(node), "t.py", "not the same")


def test_a_launcher_that_has_not_joined_in_time_is_named(launchers):
    launchers.start(0, "--join-timeout", "6", size=3)
    launchers.start(1, "--join-timeout", "6", size=3)
    assert launchers.exit_codes() == {0: 69, 1: 69}
    for node in (0, 1):
        assert mentions(launchers.stderr_of(node), "node 2", "not called")


def test_a_coordinator_that_never_comes_is_named(launchers):
    launchers.start(1, "--join-timeout", "0.5")
    assert launchers.exit_codes() == {1: 69}
    assert mentions(launchers.stderr_of(1), "node 0", f"127.0.0.1:{launchers.port}")


def test_a_rendezvous_port_in_use_is_reported(launchers):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", launchers.port))
        taken.listen()
        launchers.start(0)
        assert launchers.exit_codes() == {0: 2}
    assert f"port {launchers.port}" in launchers.stderr_of(0)


def test_a_token_is_needed_where_there_is_one(launchers):
    for rank, token in ((0, RIGHT), (1, "another long phrase")):
        launchers.start(rank, "--join-timeout", "8", env={"DISTLAUNCH_TOKEN": token})
    assert launchers.exit_codes() == {0: 69, 1: 69}
    assert mentions(launchers.stderr_of(1), "token", "same")
    assert mentions(launchers.stderr_of(0), "token", "same")


@pytest.mark.parametrize(
    "token", [RIGHT, "8f14e45fceea167a5a36dedd4bea2543"], ids=["a phrase", "128 bits"]
)
def test_a_token_from_a_file_lets_in_who_has_it_from_the_environment(launchers, tmp_path, token):
    launchers.start(0, "--token-file", token_file(tmp_path, token))
    launchers.start(1, env={"DISTLAUNCH_TOKEN": token})
    launchers.wait_ready(0, 1)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0, 1: 0}


def token_file(folder, token, mode=0o600) -> str:
    path = folder / "token"
    path.write_text(f"{token}\n")
    path.chmod(mode)
    return str(path)


def test_a_short_token_is_refused_unless_it_is_wanted(launchers):
    launchers.start(0, env={"DISTLAUNCH_TOKEN": "sesame"})
    assert launchers.exit_codes() == {0: 2}
    assert "DISTLAUNCH_TOKEN has only 6 characters" in launchers.stderr_of(0)
    assert "openssl rand -hex 32" in launchers.stderr_of(0)
    for rank in (0, 1):
        launchers.start(rank, "--weak-token-ok", env={"DISTLAUNCH_TOKEN": "sesame"})
    launchers.wait_ready(0, 1)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0, 1: 0}


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_file_that_others_can_read_is_refused(launchers, tmp_path, mode):
    path = token_file(tmp_path, RIGHT, mode)
    launchers.start(0, "--token-file", path)
    assert launchers.exit_codes() == {0: 2}
    assert mentions(launchers.stderr_of(0), f"{path}'", "other users", f"{mode:04o}")
    assert f"chmod 600 {path}" in launchers.stderr_of(0)


def test_the_command_that_closes_a_token_file_can_be_pasted_for_any_name(launchers, tmp_path):
    folder = tmp_path / "my keys"
    folder.mkdir()
    path = token_file(folder, RIGHT, 0o644)
    launchers.start(0, "--token-file", path)
    assert launchers.exit_codes() == {0: 2}
    assert f"chmod 600 '{path}'" in launchers.stderr_of(0)


FAILING_MUNGE = """#!/bin/sh
[ -e "$0.used" ] && { echo "munge: Error: Failed to access socket" >&2; exit 6; }
: > "$0.used"
echo MUNGE:credential:
"""
"""As if munged ended between the launcher's first credential and its second."""


def test_a_launcher_without_a_rank_does_not_call_itself_if_munge_fails(launchers, tmp_path):
    for name in ("munge", "unmunge"):
        (tmp_path / name).write_text(FAILING_MUNGE)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    launchers.start(None, "--join-timeout", "1000", env={"PATH": path, "SLURM_JOB_ID": "77"})
    assert launchers.exit_codes() == {None: 2}
    assert mentions(launchers.stderr_of(None), "munge", "munge: Error: Failed to access socket")


def test_a_launcher_that_cannot_join_ends_though_its_spawner_is_stopped(launchers):
    running = launchers.start(1, "--join-timeout", "4")
    until(lambda: spawner_below(running.pid) is not None, "the spawner is there")
    helpers = descendants_of(running.pid)
    for pid in helpers:
        os.kill(pid, signal.SIGSTOP)
    assert launchers.exit_codes() == {1: 69}
    until(lambda: all(stat_of(pid) is None for pid in helpers), "the spawner is gone")


def test_in_a_pod_a_token_file_that_others_can_read_is_only_mentioned(launchers, tmp_path):
    path = token_file(tmp_path, RIGHT, 0o644)
    for rank in (0, 1):
        launchers.start(rank, "--token-file", path, env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    launchers.wait_ready(0, 1)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0, 1: 0}
    assert launchers.stderr_of(0).count("other users") == 1


@pytest.mark.parametrize(
    ("host", "token", "count"),
    [("node0.invalid", None, 1), ("node0.invalid", RIGHT, 0), ("127.0.0.1", None, 0)],
)
def test_a_port_that_others_reach_without_a_token_is_mentioned_once(distlaunch, host, token, count):
    port = free_port()
    words = [
        "--rendezvous",
        f"{host}:{port}",
        "--num-nodes",
        "2",
        "--node-rank",
        "0",
        "--procs-per-node",
        "1",
    ]
    env = {} if token is None else {"DISTLAUNCH_TOKEN": token}
    result = distlaunch.train(*words, "--join-timeout", "0.5", "--no-python", "true", env=env)
    assert result.returncode == 69
    warnings = [
        line for line in result.stderr.splitlines() if mentions(line, "anybody", f"port {port}")
    ]
    assert len(warnings) == count


# --- launchers that stand still

STILL = ("--lost-after", "5", "--failure-grace", "1")


def stand_still(launchers, rank, sign):
    """Stop a launcher until the other reports it as lost."""
    stopped, other = launchers.by_rank[rank], launchers.by_rank[1 - rank]
    stopped.send_signal(signal.SIGSTOP)
    other.wait_stderr(sign)
    stopped.send_signal(signal.SIGCONT)


def test_a_joined_launcher_that_stood_still_reports_that_and_blames_no_node(launchers):
    launchers.start_all(*STILL)
    launchers.wait_ready(0, 1)
    stand_still(launchers, 1, "silent for")
    codes = launchers.exit_codes()
    assert codes == {0: 69, 1: 69}
    assert mentions(launchers.stderr_of(1), "this launcher", "stood still")
    assert mentions(" ".join(launchers.stderr_of(0).split()), "the node", "stood still")


def test_a_coordinator_that_stood_still_gets_no_hint_of_a_crash(launchers):
    launchers.start_all(*STILL)
    launchers.wait_ready(0, 1)
    stand_still(launchers, 0, "no word from it for")
    assert launchers.by_rank[0].wait(60).returncode == 69
    message = " ".join(launchers.stderr_of(0).split())
    assert mentions(message, "heard nothing")
    assert mentions(message, "this launcher", "stood still")
    assert "crash" not in message
    assert launchers.by_rank[1].wait(60).returncode == 69
