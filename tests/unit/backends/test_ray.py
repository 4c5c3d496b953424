from __future__ import annotations

import re

import pytest

from distlaunch.backends.backend_options import chosen_options
from distlaunch.backends.ray import Ray
from distlaunch.core.errors import ConfigError
from distlaunch.planning.train_options import TrainOptions


def backend(*words: str) -> Ray:
    return Ray(chosen_options(words, Ray.options(), "ray"), {})


def placement_request(*words: str, **sizes: object):
    return backend(*words).placement_request(TrainOptions(**sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_nodes": 2, "gpus_per_node": 4},
        {"num_nodes": 2, "num_gpus": 8},
        {"num_gpus": 8, "gpus_per_node": 4},
    ],
)
def test_workers_of_each_node_are_one_bundle_on_a_node_of_its_own(sizes):
    found = placement_request("cpus-per-worker=3", **sizes)
    assert found.bundles == ({"CPU": 12.0, "GPU": 4.0},) * 2
    assert (found.strategy, found.workers, found.unit) == ("STRICT_SPREAD", 4, "gpus")


def test_workers_of_a_total_have_a_bundle_each():
    found = placement_request("strategy=strict-pack", "resources=disk=0.5, A100 = 1", num_procs=3)
    assert found.bundles == ({"CPU": 1.0, "disk": 0.5, "A100": 1.0},) * 3
    assert (found.strategy, found.workers, found.unit) == ("STRICT_PACK", 1, "workers")


def test_without_a_size_there_is_a_worker_for_each_gpu_of_the_cluster():
    found = placement_request("cpus-per-worker=0")
    assert (found.bundles, found.each) == (None, {"GPU": 1.0})


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ((), {"hosts": "a,b"}, "--hosts and --backend ray exclude each other"),
        ((), {"spares": 1}, "--spares and --backend ray exclude each other"),
        (
            (),
            {"num_nodes": (2, 4)},
            "--num-nodes 2:4: with --backend ray the number of nodes is fixed",
        ),
        ((), {"num_nodes": 2}, "--num-nodes 2 alone does not say"),
        ((), {"gpus_per_node": 2}, "--gpus-per-node 2 alone does not say"),
        ((), {"num_nodes": 2, "num_procs": 3}, "3 workers cannot be divided evenly among 2 nodes"),
        ((), {"num_gpus": 3, "gpus_per_node": 2}, "3 workers are no multiple of --gpus-per-node 2"),
        ((), {"device": "cpu"}, "--device cpu alone does not say"),
        ((), {"gpus": "0"}, "--gpus and --backend ray exclude each other"),
        ((), {"num_procs": 2, "device": "cuda"}, "a worker has a GPU of its own"),
        ((), {"num_procs": 1 << 20}, "more than 131,072 bundles"),
        (
            ("cpus-per-worker=0",),
            {"num_procs": 2},
            "Ray cannot place a worker without resources",
        ),
        (("resources=disk=1.5",), {"num_procs": 2}, "'disk' would be 1.5 per bundle"),
        (
            ("resources=disk=0.5",),
            {"num_nodes": 2, "procs_per_node": 3},
            "'disk' would be 1.5 per bundle",
        ),
        (
            ("strategy=spread",),
            {"num_nodes": 2, "procs_per_node": 1},
            "-o strategy is only for a total number of workers",
        ),
    ],
)
def test_sizes_that_ray_cannot_place_are_refused(words, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        placement_request(*words, **options)


@pytest.mark.parametrize(
    "text",
    [
        "memory",
        "memory=",
        "=1",
        "memory=-1",
        "memory=much",
        "GPU=1",
        "CPU=2",
        "memory=0.5",
        "object_store_memory=9",
    ],
)
def test_invalid_resources_are_refused(text):
    with pytest.raises(ConfigError, match="-o resources"):
        backend(f"resources={text}")


def test_a_plan_before_ray_was_asked_names_no_machine():
    known = backend().location(TrainOptions(num_nodes=2, procs_per_node=3), "me").allocation
    assert [(host.name, host.slots, host.unit) for host in known.hosts] == [
        ("ray-0", 3, "workers"),
        ("ray-1", 3, "workers"),
    ]
    total = backend().location(TrainOptions(num_gpus=5), "me").allocation
    assert [(host.name, host.slots, host.unit) for host in total.hosts] == [("ray-0", 5, "gpus")]
