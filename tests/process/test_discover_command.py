"""``--discover``: a command of the user's that is run, ends with us, and whose words are not shown;
odd surroundings."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest


def test_processes_that_a_discovery_command_leaves_do_not_hold_us_up(distlaunch):
    (distlaunch.work / "t.py").touch()
    (distlaunch.work / "find").write_text("sleep 600 &\necho a:1\n")
    result = distlaunch.run(["plan", "--format", "json", "--discover", "sh ./find", "t.py"])
    assert (result.returncode, result.stderr) == (0, "")
    assert [(node["host"], node["slots"]) for node in json.loads(result.stdout)["nodes"]] == [
        ("a", 1)
    ]


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_stopped_while_hosts_are_discovered_leaves_nothing(
    distlaunch, command, number
):
    (distlaunch.work / "find").write_text(
        'exec 3>"${SURVIVOR_FIFO}"; echo here >&3; setsid sleep 600 & sleep 600\n'
    )
    running = distlaunch.start([command, "--discover", "sh ./find", "t.py"])
    running.wait_for(lambda: len(distlaunch.holding()) >= 3, "two that sleep, and their shell")
    running.send_signal(number)
    assert running.wait().returncode == (130 if number == signal.SIGINT else -number)
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize(
    "command", ["echo a:1", "echo a:x", "exit 3", "true", "echo a:1; echo b:1"]
)
def test_a_command_from_a_variable_may_have_secret_words_and_is_never_shown(distlaunch, command):
    (distlaunch.work / "t.py").touch()
    env = {"DISTLAUNCH_DISCOVER": f"{command}; : sesame"}
    if command.startswith("exit"):
        env = {"DISTLAUNCH_DISCOVER": f": sesame; {command}"}
    for words in (["plan", "--explain", "--format", "json"], ["train", "--explain", "--dry-run"]):
        result = distlaunch.run([*words, "t.py"], env=env)
        assert "DISTLAUNCH_DISCOVER" in result.stdout + result.stderr
        assert "sesame" not in result.stdout + result.stderr


def test_names_that_the_terminals_encoding_lacks_are_escaped(distlaunch):
    folder = distlaunch.work / "é"
    folder.mkdir()
    (folder / "t.py").touch()
    result = distlaunch.run(
        ["plan", "--hosts", "a:1", "t.py"], env={"PYTHONIOENCODING": "ascii"}, cwd=folder
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "Workdir" in result.stdout


LOOP = """
while read name; do
  {command} "$name" {more}
  echo "done with $name"
done < names
"""


@pytest.mark.parametrize(
    ("source", "more", "done"),
    [("", "", 1), ("", "</dev/null", 3), ("import sys; sys.stdin.read()", "", 1)],
)
def test_input_that_is_read_and_that_rank_0_never_reads_is_reported_once(
    distlaunch, source, more, done
):
    (distlaunch.work / "t.py").write_text(source)
    (distlaunch.work / "names").write_text("a\nb\nc\n")
    words = [
        sys.executable,
        "-m",
        "distlaunch",
        "train",
        "--discover",
        "echo localhost:1",
        "--num-nodes",
        "1:2",
        "t.py",
    ]
    script = LOOP.format(command=shlex.join(words), more=more)
    environ = {"PATH": os.environ["PATH"], "HOME": str(distlaunch.work), "PYTHONPATH": os.getcwd()}
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=distlaunch.work,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [f"done with {name}" for name in "abc"[:done]]
    notice = "rank 0 has not read 4 bytes of the input that came on stdin"
    assert ran.stderr.count(notice) == (0 if source or more else 1), ran.stderr
    assert notice not in ran.stderr or "</dev/null" in ran.stderr
