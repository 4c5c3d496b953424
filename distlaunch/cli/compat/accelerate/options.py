"""The option table of ``distlaunch accelerate launch``.

The options are those of Accelerate 1.15, then those of train. Many are keys of its configuration
file; their table is in ``backends``. An option that both have is train's row with Accelerate's
spelling.
"""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.backends.accelerate_config import (
    DYNAMO_BACKENDS,
    DYNAMO_MODES,
    PRECISIONS,
    SECTIONS,
)
from distlaunch.cli.compat.drop_in import own_option, train_option, underscored, with_train_options
from distlaunch.cli.option import Option
from distlaunch.core.model.record import Record

TYPE_BY_OPTION = {
    "multi_gpu": "MULTI_GPU",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
}
"""Values of ``distributed_type``, by the option with the same effect."""
TYPE_OF_SECTION = {
    "fsdp_config": ("FSDP", "--use_fsdp"),
    "deepspeed_config": ("DEEPSPEED", "--use_deepspeed"),
    "megatron_lm_config": ("MEGATRON_LM", "--use_megatron_lm"),
}
"""Sections that Accelerate uses with only one ``distributed_type``, and the option that selects it.
"""
_NO_OPTIONS = {
    "fsdp_config": ("ignored_modules",),
    "fp8_config": ("amax_compute_algorithm", "amax_history_length", "optimization_level"),
}
"""Keys of a configuration file for which Accelerate has no option."""
_SWITCHES = ("use_fullgraph", "use_dynamic", "use_regional_compilation", "use_autocast_during_eval")
_CHOICES = {"dynamo_backend": DYNAMO_BACKENDS, "dynamo_mode": DYNAMO_MODES}
FLOATS = (
    "gradient_clipping",
    "megatron_lm_gradient_clipping",
    "megatron_lm_attention_dropout",
    "megatron_lm_hidden_dropout",
)
"""Fields that Accelerate writes as a float."""


class AccelerateSetting(Record):
    """An option that is a key of the configuration, and the variable that Accelerate sets from it."""

    section: str
    key: str
    variable: str
    option: Option


def _accelerate_settings() -> Iterator[AccelerateSetting]:
    for name, section in SECTIONS.items():
        whose = f"as in the file's {name}" + (
            f", of {TYPE_OF_SECTION[name][1]}" if name in TYPE_OF_SECTION else ""
        )
        keys = {
            key: each.variable
            for key, each in section.rows.items()
            if key not in _NO_OPTIONS.get(name, ())
        }
        if name == "fp8_config":
            keys["override_linear_precision"] = ""
        for key, variable in keys.items():
            field = key if name == "deepspeed_config" else section.prefix + key
            flag = f"--{field.replace('_', '-')}"
            about = f"{key}, {whose}."
            if key in _SWITCHES:
                option = own_option(flag, "flag", "backend", about)
            else:
                choices = _CHOICES.get(field, ())
                option = own_option(
                    flag,
                    "choice" if choices else "text",
                    "backend",
                    about,
                    metavar="VALUE",
                    choices=choices,
                )
            yield AccelerateSetting(section=name, key=key, variable=variable, option=option)


SETTINGS: tuple[AccelerateSetting, ...] = tuple(_accelerate_settings())
REFUSED_OPTIONS: tuple[Option, ...] = (
    own_option("--tpu", "flag", "refused", "TPUs are not supported."),
    own_option("--tpu-cluster", "flag", "refused", "TPUs are not supported."),
    own_option("--tpu-use-sudo", "flag", "refused", "TPUs are not supported."),
    own_option(
        "--vm", "text", "refused", "TPUs are not supported.", metavar="NAME", repeatable=True
    ),
    own_option(
        "--aws-access-key-id",
        "text",
        "refused",
        "SageMaker is started by accelerate itself.",
        metavar="ID",
    ),
    own_option(
        "--aws-secret-access-key",
        "text",
        "refused",
        "SageMaker is started by accelerate itself.",
        metavar="KEY",
    ),
    own_option(
        "--mpirun-hostfile",
        "text",
        "refused",
        "Use --hostfile FILE, which does not need MPI.",
        metavar="FILE",
    ),
)
IGNORED_OPTIONS: tuple[Option, ...] = (
    own_option(
        "-t --tee",
        "text",
        "no effect",
        "All output is shown, and written to a file for each rank.",
        metavar="N",
    ),
    own_option(
        "--monitor-interval",
        "text",
        "no effect",
        "distlaunch notices the end of a worker at once.",
        metavar="S",
    ),
    own_option(
        "--rdzv-conf",
        "text",
        "no effect",
        "Use --join-timeout for the time that nodes have to join.",
        metavar="K=V",
    ),
    own_option(
        "--same-network",
        "flag",
        "no effect",
        "The launchers connect to --main-process-ip.",
    ),
    own_option(
        "--deepspeed-multinode-launcher",
        "text",
        "no effect",
        "Hosts of a list are reached by SSH.",
        metavar="NAME",
    ),
    own_option(
        "--main-training-function", "text", "no effect", "TPUs are not supported.", metavar="NAME"
    ),
    own_option("--downcast-bf16", "flag", "no effect", "TPUs are not supported."),
    own_option("--no-tpu-cluster", "flag", "no effect", "TPUs are not supported."),
)
"""Options without effect, as a notice says once."""

OWN_OPTIONS: tuple[Option, ...] = (
    own_option(
        "--config-file",
        "text",
        "backend",
        ("Configuration file of accelerate. Default: the file that accelerate config writes."),
        metavar="FILE",
    ),
    own_option(
        "--num-processes",
        "count",
        "size",
        (
            "Number of workers in the whole job. Default: as in the configuration "
            "file, else one per GPU."
        ),
        metavar="N",
    ),
    own_option(
        "--cpu",
        "flag",
        "size",
        (
            "Use CPUs; one worker unless --num-processes is given. The default "
            "configuration file is not read."
        ),
    ),
    own_option("--multi-gpu", "flag", "backend", "Use DDP, whatever the configuration file says."),
    own_option(
        "--use-deepspeed", "flag", "backend", "Use DeepSpeed, whatever the configuration file says."
    ),
    own_option("--use-fsdp", "flag", "backend", "Use FSDP, whatever the configuration file says."),
    own_option(
        "--use-megatron-lm",
        "flag",
        "backend",
        "Use Megatron-LM, whatever the configuration file says.",
    ),
    own_option(
        "--use-parallelism-config",
        "flag",
        "backend",
        "Use the options --parallelism-config-... together with --use-fsdp.",
    ),
    own_option(
        "--num-machines",
        "count",
        "nodes",
        (
            "Number of machines, each with a launcher; with a list of hosts, how "
            "many of them to use."
        ),
        metavar="N",
    ),
    own_option(
        "--machine-rank",
        "whole",
        "nodes",
        "Rank of this machine. The first machine has rank 0.",
        metavar="N",
    ),
    own_option(
        "--main-process-ip",
        "text",
        "rendezvous",
        "Address of machine 0, if there is no list of hosts.",
        metavar="HOST",
    ),
    own_option(
        "--main-process-port",
        "whole",
        "rendezvous",
        ("Port of machine 0. Default: 29500 with several machines, a free port on one machine."),
        metavar="PORT",
    ),
    own_option(
        "--rdzv-backend",
        "text",
        "rendezvous",
        "With c10d, machines do not need --machine-rank.",
        metavar="static|c10d",
    ),
    own_option(
        "--role", "text", "workers", "Value of ROLE_NAME. Default: default.", metavar="NAME"
    ),
    own_option(
        "--mixed-precision",
        "choice",
        "backend",
        "Precision of the forward pass.",
        choices=PRECISIONS,
    ),
    own_option(
        "--num-cpu-threads-per-process",
        "count",
        "workers",
        "Value of OMP_NUM_THREADS.",
        metavar="N",
    ),
    own_option(
        "--enable-cpu-affinity",
        "flag",
        "workers",
        "Let Accelerate bind each worker to the CPUs near its GPU.",
    ),
    own_option(
        "--debug",
        "flag",
        "backend",
        "Let Accelerate compare the shapes of tensors before each collective.",
    ),
    *REFUSED_OPTIONS,
    *IGNORED_OPTIONS,
    *(setting.option for setting in SETTINGS),
)

COMMAND_OPTIONS: tuple[Option, ...] = underscored(
    (
        *OWN_OPTIONS,
        train_option("gpus", "--gpu-ids", "Use these GPUs, in this order. all is every GPU."),
        train_option("module"),
        train_option("no_python"),
        train_option("quiet", "-q --quiet"),
        train_option("log_dir"),
        train_option("max_restarts"),
        train_option("hostfile", "--deepspeed-hostfile --hostfile"),
        train_option("include", "--deepspeed-inclusion-filter --include"),
        train_option("exclude", "--deepspeed-exclusion-filter --exclude"),
    )
)
OPTIONS: tuple[Option, ...] = with_train_options(COMMAND_OPTIONS, "accelerate")
