"""The data of a training: the snippets of the documentation split it, and a script that does not is
warned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts import mentions

ROOT = Path(__file__).parents[2]
SAME = "workers train on the same batches: nobody splits the data"
TRAINS = """
import sys
import torch
from distlaunch.toolkit import init, wrap

context = init(seed=0)
model, optimizer = wrap(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.01)))(torch.nn.Linear(4, 1)))
apart = {"same": 0, "apart": context.rank, "apart later": 0}[sys.argv[1]]
for step in range(6):
    if sys.argv[1] == "apart later" and step == 1:
        apart = context.rank
    x = torch.full((8, 4), step + apart / 2)
    with torch.no_grad():
        model(torch.zeros(8, 4))  # is not trained on
    model(x).sum().backward()
    optimizer.step()
print("trained", context.strategy)
"""


def snippet(page: str) -> str:
    """Return the first Python block of a page that imports the toolkit's init."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    return next(
        block for block in blocks if re.search(r"from distlaunch.toolkit import .*\binit\b", block)
    )


def checkpoints(distlaunch) -> list[int]:
    """Return the steps after which the page's script has saved."""
    found = (distlaunch.work / "runs" / "a").glob("step-*")
    return sorted(int(each.name.removeprefix("step-")) for each in found)


@pytest.mark.parametrize("page", ["distlaunch/docs/checkpoints.md", "distlaunch/docs/toolkit.md"])
def test_the_first_snippet_of_a_page_runs_as_printed_and_splits_the_data(distlaunch, page):
    script = distlaunch.work / "train.py"
    script.write_text(
        snippet(page) + "\nprint('last loss', loss.item() if 'loss' in globals() else None)\n"
    )
    result = distlaunch.train_warm("--num-procs", "2", "train.py", timeout=100)
    assert result.returncode == 0, result.stderr
    losses = [result.lines_of(rank)[-1] for rank in (0, 1)]
    assert losses[0] != losses[1], "each has data of its own"
    assert SAME not in result.stderr
    assert result.of_type("progress")[-1]["step_max"] in (299, 96)
    if page.endswith("checkpoints.md"):
        again = distlaunch.train_warm("--num-procs", "2", "train.py", timeout=100)
        assert again.returncode == 0, again.stderr
        assert (
            f"distlaunch: resumed from {distlaunch.work}/runs/a/step-000000300, after 300 steps, saved "
            in again.stderr
        )
        assert mentions(again.stderr, "already ended", "300 steps")
        assert again.stderr.count("had already ended") == 1, "rank 0 says it"
        assert checkpoints(distlaunch) == [100, 200, 300]


def test_a_resumed_training_reports_its_step_and_not_that_it_had_ended(distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        snippet("distlaunch/docs/checkpoints.md")
        .replace(", 300", ", int(sys.argv[1])")
        .replace("import torch\n", "import sys\nimport torch\n", 1)
    )
    first = distlaunch.train_warm("--num-procs", "2", "train.py", "120", timeout=100)
    assert first.returncode == 0, first.stderr
    assert "distlaunch: resumed" not in first.stderr
    second = distlaunch.train_warm("--num-procs", "2", "train.py", "130", timeout=100)
    assert second.returncode == 0, second.stderr
    assert (
        f"distlaunch: resumed from {distlaunch.work}/runs/a/step-000000120, after 120 steps, saved "
        in second.stderr
    )
    assert "already ended" not in second.stderr
    assert checkpoints(distlaunch) == [100, 120, 130], "and the last step of each run is saved"


@pytest.mark.parametrize(("data", "warned"), [("same", 1), ("apart", 0), ("apart later", 0)])
def test_workers_that_train_on_the_same_batches_are_warned_once(distlaunch, data, warned):
    (distlaunch.work / "train.py").write_text(TRAINS)
    result = distlaunch.train_warm("--num-procs", "2", "train.py", data, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(SAME) == warned, result.stderr
    if warned:
        assert "all 2 workers train" in result.stderr
        assert "StatefulBatchSampler(dataset, batch_size=...)" in result.stderr


def test_a_sharded_model_is_watched_too(distlaunch):
    (distlaunch.work / "train.py").write_text(TRAINS)
    result = distlaunch.train_warm(
        "--num-procs", "2", "--backend", "fsdp", "train.py", "same", timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(SAME) == 1
    assert "trained fsdp" in result.stdout


def test_under_torchrun_the_warning_comes_too(clean_env, tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
        "same",
    ]
    env = {**clean_env, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAME) == 1


def test_a_worker_that_is_alone_is_not_warned(clean_env, tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    argv = [sys.executable, "train.py", "same"]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=clean_env, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
