"""``distlaunch plan`` and ``train`` inside jobs of a running Slurm."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.facts import mentions

# A plan is the same under every tracker.
pytestmark = pytest.mark.parametrize("slurm", ["cgroup"], indirect=True, scope="session")
COMMAND = f"{shlex.quote(sys.executable)} -m distlaunch"
SCRIPT = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.fixture(scope="module")
def launch(slurm):
    """Write the script. Return the command that runs distlaunch in the shell of a job."""
    (slurm.work / "t.py").write_text(SCRIPT)
    state = slurm.work / "state"
    state.mkdir(exist_ok=True)
    root = Path(__file__).parents[2]
    return f"env XDG_STATE_HOME={state} PYTHONPATH={root} {COMMAND}"


def granted(slurm, reported: str) -> dict[str, int]:
    """Return from Slurm's output how many GPUs each host of a job has."""
    counts: dict[str, int] = {}
    for nodes, gres in re.findall(r"\bNodes=(\S+) CPU_IDs=\S+ Mem=\d+ GRES=(\S*)", reported):
        numbers = re.findall(r"gpu(?::\w+)?:(\d+)", gres)
        counts.update(dict.fromkeys(slurm.hostnames(nodes), sum(map(int, numbers))))
    return counts


def plans(text: str) -> list[dict]:
    """Read the plans in a job's output."""
    found, at, decoder = [], text.find("{\n"), json.JSONDecoder()
    while at >= 0:
        record, end = decoder.raw_decode(text, at)
        found.append(record)
        at = text.find("{\n", end)
    return found


def nodes_of(record: dict) -> dict[str, int | None]:
    return {node["host"]: node["slots"] for node in record["nodes"]}


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ("-N2 -w n1,n2 --gpus-per-node=2", [2, 2]),
        ("-N2 -w n1,n2 -n5 --gpus=4", [3, None]),
        ("-w n3 --gpus-per-node=volta:3,kepler:1", [4]),
        ("-w n4 --gpus-per-node=a100:2 : -w n1,n2 -n4 --gpus-per-node=1", [2, 1, 1]),
    ],
    ids=["even", "uneven", "types", "heterogeneous"],
)
def test_a_batch_script_plans_the_hosts_and_gpus_that_slurm_granted(slurm, launch, options, known):
    script = (
        f"scontrol show job --details --oneliner $SLURM_JOB_ID; {launch} plan --format json t.py"
    )
    done = slurm.sbatch(script, *options.split())
    assert done.state == "COMPLETED", done
    reported, _, _ = done.output.partition("{\n")
    (record,) = plans(done.output)
    assert record["source"] == "slurm"
    gpus = granted(slurm, reported)
    nodes = nodes_of(record)
    assert list(nodes.values()) == known
    assert {host: slots or gpus[host] for host, slots in nodes.items()} == gpus


def test_each_launcher_of_a_step_makes_the_same_plan_and_knows_its_node(slurm, launch):
    step = f'{launch} plan --format json --gpus-per-node 2 t.py >"plan-$SLURM_PROCID"'
    script = f"srun --ntasks-per-node=1 sh -c {shlex.quote(step)}"
    done = slurm.sbatch(script, "-N2", "-w", "n1,n2", "--gpus-per-node=2", "--ntasks-per-node=1")
    assert done.state == "COMPLETED", done
    records = [json.loads((slurm.work / f"plan-{task}").read_text()) for task in (0, 1)]
    assert len({record["job_id"] for record in records}) == 1
    for task, record in enumerate(records):
        assert nodes_of(record) == {"n1": 2, "n2": 2}
        assert record["nodes"][task]["devices"] == ["0", "1"]
        assert record["nodes"][1 - task]["devices"] is None
        assert [worker["rank"] for node in record["nodes"] for worker in node["workers"]] == [
            0,
            1,
            2,
            3,
        ]


def test_a_smaller_step_is_not_taken_for_the_whole_job(slurm, launch):
    script = f"srun -N1 -n1 {launch} train t.py"
    done = slurm.sbatch(script, "-N2", "-w", "n1,n2", "--gpus-per-node=2")
    assert done.state == "COMPLETED", done
    for rank in (0, 1):
        assert f"rank {rank} of 2 0,1\n" in done.output
    assert mentions(done.output, "this step", "1 of", "2 nodes")


def test_a_batch_script_on_one_node_runs_a_job_with_the_gpus_of_its_grant(slurm, launch):
    done = slurm.sbatch(f"{launch} train t.py", "-N1", "-w", "n2", "--gpus-per-node=3")
    assert done.state == "COMPLETED", done
    assert sorted(re.findall(r"rank (\d) of 3 0,1,2\n", done.output)) == ["0", "1", "2"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_jobs_of_a_batch_script_are_called_as_slurm_calls_it(slurm, launch, nodes):
    (slurm.work / "id.py").write_text(
        "import os; print('is', os.environ['DISTLAUNCH_JOB_ID'], os.environ['RANK'])"
    )
    train = f"{launch} train --procs-per-node 1 --log-dir {slurm.work}/logs-{nodes} id.py"
    script = f"{train}\n{train} &\n{train} &\nwait\n{train.replace('id.py', '--job-id mine id.py')}"
    done = slurm.sbatch(script, f"-N{nodes}", "--array=7", timeout_s=120.0)
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    (array,) = re.findall(r"distlaunch: job (\d+)_7:", done.output)
    jobs = [f"{array}_7", f"{array}_7-2", f"{array}_7-3", "mine"]
    ranks = [str(rank) for rank in range(nodes)]
    assert sorted(re.findall(r"is (\S+) (\d)", done.output)) == [
        (job, rank) for job in jobs for rank in ranks
    ]
    folders = {path.name for path in (slurm.work / f"logs-{nodes}").iterdir()}
    assert folders == {*jobs, "latest"}


def test_a_shell_of_salloc_on_another_machine_has_workers_on_the_jobs_node(slurm, launch):
    script = f"{launch} train t.py; echo ended with $?; {launch} train --source flags t.py"
    reported = slurm.salloc(f"exec 2>&1; {script}", "-N1", "-w", "n2", "--gpus-per-node=1")
    assert "1 worker on n2" in reported
    assert "rank 0 of 1 0\n" in reported
    assert "ended with 0\n" in reported
    assert "1 worker on n2" not in reported.partition("ended with 0\n")[2]


def test_some_of_a_jobs_nodes_can_be_used(slurm, launch):
    script = f"{launch} train --num-nodes 1 t.py; echo; {launch} train --exclude n1 t.py"
    done = slurm.sbatch(script, "-N3", "-w", "n1,n2,n4", "--gpus-per-node=2")
    assert done.state == "COMPLETED", done
    first, _, second = done.output.partition("\n\n")
    assert sorted(re.findall(r"rank (\d) of 2 0,1\b", first)) == ["0", "1"]
    assert "4 workers on 2 nodes (n[2,4])" in second
    assert sorted(re.findall(r"rank (\d) of 4 0,1\b", second)) == ["0", "1", "2", "3"]


def test_a_batch_script_that_was_submitted_in_a_step_says_which_of_its_variables_to_unset(
    slurm, launch
):
    commands = [
        f"{launch} train t.py",
        "echo ended with $?",
        "unset SLURM_STEP_NODELIST",
        f"{launch} plan t.py",
    ]
    (slurm.work / "inner").write_text("\n".join(["#!/bin/sh", *commands]))
    reported = slurm.srun(
        "-N1",
        "-n1",
        "-w",
        "n1",
        "sh",
        "-c",
        "sbatch --wait -N2 -w n1,n2 -o inner.out inner; cat inner.out",
    )
    assert mentions(reported, "SLURM_STEP_NUM_NODES='1' and SLURM_NNODES='2'")
    assert "unset SLURM_STEP_NODELIST" in reported
    assert "ended with 2\n" in reported
    assert re.search(r"on 2 nodes", reported)
