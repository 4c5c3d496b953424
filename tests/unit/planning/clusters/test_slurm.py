"""Values of Slurm 22.05.8 with four virtual nodes and fake GPUs, unless a test says otherwise."""

from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.planning.clusters import slurm
from distlaunch.planning.clusters.environment_reader import IncompleteError
from tests.facts import mentions

BATCH = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURMD_NODENAME": "n1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
}
SALLOC = {name: BATCH[name] for name in list(BATCH)[:7]} | {"SLURM_JOB_NAME": "interactive"}
# A real step has SLURM_NNODES, NTASKS and TASKS_PER_NODE too, equal to its own: the captures have
# them.
STEP = {
    name: value
    for name, value in BATCH.items()
    if name not in {"SLURM_NNODES", "SLURM_TASKS_PER_NODE"}
} | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
}


def find(environ, **more):
    return slurm.find({**environ, **more}, {})


def slots(found):
    return [host.slots for host in found.hosts]


def names(found):
    return [host.name for host in found.hosts]


def origins(found):
    return {origin.value: origin for origin in found.origins}


def without(environ, *gone):
    return {name: value for name, value in environ.items() if name not in gone}


def test_a_shell_outside_of_slurm_is_not_slurm():
    assert find({}) is None
    assert find({"SLURM_CONF": "/etc/slurm.conf", "SLURM_PROCID": "0"}) is None


def test_a_batch_script_stands_for_all_nodes_of_the_job_though_it_has_a_procid():
    found = find(BATCH)
    assert (found.source, found.part, found.node_rank, found.local_rank, found.job_id) == (
        "slurm",
        "all",
        0,
        None,
        "42",
    )
    assert (names(found), slots(found)) == (["n1", "n2"], [None, None])


@pytest.mark.parametrize(
    ("reported", "of_job", "of_step"),
    [
        ({}, "42", "42.0"),
        ({"SLURM_RESTART_COUNT": "0"}, "42", "42.0"),
        ({"SLURM_RESTART_COUNT": "2"}, "42-r2", "42.0-r2"),
        ({"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7"}, "40_7", "40_7.0"),
        (
            {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7", "SLURM_RESTART_COUNT": "1"},
            "40_7-r1",
            "40_7.0-r1",
        ),
        ({"SLURM_JOB_ID_HET_GROUP_0": "41"}, "41", "41.0"),
    ],
)
def test_a_job_is_called_as_squeue_calls_it(reported, of_job, of_step):
    assert find(BATCH, **reported).job_id == of_job
    step = find(STEP, SLURMD_NODENAME="n2", SLURM_NODEID="1", SLURM_PROCID="1", **reported)
    assert step.job_id == of_step
    assert step.number == int(reported.get("SLURM_JOB_ID_HET_GROUP_0", "42")), (
        "tasks of an array have a port each"
    )


def test_a_salloc_shell_stands_for_all_nodes_and_is_none_of_them():
    found = find(SALLOC)
    assert (found.part, found.node_rank, names(found)) == ("all", None, ["n1", "n2"])


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292"])
def test_an_interactive_step_is_the_shell_of_salloc(step):
    """``LaunchParameters=use_interactive_step`` (slurm.conf): the shell is a step of one node with
    a reserved id."""
    inside = {
        "SLURM_STEP_ID": step,
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
    }
    found = find(STEP, **inside, SLURM_STEP_TASKS_PER_NODE="1")
    assert (found.part, names(found), found.node_rank) == ("all", ["n1", "n2"], 0)


def test_a_step_with_a_task_on_each_node_has_one_launcher_a_node():
    found = find(STEP, SLURMD_NODENAME="n2", SLURM_NODEID="1", SLURM_PROCID="1")
    assert (found.part, found.node_rank, found.local_rank, found.job_id) == (
        "node",
        1,
        None,
        "42.0",
    )
    assert (names(found), slots(found)) == (["n1", "n2"], [None, None])


def test_a_step_with_a_task_for_each_gpu_has_one_launcher_a_worker():
    found = find(
        STEP,
        SLURM_STEP_NUM_TASKS="8",
        SLURM_STEP_TASKS_PER_NODE="4(x2)",
        SLURM_PROCID="6",
        SLURM_NODEID="1",
        SLURM_LOCALID="2",
        SLURMD_NODENAME="n2",
        CUDA_VISIBLE_DEVICES="2",
        SLURM_STEP_GPUS="2",
    )
    assert (found.part, found.node_rank, found.local_rank) == ("worker", 1, 2)
    assert slots(found) == [4, 4]
    assert found.notes == ()


def test_uneven_tasks_of_a_step_become_uneven_slots():
    found = find(
        STEP,
        SLURM_STEP_NUM_TASKS="5",
        SLURM_STEP_TASKS_PER_NODE="4,1",
        SLURM_LOCALID="3",
        SLURM_PROCID="3",
    )
    assert (found.part, slots(found)) == ("worker", [4, 1])


def test_ranks_of_a_cyclic_step_are_numbered_node_by_node_and_that_is_reported():
    found = find(
        STEP,
        SLURM_STEP_NUM_TASKS="4",
        SLURM_STEP_TASKS_PER_NODE="2(x2)",
        SLURM_PROCID="2",
        SLURM_LOCALID="1",
    )
    assert (found.node_rank, found.local_rank) == (0, 1)
    assert "SLURM_PROCID 2 is rank 1" in found.notes[0]


def test_a_smaller_step_counts_for_itself_and_names_the_jobs_size():
    """``srun -N1 -n1`` in a job of two nodes with two tasks each: the job's variables stay, and are
    stale."""
    inside = {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    stale = {
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURMD_NODENAME": "n2",
        "SLURM_TASKS_PER_NODE": "1",
    }
    found = find(STEP, **inside, **stale, SLURM_STEP_TASKS_PER_NODE="1")
    assert (found.part, names(found), found.node_rank) == ("node", ["n2"], 0)
    assert len(found.notes) == 1
    assert mentions(found.notes, "n2", "srun -N 2")
    lost = origins(found)["hosts"].instead_of
    assert mentions(lost[0], "SLURM_JOB_NODELIST='n[1-2]'")
    assert "SLURM_NTASKS_PER_NODE='2'" in origins(found)["part"].instead_of[0]


def test_variables_of_the_step_that_submitted_a_job_are_not_its_own():
    """``srun -w n1 sbatch -N2 -w n2,n3``: sbatch hands the step's variables on."""
    step = {
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_ID": "0",
    }
    job = {
        "SLURM_JOB_NODELIST": "n[2-3]",
        "SLURMD_NODENAME": "n2",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    found = find(BATCH, **step, **job)
    assert (found.part, names(found), found.node_rank) == ("all", ["n2", "n3"], 0)
    assert "left over" in origins(found)["hosts"].instead_of[0]


@pytest.mark.parametrize(
    ("job", "both"),
    [
        ({"SLURM_NNODES": "2"}, ("SLURM_STEP_NUM_NODES='1'", "SLURM_NNODES='2'")),
        (
            {"SLURM_NNODES": "1", "SLURM_NTASKS": "4"},
            ("SLURM_STEP_NUM_TASKS='1'", "SLURM_NTASKS='4'"),
        ),
        (
            {"SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "4"},
            ("SLURM_STEP_TASKS_PER_NODE='1'", "PER_NODE='4'"),
        ),
    ],
)
def test_a_leftover_step_on_a_node_of_the_job_is_an_error_that_names_the_variables_to_unset(
    job, both
):
    step = {
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_ID": "0",
    }
    with pytest.raises(ConfigError) as raised:
        find(BATCH, **step, SLURM_STEP_TASKS_PER_NODE="1", **job)
    assert all(name in raised.value.message for name in both)
    assert "unset SLURM_STEP_NODELIST" in raised.value.message


def test_the_shell_of_srun_pty_on_several_nodes_is_warned_of():
    assert "srun --pty" in find(STEP, SLURM_PTY_PORT="4711").notes[0]
    alone = find(
        STEP
        | {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
        SLURM_STEP_TASKS_PER_NODE="1",
        SLURM_PTY_PORT="4711",
        SLURM_JOB_NUM_NODES="1",
    )
    assert alone.notes == ()


# --- GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"SLURM_GPUS_PER_NODE": "4"}, [4, 4]),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, [4, 4]),
        ({"SLURM_GPUS_PER_NODE": "volta:3,kepler:1"}, [4, 4]),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "2,1"}, [4, 2]),
        # 23.11 and later, from the manual of sbatch
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:a100=2"}, [2, 2]),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:2"}, [2, 2]),
        ({"SLURM_TRES_PER_TASK": "gres:gpu:1", "SLURM_TASKS_PER_NODE": "4(x2)"}, [4, 4]),
        ({"SLURM_TRES_PER_TASK": "cpu=4"}, [None, None]),
        ({"SLURM_NTASKS_PER_GPU": "2", "SLURM_TASKS_PER_NODE": "8,4"}, [4, 2]),
        ({"SLURM_GPUS": "4"}, [None, None]),
        ({"SLURM_GPUS_PER_NODE": "0"}, [None, None]),
    ],
)
def test_gpus_of_all_nodes_are_known_from_what_was_asked_for_each(asked, expected):
    assert slots(find(SALLOC, **asked)) == expected


def test_the_total_of_gpus_is_that_of_the_only_node():
    alone = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1"}
    assert slots(find(SALLOC, **alone, SLURM_GPUS="a100:2")) == [2]


def test_uneven_gpus_are_known_of_this_node_only():
    """``-n5 --gpus=4 -N2``: tasks 4,1 and GPUs 3+1; the batch script sees the three of its own
    node."""
    own = {"SLURM_GPUS_ON_NODE": "3", "SLURM_JOB_GPUS": "0,1,2", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    found = find(BATCH, SLURM_GPUS="4", SLURM_TASKS_PER_NODE="4,1", SLURM_NTASKS="5", **own)
    assert slots(found) == [3, None]
    assert [host.devices for host in found.hosts] == [("0", "1", "2"), None]


def test_gres_sets_only_the_number_on_this_node():
    found = find(BATCH, SLURM_GPUS_ON_NODE="2")
    assert slots(found) == [2, None]
    assert origins(found)["slots of this node"].source == "SLURM_GPUS_ON_NODE"


def test_in_a_step_the_jobs_gpus_are_not_the_steps():
    """Node 1 of ``-n5 --gpus=4``: the job's list is that of node 0, the mask is its own."""
    found = find(
        STEP,
        SLURM_NODEID="1",
        SLURM_PROCID="1",
        SLURMD_NODENAME="n2",
        SLURM_JOB_GPUS="0,1,2",
        SLURM_GPUS_PER_NODE="4",
        CUDA_VISIBLE_DEVICES="0",
        SLURM_STEP_GPUS="0",
    )
    assert slots(found) == [None, 1]
    assert found.hosts[1].devices == ("0",)


def test_a_step_without_gpus_leaves_the_slots_open():
    found = find(STEP, CUDA_VISIBLE_DEVICES="NoDevFiles", SLURM_JOB_GPUS="0,1")
    assert (slots(found), found.hosts[0].devices) == ([None, None], ())


def test_the_mask_wins_over_the_list_and_the_number():
    found = find(
        BATCH,
        SLURM_GPUS_PER_NODE="4",
        SLURM_GPUS_ON_NODE="4",
        SLURM_JOB_GPUS="4,5,6,7",
        CUDA_VISIBLE_DEVICES="0,1",
    )
    assert slots(found) == [2, 4]
    assert len(origins(found)["slots of this node"].instead_of) == 2


@pytest.mark.parametrize(
    ("more", "devices"),
    [
        (
            {"SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2"},
            ("4", "5"),
        ),  # behind a device cgroup, ids differ
        ({"SLURM_GPUS_ON_NODE": "2"}, ("4", "5")),
        ({"SLURM_JOB_GPUS": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, None),
        ({"SLURM_GPUS_ON_NODE": "1"}, None),
    ],
)
def test_a_mask_that_slurm_has_not_set_is_not_taken_for_its_grant(more, devices):
    here = find(BATCH, CUDA_VISIBLE_DEVICES="4,5", **more).hosts[0]
    assert (here.slots, here.unit, here.devices) == (2, "gpus", devices)


def test_gpus_are_gpus_and_tasks_are_workers():
    assert {host.unit for host in find(BATCH, SLURM_GPUS_PER_NODE="4").hosts} == {"gpus"}
    tasks = find(BATCH, SLURM_TASKS_PER_NODE="2(x2)", SLURM_NTASKS="4")
    assert [(host.slots, host.unit) for host in tasks.hosts] == [(2, "workers")] * 2


def test_a_mask_outside_of_slurms_grant_is_the_nodes_own_business():
    assert find(BATCH, CUDA_VISIBLE_DEVICES="0,1").hosts[0].devices is None


@pytest.mark.parametrize("by", ["SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NPROCS"])
def test_tasks_that_were_asked_for_are_the_slots_where_no_gpu_is_known(by):
    assert slots(find(BATCH, SLURM_TASKS_PER_NODE="2(x2)", **{by: "4"})) == [2, 2]


def test_tasks_nobody_asked_for_are_no_slots():
    assert slots(find(BATCH, SLURM_TASKS_PER_NODE="4(x2)")) == [None, None]


def test_gpus_win_over_tasks_and_that_is_reported():
    found = find(BATCH, SLURM_TASKS_PER_NODE="2(x2)", SLURM_NTASKS="4", SLURM_GPUS_PER_NODE="8")
    assert slots(found) == [8, 8]
    assert "SLURM_NTASKS='4'" in found.notes[0]


# --- heterogeneous jobs --------------------------------------------------------------------------------------------


def test_a_heterogeneous_job_has_the_nodes_of_all_components():
    found = find(
        BATCH,
        SLURM_HET_SIZE="2",
        SLURM_JOB_NODELIST_HET_GROUP_0="n[1-2]",
        SLURM_JOB_NUM_NODES_HET_GROUP_0="2",
        SLURM_TASKS_PER_NODE_HET_GROUP_0="2(x2)",
        SLURM_NTASKS_HET_GROUP_0="4",
        SLURM_JOB_NODELIST_HET_GROUP_1="n4",
        SLURM_JOB_NUM_NODES_HET_GROUP_1="1",
        SLURM_TASKS_PER_NODE_HET_GROUP_1="1",
        SLURM_GPUS_PER_NODE_HET_GROUP_1="4",
    )
    assert (names(found), slots(found)) == (["n1", "n2", "n4"], [2, 2, 4])


def test_a_component_without_nodes_makes_the_job_unusable():
    with pytest.raises(
        IncompleteError, match=r"SLURM_HET_SIZE='2', .* SLURM_JOB_NODELIST_HET_GROUP_1"
    ):
        find(BATCH, SLURM_HET_SIZE="2", SLURM_JOB_NODELIST_HET_GROUP_0="n1")


# --- what cannot be right ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "both"),
    [
        (
            STEP | {"SLURM_STEP_NUM_NODES": "3"},
            ("SLURM_STEP_NODELIST='n[1-2]'", "SLURM_STEP_NUM_NODES='3'"),
        ),
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "1"},
            ("SLURM_STEP_TASKS_PER_NODE='1'", "SLURM_STEP_NODELIST='n[1-2]'"),
        ),
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "3"},
            ("SLURM_STEP_TASKS_PER_NODE='1(x2)'", "SLURM_STEP_NUM_TASKS='3'"),
        ),
        (STEP | {"SLURM_NODEID": "2"}, ("SLURM_NODEID='2'", "SLURM_STEP_NODELIST='n[1-2]'")),
        (STEP | {"SLURM_LOCALID": "1"}, ("SLURM_LOCALID='1'", "SLURM_STEP_TASKS_PER_NODE='1(x2)'")),
        (STEP | {"SLURM_PROCID": "2"}, ("SLURM_PROCID='2'", "SLURM_STEP_NUM_TASKS='2'")),
        (STEP | {"SLURMD_NODENAME": "n2"}, ("SLURM_NODEID='0'", "SLURMD_NODENAME='n2'")),
        (
            BATCH | {"SLURM_JOB_NUM_NODES": "3"},
            ("SLURM_JOB_NODELIST='n[1-2]'", "SLURM_JOB_NUM_NODES='3'"),
        ),
        (
            BATCH | {"SLURM_TASKS_PER_NODE": "1(x3)"},
            ("SLURM_TASKS_PER_NODE='1(x3)'", "SLURM_JOB_NODELIST='n[1-2]'"),
        ),
    ],
)
def test_a_contradiction_quotes_both_variables(environ, both):
    with pytest.raises(ConfigError) as caught:
        find(environ)
    assert all(each in caught.value.message for each in both)
    assert caught.value.hint


@pytest.mark.parametrize(
    "environ",
    [
        BATCH | {"SLURM_JOB_NODELIST": "n[3-1]"},
        BATCH | {"SLURM_TASKS_PER_NODE": "2(y3)"},
        BATCH | {"SLURM_GPUS_PER_NODE": "four"},
        BATCH | {"SLURM_GPUS_ON_NODE": "-1"},
        STEP | {"SLURM_NODEID": "0x1"},
    ],
)
def test_an_invalid_list_or_number_is_an_error_with_a_hint(environ):
    with pytest.raises(ConfigError) as caught:
        find(environ)
    assert "SLURM_" in caught.value.message
    assert caught.value.hint


def test_a_job_id_alone_is_not_enough():
    with pytest.raises(IncompleteError, match="SLURM_JOB_NODELIST"):
        find({"SLURM_JOB_ID": "42"})


def test_half_a_step_is_none():
    for gone in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"):
        with pytest.raises(IncompleteError, match=gone):
            find(without(STEP, gone))


def test_counts_of_a_step_may_be_missing_if_the_total_gives_them():
    assert find(without(STEP, "SLURM_STEP_TASKS_PER_NODE")).part == "node"
    with pytest.raises(IncompleteError):
        find(without(STEP, "SLURM_STEP_TASKS_PER_NODE"), SLURM_STEP_NUM_TASKS="5")
