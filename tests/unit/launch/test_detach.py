"""Conditions under which a launcher cannot run in the background, or would end later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.launch import logind
from distlaunch.launch.detach import check_scheduler, credential_warnings
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions

SLURM = Path(__file__).parents[2] / "data" / "slurm"


def captured(name: str) -> dict[str, str]:
    lines = (SLURM / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize(
    "environ",
    [
        captured("nodes-only"),
        captured("gpus-per-node"),
        {"PBS_JOBID": "7.pbs", "PBS_ENVIRONMENT": "PBS_BATCH"},
        {"LSB_JOBID": "7"},
        {"JOB_SCRIPT": "/spool/7", "ENVIRONMENT": "BATCH"},
    ],
    ids=["slurm", "slurm-gpus", "pbs", "lsf", "sge"],
)
@pytest.mark.parametrize("has_terminal", [False, True])
def test_a_batch_script_would_end(environ, has_terminal):
    with pytest.raises(ConfigError) as refused:
        check_scheduler(environ, has_terminal=has_terminal)
    assert "--detach" in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    "environ",
    [
        captured("salloc"),
        captured("salloc-interactive"),
        {"PBS_JOBID": "7.pbs", "PBS_ENVIRONMENT": "PBS_INTERACTIVE"},
        {"LSB_JOBID": "7", "LSB_INTERACTIVE": "Y"},
    ],
    ids=["salloc", "interactive-step", "pbs", "lsf"],
)
def test_the_end_of_an_allocation_ends_the_job(environ):
    warning = check_scheduler(environ, has_terminal=True)
    assert warning is not None
    assert mentions(warning, "job", "ends")


def test_a_task_of_a_step_would_end_and_a_shell_in_a_step_may_go_on_for_a_while():
    environ = captured("salloc-step-0")
    with pytest.raises(ConfigError):
        check_scheduler(environ, has_terminal=False)
    assert check_scheduler(environ, has_terminal=True)


def test_outside_of_a_scheduler_there_is_nothing_to_say():
    assert check_scheduler({"HOME": "/root"}, has_terminal=True) is None


FORWARDED = {"SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22", "SSH_AUTH_SOCK": "/tmp/ssh-x/agent.1"}


@pytest.mark.parametrize(
    ("options", "environ", "count"),
    [
        (TrainOptions(max_restarts=1), FORWARDED, 1),
        (TrainOptions(spares=1), {**FORWARDED, "KRB5CCNAME": "FILE:/tmp/krb5cc_1_x"}, 2),
        (TrainOptions(num_nodes=(2, 4)), FORWARDED, 1),
        (TrainOptions(max_restarts=1, ssh_key="id"), FORWARDED, 0),
        (TrainOptions(), FORWARDED, 0),
        (TrainOptions(max_restarts=1), {"SSH_AUTH_SOCK": "/run/user/1/agent"}, 0),
    ],
    ids=["agent", "ticket too", "elastic", "key of its own", "connects once", "local"],
)
def test_a_forwarded_agent_matters_if_a_lost_node_may_be_connected_again(options, environ, count):
    assert len(list(credential_warnings(options, environ))) == count


@pytest.mark.parametrize(
    ("lines", "kills"),
    [
        (["b true", "as 0", 'as 1 "root"'], True),
        (["b false", "as 0", 'as 1 "root"'], False),
        (["b true", "as 0", 'as 2 "root" "ann"'], False),
        (["b true", 'as 1 "bob"', "as 0"], False),
        (["b true", 'as 2 "bob" "ann"', "as 0"], True),
        (["b true"], False),
        (["", "", ""], False),
    ],
)
def test_whom_logind_kills(lines, kills):
    assert logind._kills(lines, "ann") is kills


WRITES = """
import os, sys
from distlaunch.launch import detach

detach.CONSOLE_BYTES = 100
launcher = detach.DetachedLauncher(os.pipe()[1], os.memfd_create("early"))
launcher.on_run_dir(sys.argv[1])
removed = sys.argv[2:]
for text in (b"a" * 50, b"b" * 50, b"c", b"d" * 100, b"e"):
    if text[:1].decode() in removed:
        os.unlink(sys.argv[1] + "/console.log")
    os.write(1, text)
    launcher.on_output(1 << 20)
os.write(2, b"f")
"""


def test_a_full_console_is_kept_and_a_new_one_is_begun(tmp_path):
    subprocess.run([sys.executable, "-c", WRITES, tmp_path], check=True, timeout=60)
    assert (tmp_path / "console.log.1").read_text() == "c" + "d" * 100
    assert (tmp_path / "console.log").read_text() == "ef"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["console.log", "console.log.1"]


def test_a_console_that_somebody_has_removed_is_begun_again(tmp_path):
    (tmp_path / "console.log.new").touch()
    subprocess.run([sys.executable, "-c", WRITES, tmp_path, "d"], check=True, timeout=60)
    assert (tmp_path / "console.log").read_text() == "ef"
    assert not (tmp_path / "console.log.new").exists()
