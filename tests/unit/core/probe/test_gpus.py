# ruff: noqa: N802 - the functions are named as NVML names them
from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distlaunch.core.model.topology import Gpu, GpuInventory
from distlaunch.core.probe.gpus import probe_gpus
from distlaunch.core.probe.isolated_call import run_in_child
from distlaunch.core.probe.nvidia import (
    NVML_NAME,
    NvmlError,
    await_memory_release,
    memory_holders,
    read_gpus,
)
from tests.facts import mentions

DATA = Path(__file__).parents[3] / "data" / "gpus"
PROBE = """
import json, sys
from distlaunch.core.model.record import plain
from distlaunch.core.probe.gpus import probe_gpus
print(json.dumps(plain(probe_gpus(sys.argv[1], {"PATH": ""}, deadline_s=float(sys.argv[2])))))
"""


class Machine:
    """A root directory with device files, sysfs entries and a recorded nvidia-smi."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ = {"PATH": ""}
        (root / "dev").mkdir()

    def devices(self, *names: str) -> None:
        for name in names:
            self.write(f"dev/{name}", "")

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def smi(self, script: str, directory: str = "bin") -> None:
        self.write(f"{directory}/nvidia-smi", "#!/bin/sh\n" + script)
        (self.root / directory / "nvidia-smi").chmod(0o755)
        self.environ["PATH"] = str(self.root / "bin")

    def recorded(self, case: str, directory: str = "bin") -> None:
        listed, queried = (DATA / case / "codes.txt").read_text().split()
        where = shlex.quote(str(DATA / case))
        self.smi(
            f'if [ "$1" = -L ]; then /bin/cat {where}/list.txt; exit {listed}; fi\n/bin/cat {where}/query.txt; exit {queried}\n',
            directory,
        )

    def probe(self, deadline_s: float = 60.0) -> GpuInventory:
        return probe_gpus(str(self.root), self.environ, deadline_s=deadline_s)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_device_files_nothing_else_is_tried(machine):
    machine.devices("null", "nvidiactl", "nvidia-uvm", "nvidia-modeset")
    machine.smi(f"/usr/bin/touch {machine.root}/asked\n")
    assert machine.probe() == GpuInventory()
    assert not (machine.root / "asked").exists()


def test_one_gpu_is_listed_with_memory_and_numa_node(machine):
    machine.devices("nvidia0")
    machine.recorded("one")
    machine.write("sys/bus/pci/devices/0000:01:00.0/numa_node", "1\n")
    (gpu,) = machine.probe().gpus
    uuid = "GPU-7f2d1c3a-9e4b-4a5d-8c6f-1a2b3c4d5e6f"
    assert gpu == Gpu(
        index=0, uuid=uuid, name="NVIDIA GeForce RTX 4090", memory_mib=24564, numa_node=1
    )


def test_eight_gpus_keep_order_and_nodes_and_an_unknown_node_is_none(machine):
    machine.devices(*(f"nvidia{i}" for i in range(8)))
    machine.recorded("eight-h100")
    for place, bus in enumerate(("1b", "43", "52", "61", "9d", "c3", "d1")):
        machine.write(f"sys/bus/pci/devices/0000:{bus}:00.0/numa_node", f"{place // 4}\n")
    machine.write("sys/bus/pci/devices/0000:df:00.0/numa_node", "-1\n")
    inventory = machine.probe()
    assert (inventory.source, inventory.problem) == ("nvidia-smi", None)
    assert [gpu.index for gpu in inventory.gpus] == list(range(8))
    assert [gpu.numa_node for gpu in inventory.gpus] == [0, 0, 0, 0, 1, 1, 1, None]
    assert {(gpu.name, gpu.memory_mib) for gpu in inventory.gpus} == {
        ("NVIDIA H100 80GB HBM3", 81559)
    }
    assert len({gpu.uuid for gpu in inventory.gpus}) == 8


def test_mig_slices_belong_to_their_gpu(machine):
    machine.devices("nvidia0", "nvidia1")
    machine.recorded("a100-mig")
    first, second = machine.probe().gpus
    assert [(mig.profile, mig.uuid[:12]) for mig in first.mig] == [
        ("3g.20gb", "MIG-0a1b2c3d"),
        ("2g.10gb", "MIG-1b2c3d4e"),
        ("1c.2g.10gb", "MIG-2c3d4e5f"),
    ]
    assert (second.uuid, second.mig) == ("GPU-6d7e8f90-2222-4333-8444-555566667777", ())


def test_mig_slices_of_an_old_driver_keep_their_old_ids(machine):
    machine.devices("nvidia0")
    machine.recorded("a100-mig-old-driver")
    (gpu,) = machine.probe().gpus
    assert [mig.uuid for mig in gpu.mig] == [f"MIG-{gpu.uuid}/1/0", f"MIG-{gpu.uuid}/2/0"]


def test_driver_without_devices_is_no_problem(machine):
    machine.devices("nvidia0")
    machine.recorded("none")
    assert machine.probe() == GpuInventory(source="nvidia-smi")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("driver-broken", "couldn't communicate with the NVIDIA driver"),
        ("version-mismatch", "Driver/library version mismatch"),
    ],
)
def test_a_broken_driver_is_reported_as_nvidia_smi_does(machine, case, message):
    machine.devices("nvidia0")
    machine.recorded(case)
    inventory = machine.probe()
    assert inventory.gpus == ()
    assert inventory.problem is not None
    assert mentions(inventory.problem, "driver")
    assert message in inventory.problem
    assert "\n" not in inventory.problem


def test_a_lost_gpu_is_reported_and_the_others_are_listed(machine):
    machine.devices("nvidia0", "nvidia1")
    machine.recorded("one-lost")
    inventory = machine.probe()
    assert [(gpu.index, gpu.memory_mib) for gpu in inventory.gpus] == [(0, None)]
    assert "Unable to determine the device handle for GPU0000:43:00.0" in str(inventory.problem)


def test_wsl_is_probed_without_nvidia_device_files(machine):
    machine.devices("dxg")
    machine.recorded("wsl", "usr/lib/wsl/lib")
    machine.environ = {"PATH": "/no/such/place"}
    assert [gpu.name for gpu in machine.probe().gpus] == ["NVIDIA GeForce RTX 3060 Laptop GPU"]


def test_wsl_without_nvidia_has_no_gpu_and_no_problem(machine):
    machine.devices("dxg")
    assert machine.probe() == GpuInventory()


def test_gpu_without_memory_of_its_own_and_a_far_pci_domain(machine):
    machine.devices("nvidia0")
    machine.recorded("unified-memory")
    machine.write("sys/bus/pci/devices/000f:01:00.0/numa_node", "0\n")
    (gpu,) = machine.probe().gpus
    assert (gpu.memory_mib, gpu.numa_node) == (None, 0)


def test_without_any_tool_the_device_files_are_counted_from_zero(machine):
    machine.devices("nvidia4", "nvidia11", "nvidiactl")
    assert machine.probe() == GpuInventory(gpus=(Gpu(index=0), Gpu(index=1)), source="device files")


def test_a_hanging_nvidia_smi_is_killed(machine):
    machine.devices("nvidia0")
    machine.smi(f"echo $$ >> {machine.root}/pids\nexec /bin/sleep 600\n")
    inventory = machine.probe(deadline_s=1.0)
    assert (len(inventory.gpus), inventory.source) == (1, "device files")
    assert "hangs" in str(inventory.problem)
    for pid in (machine.root / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_tool_that_cannot_be_executed_is_a_problem(machine):
    machine.devices("nvidia0")
    machine.smi("")
    (machine.root / "bin/nvidia-smi").write_text("#!/no/such/interpreter\n")
    assert mentions(str(machine.probe().problem), "nvidia-smi", "run")


def test_amd_gpus_are_read_from_the_kernel(machine):
    machine.devices("kfd")
    nodes = "sys/class/kfd/kfd/topology/nodes"
    machine.write(f"{nodes}/0/properties", "cpu_cores_count 64\nsimd_count 0\n")
    for node, (minor, location) in {1: (128, 0x6300), 2: (129, 0x6800), 10: (130, 0x2600)}.items():
        machine.write(
            f"{nodes}/{node}/properties",
            f"simd_count 416\nmem_banks_count 1\ndomain 0\nlocation_id {location}\n"
            f"drm_render_minor {minor}\nunique_id {0xABC0 + node}\n",
        )
        machine.write(f"{nodes}/{node}/name", "aldebaran\n")
        machine.write(
            f"{nodes}/{node}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {64 << 30}\n"
        )
    machine.devices("dri/renderD128", "dri/renderD130")  # the container has no second GPU
    machine.write("sys/bus/pci/devices/0000:26:00.0/numa_node", "1\n")
    inventory = machine.probe()
    assert inventory.source == "kfd"
    assert inventory.gpus == (
        Gpu(index=0, uuid="GPU-000000000000abc1", name="aldebaran", memory_mib=65536, vendor="amd"),
        Gpu(
            index=1,
            uuid="GPU-000000000000abca",
            name="aldebaran",
            memory_mib=65536,
            vendor="amd",
            numa_node=1,
        ),
    )


# --- NVML, as a C library in a process of its own and as an object ----------------------------------------------


@pytest.fixture(scope="module")
def nvml_library(tmp_path_factory):
    library = tmp_path_factory.mktemp("nvml") / NVML_NAME
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, DATA / "fake_nvml.c"],
        check=True,
    )
    return library


@pytest.fixture
def probe_with_library(machine, nvml_library):
    machine.devices("nvidia0", "nvidia1")
    machine.write("usr/lib/wsl/lib/libnvidia-ml.so.1", "")
    shutil.copy(nvml_library, machine.root / "usr/lib/wsl/lib/libnvidia-ml.so.1")
    machine.write("sys/bus/pci/devices/0000:2b:00.0/numa_node", "1\n")

    def probe(deadline_s: float = 60.0, **environ: str):
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(machine.root), str(deadline_s)],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    return probe


def test_library_is_loaded_and_read(probe_with_library):
    inventory = probe_with_library()
    assert (inventory["source"], inventory["problem"]) == ("nvml", None)
    first, second = inventory["gpus"]
    assert (first["uuid"], first["name"], first["memory_mib"]) == (
        "GPU-00000000-fake",
        "NVIDIA Fake",
        40960,
    )
    assert (first["mig"], first["numa_node"], second["numa_node"]) == ([], None, 1)
    assert second["mig"] == [
        {"uuid": "MIG-10000000-fake", "profile": "1g.5gb"},
        {"uuid": "MIG-10000002-fake", "profile": "1g.5gb"},
    ]


@pytest.mark.parametrize(
    ("code", "message"), [("9", "driver not loaded"), ("18", "driver/library version mismatch")]
)
def test_library_that_finds_no_driver_is_a_problem(probe_with_library, code, message):
    inventory = probe_with_library(FAKE_NVML_INIT=code)
    assert inventory["gpus"] == []
    assert mentions(inventory["problem"], "NVIDIA", message, "NVML", code)


def test_a_hanging_library_is_abandoned(probe_with_library):
    inventory = probe_with_library(deadline_s=1.0, FAKE_NVML_HANG="1")
    assert (len(inventory["gpus"]), inventory["source"]) == (2, "device files")
    assert "hangs" in inventory["problem"]


def test_a_crashing_library_does_no_harm(probe_with_library):
    inventory = probe_with_library(FAKE_NVML_CRASH="1")
    assert (len(inventory["gpus"]), inventory["source"]) == (2, "device files")


def test_library_is_found_by_name_where_the_linker_looks(nvml_library):
    code = "from distlaunch.core.probe.nvidia import load_nvml; print(load_nvml(['no-such.so', 'libnvidia-ml.so.1']).nvmlInit_v2())"
    environ = {"LD_LIBRARY_PATH": str(nvml_library.parent), "FAKE_NVML_INIT": "42"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environ, text=True) == "42\n"


HOLDERS = """
import os, sys, threading, time
from distlaunch.core.probe.nvidia import await_memory_release, memory_holders
if sys.argv[2] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
holders = memory_holders(sys.argv[1], {"PATH": ""}, until_s=time.monotonic() + float(sys.argv[3]))
print(holders and sorted(holders))
"""


@pytest.fixture(params=["one thread", "threads"])
def holders_with_library(request, machine, nvml_library):
    machine.write("usr/lib/wsl/lib/libnvidia-ml.so.1", "")
    shutil.copy(nvml_library, machine.root / "usr/lib/wsl/lib/libnvidia-ml.so.1")

    def ask(within_s: float = 60.0, **environ: str) -> str:
        argv = [sys.executable, "-c", HOLDERS, str(machine.root), request.param, str(within_s)]
        return subprocess.check_output(argv, env=environ, text=True).strip()

    return ask


def test_holders_of_gpu_and_slice_memory_come_from_the_library(holders_with_library):
    assert holders_with_library() == "[7]"
    assert holders_with_library(FAKE_NVML_PROCESSES="2") == "[7, 1000, 1001]"


def test_more_holders_than_expected_are_all_returned(holders_with_library):
    assert holders_with_library(FAKE_NVML_PROCESSES="300") == str([7, *range(1000, 1300)])


@pytest.mark.parametrize("environ", [{"FAKE_NVML_INIT": "9"}, {"FAKE_NVML_CRASH": "1"}])
def test_holders_are_unknown_where_the_library_fails_and_there_is_no_tool(
    holders_with_library, environ
):
    assert holders_with_library(**environ) == "None"


def test_holders_are_unknown_where_the_library_hangs(holders_with_library):
    assert holders_with_library(within_s=1.0, FAKE_NVML_HANG="1") == "None"


def test_without_the_library_the_tool_names_the_holders(machine):
    machine.smi('[ "$1" = --query-compute-apps=pid ] && echo 41 && echo 42\n')
    until_s = time.monotonic() + 60
    assert memory_holders(str(machine.root), machine.environ, until_s=until_s) == {41, 42}
    left = await_memory_release(
        [42, 43], bound_s=3.0, environ=machine.environ, root=str(machine.root)
    )
    assert left == (42,)


def test_the_wait_is_limited_if_nvidia_smi_hangs_and_earlier_answers_count(machine):
    machine.smi(
        f'[ -e "{machine.root}/asked" ] && exec /bin/sleep 1000\n: > "{machine.root}/asked"; echo 42\n'
    )
    left = await_memory_release([42], bound_s=1.5, environ=machine.environ, root=str(machine.root))
    assert left == (42,)


def test_the_wait_ends_at_once_if_the_holders_are_unknown(machine):
    assert (
        await_memory_release([42], bound_s=600.0, environ=machine.environ, root=str(machine.root))
        == ()
    )


class FakeNvml:
    """NVML's functions over a list of handle codes: 0 is a GPU, another number is the error of
    asking for it."""

    def __init__(self, *handles: int, mig: bool = False) -> None:
        self.handles = handles
        self.mig = mig
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count.contents.value = len(self.handles)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device) -> int:
        device.contents.value = 100 + index.value
        return self.handles[index.value]

    def nvmlDeviceGetUUID(self, device, buffer, length) -> int:
        buffer.value = f"GPU-{device.value}".encode()
        return 0

    def nvmlDeviceGetName(self, device, buffer, length) -> int:
        return 3

    def nvmlDeviceGetMemoryInfo(self, device, memory) -> int:
        return 3

    def nvmlDeviceGetPciInfo_v3(self, device, pci) -> int:
        ctypes.memmove(ctypes.addressof(pci.contents) + 36, b"00000000:0A:00.0", 16)
        return 0

    def nvmlDeviceGetMigMode(self, device, current, pending) -> int:
        if not self.mig:
            raise AttributeError
        current.contents.value = 1
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, device, most) -> int:
        most.contents.value = 0
        return 0


def test_gpus_withheld_by_a_cgroup_do_not_count():
    lib = FakeNvml(4, 0, 4, 0)
    found, problems = read_gpus(lib)
    assert [(gpu.index, gpu.uuid, bus) for gpu, bus in found] == [
        (0, "GPU-101", "00000000:0A:00.0"),
        (1, "GPU-103", "00000000:0A:00.0"),
    ]
    assert (problems, lib.open) == ([], 0)


def test_a_lost_gpu_keeps_its_index_and_is_reported():
    found, problems = read_gpus(FakeNvml(0, 15, 0))
    assert [gpu.index for gpu, _ in found] == [0, 2]
    assert len(problems) == 1
    assert mentions(problems[0], "GPU 1", "lost")


def test_mig_mode_without_slices_is_a_problem():
    found, problems = read_gpus(FakeNvml(0, mig=True))
    assert found == []
    assert mentions(problems[0], "no MIG")


def test_library_is_shut_down_when_the_count_fails():
    lib = FakeNvml()
    lib.nvmlDeviceGetCount_v2 = lambda count: 999
    with pytest.raises(NvmlError, match="999"):
        read_gpus(lib)
    assert lib.open == 0


def test_process_with_threads_asks_nvidia_smi_and_does_not_fork(machine):
    machine.devices("nvidia0")
    machine.recorded("one")
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert machine.probe().source == "nvidia-smi"
    finally:
        stop.set()
        thread.join()


def test_a_child_that_raises_has_died():
    until = time.monotonic() + 60
    assert run_in_child(lambda: (1, "a", [None]), deadline_s=until) == ((1, "a", [None]), None)
    assert run_in_child(lambda: (_ for _ in ()).throw(KeyError("x")), deadline_s=until) == (
        None,
        "died",
    )


def test_a_large_answer_of_a_child_arrives_complete():
    assert run_in_child(lambda: ("x" * 1_000_000,), deadline_s=time.monotonic() + 60) == (
        ("x" * 1_000_000,),
        None,
    )
