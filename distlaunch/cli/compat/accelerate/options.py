"""The option table of ``distlaunch accelerate launch``: Accelerate's options, then those of train.

Accelerate's options are those of release 1.15. Many are keys of its configuration file; their table
is in ``backends``. An option that train has as well is train's row with Accelerate's spelling. All
other options of train are accepted too.
"""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.backends.accelerate_config import (
    DYNAMO_BACKENDS,
    DYNAMO_MODES,
    PRECISIONS,
    SECTIONS,
)
from distlaunch.cli.compat.drop_in import row, same, with_trains
from distlaunch.cli.option import Option
from distlaunch.core.model.record import Record

WAYS = {
    "multi_gpu": "MULTI_GPU",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
}
"""By option, what a file calls ``distributed_type``."""
BELONGS = {
    "fsdp_config": ("FSDP", "--use_fsdp"),
    "deepspeed_config": ("DEEPSPEED", "--use_deepspeed"),
    "megatron_lm_config": ("MEGATRON_LM", "--use_megatron_lm"),
}
"""Sections of the configuration that Accelerate uses with only one ``distributed_type``: this type,
and the option that selects it."""
_NO_OPTIONS = {
    "fsdp_config": ("ignored_modules",),
    "fp8_config": ("amax_compute_algorithm", "amax_history_length", "optimization_level"),
}
"""Keys that a configuration file may have, but for which Accelerate has no option."""
_SWITCHES = ("use_fullgraph", "use_dynamic", "use_regional_compilation", "use_autocast_during_eval")
_CHOICES = {"dynamo_backend": DYNAMO_BACKENDS, "dynamo_mode": DYNAMO_MODES}
FLOATS = (
    "gradient_clipping",
    "megatron_lm_gradient_clipping",
    "megatron_lm_attention_dropout",
    "megatron_lm_hidden_dropout",
)
"""Fields whose text Accelerate converts to a float, and writes as a float."""


class AccelerateSetting(Record):
    """An option that is a key in a section of the configuration, and the variable that Accelerate
    sets from it."""

    section: str
    key: str
    variable: str
    option: Option


def _settings() -> Iterator[AccelerateSetting]:
    for name, section in SECTIONS.items():
        whose = f"as in the file's {name}" + (f", of {BELONGS[name][1]}" if name in BELONGS else "")
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
                option = row(flag, "flag", "backend", about)
            else:
                choices = _CHOICES.get(field, ())
                option = row(
                    flag,
                    "choice" if choices else "text",
                    "backend",
                    about,
                    metavar="VALUE",
                    choices=choices,
                )
            yield AccelerateSetting(section=name, key=key, variable=variable, option=option)


SETTINGS: tuple[AccelerateSetting, ...] = tuple(_settings())
REFUSED: tuple[Option, ...] = (
    row("--tpu", "flag", "refused", "TPUs are not supported."),
    row("--tpu-cluster", "flag", "refused", "TPUs are not supported."),
    row("--tpu-use-sudo", "flag", "refused", "TPUs are not supported."),
    row("--vm", "text", "refused", "TPUs are not supported.", metavar="NAME", repeatable=True),
    row(
        "--aws-access-key-id",
        "text",
        "refused",
        "SageMaker is started by accelerate itself.",
        metavar="ID",
    ),
    row(
        "--aws-secret-access-key",
        "text",
        "refused",
        "SageMaker is started by accelerate itself.",
        metavar="KEY",
    ),
    row(
        "--mpirun-hostfile",
        "text",
        "refused",
        "Use --hostfile FILE, which does not need MPI.",
        metavar="FILE",
    ),
)
NEEDLESS: tuple[Option, ...] = (
    row(
        "-t --tee",
        "text",
        "no effect",
        "All output is shown, and written to a file for each rank.",
        metavar="N",
    ),
    row(
        "--monitor-interval",
        "text",
        "no effect",
        "distlaunch notices the end of a worker at once.",
        metavar="S",
    ),
    row(
        "--rdzv-conf",
        "text",
        "no effect",
        "Use --join-timeout for the time that nodes have to join.",
        metavar="K=V",
    ),
    row(
        "--same-network",
        "flag",
        "no effect",
        "The launchers connect to --main-process-ip.",
    ),
    row(
        "--deepspeed-multinode-launcher",
        "text",
        "no effect",
        "Hosts of a list are reached by SSH.",
        metavar="NAME",
    ),
    row("--main-training-function", "text", "no effect", "TPUs are not supported.", metavar="NAME"),
    row("--downcast-bf16", "flag", "no effect", "TPUs are not supported."),
    row("--no-tpu-cluster", "flag", "no effect", "TPUs are not supported."),
)
"""Options that have no effect here. A notice says so once."""

OWN: tuple[Option, ...] = (
    row(
        "--config-file",
        "text",
        "backend",
        ("Configuration file of accelerate. Default: the file that accelerate config writes."),
        metavar="FILE",
    ),
    row(
        "--num-processes",
        "count",
        "size",
        (
            "Number of workers in the whole job. Default: as in the configuration "
            "file, else one per GPU."
        ),
        metavar="N",
    ),
    row(
        "--cpu",
        "flag",
        "size",
        (
            "Use CPUs; one worker unless --num-processes is given. The default "
            "configuration file is not read."
        ),
    ),
    row("--multi-gpu", "flag", "backend", "Use DDP, whatever the configuration file says."),
    row(
        "--use-deepspeed", "flag", "backend", "Use DeepSpeed, whatever the configuration file says."
    ),
    row("--use-fsdp", "flag", "backend", "Use FSDP, whatever the configuration file says."),
    row(
        "--use-megatron-lm",
        "flag",
        "backend",
        "Use Megatron-LM, whatever the configuration file says.",
    ),
    row(
        "--use-parallelism-config",
        "flag",
        "backend",
        "Use the options --parallelism-config-... together with --use-fsdp.",
    ),
    row(
        "--num-machines",
        "count",
        "nodes",
        (
            "Number of machines, each with a launcher; with a list of hosts, how "
            "many of them to use."
        ),
        metavar="N",
    ),
    row(
        "--machine-rank",
        "whole",
        "nodes",
        "Rank of this machine. The first machine has rank 0.",
        metavar="N",
    ),
    row(
        "--main-process-ip",
        "text",
        "rendezvous",
        "Address of machine 0, if there is no list of hosts.",
        metavar="HOST",
    ),
    row(
        "--main-process-port",
        "whole",
        "rendezvous",
        ("Port of machine 0. Default: 29500 with several machines, a free port on one machine."),
        metavar="PORT",
    ),
    row(
        "--rdzv-backend",
        "text",
        "rendezvous",
        "With c10d, machines do not need --machine-rank.",
        metavar="static|c10d",
    ),
    row("--role", "text", "workers", "Value of ROLE_NAME. Default: default.", metavar="NAME"),
    row(
        "--mixed-precision",
        "choice",
        "backend",
        "Precision of the forward pass.",
        choices=PRECISIONS,
    ),
    row(
        "--num-cpu-threads-per-process",
        "count",
        "workers",
        "Value of OMP_NUM_THREADS.",
        metavar="N",
    ),
    row(
        "--enable-cpu-affinity",
        "flag",
        "workers",
        "Let Accelerate bind each worker to the CPUs near its GPU.",
    ),
    row(
        "--debug",
        "flag",
        "backend",
        "Let Accelerate compare the shapes of tensors before each collective.",
    ),
    *REFUSED,
    *NEEDLESS,
    *(setting.option for setting in SETTINGS),
)
"""What no option of train is."""

THEIRS = (
    *OWN,
    same("gpus", "--gpu-ids", "Use these GPUs, in this order. all is every GPU."),
    same("module"),
    same("no_python"),
    same("quiet", "-q --quiet"),
    same("log_dir"),
    same("max_restarts"),
    same("hostfile", "--deepspeed-hostfile --hostfile"),
    same("include", "--deepspeed-inclusion-filter --include"),
    same("exclude", "--deepspeed-exclusion-filter --exclude"),
)
SPELLING = tuple(
    (option.name, f"--{option.name[2:].replace('-', '_')}")
    for option in THEIRS
    if "-" in option.name[2:]
)
"""Accelerate's spelling of options in messages, with underscores. Dashes are accepted too."""

OPTIONS: tuple[Option, ...] = with_trains(THEIRS, "accelerate")
