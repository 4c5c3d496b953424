from __future__ import annotations

import pytest

from distlaunch.backends.registry import backend_names, find_backend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from distlaunch.core.model.variables import SET_FOR_WORKERS

TOPOLOGIES = {
    "one worker": Topology(nodes=(Node(host="a", slots=1),), device="cpu"),
    "isolated GPUs": Topology(
        nodes=(
            Node(
                host="a",
                slots=2,
                mask_variable="CUDA_VISIBLE_DEVICES",
                masks=(("0",), ("1",)),
                devices=("0", "1"),
                isolated=True,
            ),
        ),
        device="cuda",
    ),
    "unequal nodes": Topology(nodes=(Node(host="a", slots=1), Node(host="b", slots=3)), device="cpu"),
}


@pytest.fixture(params=backend_names())
def backend(request):
    return find_backend(request.param)({}, {})


@pytest.fixture(params=TOPOLOGIES)
def topology(request) -> Topology:
    return TOPOLOGIES[request.param]


@pytest.mark.parametrize("name", backend_names())
def test_a_backend_has_the_name_that_it_is_found_by(name):
    assert find_backend(name).name == name


@pytest.mark.parametrize("method", ["job_variables", "default_variables", "attempt_files"])
def test_variables_are_text_and_the_same_for_the_same_topology(backend, topology, method):
    first, second = getattr(backend, method)(topology), getattr(backend, method)(topology)
    assert first == second
    assert all(type(text) is str and "\0" not in text for pair in first.items() for text in pair)
    assert all(name and "=" not in name for name in first)


def test_a_backend_leaves_alone_what_all_workers_get(backend, topology):
    added = {**backend.job_variables(topology), **backend.default_variables(topology)}
    assert not added.keys() & SET_FOR_WORKERS


def test_an_unknown_backend_is_refused_with_what_there_is():
    with pytest.raises(ConfigError) as caught:
        find_backend("pytorch")
    assert "--backend 'pytorch'" in caught.value.message
    assert "did you mean pytorch-ddp?" in caught.value.hint
    assert all(name in caught.value.hint for name in backend_names())
