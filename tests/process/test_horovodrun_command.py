"""``distlaunch horovodrun`` as it is typed, without Horovod itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.facts import mentions

SHOW = (
    "import json, os, sys\n"
    "names = [name for name in os.environ if name.startswith('HOROVOD_')]\n"
    "found = {name: os.environ[name] for name in sorted(names)}\n"
    "print(json.dumps([sys.argv[1:], found]), flush=True)\n"
)


@pytest.fixture
def show(distlaunch):
    """Return a command that has each worker print its arguments and variables of Horovod's."""
    script = distlaunch.work / "show.py"
    script.write_text(SHOW)
    distlaunch.pretend("horovod")

    def run(*words, env=None, command=(sys.executable, "show.py")):
        result = distlaunch.run(
            ["horovodrun", "--python", sys.executable, *words, *command], env=env
        )
        assert result.returncode == 0, result.stderr
        logs = sorted((result.run_dir / "attempt-0").glob("rank-*.log"))
        return [json.loads(log.read_text()) for log in logs], result

    return run


def test_workers_have_the_variables_of_horovods_own_launcher(show):
    got, _ = show("-np", "2", env={"HOROVOD_RANK": "7", "HOROVOD_CYCLE_TIME": "3"})
    ports = {found.pop("HOROVOD_GLOO_RENDEZVOUS_PORT") for _, found in got}
    assert len(ports) == 1
    of_all = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_CYCLE_TIME": "3",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_SIZE": "2",
    }
    assert [found for _, found in got] == [
        {**of_all, "HOROVOD_RANK": n, "HOROVOD_LOCAL_RANK": n} for n in "01"
    ]


def test_the_slots_of_a_host_list_or_file_are_filled_up_to_np(show, distlaunch):
    (distlaunch.work / "hosts").write_text("# ours\nlocalhost slots=3\n")
    assert len(show("-H", "localhost:3")[0]) == 3
    assert len(show("-np", "2", "-H", "localhost:3")[0]) == 2
    assert len(show("-np", "1", "-hostfile", "hosts")[0]) == 1


def test_a_host_file_and_a_configuration_may_be_pipes(distlaunch):
    command = (
        f"{sys.executable} -m distlaunch horovodrun --hostfile <(echo localhost slots=2)"
        ' --config-file <(printf "logging:\\n  level: INFO\\n")'
        " sh -c 'echo $HOROVOD_LOG_LEVEL $HOROVOD_SIZE'"
    )
    done = subprocess.run(
        ["bash", "-c", command],
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "INFO 2" in done.stdout


def test_settings_of_a_file_and_of_the_command_line(show, distlaunch):
    (distlaunch.work / "conf.yaml").write_text(
        "params:\n  cache_capacity: 5\n  cycle_time_ms: 2\nlogging:\n  level: INFO\n"
    )
    got, _ = show(
        "-np",
        "1",
        "--config-file",
        "conf.yaml",
        "--cycle-time-ms",
        "4",
        "-x",
        "HOROVOD_CACHE_CAPACITY=6",
    )
    found = got[0][1]
    assert (found["HOROVOD_CYCLE_TIME"], found["HOROVOD_LOG_LEVEL"]) == ("4", "INFO")
    assert found["HOROVOD_CACHE_CAPACITY"] == "6"


def test_a_setting_without_the_one_that_it_needs_is_reported(show):
    got, result = show("-np", "1", "--autotune-log-file", "f", "-o", "stall-check=off")
    assert "HOROVOD_AUTOTUNE_LOG" not in got[0][1]
    assert got[0][1]["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert mentions(result.stderr, "--autotune-log-file", "no effect", "--autotune")


def test_any_command_runs_and_its_words_are_its_own(show):
    inner = f'exec {sys.executable} show.py "$@" -np'
    got, _ = show("-np", "1", command=("sh", "-c", inner, "sh", "--verbose", "a b"))
    assert got[0][0] == ["--verbose", "a b", "-np"]


def test_a_script_that_is_not_there_is_reported_before_anything_starts(distlaunch):
    result = distlaunch.run(["horovodrun", "-np", "2", sys.executable, "none.py"])
    assert result.returncode == 2
    assert "none.py" in result.stderr


def test_where_horovod_is_missing_the_command_that_brings_it_is_reported(distlaunch):
    (distlaunch.work / "train.py").touch()
    result = distlaunch.run(["horovodrun", "-np", "2", sys.executable, "train.py"])
    assert result.returncode == 2
    assert mentions(result.stderr, sys.executable, "module horovod")
    assert "HOROVOD_WITH_GLOO=1" in result.stderr
    assert "-m pip install --no-build-isolation 'horovod>=0.21'" in result.stderr


def test_its_build_is_that_of_the_python_which_the_command_would_find(distlaunch, tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho built with gloo\n")
    python.chmod(0o755)
    path = f"{python.parent}:/usr/bin:/bin"
    assert (
        distlaunch.run(["horovodrun", "--check-build"], env={"PATH": path}).stdout
        == "built with gloo\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-np", "2", "--min-np", "1", "true"], "elastic Horovod is not offered"),
        (["-np", "2"], "COMMAND is missing"),
        (["true"], "-np is missing"),
        (["-np", "2", "--mpi", "true"], "mpirun -np N COMMAND"),
        (["-np", "2", "--nmu", "3", "true"], "unknown option"),
        (["-np", "3", "-H", "localhost:2", "true"], "only 2 slots"),
    ],
)
def test_bad_input(distlaunch, words, says):
    result = distlaunch.run(["horovodrun", *words])
    assert (result.returncode, result.stdout) == (2, "")
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_link_of_its_name_stands_for_it_and_help_is_there(distlaunch, tmp_path):
    result = distlaunch.run(["horovodrun", "-np", "2", "--help"], env={"COLUMNS": "200"})
    assert result.returncode == 0
    assert "--fusion-threshold-mb" in result.stdout
    assert "horovodrun [OPTIONS] COMMAND [ARGS]" in result.stdout
    link = tmp_path / "horovodrun"
    link.write_text(f"#!{sys.executable}\nfrom distlaunch.__main__ import main\nmain()\n")
    link.chmod(0o755)
    done = subprocess.run(
        [link, "-np", "2", "--quiet", "sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE"],
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split(os.linesep)[:-1]) == ["[0] 0 of 2", "[1] 1 of 2"]
