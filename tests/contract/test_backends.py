from __future__ import annotations

import pytest

from distlaunch.backends.choosing import chosen_options
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


@pytest.mark.parametrize("method", ["notes_on", "worker_words"])
def test_notes_and_words_are_text_of_one_line(backend, topology, method):
    texts = [
        *getattr(backend, method)(topology if method == "notes_on" else 1),
        *backend.notes,
        *backend.script_words(),
    ]
    assert all(type(text) is str and text and text.isprintable() for text in texts)


def test_nodes_and_workers_get_text(backend, topology):
    for node_rank, node in enumerate(topology.nodes):
        of_node = backend.node_variables(topology, node_rank)
        of_worker = backend.worker_variables(topology, node_rank, node.slots - 1, 0)
        assert all(type(text) is str for pair in (*of_node.items(), *of_worker.items()) for text in pair)


def test_a_backend_leaves_alone_what_all_workers_get(backend, topology):
    added = {
        **backend.job_variables(topology),
        **backend.default_variables(topology),
        **backend.attempt_files(topology),
        **backend.node_variables(topology, 0),
        **backend.worker_variables(topology, 0, 0, 0),
    }
    assert not added.keys() & SET_FOR_WORKERS


def test_files_of_an_attempt_are_names_within_its_folder(backend, topology):
    assert all(
        file and "/" not in file and file not in (".", "..") for file in backend.attempt_files(topology).values()
    )


@pytest.mark.parametrize("name", backend_names())
def test_options_are_described_and_take_what_they_say(name):
    kind = find_backend(name)
    options = kind.options()
    assert kind.about
    assert kind.about.isprintable()
    assert len({option.name for option in options}) == len(options)
    for option in options:
        assert option.about.isprintable()
        assert option.name == option.name.lower().replace("_", "-").strip()
        assert bool(option.choices) == (option.kind == "choice")
        for value in option.choices or VALUES[option.kind]:
            (converted,) = chosen_options([f"{option.name}={value}"], options, name).values()
            assert converted == VALUES[option.kind].get(value, value)


VALUES = {
    "text": {"x": "x"}, "choice": {}, "flag": {"on": True, "no": False}, "count": {"3": 3},
    "number": {"0.5": 0.5}, "seconds": {"1.5m": 90.0}, "file": {"a.json": "a.json"},
}  # fmt: skip


def test_an_unknown_backend_is_refused_with_what_there_is():
    with pytest.raises(ConfigError) as caught:
        find_backend("pytorch")
    assert "--backend 'pytorch'" in caught.value.message
    assert "did you mean pytorch-ddp?" in caught.value.hint
    assert all(name in caught.value.hint for name in backend_names())
