"""The variables that a configuration sets, compared with those of Accelerate's own launcher."""

from __future__ import annotations

import json
import os
from unittest.mock import patch

import pytest
import yaml

from distlaunch.backends.accelerate import Accelerate
from distlaunch.core.model.topology import Node, Topology

OURS = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
}
"""What is the launcher's own affair."""
BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
FSDP1 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": True,
    "fsdp_sharding_strategy": "HYBRID_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "GPT2Block,BertLayer",
    "fsdp_use_orig_params": True,
}
FSDP2 = {
    "fsdp_activation_checkpointing": True,
    "fsdp_activation_checkpointing_offload": False,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 2000,
    "fsdp_reshard_after_forward": True,
    "fsdp_version": 2,
    "fsdp_ignored_modules": "lm_head|embed.*",
}
ZERO3 = {
    "deepspeed_multinode_launcher": "standard",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "none",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
    "deepspeed_moe_layer_cls_names": "Expert",
}
DYNAMO = {
    "dynamo_backend": "INDUCTOR",
    "dynamo_mode": "max-autotune",
    "dynamo_use_dynamic": True,
    "dynamo_use_fullgraph": True,
    "dynamo_use_regional_compilation": False,
}
FP8 = {
    "backend": "TE",
    "fp8_format": "E4M3",
    "interval": 2,
    "margin": 1,
    "use_autocast_during_eval": True,
    "override_linear_precision": [False, True, False],
    "amax_compute_algorithm": "max",
}
CONFIGS = {
    "one process": {"distributed_type": "NO"},
    "least": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2, "_bare": True},
    "CPUs": {"distributed_type": "MULTI_CPU", "use_cpu": True},
    "CPUs with bf16": {"distributed_type": "MULTI_CPU", "use_cpu": True, "mixed_precision": "bf16", "debug": True},
    "GPUs": {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16", "gpu_ids": "all"},
    "GPUs chosen": {"distributed_type": "MULTI_GPU", "gpu_ids": "0,1", "enable_cpu_affinity": True},
    "two machines": {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 16, "main_process_ip": "10.0.0.1"},
    "other devices": {"distributed_type": "MULTI_NPU", "mixed_precision": "bf16"},
    "compiled": {"distributed_type": "MULTI_GPU", "dynamo_config": DYNAMO},
    "compiled, names in short": {"distributed_type": "NO", "dynamo_config": {k[7:]: v for k, v in DYNAMO.items()}},
    "compiled, of old": {"distributed_type": "MULTI_GPU", "dynamo_backend": "EAGER"},
    "not compiled, of old": {"distributed_type": "MULTI_GPU", "dynamo_backend": "NO", "fp16": True, "mixed_precision": ...},
    "FSDP": {"distributed_type": "FSDP", "fsdp_config": {}, "mixed_precision": "bf16"},
    "FSDP1": {"distributed_type": "FSDP", "fsdp_config": FSDP1, "mixed_precision": "bf16"},
    "FSDP1, names in short": {"distributed_type": "FSDP", "fsdp_config": {k[5:]: v for k, v in FSDP1.items()}},
    "FSDP2": {"distributed_type": "FSDP", "fsdp_config": FSDP2, "dynamo_config": DYNAMO},
    "FSDP2 over a mesh": {
        "distributed_type": "FSDP",
        "fsdp_config": FSDP2,
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": 2,
            "parallelism_config_cp_size": 2,
            "parallelism_config_tp_size": 1,
        },
    },
    "DeepSpeed": {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO3, "mixed_precision": "bf16"},
    "DeepSpeed by its own file": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "conf/Ds.json", "zero3_init_flag": False},
        "mixed_precision": ...,
    },
    "DeepSpeed with sequence parallelism": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": ZERO3,
        "parallelism_config": {"parallelism_config_sp_size": 2, "parallelism_config_sp_seq_length": 512},
    },
    "Megatron": {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_gradient_clipping": 0.5,
                               "megatron_lm_sequence_parallelism": True, "megatron_lm_num_micro_batches": 2},
    },
    "fp8": {"distributed_type": "MULTI_GPU", "mixed_precision": "fp8", "fp8_config": FP8},
    "fp8 without more": {"distributed_type": "FSDP", "mixed_precision": "fp8", "fsdp_config": FSDP2},
}  # fmt: skip


def whole(changed):
    changed = dict(changed)
    base = {} if changed.pop("_bare", False) else BASE
    return {name: value for name, value in {**base, **changed}.items() if value is not ...}


def by_accelerate(path, *words: str) -> dict[str, str]:
    """Return the variables that Accelerate's launcher adds to the environment of a worker."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    args = launch.launch_command_parser().parse_args(
        ["--config_file", str(path), *words, "train.py"]
    )
    with (
        patch.dict(os.environ, {}, clear=True),
        patch.object(prepare, "is_fp8_available", lambda: True),
    ):
        args, defaults, precision_of_file = launch._validate_launch_command(args)
        args.main_process_port = 0  # else it is tried
        if args.use_deepspeed:
            fields = [
                *defaults.deepspeed_config,
                *(["mixed_precision"] if precision_of_file else []),
            ]
            args.deepspeed_fields_from_accelerate_config = ",".join(fields)
            env = prepare.prepare_deepspeed_cmd_env(args)[1]
            del env["PYTHONPATH"]
        elif args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
            env = prepare.prepare_multi_gpu_env(args)
        else:
            env = prepare.prepare_simple_launcher_cmd_env(args)[1]
            if env["ACCELERATE_USE_CPU"] == "False":
                del env["ACCELERATE_USE_CPU"]
    return {name: value for name, value in env.items() if name not in OURS}


def by_us(path, chosen=None) -> dict[str, str]:
    backend = Accelerate({"config": str(path), **(chosen or {})}, {"config": path.read_text()})
    return dict(backend.job_variables(Topology(nodes=(Node(host="a", slots=2),), device="cuda")))


def same(value: str) -> str:
    return "true" if value == "True" else value


def assert_equal(ours, theirs):
    switches = ("ACCELERATE_USE_CPU",)
    assert ours == {
        name: same(value) if name in switches else value for name, value in theirs.items()
    }


@pytest.mark.parametrize("form", ["yaml", "json"])
@pytest.mark.parametrize("changed", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_sets_what_accelerate_launch_sets(changed, form, tmp_path):
    path = tmp_path / f"config.{form}"
    path.write_text(
        yaml.safe_dump(whole(changed)) if form == "yaml" else json.dumps(whole(changed))
    )
    assert_equal(by_us(path), by_accelerate(path))


@pytest.mark.parametrize("changed", [CONFIGS["GPUs"], CONFIGS["FSDP2"], CONFIGS["DeepSpeed"]])
def test_options_win_over_the_file_as_those_of_accelerate_launch_do(changed, tmp_path, monkeypatch):
    from accelerate.commands import launch

    monkeypatch.setattr(launch, "is_bf16_available", lambda _: True)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(whole(changed)))
    ours = by_us(path, {"mixed-precision": "fp16"})
    assert_equal(ours, by_accelerate(path, "--mixed_precision", "fp16"))


@pytest.mark.parametrize("changed", CONFIGS.values(), ids=CONFIGS)
def test_a_file_that_accelerate_has_written_is_read(changed, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    given, written = tmp_path / "given.yaml", tmp_path / "written.yaml"
    given.write_text(yaml.safe_dump(whole(changed)))
    load_config_from_file(str(given)).to_yaml_file(str(written))
    assert_equal(by_us(written), by_accelerate(written))
    assert Accelerate({"config": "written.yaml"}, {"config": written.read_text()}).notes == ()
