from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from distlaunch.core.probe import gpu_usage
from distlaunch.core.probe.nvidia import NVML_NAME

DATA = Path(__file__).parents[3] / "data" / "gpus"
SMI = """#!/bin/sh
echo $$ >> "$0.runs"
case "$1" in
*query-gpu*) echo "0, GPU-a, 71, 2048"; echo "1, GPU-b, [N/A], 3";;
*) echo "41, GPU-a, 1024"; echo "42, GPU-a, [N/A]";;
esac
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("nvml") / NVML_NAME
    source = DATA / "fake_nvml.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, source], check=True)
    return path


@pytest.fixture
def make_meter(tmp_path):
    meters = []

    def make(library: Path | None = None, path: str = "") -> gpu_usage.GpuMeter:
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev/nvidiactl").touch()
        if library is not None:
            target = tmp_path / "usr/lib/wsl/lib"
            target.mkdir(parents=True)
            shutil.copy(library, target / NVML_NAME)
        meters.append(gpu_usage.GpuMeter(str(tmp_path), {"PATH": path}))
        return meters[-1]

    yield make
    for meter in meters:
        meter.close()


def soon() -> float:
    return time.monotonic() + 30


def test_the_driver_tells_use_and_memory_of_each_gpu_and_process(make_meter, library, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_PROCESSES", "2")
    meter = make_meter(library)
    first, second = meter.read(until_s=soon())
    assert (first.index, first.percent, first.used_bytes) == (0, 37.0, 5 << 30)
    assert first.processes == {1000: 1 << 20, 1001: 1 << 20}
    assert first.has_any([1001])
    assert not first.has_any([7])
    assert (second.percent, second.processes) == (None, {7: None}), "it is in MIG mode"
    assert second.uuids == ("GPU-10000000-fake", "MIG-10000000-fake", "MIG-10000002-fake")


def test_one_child_answers_many_questions_and_a_new_one_follows_if_it_is_gone(make_meter, library):
    meter = make_meter(library)
    meter.read(until_s=soon())
    child = meter._child
    meter.read(until_s=soon())
    assert meter._child is child
    child.kill()
    child.wait()
    assert len(meter.read(until_s=soon())) == 2
    assert meter._child is not child


def test_a_driver_that_hangs_is_given_up_for_a_while(make_meter, library, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_HANG", "1")
    meter = make_meter(library)
    assert meter.read(until_s=time.monotonic() + 0.5) is None
    assert meter._child is None
    monkeypatch.delenv("FAKE_NVML_HANG")
    assert meter.read(until_s=soon()) is None, "it is not asked again at once"
    assert meter._child is None


def test_without_nvml_nvidia_smi_is_run_now_and_then(make_meter, tmp_path):
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    meter = make_meter(path=str(smi.parent))
    first, second = meter.read(until_s=soon())
    assert (first.percent, first.used_bytes) == (71.0, 2 << 30)
    assert first.processes == {41: 1 << 30, 42: None}
    assert (second.percent, second.used_bytes, second.processes) == (None, 3 << 20, {})
    meter.read(until_s=soon())
    assert len(Path(f"{smi}.runs").read_text().splitlines()) == 2, "the last answer is used again"


def test_without_a_driver_nothing_is_started(tmp_path):
    meter = gpu_usage.GpuMeter(str(tmp_path), {"PATH": ""})
    assert meter.read(until_s=soon()) is None
    assert meter._child is None
