from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Gpu, GpuInventory, MigDevice
from distlaunch.planning.devices import (
    DeviceSelection,
    describe_gpus,
    first_devices,
    select_devices,
    split_devices,
)
from tests.facts import mentions

UUIDS = [f"GPU-{letter * 8}-0000-4000-8000-{letter * 12}" for letter in "abcdef01"]
EIGHT = GpuInventory(
    gpus=tuple(Gpu(index=i, uuid=UUIDS[i], name="NVIDIA H100", numa_node=i // 4) for i in range(8)),
    source="nvml",
)
SLICES = ("MIG-11111111-aaaa", "MIG-12222222-bbbb")
MIG = GpuInventory(
    gpus=(
        Gpu(
            index=0,
            uuid=UUIDS[0],
            name="A100",
            mig=tuple(MigDevice(uuid=u, profile="3g.20gb") for u in SLICES),
        ),
        Gpu(index=1, uuid=UUIDS[1], name="A100"),
    ),
    source="nvml",
)
AMD = GpuInventory(
    gpus=tuple(Gpu(index=i, uuid=f"GPU-{i:016x}", vendor="amd") for i in range(4)), source="kfd"
)
COUNTED = GpuInventory(gpus=(Gpu(index=0), Gpu(index=1)), source="device files")
NOTHING = GpuInventory()


def select(inventory=EIGHT, requested=None, **environ: str) -> DeviceSelection:
    return select_devices(inventory, environ, requested=requested)


def indices(selection: DeviceSelection) -> list[int | None]:
    return [gpu.index if gpu else None for gpu in selection.gpus]


def refused(inventory=EIGHT, requested=None, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        select(inventory, requested, **environ)
    assert "\n" not in caught.value.message
    return caught.value


def test_without_mask_or_wish_all_gpus_are_taken_by_index():
    selection = select()
    assert (selection.mask_variable, selection.ids) == ("CUDA_VISIBLE_DEVICES", tuple("01234567"))
    assert selection.gpus == EIGHT.gpus
    assert (selection.mig, selection.notes) == (False, ())
    assert mentions(selection.source, "nvml")


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("4,5", [4, 5]),
        (" 7 , 1 ", [7, 1]),
        (f"{UUIDS[3]},{UUIDS[2]}", [3, 2]),
        ("GPU-c,GPU-aaaa", [2, 0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_mask_is_kept_as_written_and_understood(mask, expected):
    selection = select(CUDA_VISIBLE_DEVICES=mask)
    assert indices(selection) == expected
    assert list(selection.ids) == ([entry.strip() for entry in mask.split(",")] if expected else [])
    assert selection.notes == ()
    assert selection.source == f"CUDA_VISIBLE_DEVICES={mask.strip()}"


@pytest.mark.parametrize(
    ("mask", "expected", "text"),
    [
        ("0,1,8,2", [0, 1], "'8' is not a GPU and ends the list"),
        ("0,-1,2", [0], "'-1' is not a GPU and ends the list"),
        ("2,x,3", [2], "'x' is not a GPU and ends the list"),
        ("0-3", [], "no GPU is visible"),
        (f"0,{UUIDS[1]}", [0], "ends the list"),
        ("GPU-9", [], "no GPU is visible"),
        ("GPU-", [], "no GPU is visible"),
        ("1,1", [], "names a GPU twice"),
        (f"{UUIDS[1]},GPU-bb", [], "names a GPU twice"),
    ],
)
def test_mask_that_cuda_cuts_short_is_cut_short_and_reported(mask, expected, text):
    selection = select(CUDA_VISIBLE_DEVICES=mask)
    assert indices(selection) == expected
    (note,) = selection.notes
    assert text in note


def test_wish_is_taken_in_its_own_order_by_index():
    assert select(requested="6,0").ids == ("6", "0")


def test_wish_that_mixes_indices_and_uuids_is_written_as_uuids():
    selection = select(requested=f"3,{UUIDS[1]},GPU-cc")
    assert selection.ids == (UUIDS[3], UUIDS[1], UUIDS[2])
    assert indices(selection) == [3, 1, 2]


def test_wish_within_a_mask_is_physical_and_keeps_the_masks_own_words():
    selection = select(requested="5,4", CUDA_VISIBLE_DEVICES="3,4,5")
    assert (selection.ids, indices(selection)) == (("5", "4"), [5, 4])
    assert mentions(selection.source, "--gpus 5,4", "CUDA_VISIBLE_DEVICES=3,4,5")
    by_uuid = select(requested="2", CUDA_VISIBLE_DEVICES=f"{UUIDS[1]},GPU-cc")
    assert (by_uuid.ids, indices(by_uuid)) == (("GPU-cc",), [2])


def test_wish_outside_the_mask_names_the_mask_and_what_places_would_mean():
    error = refused(requested="0,1", CUDA_VISIBLE_DEVICES="4,5")
    assert mentions(error.message, "--gpus 0,1", "GPU 0", "GPUs", "CUDA_VISIBLE_DEVICES=4,5")
    assert error.hint is not None
    assert error.hint.endswith("--gpus 4,5")


def test_wish_outside_the_mask_that_is_no_place_gets_the_choice():
    assert refused(requested="7", CUDA_VISIBLE_DEVICES="4,5").hint == "choose among 4,5"
    assert "--num-procs" in str(refused(requested="0", CUDA_VISIBLE_DEVICES="").hint)


@pytest.mark.parametrize("requested", ["0,0", f"1,{UUIDS[1]}", f"GPU-b,{UUIDS[1]}"])
def test_gpu_named_twice_is_refused(requested):
    assert mentions(refused(requested=requested).message, "twice")


def test_gpu_named_twice_is_refused_within_a_mask_too():
    error = refused(requested="4,4", CUDA_VISIBLE_DEVICES="4,5")
    assert mentions(error.message, "GPU 4", "twice")


def test_unknown_index_is_refused_with_what_there_is():
    error = refused(requested="9")
    assert mentions(error.message, "--gpus 9", "GPU 9")
    assert mentions(error.hint, "GPUs 0-7", "NVIDIA H100")


@pytest.mark.parametrize("requested", ["GPU-9", "GPU-", "MIG-1"])
def test_unknown_or_ambiguous_uuid_is_refused_with_the_uuids(requested):
    error = refused(requested=requested)
    assert mentions(error.message, "UUID") == (requested == "GPU-")
    assert f"GPU 7 is {UUIDS[7]}" in str(error.hint)


@pytest.mark.parametrize("requested", ["", "0,,1", "0,"])
def test_empty_entry_is_refused(requested):
    assert mentions(refused(requested=requested).message, "empty")


@pytest.mark.parametrize("requested", ["x", "-1", "1.5", "0-3"])
def test_an_invalid_gpu_id_is_refused(requested):
    assert mentions(refused(requested=requested).message, "no GPU")


def test_a_wish_on_a_machine_without_gpus_is_refused():
    error = refused(NOTHING, "0")
    assert mentions(error.message, "--gpus 0", "GPU")
    assert error.hint is not None
    assert "--num-procs" in error.hint


def test_broken_driver_is_named_by_the_refusal_and_by_the_notes():
    broken = GpuInventory(source="nvml", problem="NVML error 9")
    assert "NVML error 9" in refused(broken, "0").message
    assert select(broken).notes == (broken.problem,)
    with pytest.raises(ConfigError, match=r"^2 GPUs .* NVML error 9"):
        first_devices(select(broken), 2)


def test_mask_on_a_machine_without_gpus_selects_none_and_is_reported():
    selection = select(NOTHING, CUDA_VISIBLE_DEVICES="0,1")
    assert selection.ids == ()
    assert "CUDA_VISIBLE_DEVICES=0,1" in selection.notes[0]


# --- MIG ----------------------------------------------------------------------------------------------------------


def test_gpu_cut_into_slices_counts_as_its_slices_and_all_go_by_uuid():
    selection = select(MIG)
    assert selection.ids == (*SLICES, UUIDS[1])
    assert selection.mig
    assert indices(selection) == [0, 0, 1]


@pytest.mark.parametrize("requested", ["0", UUIDS[0], "GPU-aa", ",".join(SLICES)])
def test_wish_for_a_cut_gpu_means_its_slices(requested):
    assert select(MIG, requested).ids == SLICES


def test_single_slice_can_be_wished_for_also_by_its_beginning():
    assert select(MIG, "MIG-12").ids == (SLICES[1],)
    assert select(MIG, "MIG-12").mig
    assert not select(MIG, "1").mig


def test_slice_named_beside_its_gpu_is_named_twice():
    assert mentions(refused(MIG, f"0,{SLICES[1]}").message, "twice")


def test_mask_of_a_slice_limits_the_wish():
    assert select(MIG, CUDA_VISIBLE_DEVICES=SLICES[1]).ids == (SLICES[1],)
    assert (
        refused(MIG, SLICES[0], CUDA_VISIBLE_DEVICES=SLICES[1]).hint == f"choose among {SLICES[1]}"
    )


def test_mask_that_names_a_cut_gpu_is_subdivided_into_slices():
    assert select(MIG, CUDA_VISIBLE_DEVICES="0").ids == SLICES


def test_old_form_of_a_slice_is_passed_through_with_its_gpu():
    mask = f"MIG-{UUIDS[0]}/1/0"
    selection = select(MIG, CUDA_VISIBLE_DEVICES=mask)
    assert (selection.ids, indices(selection), selection.mig) == ((mask,), [0], True)
    assert select(MIG, CUDA_VISIBLE_DEVICES="MIG-GPU-99/1/0").ids == ()


def test_slices_are_listed_when_a_gpu_is_not_found():
    hint = str(refused(MIG, "7").hint)
    assert mentions(
        hint, "GPU 1", "A100", "GPU 0", "MIG", SLICES[0], "3g.20gb", SLICES[1], "3g.20gb"
    )


# --- other orders, vendors and containers ---------------------------------------------------------------------------


def test_container_that_asked_for_no_gpu_gets_none():
    selection = select(NVIDIA_VISIBLE_DEVICES="none")
    assert (selection.ids, selection.source) == ((), "NVIDIA_VISIBLE_DEVICES=none")
    assert (
        "NVIDIA_VISIBLE_DEVICES=none allows"
        in refused(requested="0", NVIDIA_VISIBLE_DEVICES="none").message
    )


def test_void_beside_injected_gpus_does_not_hide_them():
    assert len(select(NVIDIA_VISIBLE_DEVICES="void").ids) == 8
    assert select(NOTHING, NVIDIA_VISIBLE_DEVICES="void").ids == ()


def test_cudas_own_mask_counts_beside_the_containers():
    assert select(NVIDIA_VISIBLE_DEVICES="none", CUDA_VISIBLE_DEVICES="1").ids == ("1",)


def test_in_cudas_own_order_an_index_does_not_identify_the_gpu():
    selection = select(CUDA_VISIBLE_DEVICES="1,0", CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert (selection.ids, selection.gpus) == (("1", "0"), (None, None))
    by_uuid = select(CUDA_VISIBLE_DEVICES=UUIDS[1], CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert indices(by_uuid) == [1]
    assert select(requested=f"{UUIDS[1]},GPU-a", CUDA_DEVICE_ORDER="FASTEST_FIRST").ids == (
        UUIDS[1],
        UUIDS[0],
    )
    assert select(requested="1,0", CUDA_DEVICE_ORDER="FASTEST_FIRST").ids == ("1", "0")
    mixed = refused(requested=f"0,{UUIDS[1]}", CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert mentions(mixed.message, "UUIDs")


def test_counted_device_files_leave_the_mask_the_last_word():
    assert select(COUNTED).ids == ("0", "1")
    sparse = select(COUNTED, CUDA_VISIBLE_DEVICES="6,7")
    assert (sparse.ids, sparse.gpus, sparse.notes) == (("6", "7"), (None, None), ())
    assert select(COUNTED, "7", CUDA_VISIBLE_DEVICES="6,7").ids == ("7",)
    assert select(COUNTED, UUIDS[0]).ids == (UUIDS[0],)
    assert "no GPU 6" in refused(COUNTED, "6").message


def test_amd_gpus_go_into_hips_mask():
    selection = select(AMD, "3,1")
    assert (selection.mask_variable, selection.ids) == ("HIP_VISIBLE_DEVICES", ("3", "1"))


@pytest.mark.parametrize(
    ("environ", "variable", "ids", "gpus"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,3"}, "HIP_VISIBLE_DEVICES", ("2", "3"), [2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, "ROCR_VISIBLE_DEVICES", ("2", "3"), [2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES", ("1",), [1]),
        (
            {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"},
            "HIP_VISIBLE_DEVICES",
            ("2",),
            [2],
        ),
        (
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"},
            "HIP_VISIBLE_DEVICES",
            ("1",),
            [3],
        ),
        ({"HIP_VISIBLE_DEVICES": ""}, "HIP_VISIBLE_DEVICES", (), []),
    ],
)
def test_amd_masks_stack_as_rocm_stacks_them(environ, variable, ids, gpus):
    selection = select_devices(AMD, environ)
    assert (selection.mask_variable, selection.ids, indices(selection)) == (variable, ids, gpus)


def test_wish_on_amd_is_physical_where_hip_counts_what_rocr_left():
    selection = select(AMD, "3", ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="0,1")
    assert (selection.ids, indices(selection)) == (("1",), [3])


def test_intel_mask_is_subdivided_where_no_other_gpu_is():
    selection = select(NOTHING, ZE_AFFINITY_MASK="0.0,0.1,1")
    assert (selection.mask_variable, selection.ids) == ("ZE_AFFINITY_MASK", ("0.0", "0.1", "1"))
    assert select(NOTHING, "0.1", ZE_AFFINITY_MASK="0.0,0.1").ids == ("0.1",)
    assert "allows" in refused(NOTHING, "2", ZE_AFFINITY_MASK="0,1").message
    assert select(EIGHT, ZE_AFFINITY_MASK="0").mask_variable == "CUDA_VISIBLE_DEVICES"


# --- handing out ----------------------------------------------------------------------------------------------------


def test_all_workers_see_all_devices_unless_isolated():
    selection = select(requested="4,5")
    assert split_devices(selection, 2, isolate=False) == (("4", "5"), ("4", "5"))
    assert split_devices(selection, 2, isolate=True) == (("4",), ("5",))
    assert split_devices(selection, 3, isolate=True) == (("4",), ("5",), ("4",))


def test_slices_are_always_isolated():
    assert split_devices(select(MIG, "0"), 2, isolate=False) == ((SLICES[0],), (SLICES[1],))


def test_no_device_leaves_every_worker_an_empty_mask():
    assert split_devices(select(NOTHING), 2, isolate=True) == ((), ())


def test_first_devices_narrow_ids_and_gpus_together():
    two = first_devices(select(CUDA_VISIBLE_DEVICES="7,3,1"), 2)
    assert (two.ids, indices(two)) == (("7", "3"), [7, 3])


def test_more_gpus_than_there_are_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match=r"^9 GPUs .* 8 ") as caught:
        first_devices(select(), 9)
    assert "--num-procs" in str(caught.value.hint)


def test_description_names_kinds_and_nothing():
    assert describe_gpus(EIGHT) == "GPUs 0-7 (NVIDIA H100)"
    assert describe_gpus(NOTHING) == "no GPU"


ENTRIES = st.sampled_from(
    [*map(str, range(9)), *UUIDS, "GPU-a", "GPU-", "-1", "x", "", *SLICES, "MIG-GPU-1/1/0"]
)
MASKS = st.lists(ENTRIES, min_size=1, max_size=6).map(",".join)
MACHINES = st.sampled_from([EIGHT, MIG, AMD, COUNTED, NOTHING])
ENVIRONMENTS = st.dictionaries(
    st.sampled_from(
        [
            "CUDA_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "ZE_AFFINITY_MASK",
            "CUDA_DEVICE_ORDER",
        ]
    ),
    MASKS,
)


@given(MACHINES, ENVIRONMENTS, st.none() | MASKS)
def test_any_wish_is_answered_or_refused_and_never_widens_the_mask(inventory, environ, requested):
    allowed = select_devices(inventory, environ)
    assert len(allowed.ids) == len(allowed.gpus)
    try:
        selection = select_devices(inventory, environ, requested=requested)
    except ConfigError:
        assert requested is not None
        return
    assert len(set(selection.ids)) == len(selection.ids) == len(selection.gpus)
    if requested is not None and allowed.source.partition("=")[0].endswith(("DEVICES", "MASK")):
        assert set(selection.ids) <= set(allowed.ids)
