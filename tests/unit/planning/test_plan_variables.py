from __future__ import annotations

import pytest

from distlaunch.backends.base import Backend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import CpuInventory, Node, Topology
from distlaunch.core.model.variables import SET_FOR_WORKERS
from distlaunch.planning.build_plan import bind, build_plan
from distlaunch.planning.local_topology import local_topology
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions
from tests.unit.planning.plans import TWO, plan, refused, variables


def test_a_variable_longer_than_linux_takes_is_refused_by_its_name(make_facts):
    most = 131_071 - len("LONG=")
    assert plan(make_facts, env=("LONG=" + "é" * (most // 2),))
    why = refused(make_facts, env=("LONG=" + "x" * (most + 1),)).message
    assert mentions(why, "--env", "LONG", "131,072 bytes", "Linux", "NAME=VALUE", "131,071")
    texts = {"f.env": "LONG=" + "x" * 200_000}
    assert refused(make_facts, env_file=("f.env",), facts={"texts": texts}).message.startswith(
        "LONG in f.env: it has 200,005"
    )


def test_a_variable_of_a_backend_may_not_be_too_long_either(make_facts):
    class Long(Backend):
        name = "long"

        def job_variables(self, topology):
            return {"CLASSES": "Block," * 50_000}

    chosen, facts = TrainOptions(script="train.py", num_procs=1), make_facts()
    with pytest.raises(
        ConfigError, match=r"^CLASSES, which --backend long sets: it has 300,008 bytes"
    ):
        build_plan(
            chosen, facts, local_topology(chosen, facts), Long({}, {}), job_id="j", run_dir="/r"
        )


# --- what contradicts a backend


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_an_inherited_variable_that_contradicts_a_backend_is_dropped_and_reported(make_facts, name):
    environ = {
        name: "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }
    planned = plan(make_facts, backend="fsdp", facts={"environ": environ})
    assert name not in variables(planned)
    assert variables(planned)["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert variables(planned)["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT", (
        "the user's, as no option says otherwise"
    )
    (note,) = (note for note in planned.notes if name in note)
    assert mentions(note, name, "--backend fsdp", "--env", "NAME")


def test_a_variable_that_contradicts_a_backend_can_be_given(make_facts):
    environ = {"ACCELERATE_USE_DEEPSPEED": "true"}
    planned = plan(
        make_facts, backend="fsdp", facts={"environ": environ}, env=("ACCELERATE_USE_DEEPSPEED",)
    )
    assert variables(planned)["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert not any("ACCELERATE" in note for note in planned.notes)


@pytest.mark.parametrize("backend", ["pytorch-ddp", "accelerate"])
def test_exported_variables_for_accelerate_reach_it(make_facts, backend):
    environ = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }
    planned = plan(make_facts, backend=backend, facts={"environ": environ})
    assert environ.items() <= variables(planned).items()
    assert not any("ACCELERATE" in note for note in planned.notes)


# --- what the user gives


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("horovod", "HOROVOD_RANK"),
        ("horovod", "HOROVOD_HOSTNAME"),
        ("deepspeed", "LOCAL_SIZE"),
        ("tensorflow", "TF_CONFIG"),
    ],
)
def test_a_variable_that_a_backend_sets_for_each_worker_cannot_be_given(make_facts, backend, name):
    text = f"--env {name}: --backend {backend} sets {name} for each worker"
    assert refused(make_facts, backend=backend, env=("A=1", f"{name}=7")).message == text
    file = refused(
        make_facts, backend=backend, env_file=("/w/f",), facts={"texts": {"/w/f": f"{name}=7\n"}}
    )
    assert file.message == text.replace(f"--env {name}", f"{name} in /w/f")
    assert plan(make_facts, env=(f"{name}=7",)).given_env == {name: "7"}, (
        "another backend has no use for it"
    )


def test_a_variable_that_a_backend_sets_for_all_can_be_given(make_facts):
    assert (
        variables(plan(make_facts, backend="horovod", env=("HOROVOD_CONTROLLER=x",)))[
            "HOROVOD_CONTROLLER"
        ]
        == "x"
    )


# --- what workers get


def test_a_worker_gets_everything_that_the_design_names(make_facts):
    bound = bind(plan(make_facts, max_restarts=3), attempt=2, master_port=29511)
    assert variables(bound, 1) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "TORCHELASTIC_RUN_ID": "job-1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/r/job-1/attempt-2/rank-1.error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "8",
        "DISTLAUNCH_JOB_ID": "job-1",
        "DISTLAUNCH_ATTEMPT": "2",
        "DISTLAUNCH_BACKEND": "pytorch-ddp",
        "DISTLAUNCH_RUN_DIR": "/r/job-1",
    }


def test_everything_that_cannot_be_given_is_set_but_for_what_the_agent_adds(make_facts):
    bound = bind(plan(make_facts), attempt=0, master_port=1)
    descriptors = {"DISTLAUNCH_PROGRESS_FD", "DISTLAUNCH_STACKS_FD", "DISTLAUNCH_WARM_FD"}
    chosen = {"DISTLAUNCH_BACKEND_OPTIONS"}  # with options alone
    assert variables(bound).keys() >= SET_FOR_WORKERS - descriptors - chosen - {
        "DISTLAUNCH_COOKIE",
        "DISTLAUNCH_BOOT",
    }


def test_ranks_are_contiguous_over_unequal_nodes_in_topology_order(make_facts):
    nodes = (Node(host="a", slots=1), Node(host="b", slots=3), Node(host="c", slots=2))
    planned = plan(make_facts, topology=Topology(nodes=nodes, device="cpu"))
    assert planned.world_size == 6
    assert [(w.rank, w.node_rank, w.local_rank) for w in planned.workers] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 1, 1),
        (3, 1, 2),
        (4, 2, 0),
        (5, 2, 1),
    ]
    fifth = variables(planned, 4)
    assert {
        name: fifth[name]
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE")
    } == {
        "RANK": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
    }
    assert "CUDA_VISIBLE_DEVICES" not in fifth


def test_isolated_workers_have_local_rank_0_and_their_own_gpu(make_facts):
    planned = plan(make_facts, facts={"gpus": TWO}, num_procs=None, isolate_gpus=True)
    seen = [
        (variables(planned, r)["LOCAL_RANK"], variables(planned, r)["CUDA_VISIBLE_DEVICES"])
        for r in (0, 1)
    ]
    assert seen == [("0", "0"), ("0", "1")]
    assert [worker.local_rank for worker in planned.workers] == [0, 1]


def test_workers_share_the_mask_otherwise(make_facts):
    planned = plan(make_facts, facts={"gpus": TWO}, num_procs=None)
    seen = [
        (variables(planned, r)["LOCAL_RANK"], variables(planned, r)["CUDA_VISIBLE_DEVICES"])
        for r in (0, 1)
    ]
    assert seen == [("0", "0,1"), ("1", "0,1")]


def test_faulthandler_is_on_by_a_variable_where_no_bootstrap_turns_it_on(make_facts):
    name = "PYTHONFAULTHANDLER"
    alone, several = (variables(plan(make_facts, num_procs=number)) for number in (1, 2))
    assert (alone.get(name), several.get(name)) == ("1", None)
    kept = {"environ": {name: "0"}}
    assert variables(plan(make_facts, num_procs=1, facts=kept))[name] == "0"


@pytest.mark.parametrize(
    "name",
    ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS"],
)
def test_a_default_gives_way_to_the_environment_and_to_the_user(make_facts, name):
    assert variables(plan(make_facts, facts={"environ": {name: "theirs"}}))[name] == "theirs"
    assert variables(plan(make_facts, env=(f"{name}=given",)))[name] == "given"
    assert (
        variables(plan(make_facts, facts={"environ": {name: "theirs"}}, env=(f"{name}=given",)))[
            name
        ]
        == "given"
    )


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_cpu_workers_see_no_gpu_by_any_mask_that_is_set_outside(make_facts, name):
    seen = variables(plan(make_facts, facts={"environ": {name: "0,1"}}))
    assert (seen["CUDA_VISIBLE_DEVICES"], seen[name]) == ("", "-1")


def test_given_variables_win_over_inherited_ones(make_facts):
    planned = plan(make_facts, facts={"environ": {"A": "1", "B": "1", "RANK": "7"}}, env=("A=2",))
    seen = variables(planned)
    assert (seen["A"], seen["B"], seen["RANK"]) == ("2", "1", "0")


def test_threads_are_this_workers_share_of_the_cpus(make_facts):
    cpus = CpuInventory(allowed=tuple(range(8)), online=8, quota=4.0)
    planned = plan(make_facts, facts={"cpus": cpus})
    assert variables(planned)["OMP_NUM_THREADS"] == "2"


def test_bound_workers_have_as_many_threads_as_cpus_near_their_gpu(make_facts):
    cpus = CpuInventory(allowed=tuple(range(8)), online=8, numa=((0, 1, 2, 3), (4, 5, 6, 7)))
    planned = plan(make_facts, facts={"cpus": cpus, "gpus": TWO}, num_procs=None, bind="numa")
    assert [worker.cpus for worker in planned.workers] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert variables(planned)["OMP_NUM_THREADS"] == "4"


def test_unbound_workers_keep_the_cpus(make_facts):
    assert [worker.cpus for worker in plan(make_facts).workers] == [None, None]
