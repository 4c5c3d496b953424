from __future__ import annotations

import pytest

from distlaunch.backends.option_files import configured_backend
from distlaunch.backends.registry import find_backend
from distlaunch.cli.commands.render import parse_render
from distlaunch.cli.parser import parse_train
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import CpuInventory, Gpu, GpuInventory
from distlaunch.planning.build_topology import build_topology
from distlaunch.planning.facts import Facts, Surroundings
from distlaunch.planning.hosts.this_host import Identity
from distlaunch.planning.node_source import locate
from tests.unit.render.cluster import pods_of
from tests.unit.render.test_manifests import ODD

TARGETS = ("kubernetes", "pytorchjob", "trainjob")
ONE_LAUNCHER_A_NODE = {"kubernetes": "train-{}.train", "trainjob": "train-node-0-{}.train"}


def planned(pod, gpus: int):
    """Return the location and the topology of a pod's launcher."""
    assert pod.argv[:2] == ["distlaunch", "train"]
    options = parse_train(pod.argv[2:], pod.environ)
    options = configured_backend(find_backend(options.backend), options, {}, "/")[0].sized(options)
    hostname = pod.environ["HOSTNAME"]
    around = Surroundings(texts=pod.files, discovered=None, identity=Identity(hostname=hostname))
    devices = tuple(
        Gpu(index=index, uuid=f"GPU-{hostname}-{index}", name="H100") for index in range(gpus)
    )
    facts = Facts(
        environ=pod.environ,
        cwd="/w",
        hostname=hostname,
        python="/usr/bin/python3",
        cpus=CpuInventory(allowed=tuple(range(16)), online=16),
        gpus=GpuInventory(gpus=devices, source="nvml"),
        paths={},
        texts={},
        programs={},
        surroundings=around,
    )
    location, _ = locate(options, facts)
    if location is None:
        return None, None, options
    return (
        location,
        build_topology(location.allocation, options, facts, here=location.here),
        options,
    )


@pytest.mark.parametrize(
    ("size", "nodes", "workers"),
    [
        (["--num-nodes=4", "--gpus-per-node=8"], 4, 8),
        (["--num-nodes=3", "--num-gpus=6"], 3, 2),
        (["--num-gpus=16", "--gpus-per-node=8"], 2, 8),
        (["--num-nodes=2", "--procs-per-node=3"], 2, 3),
        (["--num-nodes=2", "--num-procs=8", "--procs-per-node=4"], 2, 4),
        (["--num-nodes=12", "--num-procs=12"], 12, 1),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_all_pods_plan_the_same_job(manifests, target, size, nodes, workers):
    gpus = workers if "gpus" in " ".join(size) else 0
    pods = pods_of(
        manifests(target, *size, "--image=x", "--token-secret=t", "train.py", "--lr", "$(HOME)")
    )
    assert len(pods) == nodes
    seen = set()
    for number, pod in enumerate(pods):
        location, topology, options = planned(pod, gpus)
        assert (location.allocation.source, location.allocation.part) == ("kubernetes", "node")
        assert location.here == number
        assert [node.slots for node in topology.nodes] == [workers] * nodes
        assert options.script_args == ("--lr", "$(HOME)")
        seen.add((location.allocation.master_addr, tuple(node.host for node in topology.nodes)))
    ((master, hosts),) = seen
    assert hosts[0] == master
    assert len(set(hosts)) == nodes


@pytest.mark.parametrize("target", TARGETS)
def test_one_worker_of_tensorflow_has_all_gpus_of_its_pod(manifests, target):
    words = [
        "--num-nodes=2",
        "--gpus-per-node=4",
        "--backend=tensorflow",
        "-o",
        "per=node",
        "--image=x",
        "train.py",
    ]
    pods = pods_of(manifests(target, *words))
    assert len(pods) == 2
    for number, pod in enumerate(pods):
        location, topology, _ = planned(pod, 4)
        assert location.here == number
        assert [node.slots for node in topology.nodes] == [1, 1]
        assert topology.nodes[number].masks == (("0", "1", "2", "3"),)


@pytest.mark.parametrize("target", ["kubernetes", "pytorchjob"])
def test_all_pods_of_an_elastic_job_know_its_bounds_and_who_coordinates(manifests, target):
    pods = pods_of(
        manifests(target, "--num-nodes=2:5", "--gpus-per-node=4", "--image=x", "train.py")
    )
    assert len(pods) == 5
    for number, pod in enumerate(pods):
        location, topology, options = planned(pod, 4)
        assert location.here == number
        assert options.num_nodes == (2, 5)
        assert len(topology.nodes) == 5
        assert location.allocation.hosts[0].name == location.allocation.master_addr


@pytest.mark.parametrize(
    "size", [["--gpus-per-node=4"], ["--num-gpus=4"], ["--num-procs=4"]], ids=" ".join
)
@pytest.mark.parametrize("target", TARGETS)
def test_a_single_pod_trains_alone(manifests, target, size):
    (pod,) = pods_of(manifests(target, *size, "--image=x", "train.py"))
    location, topology, options = planned(pod, 4)
    if location is None:
        assert (options.num_nodes, options.script) == (1, "train.py")
    else:
        assert [node.slots for node in topology.nodes] == [4]


@pytest.mark.parametrize("target", TARGETS)
def test_every_option_reaches_the_pod_unchanged(manifests, target):
    size = ["--num-nodes=2", "--procs-per-node=2", "--image=x", "--join-timeout=1h"]
    variables = [f"--env=V{number}={value}" for number, value in enumerate(ODD)]
    odd = [
        "--setup=module load 'a b' && export X=$Y",
        "--job-id=a b$c",
        "--workdir=/w $$ é$é",
        "--log-dir=/d/$(X)",
    ]
    others = [
        "--output=0,1",
        "--hang-timeout=1.5h",
        "--grace=0.001",
        "--quiet",
        "--no-forward-env",
        "--bind=numa",
    ]
    words = [*size, *variables, *odd, *others, "--max-restarts=3", "-m", "pkg.train", *ODD]
    meant, _ = parse_render(target, words, {})
    for pod in pods_of(manifests(target, *words)):
        assert replace(parse_train(pod.argv[2:], pod.environ), given={}) == replace(meant, given={})
