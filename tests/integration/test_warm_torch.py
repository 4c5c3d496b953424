"""Warm start with torch gives the same numbers, threads and results as a cold start."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts import mentions
from tests.launcher import TRAINING

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
EXAMPLE = ROOT / "scripts" / "examples" / "digits_ddp.py"
COLD = "workers start without preloading"
PRELOADS: list[list[str]] = [[], ["--preload", "torch"]]


@pytest.mark.parametrize(
    "options", [(), ("-x", "OMP_NUM_THREADS=2", "-x", "OPENBLAS_NUM_THREADS=1")]
)
def test_threads_libraries_and_seeds_are_as_in_cold_workers(distlaunch, options):
    seen = []
    for preload in PRELOADS:
        result = distlaunch.train(
            "--num-procs", "2", *options, *preload, PROGRAMS / "same.py", "--torch"
        )
        assert result.returncode == 0, result.stderr
        assert COLD not in result.stderr
        seen.append(
            [json.loads((distlaunch.work / f"same-{rank}.json").read_text()) for rank in (0, 1)]
        )
    for cold, warm in zip(*seen, strict=True):
        facts = [each["same"]["torch"] for each in (cold, warm)]
        for fact in facts:
            del fact["seed"], fact["draws"]  # torch seeds itself anew in each process
        assert facts[0] == facts[1]
        assert cold["same"]["descriptors"].keys() == warm["same"]["descriptors"].keys()
    for ranks in seen:
        assert all(
            ranks[0]["differs"][name] != ranks[1]["differs"][name] for name in ranks[0]["differs"]
        )
        assert ranks[0]["same"].get("seed", 0) != ranks[1]["same"].get("seed", 1)


def test_a_seed_that_a_preloaded_module_chose_stays(distlaunch):
    (distlaunch.work / "seeds.py").write_text(
        "import torch, numpy.random\ntorch.manual_seed(5)\nnumpy.random.seed(6)\n"
    )
    (distlaunch.work / "draw.py").write_text(
        "import seeds, torch, numpy\nprint(torch.initial_seed(), torch.rand(2).tolist(), numpy.random.rand())\n"
    )
    drawn = set()
    for preload in ([], ["--preload", "seeds"]):
        result = distlaunch.train("--num-procs", "2", *preload, "draw.py")
        assert result.returncode == 0, result.stderr
        assert COLD not in result.stderr
        drawn |= {
            (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text() for rank in (0, 1)
        }
    assert len(drawn) == 1


def test_data_loaders_of_all_start_methods_autograd_and_collectives_work(distlaunch):
    result = distlaunch.train(
        "--num-procs", "2", "--preload", "torch", PROGRAMS / "uses.py", "--torch", timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert COLD not in result.stderr
    for rank in (0, 1):
        assert (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text().splitlines() == [
            "exit 2",
            "exit 1",
        ]


def test_the_example_ends_bit_for_bit_as_it_does_cold_also_over_a_restart(distlaunch, tmp_path):
    files = []
    warm = ["--preload", f"{TRAINING},sklearn.datasets"]
    for number, preload in enumerate(([], warm)):
        path = tmp_path / f"{number}.pt"
        result = distlaunch.train(
            *("--num-procs", "2", "--max-restarts", "1", "--min-uptime", "0", *preload),
            *(
                EXAMPLE,
                "--epochs",
                "3",
                "--seed",
                "3",
                "--checkpoint",
                path,
                "--fail-at-epoch",
                "1",
            ),
            timeout=90,
        )
        assert result.returncode == 0, result.stderr
        assert COLD not in result.stderr
        assert "resuming at epoch 1 (attempt 1)" in result.stdout
        files.append((path, re.findall(r"accuracy (\S+)", result.stdout)))
    compare = (
        "import sys, torch\na, b = (torch.load(path, weights_only=False) for path in sys.argv[1:])\n"
        "assert a.keys() == b.keys()\n"
        "assert all(torch.equal(a['model'][name], b['model'][name]) for name in a['model'])\n"
        "assert torch.equal(a['rng'], b['rng'])\nassert str(a['optimizer']) == str(b['optimizer'])\n"
    )
    subprocess.run([sys.executable, "-c", compare, *(path for path, _ in files)], check=True)
    assert files[0][1] == files[1][1]


def test_a_parallel_operation_while_preloading_leads_to_a_cold_start_not_to_a_hang(distlaunch):
    (distlaunch.work / "computes.py").write_text(
        "import torch\ntorch.ones(700, 700) @ torch.ones(700, 700)\n"
    )
    (distlaunch.work / "train.py").write_text(
        "import torch\nprint((torch.ones(700, 700) @ torch.ones(700, 700)).sum().item())\n"
    )
    result = distlaunch.train(
        "--num-procs", "2", "-x", "OMP_NUM_THREADS=2", "--preload", "computes", "train.py"
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(COLD) == 1
    assert "left a thread running" in result.stderr


@pytest.mark.parametrize(("answer", "warm"), [(0, False), (3, True)])
def test_a_preload_that_starts_cuda_leads_to_a_cold_start(distlaunch, answer, warm):
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    source, library = distlaunch.work / "cuda.c", distlaunch.work / "libcuda.so.1"
    source.write_text(f"int cuDeviceGetCount(int *count) {{ *count = 1; return {answer}; }}\n")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source],
        check=True,
    )
    (distlaunch.work / "starts_cuda.py").write_text(
        f"import ctypes\nctypes.CDLL({str(library)!r})\n"
    )
    (distlaunch.work / "train.py").write_text(
        "import os\nprint(os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK'))\n"
    )
    result = distlaunch.train("--num-procs", "1", "--preload", "starts_cuda", "train.py")
    assert result.returncode == 0, result.stderr
    assert mentions(result.stderr, "starts_cuda", "CUDA") is not warm
    assert (result.run_dir / "attempt-0" / "rank-0.log").read_text() == "None\n"
    several = distlaunch.train(
        "--num-procs", "1", "--preload", "json,starts_cuda,decimal", "train.py"
    )
    assert several.returncode == 0, several.stderr
    assert COLD not in several.stderr
    assert mentions(several.stderr, "starts_cuda", "left out") is not warm
