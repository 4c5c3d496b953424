"""distlaunch's reading of Slurm's environments against a running Slurm, in every process of every
kind of job.

RECORD=1 writes the captures to tests/data/slurm, for tests without Slurm.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from distlaunch.core.model.host_list import expand_nodelist
from distlaunch.planning.clusters import slurm as source
from distlaunch.transport.slurm.step import node_list

pytestmark = pytest.mark.parametrize("slurm", ["linuxproc"], indirect=True, scope="session")
"""Environments are the same under every tracker."""

DATA = Path(__file__).parents[1] / "data" / "slurm"

# Every process writes its environment to CAPTURES/JOB/LABEL/PROCID, and every job what Slurm itself
# says of it.
TASK = 'env -0 >"$CAPTURES/$1/$SLURM_PROCID"'
PRELUDE = """
cd "$CAPTURES"
shell() { mkdir "$1"; env -0 >"$1/0"; scontrol show job --details --oneliner "$SLURM_JOB_ID" >job; }
step() { label=$1; shift; mkdir "$label"; srun "$@" sh "$CAPTURES/../task" "$label"; }
"""

BATCH: dict[str, tuple[str, dict[str, str]]] = {
    "nodes-only": ("-N2 -w n1,n2", {"step": ""}),
    "node-list": ("-w n4,n1", {"step": ""}),
    "tasks-per-node": (
        "-N2 -w n1,n2 --ntasks-per-node=3",
        {"step": "", "cyclic": "-m cyclic", "one-task": "-N1 -n1"},
    ),
    "uneven-tasks": ("-n4 -w n1,n2,n3", {"step": ""}),
    "uneven-gpus": ("-N2 -w n1,n2 -n5 --gpus=4", {}),
    "gpus-per-node": (
        "-N2 -w n1,n2 --ntasks-per-node=2 --gpus-per-node=2",
        {
            "step": "",
            "one-task": "-N1 -n1",
            "task-per-node": "-n2 --ntasks-per-node=1",
            "single": "--gpu-bind=single:1",
        },
    ),
    "gpus-per-task": (
        "-w n2,n3 -n4 --ntasks-per-node=2 --gpus-per-task=1",
        {"step": "", "one-task": "-N1 -n1"},
    ),
    "tasks-per-gpu": ("-w n1,n4 --gpus=4 --ntasks-per-gpu=1", {"step": ""}),
    "gres": ("-w n2,n3 --gres=gpu:2", {"step": "", "second-node": "-N1 -n1 -w n2"}),
    "types": ("-w n3 --gpus-per-node=volta:3,kepler:1", {"step": ""}),
    "heterogeneous": (
        "-w n4 --gpus-per-node=a100:2 : -w n1,n2 -n4 --gpus-per-node=1",
        {"step": "--het-group=0,1", "first-group": "", "second-group": "--het-group=1"},
    ),
    "three-components": (
        "-w n4 : -w n3 -n2 : -w n1",
        {"step": "--het-group=0-2", "last-two": "--het-group=1,2", "outer-two": "--het-group=0,2"},
    ),
}
"""Options of sbatch, and those of srun for each step in the script."""

SRUN = {
    "srun-uneven-gpus": "-N2 -w n1,n2 -n5 --gpus=4",
    "srun-task-per-node": "-w n1,n2 --gpus-per-node=4",
    "srun-gpus-per-task": "-w n1,n2 -n3 --gpus-per-task=1",
}
"""Options of srun where it makes a job of its own; the label of its step is ``step``."""

GPUS_KNOWN = {
    "uneven-gpus": [3, None],
    "gpus-per-node": [2, 2],
    "gpus-per-task": [2, 2],
    "tasks-per-gpu": [2, 2],
    "gres": [2, None],
    "types": [4],
    "heterogeneous": [2, 1, 1],
    "salloc": [None, None],
    "salloc-per-node": [2, 2],
    "salloc-interactive": [2, None],
}
"""What a shell's environment says of each node's GPUs. Only Slurm's controller knows the rest."""

SHELLS = [*BATCH, "salloc", "salloc-per-node", "salloc-interactive"]
STEPS = [(job, label) for job, (_, steps) in BATCH.items() for label in steps]
STEPS += [(job, "step") for job in SRUN] + [
    ("terminal", "step"),
    ("salloc", "step"),
    ("salloc", "one-task"),
]


ALL_OF_A_NODE = [
    *(
        ("nodes-only", "step"),
        ("node-list", "step"),
        ("gpus-per-node", "one-task"),
        ("gpus-per-node", "task-per-node"),
    ),
    *(
        ("gres", "step"),
        ("gres", "second-node"),
        ("types", "step"),
        ("heterogeneous", "first-group"),
    ),
    *(("three-components", "outer-two"),),
]
"""Steps with one task a node, which has all that the job has there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job: environments of its processes, and Slurm's description of it."""

    name: str
    command: str
    environs: dict[str, list[dict[str, str]]]
    """Of each label, in the order of PROCID."""
    hosts: list[str]
    gpus: dict[str, list[str]]
    """Device numbers granted on each host."""

    def nodes(self, label: str) -> list[str]:
        """Name the node on which each task of a step ran, by rank."""
        return [environ["SLURMD_NODENAME"] for environ in self.environs[label]]


def job_of(slurm, folder: Path, command: str) -> Job:
    environs = {}
    for directory in (entry for entry in folder.iterdir() if entry.is_dir()):
        tasks = sorted(directory.iterdir(), key=lambda path: int(path.name))
        environs[directory.name] = [
            dict(entry.split("=", 1) for entry in path.read_text().split("\0") if "=" in entry)
            for path in tasks
        ]
    reported = (folder / "job").read_text() if (folder / "job").exists() else ""
    gpus: dict[str, list[str]] = {}
    for nodes, gres in re.findall(r"\bNodes=(\S+) CPU_IDs=\S+ Mem=\d+ GRES=(\S*)", reported):
        for host in slurm.hostnames(nodes):
            gpus[host] = [
                number for part in re.findall(r"IDX:([-\d,]*)", gres) for number in _numbers(part)
            ]
    lists = re.findall(r"\bNodeList=(\S+)", reported)
    hosts = [host for each in lists if each != "(null)" for host in slurm.hostnames(each)]
    return Job(name=folder.name, command=command, environs=environs, hosts=hosts, gpus=gpus)


def _numbers(text: str) -> list[str]:
    """Expand ``0-2,5``."""
    ranges = [part.split("-") for part in text.split(",") if part]
    return [str(number) for each in ranges for number in range(int(each[0]), int(each[-1]) + 1)]


@pytest.fixture(scope="session")
def jobs(slurm) -> dict[str, Job]:
    """Run one job of each kind, the batch jobs at the same time."""
    commands = {}

    def folder(name: str, command: str) -> dict[str, str]:
        commands[name] = command
        (slurm.work / name).mkdir()
        return {"CAPTURES": str(slurm.work / name)}

    (slurm.work / "task").write_text(TASK)
    task = ["sh", f"{slurm.work}/task", "step"]
    for name, options in SRUN.items():
        variables = folder(name, f"srun {options}")
        (slurm.work / name / "step").mkdir()
        slurm.srun(*options.split(), *task, **variables)
    variables = folder("terminal", "srun -N2 --pty (on a terminal)")
    (slurm.work / "terminal" / "step").mkdir()
    words = " ".join(["exec srun -N2 --pty", *task])
    slurm.run("script", "--quiet", "--return", "--command", words, "/dev/null", **variables)
    script = f"{PRELUDE} shell shell; step step --gpus=0; step one-task --pty -N1 -n1 --gpus=0"
    slurm.salloc(script, "-N2", "-n3", "--gpus=3", **folder("salloc", "salloc -N2 -n3 --gpus=3"))
    variables = folder("salloc-per-node", "salloc -N2 --gpus-per-node=2")
    slurm.salloc(f"{PRELUDE} shell shell", "-N2", "--gpus-per-node=2", **variables)
    variables = folder(
        "salloc-interactive",
        "salloc -N2 -n3 --gres=gpu:2 (with LaunchParameters=use_interactive_step)",
    )
    slurm.salloc(
        f"{PRELUDE} shell shell", "-N2", "-n3", "--gres=gpu:2", interactive=True, **variables
    )
    queued = {}
    for name, (options, steps) in BATCH.items():
        script = f"set -e\n{PRELUDE}\nshell shell\n" + "\n".join(
            f"step {label} {steps[label]}" for label in steps
        )
        queued[name] = slurm.submit(script, *options.split(), **folder(name, f"sbatch {options}"))
    for name, done in zip(queued, slurm.wait(*queued.values()), strict=True):
        assert done.state == "COMPLETED", (name, done)
    found = {name: job_of(slurm, slurm.work / name, command) for name, command in commands.items()}
    if os.environ.get("RECORD"):
        record(slurm, found)
    return found


# --- the shell of a job ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_stands_for_the_whole_job(jobs, name):
    (environ,) = jobs[name].environs["shell"]
    allocation = source.find(environ, {})
    assert allocation.part == "all"
    assert [host.name for host in allocation.hosts] == jobs[name].hosts
    here = environ.get("SLURMD_NODENAME")
    assert allocation.node_rank == (jobs[name].hosts.index(here) if here else None)
    assert allocation.local_rank is None
    assert allocation.job_id == environ["SLURM_JOB_ID"]


@pytest.mark.parametrize("name", GPUS_KNOWN)
def test_slots_are_the_gpus_that_slurm_granted(jobs, name):
    job = jobs[name]
    allocation = source.find(job.environs["shell"][0], {})
    slots = [host.slots for host in allocation.hosts]
    assert slots == GPUS_KNOWN[name]
    granted = [len(job.gpus[host]) for host in job.hosts]
    assert [known or real for known, real in zip(slots, granted, strict=True)] == granted


@pytest.mark.parametrize("name", [name for name in GPUS_KNOWN if not name.startswith("salloc")])
def test_devices_of_the_batch_host_are_those_that_slurm_granted(jobs, name):
    job = jobs[name]
    allocation = source.find(job.environs["shell"][0], {})
    devices = {host.name: host.devices for host in allocation.hosts if host.devices is not None}
    first = job.hosts[0]
    assert devices == {first: tuple(job.gpus[first])}


# --- the tasks of a step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "label"), STEPS)
def test_a_task_knows_its_place(jobs, name, label):
    nodes = jobs[name].nodes(label)
    hosts = list(dict.fromkeys(nodes))
    one_each = len(nodes) == len(hosts)
    for rank, (node, environ) in enumerate(zip(nodes, jobs[name].environs[label], strict=True)):
        assert environ["SLURM_PROCID"] == str(rank)
        allocation = source.find(environ, {})
        assert [host.name for host in allocation.hosts] == hosts
        assert allocation.node_rank == hosts.index(node)
        assert allocation.part == ("node" if one_each else "worker")
        if not one_each:
            assert allocation.local_rank == nodes[:rank].count(node)
            assert [host.slots for host in allocation.hosts] == [
                nodes.count(host) for host in hosts
            ]


@pytest.mark.parametrize(("name", "label"), ALL_OF_A_NODE)
def test_the_only_task_of_a_node_has_the_gpus_that_slurm_granted_there(jobs, name, label):
    job = jobs[name]
    for node, environ in zip(job.nodes(label), job.environs[label], strict=True):
        allocation = source.find(environ, {})
        assert allocation.part == "node"
        own = allocation.hosts[allocation.node_rank]
        granted = tuple(job.gpus[node])
        assert (own.name, own.devices, own.slots) == (node, granted or None, len(granted) or None)


def test_a_task_with_one_of_its_nodes_gpus_has_that_one(jobs):
    job = jobs["gpus-per-task"]
    (environ,) = job.environs["one-task"]
    own = source.find(environ, {}).hosts[0]
    assert own.slots == 1
    assert own.devices[0] in job.gpus[own.name]


def test_all_launchers_of_a_step_agree_on_its_id(jobs):
    for job in jobs.values():
        for label, environs in job.environs.items():
            assert len({source.find(environ, {}).job_id for environ in environs}) == 1, (
                job.name,
                label,
            )


# --- all of them -----------------------------------------------------------------------------------------------------


def test_node_lists_expand_as_scontrol_expands_them(slurm, jobs):
    lists = {
        (name, environ[name])
        for job in jobs.values()
        for environs in job.environs.values()
        for environ in environs
        for name in environ
        if name.startswith("SLURM") and "NODELIST" in name
    }
    assert {name for name, _ in lists} >= {
        "SLURM_JOB_NODELIST",
        "SLURM_STEP_NODELIST",
        "SLURM_NODELIST",
    }
    for name, text in lists:
        assert expand_nodelist(text, where=name) == slurm.hostnames(text)


@pytest.mark.parametrize(
    "hosts",
    [
        ["n1", "n2", "n4", "m08", "m09", "m10", "login"],
        ["rack1-n5", "rack2-n5", "rack2-n6", "r1-ib", "r2-ib", "n9", "n010"],
        [f"n{number}" for number in range(1, 20_000, 2)],
    ],
    ids=["runs", "other places", "no run, in 57 KB"],
)
def test_the_nodes_of_a_step_are_written_as_scontrol_reads_them(slurm, hosts):
    assert sorted(slurm.hostnames(node_list(hosts))) == sorted(hosts)


def test_a_request_for_uneven_gpus_is_granted_unevenly(jobs):
    assert [len(numbers) for numbers in jobs["uneven-gpus"].gpus.values()] == [3, 1]
    masks = [
        environ["CUDA_VISIBLE_DEVICES"] for environ in jobs["srun-uneven-gpus"].environs["step"]
    ]
    assert masks == ["0,1,2"] * 4 + ["0"]


# --- recording -------------------------------------------------------------------------------------------------------

LEFT_OUT = re.compile(
    r"SLURM_(CONF|WORKING_CLUSTER|TASK_PID|.*COMM_PORT|.*LAUNCHER_PORT|TOPOLOGY_.*|UMASK)$"
)
REPLACED = {
    "SLURM_SUBMIT_DIR": "/home/user",
    "SLURM_SUBMIT_HOST": "login",
    "SLURM_PTY_PORT": "40000",
}


def record(slurm, jobs: dict[str, Job]) -> None:
    """Write the environments of shells and of the first and last tasks of steps to
    tests/data/slurm, without those of this machine."""
    version = slurm.run("sinfo", "--version").strip()
    for job in jobs.values():
        for label, environs in job.environs.items():
            for task in sorted({0, len(environs) - 1}):
                environ = environs[task]
                where = environ.get("SLURMD_NODENAME", "the submit host")
                what = "the shell" if label == "shell" else f"task {task} of step '{label}'"
                lines = [
                    f"# {job.command}: {what}, on {where}. Captured from {version} by tests/cluster, RECORD=1."
                ]
                lines += [
                    f"{name}={REPLACED.get(name, value)}"
                    for name, value in sorted(environ.items())
                    if name.startswith(("SLURM", "CUDA_")) and not LEFT_OUT.match(name)
                ]
                end = "" if label == "shell" else f"-{label}-{task}"
                (DATA / f"{job.name}{end}.env").write_text("\n".join(lines) + "\n")
