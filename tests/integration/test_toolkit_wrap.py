"""`wrap` under each backend: the losses of one process at the same global batch."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launcher import TRAINING, Launcher

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "digits_toolkit.py"
PROGRAMS = Path(__file__).parents[1] / "programs" / "toolkit"
SHARDED, HOROVOD_STATE, AVERAGES = (
    PROGRAMS / f"{name}.py" for name in ("sharded", "horovod_state", "averages")
)
GLOBAL_BATCH, EPOCHS = 64, 3
STEPS_PER_EPOCH = 22


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines if re.match(r"step +\d+  loss ", line)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    """Return the losses of a plain `python digits_toolkit.py`."""
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--batch-size", str(GLOBAL_BATCH), "--epochs", str(EPOCHS)],
        capture_output=True,
        text=True,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path_factory.mktemp("home")),
            "OMP_NUM_THREADS": "1",
        },
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 0.9, "it learns to tell the digits"
    return losses(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (2, ()),
        (4, ("--backend", "fsdp")),
        (2, ("-o", "static-graph", "-o", "bucket-mb=1")),
        (2, ("--backend", "fsdp", "-o", "wrap-classes=Block", "-o", "sharding=grad")),
        (2, ("--backend", "fsdp", "-o", "wrap-min-params=4000", "-o", "activation-checkpointing")),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(value[1::2]) or "ddp",
)
def test_the_loss_curve_is_that_of_one_process_at_the_same_global_batch(
    distlaunch, alone, words, workers
):
    size = ("--batch-size", str(GLOBAL_BATCH // workers), "--epochs", str(EPOCHS))
    warm = functools.partial(distlaunch.train_warm, preload=f"{TRAINING},sklearn.datasets")
    train = distlaunch.train if workers == 2 and not words else warm
    done = train("--num-procs", str(workers), *words, EXAMPLE, *size, timeout=110)
    assert done.returncode == 0, done.stderr
    found = losses(done.lines_of(0))
    assert len(found) == len(alone) == EPOCHS * STEPS_PER_EPOCH
    assert found == pytest.approx(alone, rel=1e-3, abs=1e-4)


@pytest.mark.timeout(1800)  # Horovod is built once
def test_the_loss_curve_under_horovod_is_that_of_one_process_too(alone, horovod_launcher):
    size = ("--batch-size", str(GLOBAL_BATCH // 2), "--epochs", str(EPOCHS))
    words = ("--num-procs", "2", "--backend", "horovod")
    done = horovod_launcher.train(*words, EXAMPLE, *size, timeout=110)
    assert done.returncode == 0, done.stderr
    assert losses(done.lines_of(0)) == pytest.approx(alone, rel=1e-3, abs=1e-4)
    halved = horovod_launcher.train(*words, "-o", "compression=fp16", EXAMPLE, *size, timeout=110)
    assert halved.returncode == 0, halved.stderr
    assert losses(halved.lines_of(0)) == pytest.approx(alone, rel=0.1, abs=0.05)


@pytest.mark.timeout(1800)
def test_an_optimizer_that_has_learnt_goes_on_under_horovod_from_what_rank_0_has(
    horovod_launcher,
):
    words = ("--num-procs", "2", "--backend", "horovod")
    done = horovod_launcher.train(*words, HOROVOD_STATE, timeout=110)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        reported = [json.loads(line) for line in done.lines_of(rank) if line.startswith("{")]
        assert len(reported) == 8
        for case in reported:
            assert case["found"] == pytest.approx(case["expected"], abs=2e-5), case["case"]


CASES_OF_AVERAGES = [
    "clipping",
    "scaler",
    "accumulation",
    "left_out",
    "two_models",
    "closures",
    "heads",
    "sparse",
    "kinds",
    "sixteen_bits",
    "again",
    "tied",
    "tied_sixteen_bits",
    "made_after",
]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory, horovod_python) -> dict[str, list[dict]]:
    """Return the parameters of each worker in each case, by DDP and by Horovod."""
    folder = tmp_path_factory.mktemp("learnt")
    launcher = Launcher(folder, {"PATH": "/usr/bin:/bin", "HOME": str(folder)})
    launcher.python = horovod_python
    found = {}
    for backend in ("pytorch-ddp", "horovod"):
        (kept := folder / backend).mkdir()
        words = ("--num-procs", "2", "--backend", backend)
        done = launcher.train_warm(
            *words, AVERAGES, kept, preload=f"horovod.torch,{TRAINING}", timeout=200
        )
        assert done.returncode == 0, done.stderr
        found[backend] = [torch.load(kept / f"{rank}.pt") for rank in (0, 1)]
    launcher.close()
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES_OF_AVERAGES)
def test_under_horovod_a_script_learns_what_it_learns_under_ddp(learnt, case):
    expected = learnt["pytorch-ddp"][0][case]
    tolerance = {"sixteen_bits": 0.02, "tied_sixteen_bits": 0.004}.get(
        case, 1e-6
    )  # two ways to round a sum
    for rank in (0, 1):
        torch.testing.assert_close(learnt["horovod"][rank][case], expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        learnt["horovod"][0][case], learnt["horovod"][1][case], rtol=0, atol=0
    )


@pytest.mark.timeout(1800)
def test_horovod_takes_models_again_and_optimizers_of_all_kinds_and_goes_on_after_a_failed_backward(
    horovod_launcher,
):
    words = ("--num-procs", "2", "--backend", "horovod")
    done = horovod_launcher.train(*words, PROGRAMS / "horovod_wraps.py", timeout=110)
    assert done.returncode == 0, done.stderr
    reported = [[line for line in done.lines_of(rank) if ": " in line] for rank in (0, 1)]
    assert len(reported[0]) == 5
    assert reported[0] == reported[1]


def parts_by_case(lines: list[str]) -> dict[str, str]:
    return dict(re.findall(r"^(\w+(?: size)?): (.*)$", "\n".join(lines), re.MULTILINE))


BLOCKS = "whole blocks.0 blocks.1 blocks.2"
CASES = {
    "listed": BLOCKS,
    "grad": BLOCKS,
    "hybrid": BLOCKS,
    "classes": BLOCKS,
    "by size": "whole blocks.0.linear blocks.1.linear blocks.2.linear",  # first and last are one parameter
    "attending": "whole attention inner.0 inner.2",
    "again": BLOCKS,
    "offloaded": BLOCKS,
    "language": "whole inner.transformer.h.0 inner.transformer.h.1",
    "learnt": BLOCKS,
    "conv": "whole",
    "bf16": BLOCKS,
}


def test_fsdp_trains_models_of_many_shapes_with_the_optimizer_that_was_made_before(distlaunch):
    done = distlaunch.train_warm("--num-procs", "2", "--backend", "fsdp", SHARDED, timeout=110)
    assert done.returncode == 0, done.stderr
    assert parts_by_case(done.lines_of(0)) == CASES


def test_ddp_trains_the_same_models_and_ignores_what_concerns_sharding(distlaunch):
    done = distlaunch.train_warm("--num-procs", "2", SHARDED, timeout=110)
    assert done.returncode == 0, done.stderr
    assert parts_by_case(done.lines_of(0)).keys() == CASES.keys() - {"bf16"} | {"unused", "static"}
