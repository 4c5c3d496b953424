from __future__ import annotations

import json

import pytest

from distlaunch.backends.backend_options import chosen_options
from distlaunch.backends.pytorch_ddp import PytorchDdp
from distlaunch.backends.registry import find_backend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from distlaunch.core.model.variables import BACKEND_OPTIONS
from distlaunch.planning.build_plan import job_variables
from tests.facts import mentions

CPUS = Topology(nodes=(Node(host="a", slots=2),), device="cpu")
GPUS = Topology(nodes=(Node(host="a", slots=2),), device="cuda")
UNKNOWN = Topology(nodes=(Node(host="a", slots=None),), device="auto")
FILES = {
    "TORCH_FR_DUMP_TEMP_FILE": "nccl_trace_rank_",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "nccl_trace_rank_",
}


def chosen(*words: str, kind=PytorchDdp):
    return kind(chosen_options(words, kind.options(), kind.name), {})


def test_on_cpus_nothing_is_set():
    backend = chosen()
    assert (
        backend.job_variables(CPUS)
        == backend.default_variables(CPUS)
        == backend.attempt_files(CPUS)
        == {}
    )


@pytest.mark.parametrize("topology", [GPUS, UNKNOWN])
def test_nccls_flight_recorder_writes_into_the_attempts_folder(topology):
    backend = chosen()
    assert backend.default_variables(topology) == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert backend.attempt_files(topology) == FILES
    assert backend.job_variables(topology) == {}


@pytest.mark.parametrize("name", ["fsdp", "accelerate", "deepspeed", "ray"])
def test_the_recorder_writes_for_all_backends_that_communicate_by_torch(name):
    backend = find_backend(name)({"flight-recorder": 5}, {})
    assert backend.default_variables(GPUS)["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert backend.attempt_files(GPUS) == FILES
    assert backend.job_variables(GPUS)["TORCH_FR_BUFFER_SIZE"] == "5"


def test_options_become_variables_of_nccl_and_the_recorder():
    backend = chosen("nccl-debug=info", "flight-recorder=500", "dump-pipe")
    assert backend.job_variables(GPUS) == {
        "NCCL_DEBUG": "INFO",
        "TORCH_FR_BUFFER_SIZE": "500",
    }, "the old name would make torch print a warning"
    assert backend.attempt_files(GPUS) == {
        **FILES,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "nccl_dump_rank_",
    }
    assert chosen("dump-pipe=off").attempt_files(GPUS) == FILES


def test_options_of_the_toolkit_reach_it():
    words = ["collective-timeout=5m", "find-unused-parameters", "bucket-mb=50", "static-graph=no"]
    variables = job_variables(
        CPUS,
        job_id="j",
        run_id="j",
        role="default",
        max_restarts=0,
        run_dir="",
        backend=chosen(*words),
    )
    assert json.loads(variables[BACKEND_OPTIONS]) == {
        "collective-timeout": 300.0,
        "find-unused-parameters": True,
        "bucket-mb": 50,
        "static-graph": False,
    }


@pytest.mark.parametrize("name", ["collective-timeout", "bucket-mb"])
def test_zero_is_refused_where_it_has_no_meaning(name):
    with pytest.raises(ConfigError, match=f"-o {name}=0"):
        chosen(f"{name}=0")


def test_a_static_graph_makes_looking_for_unused_parameters_idle():
    assert chosen("static-graph").notes == chosen("find-unused-parameters").notes == ()
    (notice,) = chosen("static-graph", "find-unused-parameters").notes
    assert mentions(notice, "find-unused-parameters", "no effect")
