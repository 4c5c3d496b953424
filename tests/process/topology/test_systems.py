"""``plan`` and ``train`` over nodes that a system names."""

from __future__ import annotations

import socket

import pytest

from tests.facts import mentions
from tests.process.topology.conftest import MPIRUN, SAYS, SKYPILOT, TRAINER, slurm

HERE = socket.gethostname()


# --- plans


@pytest.mark.parametrize(
    ("env", "source", "nodes"),
    [
        (slurm("gpus-per-node"), "slurm", [("n1", 2, ["0", "1"]), ("n2", 2, None)]),
        (slurm("uneven-gpus"), "slurm", [("n1", 3, ["0", "1", "2"]), ("n2", None, None)]),
        (slurm("tasks-per-node-step-5"), "slurm", [("n1", 3, None), ("n2", 3, None)]),
        (slurm("gres-second-node-0"), "slurm", [("n2", 2, ["4", "5"])]),
        (slurm("salloc-per-node"), "slurm", [("n1", 2, None), ("n2", 2, None)]),
        (TRAINER, "kubernetes", [("job-node-0-0.job", None, None), ("job-node-0-1.job", 1, [])]),
        (
            {"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "h:29400"},
            "kubernetes",
            [("h", None, None), (None, 1, []), (None, None, None), (None, None, None)],
        ),
        (MPIRUN, "openmpi", [(None, 2, None)]),
        (
            {
                "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
                "SKYPILOT_NODE_RANK": "1",
                "SKYPILOT_NUM_NODES": "2",
            },
            "skypilot",
            [("10.0.0.1", None, None), ("10.0.0.2", 1, [])],
        ),
    ],
    ids=[
        "batch",
        "uneven",
        "tasks",
        "small step",
        "salloc",
        "trainer",
        "elastic",
        "mpirun",
        "skypilot",
    ],
)
def test_a_system_names_the_nodes(plan, env, source, nodes):
    record = plan(env=env)
    assert record["source"] == source
    assert [(node["host"], node["slots"], node["devices"]) for node in record["nodes"]] == nodes


def test_an_elastic_job_shows_both_numbers_of_nodes(plan):
    record = plan(env={"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "h:29400"})
    assert (
        record["min_nodes"],
        record["max_nodes"],
        record["master_addr"],
        record["master_port"],
    ) == (
        2,
        4,
        "h",
        29400,
    )
    record = plan("--hosts", "a:1,b:1,c:1", "--num-nodes", "2:4")
    assert (record["min_nodes"], record["max_nodes"], len(record["nodes"])) == (2, 4, 3)


@pytest.mark.parametrize(
    ("tasks", "nodes"),
    [("2(x3),1", [2, 2, 2, 1]), ("4", None), ("2(x3),a", None)],
    ids=["folded", "too few", "odd"],
)
def test_slurms_tasks_per_node_are_those_of_the_nodes_in_order(plan, refused, tasks, nodes):
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NTASKS": "7",
        "SLURM_TASKS_PER_NODE": tasks,
    }
    if nodes is None:
        assert "SLURM_TASKS_PER_NODE" in refused(env=env)
    else:
        assert [node["slots"] for node in plan(env=env)["nodes"]] == nodes


def test_launchers_that_run_together_have_one_id_for_their_job(plan):
    ids = {plan(env=slurm(f"gpus-per-node-task-per-node-{task}"))["job_id"] for task in (0, 1)}
    assert len(ids) == 1
    assert plan("--job-id", "mine", env=slurm("gpus-per-node-task-per-node-0"))["job_id"] == "mine"


STALE = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "NODE_RANK": "1",
    "MASTER_ADDR": "gone",
    "MASTER_PORT": "1",
    "TF_CONFIG": '{"cluster": {"worker": ["gone:1", "gone:2"]}}',
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_MCA_x": "1",
}


def test_leftover_variables_in_a_plain_shell_are_not_used_and_can_be_explained(train, plan):
    message, _ = train("--num-procs", "2", env=STALE)
    assert message == ["0 2 0 0", "1 2 1 0"]
    explained = plan("--explain", env=STALE)["explain"]
    assert explained["values"][0] == {
        "value": "source",
        "shown": "local",
        "source": "no option and no system names other nodes",
        "instead_of": [],
    }
    for name in ("OMPI_COMM_WORLD_RANK", "RANK=", "WORLD_SIZE=", "MASTER_ADDR=", "TF_CONFIG="):
        assert any(name in lost for lost in explained["lost"]), name


def test_variables_that_contradict_each_other_are_quoted(refused):
    env = {**TRAINER, "RANK": "0"}
    text = refused(env=env)
    assert "RANK='0'" in text
    assert "PET_NODE_RANK='1'" in text


# --- jobs


@pytest.mark.parametrize(
    ("words", "env", "code", "parts"),
    [
        (
            [
                "--num-nodes",
                "2",
                "--node-rank",
                "0",
                "--rendezvous",
                "127.0.0.1",
                "--num-procs",
                "2",
            ],
            {},
            69,
            ["1 of 2 nodes", "node 1", "has not called"],
        ),
        (
            ["--num-nodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:1"],
            {},
            69,
            ["node 0 has not answered at 127.0.0.1:1", "connection refused"],
        ),
        (
            ["--num-nodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:"],
            {},
            2,
            ["--rendezvous '127.0.0.1:'", "HOST:PORT"],
        ),
        (
            ["--num-nodes", "2", "--node-rank", "1", "--rendezvous", "h:5", "--master-port", "5"],
            {},
            2,
            ["port 5 cannot be both"],
        ),
        (
            ["--rendezvous", "nobody.invalid:5"],
            slurm("gpus-per-node-task-per-node-1"),
            69,
            ["node 0 has not answered at nobody.invalid:5", "resolve"],
        ),
        (
            [],
            MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
            2,
            ["openmpi starts several launchers", "--rendezvous HOST:PORT"],
        ),
        (
            ["--spares", "1", "--num-nodes", "2"],
            SKYPILOT,
            2,
            ["--spares 1 node", "--num-nodes MIN:MAX"],
        ),
    ],
    ids=[
        "nobody calls",
        "nobody answers",
        "no port",
        "one port for two",
        "no such host",
        "nowhere",
        "spares",
    ],
)
def test_a_launcher_that_finds_no_others_names_the_missing_settings(
    distlaunch, words, env, code, parts
):
    (distlaunch.work / "t.py").write_text(SAYS)
    result = distlaunch.run(["train", "--join-timeout", "0.3", *words, "t.py"], env=env)
    assert result.returncode == code, result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


@pytest.mark.parametrize(
    ("words", "env", "workers"),
    [
        (["--hosts", "localhost:2"], {}, 2),
        (["--hosts", f"{HERE}:2"], {}, 2),
        (["--hosts", "127.0.0.1:3", "--num-procs", "2"], {}, 2),
        (["--hosts", "localhost:2,a:2", "--num-nodes", "1"], {}, 2),
        (["--hosts", "localhost:2,a:2", "--exclude", "a"], {}, 2),
        (["--hosts", "a:2,localhost:2", "--include", "localhost:1"], {}, 1),
        (["--node-rank", "0", "--num-procs", "2"], {}, 2),
        ([], slurm("types"), 4),
        (["--num-procs", "3"], slurm("types"), 3),
        ([], slurm("gres-second-node-0"), 2),
        (
            [],
            slurm("srun-gpus-per-task-step-2")
            | {
                "SLURM_STEP_NODELIST": "n1",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_STEP_TASKS_PER_NODE": "1",
                "SLURM_NNODES": "1",
                "SLURM_NTASKS": "1",
                "SLURM_TASKS_PER_NODE": "1",
                "SLURM_NODEID": "0",
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURMD_NODENAME": "n1",
            },
            1,
        ),
        (["--num-nodes", "1"], slurm("uneven-gpus"), 3),
        (["--num-nodes", "1"], slurm("gpus-per-node-task-per-node-1"), 2),
        (["--num-nodes", "1", "--num-procs", "2"], TRAINER, 2),
        (["--source", "flags", "--num-procs", "2"], slurm("tasks-per-node-step-5"), 2),
        (["--source", "flags"], MPIRUN, 1),
        (
            [],
            {
                **MPIRUN,
                "OMPI_COMM_WORLD_SIZE": "1",
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            },
            1,
        ),
        ([], {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "web-abc"}, 1),
    ],
)
def test_a_job_of_this_machine_alone_runs_as_ever(train, words, env, workers):
    message, _ = train(*words, env=env)
    assert message == [f"{rank} {workers} {rank} 0" for rank in range(workers)]


@pytest.mark.parametrize(
    "env",
    [slurm("gpus-per-node"), slurm("tasks-per-node-step-5"), MPIRUN],
    ids=["batch", "step", "mpirun"],
)
def test_torchruns_name_means_torchruns_options_whatever_is_around(distlaunch, env):
    (distlaunch.work / "t.py").write_text(SAYS)
    result = distlaunch.run(["torchrun", "--nproc-per-node", "2", "t.py"], env=env)
    assert (result.returncode, sorted(result.stdout.splitlines())) == (
        0,
        ["is 0 2 0 0", "is 1 2 1 0"],
    )


def test_a_plan_for_the_gpus_of_an_allocation_is_shown_where_they_are_not(plan, refused):
    environ = {
        name: value
        for name, value in slurm("gpus-per-node").items()
        if name != "CUDA_VISIBLE_DEVICES"
    }
    environ["SLURM_JOB_GPUS"] = "0,1"
    record = plan("--explain", env=environ)
    assert [node["slots"] for node in record["nodes"]] == [2, 2]
    assert [note for note in record["notes"] if mentions(note, "another machine", "slurm")]
    assert mentions(refused(env=environ, command="train"), "no GPU")
