"""The names of Accelerate 1.15: keys of its configuration files, and the variables that they become.

Releases that know less read less. Left out is what is the launcher's here (``MASTER_*``, ``OMP_NUM_THREADS``, device
masks) and Intel's ``KMP_AFFINITY``, which would put all workers of a node on the same cores.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.model.record import Record

PRECISIONS = ("no", "fp16", "bf16", "fp8")
DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune")
DYNAMO_BACKENDS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
    "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron",
)  # fmt: skip
ON_GPUS = (
    "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON",
)  # fmt: skip
TYPES = ("NO", "MULTI_CPU", *ON_GPUS, "FSDP", "DEEPSPEED", "MEGATRON_LM")

TOP = frozenset({
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config",
    "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config", "fp16",
    "dynamo_backend",
})  # fmt: skip


class Row(Record):
    """One key of a section: which variable it becomes, what holds without it, and whether it is written in small."""

    variable: str
    default: str | None = None
    small: bool = False


def _rows(prefix: str, small: str = "", as_is: str = "", **defaults: str) -> dict[str, Row]:
    """Make rows for keys whose variables are called alike; ``defaults`` are of any of them."""
    names = {**dict.fromkeys(as_is.split(), False), **dict.fromkeys(small.split(), True)}
    return {
        name: Row(variable=prefix + name.upper(), default=defaults.get(name), small=is_small)
        for name, is_small in names.items()
    }


FSDP = {
    **_rows(
        "FSDP_",
        small="reshard_after_forward offload_params forward_prefetch use_orig_params cpu_ram_efficient_loading"
        " sync_module_states activation_checkpointing activation_checkpointing_offload",
        as_is="version sharding_strategy min_num_params auto_wrap_policy backward_prefetch state_dict_type"
        " ignored_modules",
        version="1", sharding_strategy="FULL_SHARD", reshard_after_forward="true", offload_params="false",
        min_num_params="100000000", forward_prefetch="false", use_orig_params="true",
        cpu_ram_efficient_loading="true", sync_module_states="true", activation_checkpointing="false",
        activation_checkpointing_offload="false",
    ),
    "transformer_layer_cls_to_wrap": Row(variable="FSDP_TRANSFORMER_CLS_TO_WRAP"),
}  # fmt: skip
DEEPSPEED = {
    **_rows(
        "ACCELERATE_DEEPSPEED_",
        small="offload_optimizer_device offload_param_device zero3_save_16bit_model",
        as_is="zero_stage offload_optimizer_nvme_path offload_param_nvme_path",
    ),
    **_rows("ACCELERATE_", small="gradient_clipping", as_is="gradient_accumulation_steps deepspeed_config_file"),
    "zero3_init_flag": Row(variable="ACCELERATE_DEEPSPEED_ZERO3_INIT", small=True),
    "deepspeed_moe_layer_cls_names": Row(variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
}
DEEPSPEED_FILE = DEEPSPEED["deepspeed_config_file"].variable
NODE_LISTS = ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter")
"""Keys of ``deepspeed_config`` that say which nodes take part."""
DYNAMO = {
    "backend": Row(variable="ACCELERATE_DYNAMO_BACKEND", default="NO"),
    "mode": Row(variable="ACCELERATE_DYNAMO_MODE", default="default"),
    **_rows(
        "ACCELERATE_DYNAMO_",
        as_is="use_fullgraph use_dynamic use_regional_compilation",
        use_fullgraph="False", use_dynamic="False", use_regional_compilation="False",
    ),
}  # fmt: skip
MEGATRON = _rows(
    "MEGATRON_LM_",
    as_is="tp_degree use_custom_fsdp no_load_optim eod_mask_loss no_save_optim optimizer_cpu_offload"
    " use_precision_aware_optimizer overlap_cpu_optimizer_d2h_h2d decoder_last_pipeline_num_layers pp_degree"
    " gradient_clipping num_micro_batches sequence_parallelism recompute_activations use_distributed_optimizer"
    " recompute_granularity recompute_method recompute_num_layers attention_backend expert_model_parallel_size"
    " context_parallel_size attention_dropout hidden_dropout attention_softmax_in_fp32 expert_tensor_parallel_size"
    " calculate_per_token_loss use_rotary_position_embeddings",
    tp_degree="1", use_custom_fsdp="False", no_load_optim="False", eod_mask_loss="False", no_save_optim="False",
    optimizer_cpu_offload="False", use_precision_aware_optimizer="False", overlap_cpu_optimizer_d2h_h2d="False",
    pp_degree="1", gradient_clipping="1.0",
)  # fmt: skip
PARALLELISM = _rows(
    "PARALLELISM_CONFIG_",
    as_is="dp_replicate_size dp_shard_size tp_size cp_size cp_backend sp_size sp_backend cp_comm_strategy"
    " sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
    dp_replicate_size="1", dp_shard_size="1", tp_size="1", cp_size="1", cp_backend="torch", sp_size="1",
    sp_backend="deepspeed",
)  # fmt: skip
FP8 = _rows(
    "ACCELERATE_FP8_",
    as_is="backend use_autocast_during_eval margin interval format amax_history_len amax_compute_algo opt_level"
    " enable_fsdp_float8_all_gather pad_inner_dim amax_compute_algorithm amax_history_length optimization_level",
    use_autocast_during_eval="False", margin="0", interval="1", format="HYBRID", amax_history_len="1024",
    amax_compute_algo="most_recent", opt_level="O2", enable_fsdp_float8_all_gather="1", pad_inner_dim="1",
)  # fmt: skip
FP8_OVERRIDES = ("FPROP", "DGRAD", "WGRAD")

DECIDED = (
    *(f"ACCELERATE_USE_{way}" for way in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG", "CPU")),
    "ACCELERATE_CONFIG_DS_FIELDS",
    *(
        row.variable
        for rows in (FSDP, DEEPSPEED, MEGATRON, PARALLELISM)
        for row in rows.values()
        if row.variable != "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"  # which any script may read
    ),
)
"""Which way a job is spread out, and all that belongs to one of these ways: what a file leaves out holds by default."""


class Section(Record):
    """One of the file's sections: what launch's options put before its keys, and keys that are no variables' own."""

    prefix: str
    rows: Mapping[str, Row]
    others: tuple[str, ...] = ()


SECTIONS: Mapping[str, Section] = {
    "fsdp_config": Section(prefix="fsdp_", rows=FSDP),
    "deepspeed_config": Section(
        prefix="deepspeed_", rows=DEEPSPEED, others=(*NODE_LISTS, "deepspeed_multinode_launcher")
    ),
    "dynamo_config": Section(prefix="dynamo_", rows=DYNAMO),
    "megatron_lm_config": Section(prefix="megatron_lm_", rows=MEGATRON),
    "parallelism_config": Section(prefix="parallelism_config_", rows=PARALLELISM),
    "fp8_config": Section(prefix="fp8_", rows=FP8, others=("override_linear_precision",)),
}
