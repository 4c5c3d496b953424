"""The variables of the fsdp backend, read by the real Accelerate and Transformers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from distlaunch.backends.backend_options import chosen_options
from distlaunch.backends.fsdp import Fsdp
from distlaunch.core.model.topology import Node, Topology
from tests.launcher import TRAINING

PROGRAMS = Path(__file__).parents[1] / "programs" / "frameworks"
DONE = re.compile(r"^(?:\[\d\] )?done (\d) (\d+) (\S+)$", re.MULTILINE)
TWO_NODES = Topology(nodes=(Node(host="a", slots=4), Node(host="b", slots=4)), device="cuda")


def train(distlaunch, *words: str, options=()):
    """Train with two workers. Return the report of rank 0."""
    given = [word for option in options for word in ("-o", option)]
    command = ["--num-procs", "2", "--format", "plain", "--backend", "fsdp", *given]
    script = [PROGRAMS / words[0], *words[1:]]
    result = distlaunch.train_warm(*command, *script, preload=f"accelerate,{TRAINING}", timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    done = DONE.findall(result.stdout)
    assert sorted(rank for rank, _, _ in done) == ["0", "1"]
    assert len({(steps, total) for _, steps, total in done}) == 1, "both ranks have the same model"
    (line,) = (line for line in result.lines_of(0) if line.startswith("told "))
    return json.loads(line.removeprefix("told "))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            [],
            {
                "version": 2,
                "reshard": True,
                "offload": "OffloadPolicy",
                "precision": "no",
                "sharded": 1,
            },
        ),
        (
            ["sharding=grad", "wrap-classes=Block", "precision=bf16"],
            {
                "reshard": False,
                "classes": ["Block"],
                "precision": "bf16",
                "compute": "torch.bfloat16",
                "sharded": 4,
            },
        ),
        (
            ["sharding=full", "wrap-min-params=100", "activation-checkpointing"],
            {"reshard": True, "min": 100, "checkpointing": True},
        ),
    ],
)
def test_accelerate_shards_as_the_options_say(distlaunch, options, expected):
    reported = train(distlaunch, "accelerate_fsdp.py", options=options)
    assert reported["processes"] == 2
    assert {name: reported[name] for name in expected} == expected


def test_a_trainer_that_asks_for_nothing_trains_on_all_workers_in_the_precision_chosen(distlaunch):
    reported = train(distlaunch, "hf_trainer.py", "auto", options=["precision=bf16"])
    assert reported == {"precision": "bf16", "processes": 2}


@pytest.mark.parametrize("sharding", ["full", "grad", "hybrid"])
def test_accelerate_understands_how_gpus_are_to_shard(sharding, clean_env, monkeypatch):
    import accelerate

    words = [f"sharding={sharding}", "cpu-offload", "activation-checkpointing", "wrap-min-params=7"]
    backend = Fsdp(chosen_options(words, Fsdp.options(), Fsdp.name), {})
    variables = {**backend.default_variables(TWO_NODES), **backend.job_variables(TWO_NODES)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plugin = accelerate.FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (sharding != "grad")
    assert type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    assert plugin.activation_checkpointing
    assert plugin.min_num_params == 7
    mesh = accelerate.ParallelismConfig()
    assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (
        (2, 4) if sharding == "hybrid" else (1, 1)
    )
    monkeypatch.setenv("FSDP_VERSION", "1")
    strategy = {"full": "FULL_SHARD", "grad": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD"}[sharding]
    assert accelerate.FullyShardedDataParallelPlugin().sharding_strategy.name == strategy
    assert os.environ["FSDP_SHARDING_STRATEGY"] == strategy
