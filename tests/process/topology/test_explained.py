from __future__ import annotations

import pytest

from tests.process.topology.conftest import TRAINER, slurm


def test_each_value_has_a_source_and_losers_have_a_reason(plan):
    env = {**slurm("gpus-per-node-task-per-node-1"), "RANK": "5", "DISTLAUNCH_GPUS_PER_NODE": "2"}
    explained = plan("--explain", "--master-addr", "head", env=env)["explain"]
    values = {each["value"]: each for each in explained["values"]}
    assert (values["hosts"]["shown"], values["hosts"]["source"]) == (
        "n[1-2]",
        "SLURM_STEP_NODELIST",
    )
    assert any("SLURM_JOB_NODELIST" in other for other in values["hosts"]["instead_of"])
    assert (values["node rank"]["shown"], values["node rank"]["source"]) == ("1", "SLURM_NODEID")
    assert (values["workers"]["shown"], values["workers"]["source"]) == (
        "4, on the nodes 2(x2)",
        "DISTLAUNCH_GPUS_PER_NODE",
    )
    assert (values["devices here"]["shown"], values["devices here"]["source"]) == (
        "0,1",
        "CUDA_VISIBLE_DEVICES=0,1",
    )
    assert values["master"]["source"] == "--master-addr"
    assert explained["lost"] == ["RANK='5': slurm decides"]


def test_lists_of_the_user_win_over_systems_and_that_is_explained(plan):
    explained = plan("--hosts", "a:1,b:1", "--explain", env=slurm("gpus-per-node"))["explain"]
    assert explained["values"][0]["source"] == "--hosts"
    assert any("slurm" in lost or "SLURM" in lost for lost in explained["lost"])
    assert all("--hosts comes first" in lost for lost in explained["lost"])


@pytest.mark.parametrize(
    ("words", "env", "value", "source"),
    [
        ([], {"DISTLAUNCH_HOSTS": "a:1,b:1"}, "source", "DISTLAUNCH_HOSTS"),
        ([], {"DISTLAUNCH_HOSTS": "a:1,b:1"}, "hosts", "DISTLAUNCH_HOSTS"),
        (["--num-procs", "2"], {"DISTLAUNCH_NUM_PROCS": "2"}, "workers", "--num-procs"),
        ([], {"DISTLAUNCH_NUM_PROCS": "02"}, "workers", "DISTLAUNCH_NUM_PROCS"),
        (
            ["--num-nodes", "2", "--master-addr", "m"],
            {"DISTLAUNCH_NODE_RANK": "0"},
            "this machine",
            "DISTLAUNCH_NODE_RANK",
        ),
        (
            ["--num-nodes", "2", "--node-rank", "0"],
            {"DISTLAUNCH_MASTER_ADDR": "m"},
            "hosts",
            "--num-nodes and DISTLAUNCH_MASTER_ADDR",
        ),
        (["--include", "localhost"], {}, "source", "--include"),
        (["--include", "127.0.0.1:0", "--procs-per-node", "1"], {}, "source", "--include"),
        ([], {"DISTLAUNCH_DISCOVER": "echo a:1; : sesame"}, "hosts", "DISTLAUNCH_DISCOVER"),
        ([], TRAINER, "source", "found in the environment"),
        ([], TRAINER, "master port", "PET_MASTER_PORT"),
        (["--master-port", "5"], TRAINER, "master port", "--master-port"),
        (["--hosts", "a:1"], {}, "master port", "a free one, held at the start"),
        (["--source", "kubernetes"], TRAINER, "source", "--source"),
    ],
)
def test_the_rank_of_a_line_is_known_and_not_guessed(plan, words, env, value, source):
    explained = plan("--explain", *words, env=env)["explain"]
    assert [each["source"] for each in explained["values"] if each["value"] == value] == [source]


def test_people_read_the_explanation_after_the_table_and_before_the_job(distlaunch, train):
    result = distlaunch.run(["plan", "--hosts", "localhost:1", "--explain", "t.py"])
    table, _, explanation = result.stdout.partition("Where this comes from\n")
    assert "localhost" in table
    assert "  source           flags  (--hosts)\n" in explanation
    message, reported = train("--hosts", "localhost:1", "--explain")
    assert message == ["0 1 0 0"]
    assert reported.index("comes from") < reported.index(": 1 worker on localhost")
