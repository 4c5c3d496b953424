"""A launcher in each worker of another launcher: the real torchrun, horovodrun, accelerate and
deepspeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.core.agent.workers import spawner
from distlaunch.planning import outer_launcher
from tests.facts import mentions

# Building Horovod takes up to a quarter of an hour, once.
pytestmark = pytest.mark.timeout(2400)

PATIENCE_S = 200
TELL = """
import json, os, sys, time
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
         "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "HOROVOD_RANK", "HOROVOD_SIZE",
         "HOROVOD_GLOO_RENDEZVOUS_PORT", "OMP_NUM_THREADS", "DISTLAUNCH_ATTEMPT", "DISTLAUNCH_JOB_ID"]
rank = os.environ.get("RANK") or os.environ["HOROVOD_RANK"]
with open(f"{sys.argv[1]}-{rank}", "w") as file:
    json.dump({name: os.environ.get(name) for name in names}, file)
print("told by", rank, flush=True)
if sys.argv[2:3] == [rank]:
    other = f"{sys.argv[1]}-{1 - int(rank)}"
    while not os.path.exists(other) or not os.path.getsize(other):  # else it is stopped before it has written
        time.sleep(0.01)
    raise SystemExit(37) if len(sys.argv) < 4 else ValueError("boom")
"""
LIKE_TORCHRUN = """
import os, socket, subprocess, sys
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
common = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
          "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
          "OMP_NUM_THREADS": 1}
workers = []
for rank in (0, 1):
    told = {**common, "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
    workers.append(subprocess.Popen(sys.argv[1:], env={**os.environ, **{name: str(value) for name, value in told.items()}}))
codes = [worker.wait() for worker in workers]
for code in filter(None, codes):
    print("exitcode  :", code, file=sys.stderr)
sys.exit(any(codes))
"""
INNER = (sys.executable, "-m", "distlaunch")


@pytest.fixture
def outer_run(distlaunch):
    """Run an outer launcher's command line in the work directory with the scripts."""
    (distlaunch.work / "tell.py").write_text(TELL)
    (distlaunch.work / "torchrun").write_text(LIKE_TORCHRUN)

    def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, words)],
            env={**distlaunch.env, **(env or {})},
            cwd=distlaunch.work,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    return run


def reported(work: Path, name: str, size: int) -> list[dict[str, str | None]]:
    return [json.loads((work / f"{name}-{rank}").read_text()) for rank in range(size)]


def torchrun(*words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--no-python",
        *words,
    ]


def like_torchrun(*words: str) -> list[str]:
    """Return the words that start two workers with torchrun's name and variables, without torch.

    For tests whose subject is the inner launcher: the import of torch takes 2 s of CPU.
    """
    return [sys.executable, "torchrun", *words]


def test_under_torchrun_each_launcher_runs_one_worker_with_torchruns_variables(
    outer_run, distlaunch
):
    plain = outer_run(*torchrun("--", sys.executable, "tell.py", "plain"))
    assert plain.returncode == 0, plain.stderr
    directly = [*INNER, "train", "tell.py", "inner"]
    by_a_shell = ["sh", "-c", f"{' '.join([*INNER, 'train', 'tell.py', 'shell'])}; exit $?"]
    for name, words in (("inner", directly), ("shell", by_a_shell)):
        done = outer_run(*torchrun(*words))
        assert done.returncode == 0, done.stderr
        expected, found = (reported(distlaunch.work, each, 2) for each in ("plain", name))
        for record in (*expected, *found):
            assert record.pop("MASTER_PORT")
            assert record.pop("TORCHELASTIC_RUN_ID")
            del record["DISTLAUNCH_ATTEMPT"], record["DISTLAUNCH_JOB_ID"]
        assert found == expected
        assert sorted(done.stdout.splitlines()) == ["told by 0", "told by 1"], (
            "torchrun shows whose line it is, or nobody"
        )
        notices = [
            line for line in done.stderr.splitlines() if mentions(line, "torchrun", "rank 0 of 2")
        ]
        assert len(notices) == 1


def test_a_failure_is_explained_with_the_outer_rank_and_the_exit_code_is_passed_on(
    outer_run, distlaunch
):
    done = outer_run(*torchrun(*INNER, "train", "tell.py", "inner", "1"))
    assert "distlaunch: rank 1 of 2 failed: exit code 37" in done.stderr
    assert "exitcode  : 37" in done.stderr, "torchrun's own summary has the worker's code"
    assert "/attempt-0/rank-1.log" in done.stderr
    (failed,) = [
        each
        for each in distlaunch.jobs.iterdir()
        if (each / "report.txt").exists() and not each.is_symlink()
    ]
    events = [json.loads(line) for line in (failed / "events.jsonl").read_text().splitlines()]
    assert [event["rank"] for event in events if "rank" in event] == [1]
    assert [list(event["pids"]) for event in events if event["type"] == "workers_started"] == [
        ["1"]
    ]


def test_torchrun_restarts_the_job_and_the_launchers_follow(outer_run, distlaunch):
    (distlaunch.work / "again.py").write_text(
        "import os\nassert os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\n"
    )
    words = torchrun(*INNER, "train", "again.py")
    words.insert(3, "--max-restarts=1")
    assert outer_run(*words).returncode == 0


@pytest.mark.parametrize(
    ("words", "named_in"),
    [
        (["train", "--num-gpus", "4"], "--num-gpus 4: torchrun started this launcher as rank"),
        (
            ["train", "--max-restarts", "2"],
            "--max-restarts 2: torchrun started this launcher as rank",
        ),
        (
            ["torchrun", "--nproc-per-node", "2"],
            "--nproc-per-node 2: torchrun started this launcher as rank",
        ),
        (
            ["accelerate", "launch", "--num_processes", "2"],
            "2 workers: torchrun started this launcher as rank",
        ),
        (
            ["train", "--backend", "tensorflow"],
            "--backend tensorflow: torchrun started this launcher as rank",
        ),
        (
            ["train", "--backend", "horovod"],
            "--backend horovod: torchrun started this launcher as rank",
        ),
    ],
)
def test_options_that_contradict_the_outer_launcher_are_an_error(
    outer_run, distlaunch, words, named_in
):
    distlaunch.pretend("horovod", "tensorflow", "accelerate")
    done = outer_run(*like_torchrun(*INNER, *words, "tell.py", "inner"))
    assert done.returncode == 1
    assert named_in in done.stderr
    assert "exitcode  : 2" in done.stderr
    assert not (distlaunch.work / "inner-0").exists()


def test_a_launcher_that_the_script_of_a_rank_starts_has_a_job_of_its_own(outer_run, distlaunch):
    (distlaunch.work / "sweep.py").write_text(
        "import os, subprocess, sys\n"
        "if os.environ['RANK'] == '1':\n"
        f"    subprocess.run([*{INNER!r}, 'train', '--num-procs', '3', 'tell.py', 'run'], check=True)\n"
        f"    sys.exit(os.system({' '.join(INNER)!r} + ' train --num-procs 1 tell.py system'))\n"
    )
    command = like_torchrun(sys.executable, "sweep.py")
    for words in (command, [*INNER, "train", "--num-procs", "2", "sweep.py"]):
        done = outer_run(*words)
        assert done.returncode == 0, done.stderr
        assert [record["WORLD_SIZE"] for record in reported(distlaunch.work, "run", 3)] == ["3"] * 3
        assert [record["WORLD_SIZE"] for record in reported(distlaunch.work, "system", 1)] == ["1"]
        for file in distlaunch.work.glob("*-[0-9]"):
            file.unlink()


def test_torchruns_words_in_a_worker_show_the_outer_ranks_in_a_prefix(outer_run, distlaunch):
    template = "<${rank}/${local_rank}> "
    words = [
        *INNER,
        "torchrun",
        "--tee",
        "3",
        "--log-line-prefix-template",
        template,
        "tell.py",
        "inner",
    ]
    done = outer_run(*like_torchrun(*words))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["<0/0> told by 0", "<1/1> told by 1"]
    notices = [
        line for line in done.stderr.splitlines() if mentions(line, "torchrun", "rank 0 of 2")
    ]
    assert len(notices) == 1


def test_a_format_has_our_console_with_the_outer_ranks(outer_run, distlaunch):
    done = outer_run(*like_torchrun(*INNER, "train", "--format", "plain", "tell.py", "inner"))
    assert sorted(done.stdout.splitlines()) == ["[0] told by 0", "[1] told by 1"], done.stderr


def test_the_outer_launcher_gets_the_failure_in_its_own_error_file(outer_run, distlaunch):
    file = distlaunch.work / "error.json"
    done = outer_run(
        *torchrun(*INNER, "train", "tell.py", "inner", "1", "raise"),
        env={"TORCHELASTIC_ERROR_FILE": str(file)},
    )
    assert "ValueError: boom" in done.stderr.partition("Root Cause")[2]
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: boom"


def test_plan_shows_the_one_worker_by_its_outer_rank(outer_run, distlaunch):
    words = ["plan", "--format", "json", "tell.py"]
    done = outer_run(*like_torchrun("sh", "-c", f"{' '.join([*INNER, *words])} > plan-$RANK.json"))
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        (node,) = json.loads((distlaunch.work / f"plan-{rank}.json").read_text())["nodes"]
        (worker,) = node["workers"]
        assert (worker["rank"], worker["local_rank"]) == (rank, rank)
        assert "RANK" not in worker["env"], "what workers inherit is not shown"


def test_explain_shows_the_decisions_of_the_outer_launcher(outer_run):
    done = outer_run(*like_torchrun(*INNER, "plan", "--explain", "tell.py"))
    assert done.returncode == 0, done.stderr
    message = " ".join(done.stdout.split())
    assert mentions(message, "torchrun", "rank 1 of 2")
    assert mentions(message, "1 (one of the 2 of torchrun)")


def test_source_flags_runs_a_job_of_its_own_in_a_worker(outer_run, distlaunch):
    done = outer_run(
        *like_torchrun(*INNER, "train", "--source", "flags", "--num-procs", "3", "tell.py", "own")
    )
    assert done.returncode == 0, done.stderr
    assert [record["WORLD_SIZE"] for record in reported(distlaunch.work, "own", 3)] == ["3"] * 3


def test_our_own_workers_start_launchers_that_run_one_worker_each(outer_run, distlaunch):
    inner = f"{' '.join(INNER)} train tell.py inner 1; exit $?"
    done = outer_run(
        *INNER, "train", "--num-procs", "2", "--backend", "fsdp", "--no-python", "sh", "-c", inner
    )
    assert done.returncode == 37
    records = reported(distlaunch.work, "inner", 2)
    assert [(record["RANK"], record["WORLD_SIZE"]) for record in records] == [
        ("0", "2"),
        ("1", "2"),
    ]
    assert len({(record["MASTER_PORT"], record["DISTLAUNCH_JOB_ID"]) for record in records}) == 1
    assert mentions(done.stderr, "another distlaunch", "rank 0 of 2")


def test_under_accelerate_launch_each_launcher_runs_one_worker(outer_run, distlaunch):
    words = [
        "--multi_gpu",
        "--num_machines",
        "1",
        "--num_processes",
        "2",
        "--mixed_precision",
        "no",
        "--no_python",
    ]
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *words]
    done = outer_run(*launch, *INNER, "train", "tell.py", "inner")
    assert done.returncode == 0, done.stderr
    assert [record["RANK"] for record in reported(distlaunch.work, "inner", 2)] == ["0", "1"]
    assert mentions(done.stderr, "accelerate", "rank 0 of 2")


def test_under_deepspeed_each_launcher_runs_one_worker(outer_run, distlaunch, deepspeed_python):
    runner = [
        deepspeed_python,
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        "2",
        "--no_local_rank",
        "--no_python",
    ]
    path = f"{Path(deepspeed_python).parent}{os.pathsep}{distlaunch.env['PATH']}"
    done = outer_run(
        *runner, *INNER, "train", "tell.py", "inner", env={"PATH": path, "DS_ACCELERATOR": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    assert [record["RANK"] for record in reported(distlaunch.work, "inner", 2)] == ["0", "1"]
    assert mentions(done.stderr, "deepspeed", "rank 0 of 2")


HOROVOD = """
import sys
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
print("rank", hvd.rank(), "of", hvd.size(), "sum", total, flush=True)
if sys.argv[1:] == [str(hvd.rank())]:
    sys.exit(37)
"""


def test_under_horovodrun_the_workers_are_one_job(outer_run, distlaunch, horovod_python):
    """A shell between the two is found as under torchrun."""
    (distlaunch.work / "train.py").write_text(HOROVOD)
    words = [
        horovod_python,
        "-m",
        "distlaunch",
        "train",
        "--script",
        "train.py",
        "--backend",
        "horovod",
        "--",
        "1",
    ]
    horovodrun = str(Path(horovod_python).with_name("horovodrun"))
    done = outer_run(horovodrun, "-np", "2", *words)
    assert [f"rank {rank} of 2 sum 2.0" in done.stdout for rank in (0, 1)] == [True, True], (
        done.stderr
    )
    assert mentions(done.stderr, "horovodrun", "rank 0 of 2")
    assert "distlaunch: rank 1 of 2 failed: exit code 37" in done.stderr
    assert "Exit code: 37" in done.stderr


def test_the_name_of_our_spawner_is_the_one_that_the_search_knows():
    assert outer_launcher.SPAWNER == spawner.NAME
