from __future__ import annotations

import pytest

from distlaunch.backends.registry import find_backend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import TORCHRUN
from distlaunch.core.model.topology import CpuInventory, Gpu, GpuInventory, MigDevice
from distlaunch.planning.build_plan import build_plan
from distlaunch.planning.local_topology import torchrun_topology
from distlaunch.planning.train_options import TorchrunOptions
from tests.facts import mentions

FOUR = GpuInventory(
    gpus=tuple(Gpu(index=index, uuid=f"GPU-{index}", name="A") for index in range(4)), source="nvml"
)
SLICED = GpuInventory(
    gpus=(
        Gpu(
            index=0,
            uuid="GPU-a",
            mig=tuple(MigDevice(uuid=f"MIG-{x}", profile="1g.10gb") for x in "xy"),
        ),
    ),
    source="nvml",
)
CUDA = "CUDA_VISIBLE_DEVICES"
DIALECT = TorchrunOptions().dialect


def resolve(make_facts, found=None, environ=None, cpus=None, **options):
    changed = {} if cpus is None else {"cpus": cpus}
    asked = TorchrunOptions(script="train.py", **options)
    return torchrun_topology(asked, make_facts(gpus=found, environ=environ or {}, **changed))


def refused(make_facts, found=None, **options) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(make_facts, found, **options)
    assert "\n" not in caught.value.message
    return caught.value


def test_a_number_is_that_many_workers_and_no_device_is_masked(make_facts):
    for found in (None, FOUR):
        (node,) = resolve(make_facts, found, workers=6).nodes
        assert (node.slots, node.mask_variable, node.masks, node.isolated) == (6, None, (), False)


@pytest.mark.parametrize("workers", ["auto", "gpu"])
def test_gpus_are_counted_within_the_mask_that_stays_as_it_is(make_facts, workers):
    assert resolve(make_facts, FOUR, workers=workers).world_size == 4
    topology = resolve(make_facts, FOUR, {CUDA: "2,3"}, workers=workers)
    (node,) = topology.nodes
    assert (topology.world_size, node.mask_variable, node.devices) == (2, None, ("2", "3"))


@pytest.mark.parametrize(
    ("cpus", "count"),
    [
        (CpuInventory(allowed=(0, 1, 2, 3), online=16), 4),
        (CpuInventory(allowed=(0, 1, 2, 3), online=16, quota=2.5), 2),
        (CpuInventory(allowed=(0, 1, 2, 3), online=16, quota=0.5), 1),
        (CpuInventory(allowed=(0,), online=16, quota=8.0), 1),
    ],
)
def test_cpus_are_those_that_this_container_may_use(make_facts, cpus, count):
    assert resolve(make_facts, workers="cpu", cpus=cpus).world_size == count
    without_gpus = resolve(make_facts, workers="auto", cpus=cpus)
    assert without_gpus.world_size == count
    assert mentions(without_gpus.notes[-1].text, "CPU")


def test_missing_gpus_are_an_error_with_the_reason(make_facts):
    assert mentions(refused(make_facts, workers="gpu").message, "no GPU")
    broken = GpuInventory(source="device files", problem="nvidia-smi: silent")
    assert "nvidia-smi: silent" in refused(make_facts, broken, workers="gpu").message


def test_xpus_are_counted_by_their_mask(make_facts):
    assert resolve(make_facts, None, {"ZE_AFFINITY_MASK": "0,1,2"}, workers="xpu").world_size == 3
    assert "ZE_AFFINITY_MASK" in refused(make_facts, workers="xpu").message


def test_a_virtual_local_rank_gives_each_worker_its_own_device_of_the_mask(make_facts):
    (node,) = resolve(make_facts, FOUR, {CUDA: "2,3"}, workers=2, isolate_gpus=True).nodes
    assert (node.isolated, node.mask_variable, node.masks) == (True, CUDA, (("2",), ("3",)))
    assert "only 4" in refused(make_facts, FOUR, workers=5, isolate_gpus=True).message
    (node,) = resolve(make_facts, None, workers=2, isolate_gpus=True).nodes
    assert (node.isolated, node.mask_variable) == (True, None), (
        "no GPUs: nothing to point a worker at"
    )


def test_mig_slices_go_to_one_worker_each_since_a_process_can_use_one(make_facts):
    (node,) = resolve(make_facts, SLICED, workers="auto").nodes
    assert (node.slots, node.isolated, node.masks) == (2, True, (("MIG-x",), ("MIG-y",)))


def test_our_choice_of_gpus_masks_them_for_all(make_facts):
    (node,) = resolve(make_facts, FOUR, workers="gpu", gpus="1,3").nodes
    assert (node.slots, node.mask_variable, node.masks) == (2, CUDA, (("1", "3"),) * 2)


def planned(make_facts, *, facts=None, **options):
    asked = TorchrunOptions(**{"script": "train.py", "workers": 2, **options})
    known = make_facts(**(facts or {}))
    topology = torchrun_topology(asked, known)
    return build_plan(
        asked, known, topology, find_backend("pytorch-ddp")({}, {}), job_id="a_1", run_dir="/r/a_1"
    )


def test_the_plan_has_torchruns_files_run_id_and_role(make_facts):
    plan = planned(make_facts, dialect=replace(DIALECT, run_id="a/b c", role="trainer"))
    assert plan.layout == TORCHRUN
    assert plan.workers[1].env["TORCHELASTIC_ERROR_FILE"] == "/r/a_1/attempt_0/1/error.json"
    assert (plan.env["TORCHELASTIC_RUN_ID"], plan.env["ROLE_NAME"]) == ("a/b c", "trainer")
    assert plan.env["DISTLAUNCH_JOB_ID"] == "a_1"
    assert planned(make_facts).env["TORCHELASTIC_RUN_ID"] == "a_1"
    assert "CUDA_VISIBLE_DEVICES" not in plan.workers[0].env


def test_the_local_rank_is_put_into_the_scripts_arguments_and_nothing_else_is(make_facts):
    plan = planned(make_facts, script_args=("--gpu=${local_rank}", "$$", "$local_rank"))
    assert [worker.argv[-3:] for worker in plan.workers if worker.argv] == [
        ("--gpu=0", "$$", "$local_rank"),
        ("--gpu=1", "$$", "$local_rank"),
    ]
    assert all(worker.argv is None for worker in planned(make_facts, script_args=("$$",)).workers)
    with pytest.raises(ConfigError, match=r"--preload .* exclude"):
        planned(make_facts, script_args=("${local_rank}",), preload="json")


def test_lines_without_a_prefix_have_the_terminals_whole_width(make_facts):
    assert planned(make_facts, facts={"columns": 80}).env["COLUMNS"] == "80"
    assert (
        planned(make_facts, facts={"columns": 80}, dialect=replace(DIALECT, prefix_columns=12)).env[
            "COLUMNS"
        ]
        == "68"
    )
