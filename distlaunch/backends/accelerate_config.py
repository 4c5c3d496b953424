"""Convert an Accelerate configuration file to the variables that ``accelerate launch`` sets.

Keys, variables and allowed values are those of Accelerate 1.15; older releases ignore unknown
variables. Not set are variables that distlaunch sets itself, and ``KMP_AFFINITY``, which would put
all workers of a node on the same cores.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from distlaunch.backends.config_file import Document
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, quoted

_MAX_NOTICES = 10
_MAX_COMPARED = 200
"""How many unknown keys get a notice, and how many are compared with known keys."""

_ACCUMULATION = "gradient_accumulation_steps"
"""Accelerate accepts this key only in ``deepspeed_config``. For other jobs, accelerate launch has
an option."""


class Config(Record):
    """A validated configuration. Nodes and devices are only compared with the plan."""

    document: Document
    kind: str
    precision: str | None
    notes: tuple[str, ...]
    of_deepspeed: tuple[str, ...]
    """Keys of ``deepspeed_config`` in the file, without those of ``-o settings``."""

    def number(self, name: str) -> int | None:
        """Return an integer; None if it is missing or -1. Raises ConfigError for other values."""
        value = self.document.values.get(name)
        if value is None or value == -1:
            return None
        if type(value) is not int or value < 0:
            raise ConfigError(
                f"{self.document.where(name)}: {name} takes a whole number, not "
                f"{quoted(str(value))}"
            )
        return value

    def text(self, name: str) -> str | None:
        """Return a value as text; None if it is missing."""
        value = self.document.values.get(name)
        return None if value is None else str(value)

    @property
    def uses_cpu(self) -> bool:
        """Whether the configuration is for CPUs."""
        return bool(self.document.values.get("use_cpu")) or self.kind == "MULTI_CPU"

    @property
    def deepspeed_file(self) -> str | None:
        """The path of DeepSpeed's own configuration; None if no file is named, or the text in its
        place is the configuration itself."""
        value = self.section("deepspeed_config").get("deepspeed_config_file")
        has_one = self.kind == "DEEPSPEED" and value is not None and str(value) != "none"
        return str(value) if has_one and not _is_inline(str(value)) else None

    def variables(self, precision: str | None) -> dict[str, str]:
        """Return the variables of all workers. Raises ConfigError for an invalid value."""
        found = precision or self.precision or "no"
        variables = {"ACCELERATE_MIXED_PRECISION": found}
        if found == "fp8":
            variables.update(self._fp8_variables())
        if self.kind == "DEEPSPEED":
            fields = [
                *self.of_deepspeed,
                *(["mixed_precision"] if not precision and self.precision else []),
            ]
            variables.update(self._section_variables("deepspeed_config", DEEPSPEED, "deepspeed_"))
            variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields).lower()
            variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        else:
            variables.update(self._section_variables("dynamo_config", DYNAMO, "dynamo_"))
            variables["ACCELERATE_DYNAMO_BACKEND"] = self._check_dynamo_backend(
                variables["ACCELERATE_DYNAMO_BACKEND"]
            )
        if self.kind == "FSDP":
            variables.update(self._fsdp_variables())
        if self.kind == "MEGATRON_LM":
            variables.update(
                self._section_variables("megatron_lm_config", MEGATRON, "megatron_lm_")
            )
            variables["ACCELERATE_USE_MEGATRON_LM"] = "true"
        if self.section("parallelism_config") and self.kind not in ("NO", "MULTI_CPU"):
            variables.update(self._parallelism_variables())
        if self.document.values.get("debug"):
            variables["ACCELERATE_DEBUG_MODE"] = "true"
        for name, value in variables.items():
            if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ConfigError(
                    f"{self.document.where()}: {name} would be {quoted(value)}, which no variable "
                    "can hold"
                )
        return variables

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the keys of a section. Raises ConfigError if it is not a mapping."""
        return _read_section(self.document, name)

    def _section_variables(
        self, section: str, rows: Mapping[str, Row], prefix: str
    ) -> dict[str, str]:
        """Return the variables of a section, whose keys may have the prefix of ``accelerate
        launch``'s options."""
        given = {
            (key if key in rows else key.removeprefix(prefix)): (key, value)
            for key, value in self.section(section).items()
            if value is not None
        }
        for name, (key, value) in given.items():
            if name in rows:
                check_value(
                    f"{self.document.where(section, key)}: {key}", value, rows[name].variable
                )
        return dict(_variables_of_rows({name: value for name, (_, value) in given.items()}, rows))

    def _fsdp_variables(self) -> dict[str, str]:
        variables = {
            **self._section_variables("fsdp_config", FSDP, "fsdp_"),
            "ACCELERATE_USE_FSDP": "true",
        }
        if (variables["FSDP_CPU_RAM_EFFICIENT_LOADING"], variables["FSDP_SYNC_MODULE_STATES"]) == (
            "true",
            "false",
        ):
            where = self.document.where("fsdp_config", "fsdp_sync_module_states")
            raise ConfigError(
                f"{where}: fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states: true",
                hint="only rank 0 loads the model, and the other ranks get it from there",
            )
        return variables

    def _parallelism_variables(self) -> dict[str, str]:
        variables = self._section_variables(
            "parallelism_config", PARALLELISM, "parallelism_config_"
        )
        defaults = {}
        if variables["PARALLELISM_CONFIG_CP_SIZE"] != "1":
            defaults["CP_COMM_STRATEGY"] = "allgather"
        if variables["PARALLELISM_CONFIG_SP_SIZE"] != "1":
            defaults.update(
                SP_SEQ_LENGTH="None",
                SP_SEQ_LENGTH_IS_VARIABLE="True",
                SP_ATTN_IMPLEMENTATION="sdpa",
            )
        named = {"PARALLELISM_CONFIG_" + name: value for name, value in defaults.items()}
        return {**named, **variables, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}

    def _fp8_variables(self) -> dict[str, str]:
        variables = self._section_variables("fp8_config", FP8, "fp8_")
        given = self.section("fp8_config").get("override_linear_precision") or (False,) * len(
            FP8_OVERRIDES
        )
        values = given.split(",") if isinstance(given, str) else given
        if not isinstance(values, list | tuple) or len(values) != len(FP8_OVERRIDES):
            where = self.document.where("fp8_config", "override_linear_precision")
            raise ConfigError(
                f"{where}: override_linear_precision needs three values, for forward, "
                "dgrad and wgrad"
            )
        overrides = zip(FP8_OVERRIDES, values, strict=True)
        return {
            **variables,
            **{f"ACCELERATE_FP8_OVERRIDE_{name}": str(value).strip() for name, value in overrides},
        }

    def _check_dynamo_backend(self, text: str) -> str:
        # YAML reads an unquoted "no" as false.
        name = "no" if text == "False" else text.lower()
        if name not in DYNAMO_BACKENDS:
            where = self.document.where("dynamo_config", "dynamo_backend")
            raise ConfigError(
                f"{where}: dynamo_backend {quoted(text)}", hint=_choices_hint(text, DYNAMO_BACKENDS)
            )
        return name.upper()


def read_config(document: Document, above: Mapping[str, Any] | None = None) -> Config:
    """Validate a configuration, overridden by the values in ``above``.

    Unknown keys give notes, unless they are nearly known ones. Raises ConfigError with file and
    line for values that are invalid or not supported here.
    """
    of_deepspeed = tuple(_read_section(document, "deepspeed_config"))
    document = _merge(document, above or {})
    values = document.values
    notes = tuple(_unknown_keys(document))
    environment = values.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise ConfigError(
            f"{document.where('compute_environment')}: {quoted(str(environment))} is "
            "supported by accelerate launch only",
            hint="compute_environment: LOCAL_MACHINE is for any machines that you can log in to",
        )
    if "distributed_type" not in values:
        raise ConfigError(f"{document.where()}: distributed_type is missing", hint=", ".join(TYPES))
    kind = "NO" if values["distributed_type"] is False else str(values["distributed_type"])
    if kind in ("XLA", "TPU"):
        raise ConfigError(f"{document.where('distributed_type')}: distlaunch does not support TPUs")
    if kind not in TYPES:
        raise ConfigError(
            f"{document.where('distributed_type')}: {quoted(kind)}", hint=_choices_hint(kind, TYPES)
        )
    precision = values.get("mixed_precision", "fp16" if values.get("fp16") else None)
    precision = "no" if precision is False else precision
    if precision is not None and str(precision).lower() not in PRECISIONS:
        raise ConfigError(
            f"{document.where('mixed_precision')}: mixed_precision {quoted(str(precision))}",
            hint=_choices_hint(str(precision), PRECISIONS),
        )
    if "dynamo_backend" in values and "dynamo_config" not in values:  # Accelerate before 0.17
        document = Document(
            path=document.path,
            values={**values, "dynamo_config": {"dynamo_backend": values["dynamo_backend"]}},
            lines=document.lines,
        )
    return Config(
        document=document,
        kind=kind,
        precision=None if precision is None else str(precision).lower(),
        notes=notes,
        of_deepspeed=of_deepspeed,
    )


def _merge(document: Document, above: Mapping[str, Any]) -> Document:
    """Merge sections by key; a value of None removes a key."""
    values, lines = dict(document.values), dict(document.lines)
    for name, value in above.items():
        if name in SECTIONS and isinstance(value, Mapping):
            kept = {
                key: each for key, each in _read_section(document, name).items() if key not in value
            }
            values[name] = {**kept, **value}  # the last of two names for one key counts
            lines = {
                keys: line
                for keys, line in lines.items()
                if keys[:1] != (name,) or keys[-1] in kept
            }
        else:
            values[name] = value
            lines.pop((name,), None)
    present = {name: value for name, value in values.items() if value is not None}
    return Document(path=document.path, values=present, lines=lines)


def _is_inline(text: str) -> bool:
    """Return whether a text is JSON, possibly in base64, which Accelerate accepts as a file name."""
    for decoded in (bytes, urlsafe_b64decode):
        with suppress(ValueError, RecursionError):
            return isinstance(json.loads(decoded(text.encode())), dict)
    return False


def _variables_of_rows(
    given: Mapping[str, Any], rows: Mapping[str, Row]
) -> Iterator[tuple[str, str]]:
    for name, row in rows.items():
        value = str(given[name]) if name in given else row.default
        if value is not None:
            yield row.variable, value.lower() if row.lower else value


def _read_section(document: Document, name: str) -> Mapping[str, Any]:
    value = document.values.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{document.where(name)}: {name} takes names and values, not {quoted(str(value))}"
        )
    return value


def _unknown_keys(document: Document) -> Iterator[str]:
    """Yield notices about unknown keys, which a newer Accelerate may know.

    Raises ConfigError for a key that is probably misspelt.
    """
    unknown: list[tuple[tuple[str, ...], frozenset[str]]] = [
        ((name,), TOP_LEVEL_KEYS) for name in document.values if name not in TOP_LEVEL_KEYS
    ]
    for name, section in SECTIONS.items():
        known = {*section.rows, *(section.prefix + key for key in section.rows), *section.others}
        unknown += [
            ((name, key), frozenset(known))
            for key in _read_section(document, name)
            if key not in known
        ]
    for at, (keys, known_names) in enumerate(unknown[:_MAX_COMPARED]):
        message = f"{document.where(*keys)}: {quoted(keys[-1])} is not known"
        near = get_close_matches(keys[-1], sorted(known_names), n=1, cutoff=0.85)
        if near:
            raise ConfigError(message, hint=f"did you mean {near[0]}?")
        if at < _MAX_NOTICES:
            instead = (
                "; -o gradient-accumulation-steps=N sets it" if keys == (_ACCUMULATION,) else ""
            )
            yield f"{message} and is ignored{instead}"
    if len(unknown) > _MAX_NOTICES:
        more = (
            f"{counted(len(unknown) - _MAX_NOTICES, 'more key')} "
            f"{'is' if len(unknown) == _MAX_NOTICES + 1 else 'are'}"
        )
        yield f"{document.where()}: {more} not known: is it a configuration of Accelerate?"


def _choices_hint(text: str, known_names: tuple[str, ...]) -> str:
    near = get_close_matches(text, known_names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(known_names)}"


PRECISIONS = ("no", "fp16", "bf16", "fp8")
DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune")
DYNAMO_BACKENDS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
    "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron",
)  # fmt: skip
ON_GPUS = (
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
)
TYPES = ("NO", "MULTI_CPU", *ON_GPUS, "FSDP", "DEEPSPEED", "MEGATRON_LM")

TOP_LEVEL_KEYS = frozenset({
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config",
    "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config", "fp16",
    "dynamo_backend",
})  # fmt: skip


class Row(Record):
    """A key of a section: its variable, its default, and whether its value is in lower case."""

    variable: str
    default: str | None = None
    lower: bool = False


def _make_rows(prefix: str, lower: str = "", as_is: str = "", **defaults: str) -> dict[str, Row]:
    """Name variables by the prefix and the key in upper case."""
    names = {**dict.fromkeys(as_is.split(), False), **dict.fromkeys(lower.split(), True)}
    return {
        name: Row(variable=prefix + name.upper(), default=defaults.get(name), lower=is_lower)
        for name, is_lower in names.items()
    }


FSDP = {
    **_make_rows(
        "FSDP_",
        lower="reshard_after_forward offload_params forward_prefetch use_orig_params "
        "cpu_ram_efficient_loading"
        " sync_module_states activation_checkpointing activation_checkpointing_offload",
        as_is="version sharding_strategy min_num_params auto_wrap_policy backward_prefetch "
        "state_dict_type"
        " ignored_modules",
        version="1",
        sharding_strategy="FULL_SHARD",
        reshard_after_forward="true",
        offload_params="false",
        min_num_params="100000000",
        forward_prefetch="false",
        use_orig_params="true",
        cpu_ram_efficient_loading="true",
        sync_module_states="true",
        activation_checkpointing="false",
        activation_checkpointing_offload="false",
    ),
    "transformer_layer_cls_to_wrap": Row(variable="FSDP_TRANSFORMER_CLS_TO_WRAP"),
}
DEEPSPEED = {
    **_make_rows(
        "ACCELERATE_DEEPSPEED_",
        lower="offload_optimizer_device offload_param_device zero3_save_16bit_model",
        as_is="zero_stage offload_optimizer_nvme_path offload_param_nvme_path",
    ),
    **_make_rows(
        "ACCELERATE_",
        lower="gradient_clipping",
        as_is="gradient_accumulation_steps deepspeed_config_file",
    ),
    "zero3_init_flag": Row(variable="ACCELERATE_DEEPSPEED_ZERO3_INIT", lower=True),
    "deepspeed_moe_layer_cls_names": Row(variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
}
DEEPSPEED_FILE = DEEPSPEED["deepspeed_config_file"].variable
NODE_LISTS = ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter")
DYNAMO = {
    "backend": Row(variable="ACCELERATE_DYNAMO_BACKEND", default="NO"),
    "mode": Row(variable="ACCELERATE_DYNAMO_MODE", default="default"),
    **_make_rows(
        "ACCELERATE_DYNAMO_",
        as_is="use_fullgraph use_dynamic use_regional_compilation",
        use_fullgraph="False",
        use_dynamic="False",
        use_regional_compilation="False",
    ),
}
MEGATRON = _make_rows(
    "MEGATRON_LM_",
    as_is="tp_degree use_custom_fsdp no_load_optim eod_mask_loss no_save_optim "
    "optimizer_cpu_offload"
    " use_precision_aware_optimizer overlap_cpu_optimizer_d2h_h2d decoder_last_pipeline_num_layers "
    "pp_degree"
    " gradient_clipping num_micro_batches sequence_parallelism recompute_activations "
    "use_distributed_optimizer"
    " recompute_granularity recompute_method recompute_num_layers attention_backend "
    "expert_model_parallel_size"
    " context_parallel_size attention_dropout hidden_dropout attention_softmax_in_fp32 "
    "expert_tensor_parallel_size"
    " calculate_per_token_loss use_rotary_position_embeddings",
    tp_degree="1",
    use_custom_fsdp="False",
    no_load_optim="False",
    eod_mask_loss="False",
    no_save_optim="False",
    optimizer_cpu_offload="False",
    use_precision_aware_optimizer="False",
    overlap_cpu_optimizer_d2h_h2d="False",
    pp_degree="1",
    gradient_clipping="1.0",
)
PARALLELISM = _make_rows(
    "PARALLELISM_CONFIG_",
    as_is="dp_replicate_size dp_shard_size tp_size cp_size cp_backend sp_size sp_backend "
    "cp_comm_strategy"
    " sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
    dp_replicate_size="1",
    dp_shard_size="1",
    tp_size="1",
    cp_size="1",
    cp_backend="torch",
    sp_size="1",
    sp_backend="deepspeed",
)
FP8 = _make_rows(
    "ACCELERATE_FP8_",
    as_is="backend use_autocast_during_eval margin interval format amax_history_len "
    "amax_compute_algo opt_level"
    " enable_fsdp_float8_all_gather pad_inner_dim amax_compute_algorithm amax_history_length "
    "optimization_level",
    use_autocast_during_eval="False",
    margin="0",
    interval="1",
    format="HYBRID",
    amax_history_len="1024",
    amax_compute_algo="most_recent",
    opt_level="O2",
    enable_fsdp_float8_all_gather="1",
    pad_inner_dim="1",
)
FP8_OVERRIDES = ("FPROP", "DGRAD", "WGRAD")

DECIDED_VARIABLES = (
    *(
        f"ACCELERATE_USE_{way}"
        for way in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG", "CPU")
    ),
    "ACCELERATE_CONFIG_DS_FIELDS",
    *(
        row.variable
        for rows in (FSDP, DEEPSPEED, MEGATRON, PARALLELISM)
        for row in rows.values()
        if row.variable != "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"  # any script may read it
    ),
)
"""A configuration determines these completely. A key that is missing in the file has its default.
"""


class Section(Record):
    """A section of the file.

    ``prefix`` is what the options of ``accelerate launch`` have. ``others`` are keys without a
    variable.
    """

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


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_NUMBERS_OF_STRATEGIES = tuple("12345")
_DEVICES = ("none", "cpu", "nvme")
_SWITCH = ("true", "false")
_WHOLE, _WHOLE_OR_AUTO, _NUMBER_OR_AUTO = (
    "a whole number",
    "a whole number or auto",
    "a number or auto",
)
_SHAPES: Mapping[str, re.Pattern[str]] = {
    _WHOLE: re.compile("[0-9]+"),
    _WHOLE_OR_AUTO: re.compile("[0-9]+|auto"),
    _NUMBER_OR_AUTO: re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|auto", re.IGNORECASE),
}
_ALLOWED_VALUES: Mapping[str, str | tuple[str, ...]] = {
    "FSDP_VERSION": ("1", "2"),
    "FSDP_SHARDING_STRATEGY": _STRATEGIES,
    "FSDP_RESHARD_AFTER_FORWARD": (*_SWITCH, *_STRATEGIES),  # of version 2 and of version 1
    "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "FSDP_STATE_DICT_TYPE": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": tuple("0123"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": _DEVICES,
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": _DEVICES,
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _WHOLE_OR_AUTO,
    "ACCELERATE_GRADIENT_CLIPPING": _NUMBER_OR_AUTO,
    **dict.fromkeys(
        (
            "FSDP_OFFLOAD_PARAMS", "FSDP_FORWARD_PREFETCH", "FSDP_USE_ORIG_PARAMS", "FSDP_CPU_RAM_EFFICIENT_LOADING",
            "FSDP_SYNC_MODULE_STATES", "FSDP_ACTIVATION_CHECKPOINTING", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
            "ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_DYNAMO_USE_DYNAMIC",
            "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        ),
        _SWITCH,
    ),
    **dict.fromkeys(
        (
            "FSDP_MIN_NUM_PARAMS", "MEGATRON_LM_TP_DEGREE", "MEGATRON_LM_PP_DEGREE", "MEGATRON_LM_NUM_MICRO_BATCHES",
            *(f"PARALLELISM_CONFIG_{name}_SIZE" for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")),
        ),
        _WHOLE,
    ),
}  # fmt: skip
"""One of these values in any case, or this form. Other variables accept any text."""
_SYNONYMS = {
    text: each
    for each, words in (("true", "y yes t on 1"), ("false", "n no f off 0"))
    for text in words.split()
}


def check_value(what: str, value: Any, variable: str) -> None:
    """Raise ConfigError for a value of ``variable`` that Accelerate rejects with a traceback on
    every rank.

    ``what`` begins the message. A variable that is not in the table accepts any single value.
    """
    allowed = _ALLOWED_VALUES.get(variable, ())
    if isinstance(value, Mapping | list):
        found, hint = (
            ("names and values", None)
            if isinstance(value, Mapping)
            else ("a list", "A,B for several")
        )
        raise ConfigError(f"{what} takes one value, not {found}", hint=hint)
    text = str(value)
    if isinstance(allowed, str):
        if not _SHAPES[allowed].fullmatch(text):
            raise ConfigError(f"{what} takes {allowed}, not {quoted(text)}")
        return
    names = [each.lower() for each in allowed]
    lower = text.lower()
    lower = _SYNONYMS.get(lower, lower) if "true" in names else lower
    is_number_of_one = _STRATEGIES[0] in allowed and text in _NUMBERS_OF_STRATEGIES
    if allowed and lower not in names and not is_number_of_one:
        near = get_close_matches(lower, names, n=1, cutoff=0.6)
        hint = f"did you mean {allowed[names.index(near[0])]}?" if near else None
        raise ConfigError(
            f"{what} takes {', '.join(allowed[:-1])} or {allowed[-1]}, not {quoted(text)}",
            hint=hint,
        )
