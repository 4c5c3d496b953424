from __future__ import annotations

import pytest

from distlaunch.backends.backend_options import chosen_options
from distlaunch.backends.fsdp import Fsdp
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from tests.facts import mentions

CPUS = Topology(nodes=(Node(host="a", slots=2),), device="cpu")
GPUS = Topology(nodes=(Node(host="a", slots=4), Node(host="b", slots=4)), device="cuda")
UNEQUAL = Topology(nodes=(Node(host="a", slots=1), Node(host="b", slots=3)), device="cuda")
UNKNOWN = Topology(nodes=(Node(host="a", slots=4), Node(host="b", slots=None)), device="auto")


def chosen(*words: str) -> Fsdp:
    return Fsdp(chosen_options(words, Fsdp.options(), Fsdp.name), {})


def environment(backend: Fsdp, topology: Topology) -> dict[str, str]:
    return {**backend.default_variables(topology), **backend.job_variables(topology)}


def test_without_options_accelerate_uses_fsdp2():
    assert environment(chosen(), GPUS) == {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert chosen().notes_on(GPUS) == ()


def test_workers_on_cpus_are_several_for_accelerate_too():
    assert environment(chosen(), CPUS)["ACCELERATE_USE_CPU"] == "true"
    assert mentions(chosen().notes_on(CPUS)[0], "CPUs", "toolkit")


@pytest.mark.parametrize(
    ("word", "variables"),
    [
        (
            "sharding=full",
            {"FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true"},
        ),
        (
            "sharding=grad",
            {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_RESHARD_AFTER_FORWARD": "false"},
        ),
        ("precision=bf16", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        ("precision=fp32", {"ACCELERATE_MIXED_PRECISION": "no"}),
        ("cpu-offload", {"FSDP_OFFLOAD_PARAMS": "true"}),
        ("activation-checkpointing=off", {"FSDP_ACTIVATION_CHECKPOINTING": "false"}),
        (
            "wrap-min-params=1000",
            {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "1000"},
        ),
        (
            "wrap-classes=Block, Head",
            {
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Head",
            },
        ),
    ],
)
def test_an_option_becomes_what_accelerate_reads(word, variables):
    assert chosen(word).job_variables(GPUS) == {"ACCELERATE_USE_FSDP": "true", **variables}


def test_hybrid_sharding_is_full_within_a_node_with_copies_between_nodes():
    variables = chosen("sharding=hybrid").job_variables(GPUS)
    assert variables["FSDP_SHARDING_STRATEGY"] == "HYBRID_SHARD"
    assert variables["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert variables["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "4"
    assert not any(
        name.startswith("PARALLELISM") for name in chosen("sharding=hybrid").job_variables(UNKNOWN)
    )


def test_hybrid_sharding_over_unequal_nodes_is_refused():
    with pytest.raises(ConfigError, match=r"a: 1, b: 3") as caught:
        chosen("sharding=hybrid").job_variables(UNEQUAL)
    assert "sharding=full" in caught.value.hint
    chosen("sharding=full").job_variables(UNEQUAL)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["wrap-classes=Block", "wrap-min-params=5"], "exclude each other"),
        (["wrap-classes=model.Block"], "'model.Block' is not a class name"),
        (["wrap-classes=Block,,Head"], "'' is not a class name"),
        (["wrap-min-params=0"], "wrap-min-params=0"),
        (["precision=bf32"], "precision takes bf16|fp16|fp32"),
        (["sharding=zero3"], "sharding takes full|grad|hybrid"),
    ],
)
def test_contradicting_or_invalid_options_are_refused(words, why):
    with pytest.raises(ConfigError) as caught:
        chosen(*words)
    assert why in caught.value.message


def test_a_chosen_sharding_discards_another_mesh():
    mesh = {
        "PARALLELISM_CONFIG_TP_SIZE",
        "PARALLELISM_CONFIG_CP_SIZE",
        "PARALLELISM_CONFIG_SP_SIZE",
    }
    assert mesh <= set(chosen("sharding=hybrid").unwanted())
    assert "ACCELERATE_USE_PARALLELISM_CONFIG" in chosen("sharding=full").unwanted()
    assert not any("PARALLELISM" in name for name in chosen("precision=bf16").unwanted())


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("model = DistributedDataParallel(model)\n", True),
        (
            "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)\n",
            True,
        ),
        ("model = torch.nn.parallel.DistributedDataParallel(\n    model)\n", True),
        ("# DDP(model)\n", False),
        ("print('no model')\n", False),
        ("model = fully_shard(model) if big else DDP(model)\n", False),
        ("from distlaunch import toolkit\nmodel = toolkit.wrap(model)\n", False),
        ("from accelerate import Accelerator\nDDP(model)\n", False),
    ],
)
def test_a_script_that_calls_ddp_itself_gives_a_notice(text, reported):
    notes = Fsdp({}, {}).notes_on_script("train.py", text)
    assert [mentions(note, "train.py", "DistributedDataParallel") for note in notes] == [
        True
    ] * reported
