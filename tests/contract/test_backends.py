"""The contract of ``Backend``, for each of our backends and an example of another package."""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress

import pytest

from distlaunch.backends.backend_options import chosen_options
from distlaunch.backends.base import Backend, Requirement
from distlaunch.backends.plugins import checked_backend
from distlaunch.backends.registry import backend_names, find_backend
from distlaunch.backends.requirements import find_modules
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from distlaunch.core.model.variables import SET_FOR_WORKERS
from distlaunch.planning.node_source import Location
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions
from tests.launcher import PROGRAMS

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
    "unequal nodes": Topology(
        nodes=(Node(host="a", slots=1), Node(host="b", slots=3)), device="cpu"
    ),
    "a node that has yet to tell": Topology(
        nodes=(Node(host="a", slots=2), Node(host="b", slots=None)), device="auto"
    ),
    "nobody has told": Topology(
        nodes=(Node(host="a", slots=None), Node(host="b", slots=None)), device="auto"
    ),
}
ROWS = {
    "pytorch-ddp": "nccl-debug=info collective-timeout=5m flight-recorder=5 dump-pipe find-unused-parameters bucket-mb=3",
    "fsdp": "sharding=grad precision=bf16 cpu-offload wrap-classes=Block activation-checkpointing flight-recorder=0",
    "accelerate": "config=c.yaml mixed-precision=bf16 dynamo-backend=inductor gradient-accumulation-steps=2 debug",
    "deepspeed": "config=ds.json zero=3 pass-config=deepspeed local-rank precision=bf16 dump-pipe",
    "horovod": "compression=fp16 autotune fusion-threshold-mb=2 timeline-filename=t log-level=info",
    "tensorflow": "per=node chief evaluator",
    "ray": "address=local strategy=spread cpus-per-worker=2 resources=memory=5 bucket-mb=3",
    "gossip": "rounds=3 topology=ring loud",
}
"""Options that can be combined, by backend."""
TEXTS = {
    "accelerate": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\nnum_processes: 3\n",
    "deepspeed": '{"zero_optimization": {"stage": 3}}',
}
NAMES = (*backend_names(), "gossip")


def kind_of(name: str) -> type[Backend]:
    """Return a backend class; the example is loaded as if it were installed."""
    if name in backend_names():
        return find_backend(name)
    path = PROGRAMS / "third_party" / "src" / "gossip_backend" / "__init__.py"
    spec = importlib.util.spec_from_file_location("gossip_backend", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return checked_backend(module.Gossip, "gossip", "gossip-backend")


@pytest.fixture(
    params=[(name, words) for name in NAMES for words in ("", ROWS[name])], ids=" ".join
)
def backend(request):
    name, words = request.param
    kind = kind_of(name)
    return kind(
        chosen_options(words.split(), kind.options(), name), {"config": TEXTS.get(name, "")}
    )


@pytest.fixture(params=TOPOLOGIES)
def topology(request) -> Topology:
    return TOPOLOGIES[request.param]


def asked(backend: Backend, topology: Topology) -> dict[str, list[dict[str, str]]]:
    """Return all variables, as planning asks for them."""
    methods = ("job_variables", "default_variables", "attempt_files")
    found = {method: [getattr(backend, method)(topology)] for method in methods}
    found["repeated"] = [backend.repeated()]
    found["node_variables"] = [
        backend.node_variables(topology, rank) for rank in range(len(topology.nodes))
    ]
    found["worker_variables"] = workers = []
    for node_rank, node in enumerate(topology.nodes):
        if node.slots is None:
            break
        for local_rank in range(node.slots):
            workers.append(backend.worker_variables(topology, node_rank, local_rank, len(workers)))
    cluster = tuple(
        f"10.0.0.1:{port}" for port in range(1, 1 + backend.worker_ports * len(workers))
    )
    found["cluster_variables"] = [backend.cluster_variables(cluster)] if cluster else []
    found["task_variables"] = [
        backend.task_variables(len(workers), rank) for rank in range(len(workers)) if cluster
    ]
    return found


def test_each_has_its_row_of_options():
    assert ROWS.keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_has_the_name_that_it_is_found_by(name):
    assert kind_of(name).name == name


def test_variables_are_text_and_the_same_for_the_same_topology(backend, topology):
    found = asked(backend, topology)
    for other in TOPOLOGIES.values():  # what it may remember of one is not another's
        backend.node_variables(other, 0)
    assert asked(backend, topology) == found
    for values in found.values():
        for value in values:
            assert all(
                type(text) is str and "\0" not in text for pair in value.items() for text in pair
            )
            assert all(name and "=" not in name for name in value)
            assert "None" not in value.values(), "what is not known is left out"


def test_all_nodes_and_all_workers_get_variables_of_the_same_names(backend, topology):
    found = asked(backend, topology)
    assert len({frozenset(each) for each in found["worker_variables"]}) <= 1
    assert len({frozenset(each) for each in found["task_variables"]}) <= 1
    known = [
        each
        for each, node in zip(found["node_variables"], topology.nodes, strict=True)
        if node.slots is not None
    ]
    assert len({frozenset(each) for each in known}) <= 1


def test_a_workers_own_variables_are_not_set_for_all_workers(backend, topology):
    found = asked(backend, topology)
    own = [
        name
        for part in ("node_variables", "worker_variables", "cluster_variables", "task_variables")
        for name in found[part][:1]
    ]
    names = {name for each in own for name in each}
    shared = {
        name for part in ("job_variables", "attempt_files", "repeated") for name in found[part][0]
    }
    assert not names & shared


def test_a_backend_does_not_set_variables_of_the_launcher(backend, topology):
    names = {
        name for values in asked(backend, topology).values() for each in values for name in each
    }
    assert not names & SET_FOR_WORKERS


def test_repeated_variables_are_settled_at_the_start(backend):
    assert set(backend.repeated().values()) <= {"MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"}


def test_backends_with_cluster_variables_have_ports(backend):
    assert (type(backend).cluster_variables is not Backend.cluster_variables) >= (
        backend.worker_ports > 0
    )


@pytest.mark.parametrize("method", ["notes_on", "worker_words"])
def test_notes_and_words_are_text_of_one_line(backend, topology, method):
    texts = [
        *getattr(backend, method)(topology if method == "notes_on" else 1),
        *backend.notes,
        *backend.script_words(),
        backend.fewer_workers(),
    ]
    assert all(type(text) is str and text and text.isprintable() for text in texts)


def test_contradictions_are_config_errors(backend, topology):
    with suppress(ConfigError):
        backend.check(topology)
    backend.check_nodes([], [])


def test_sizing_twice_changes_nothing(backend):
    sized = backend.sized(TrainOptions(num_nodes=2))
    assert type(sized) is TrainOptions
    assert backend.sized(sized) == sized


def test_a_location_names_hosts(backend):
    found = backend.location(TrainOptions(num_procs=2), "here")
    assert found is None or (
        isinstance(found, Location) and found.allocation.hosts and found.here is None
    )


def test_env_files_exist(backend, tmp_path):
    assert list(backend.env_files({"HOME": str(tmp_path)}, str(tmp_path))) == []


def test_all_launchers_of_a_job_have_to_agree_on_options_wherever_files_are(backend):
    agreed = backend.agreed()
    assert agreed.keys() == backend.chosen.keys()
    assert all("/" not in str(value) for value in agreed.values())


@pytest.mark.parametrize(
    "variables", [{}, {"TF_USE_LEGACY_KERAS": "1"}], ids=["nothing set", "as by default"]
)
def test_requirements_can_be_found_and_installed(backend, variables):
    needed = backend.needed(variables)
    assert all(
        type(each) is Requirement and each.module.isidentifier()
        for each in (*needed, *backend.requires)
    )
    for found in find_modules(needed):
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", found.package), (
            "a distribution, no extra of it"
        )


def test_files_of_an_attempt_are_names_within_its_folder(backend, topology):
    assert all(
        file and "/" not in file and file not in (".", "..")
        for file in backend.attempt_files(topology).values()
    )


@pytest.mark.parametrize("name", NAMES)
def test_files_in_shared_memory_belong_to_one_job(name):
    jobs = [("10.0.0.1", 1), ("10.0.0.1", 2), ("10.0.0.2", 1)]
    for each in kind_of(name).shared_memory:
        found = {each.format(uid=0, address=address, port=port, rank=0) for address, port in jobs}
        assert len(found) == len(jobs)
        assert not any("/" in one or "{" in one for one in found)


@pytest.mark.parametrize("name", NAMES)
def test_options_are_described_and_accept_their_values(name):
    kind = kind_of(name)
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
    "text": {"x": "x"},
    "choice": {},
    "flag": {"on": True, "no": False},
    "count": {"3": 3},
    "number": {"0.5": 0.5},
    "seconds": {"1.5m": 90.0},
    "file": {"a.json": "a.json"},
}


@pytest.mark.parametrize("name", ["nccl", "gloo", "NCCL"])
def test_a_backend_of_torch_distributed_is_the_scripts_choice(name):
    with pytest.raises(ConfigError) as caught:
        find_backend(name)
    assert mentions(caught.value.hint, name.lower())
    assert "init_process_group" in caught.value.hint


def test_an_unknown_backend_is_refused_with_a_list_of_backends():
    with pytest.raises(ConfigError) as caught:
        find_backend("pytorch")
    assert "--backend 'pytorch'" in caught.value.message
    assert "pytorch-ddp?" in caught.value.hint
    assert all(name in caught.value.hint for name in backend_names())
