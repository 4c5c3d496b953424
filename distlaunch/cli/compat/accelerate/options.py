"""The one table of ``distlaunch accelerate launch``'s options: those of Accelerate's launcher, then
train's.

The former are those of Accelerate 1.15; many are keys of its configuration files, whose table is
the backend's. Where an option of train means the same, the row is train's with Accelerate's
spelling; what train has beyond is taken, too.
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
"""Sections of which Accelerate makes something under one ``distributed_type`` alone, and what
chooses that."""
_NO_OPTIONS = {
    "fsdp_config": ("ignored_modules",),
    "fp8_config": ("amax_compute_algorithm", "amax_history_length", "optimization_level"),
}
"""Keys that are a file's alone."""
_SWITCHES = ("use_fullgraph", "use_dynamic", "use_regional_compilation", "use_autocast_during_eval")
_CHOICES = {"dynamo_backend": DYNAMO_BACKENDS, "dynamo_mode": DYNAMO_MODES}
FLOATS = (
    "gradient_clipping",
    "megatron_lm_gradient_clipping",
    "megatron_lm_attention_dropout",
    "megatron_lm_hidden_dropout",
)
"""Of those, the fields whose text Accelerate reads as a number and writes anew."""


class Setting(Record):
    """An option that is a key of a section, and the variable that becomes of it."""

    section: str
    key: str
    variable: str
    option: Option


def _settings() -> Iterator[Setting]:
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
            yield Setting(section=name, key=key, variable=variable, option=option)


SETTINGS: tuple[Setting, ...] = tuple(_settings())
REFUSED: tuple[Option, ...] = (
    row("--tpu", "flag", "size", "Refused, as all that follows: TPUs are not started here."),
    row("--tpu-cluster", "flag", "size", "As --tpu."),
    row("--tpu-use-sudo", "flag", "size", "As --tpu."),
    row("--vm", "text", "size", "As --tpu.", metavar="NAME", repeatable=True),
    row(
        "--aws-access-key-id",
        "text",
        "nodes",
        "Refused: SageMaker is Accelerate's own.",
        metavar="ID",
    ),
    row(
        "--aws-secret-access-key",
        "text",
        "nodes",
        "Refused: SageMaker is Accelerate's own.",
        metavar="KEY",
    ),
    row(
        "--mpirun-hostfile",
        "text",
        "nodes",
        "Refused: --hostfile FILE does without MPI.",
        metavar="FILE",
    ),
)
NEEDLESS: tuple[Option, ...] = (
    row(
        "-t --tee",
        "text",
        "output",
        "No effect: all output is shown, and filed for each rank.",
        metavar="N",
    ),
    row(
        "--monitor-interval",
        "text",
        "failure",
        "No effect: the end of a worker is noticed at once.",
        metavar="S",
    ),
    row(
        "--rdzv-conf",
        "text",
        "rendezvous",
        "No effect: --join-timeout is how long nodes may take.",
        metavar="K=V",
    ),
    row(
        "--same-network",
        "flag",
        "rendezvous",
        "No effect: launchers meet where --main-process-ip says.",
    ),
    row(
        "--deepspeed-multinode-launcher",
        "text",
        "nodes",
        "No effect: hosts of a list are reached by SSH.",
        metavar="NAME",
    ),
    row("--main-training-function", "text", "script", "No effect: it is for TPUs.", metavar="NAME"),
    row("--downcast-bf16", "flag", "backend", "No effect: it is for TPUs."),
    row("--no-tpu-cluster", "flag", "size", "No effect: TPUs are not started here."),
)
"""What changes nothing, which is told once."""

OWN: tuple[Option, ...] = (
    row("--config-file", "text", "backend", "The file of accelerate config; else its own "
    "default.", metavar="FILE"),
    row("--num-processes", "count", "size", "Workers in all, over all machines (the file's, or one "
    "for each GPU).",
        metavar="N"),
    row("--cpu", "flag", "size", "Workers on CPUs (one, without --num-processes); the default file "
    "is not read."),
    row("--multi-gpu", "flag", "backend", "DDP, whatever the file says."),
    row("--use-deepspeed", "flag", "backend", "DeepSpeed, whatever the file says."),
    row("--use-fsdp", "flag", "backend", "FSDP, whatever the file says."),
    row("--use-megatron-lm", "flag", "backend", "Megatron-LM, whatever the file says."),
    row("--use-parallelism-config", "flag", "backend", "Take --parallelism-config-...; with "
    "--use-fsdp."),
    row("--num-machines", "count", "nodes", "Machines, each with a launcher; or how many of a list "
    "of hosts.",
        metavar="N"),
    row("--machine-rank", "whole", "nodes", "Which of the machines this is, counted from 0.", metavar="N"),
    row("--main-process-ip", "text", "rendezvous", "Where machine 0 is, of several without a "
    "list.", metavar="HOST"),
    row("--main-process-port", "whole", "rendezvous", "Of several machines, where they meet "
    "(29500); of one, rank 0's"
        " port; 0 and else a free one.", metavar="PORT"),
    row("--rdzv-backend", "text", "rendezvous", "With c10d machines may be numbered as they come.",
        metavar="static|c10d"),
    row("--role", "text", "workers", "What ROLE_NAME says (default).", metavar="NAME"),
    row("--mixed-precision", "choice", "backend", "What forward computes in.", choices=PRECISIONS),
    row("--num-cpu-threads-per-process", "count", "workers", "What OMP_NUM_THREADS says.", metavar="N"),
    row("--enable-cpu-affinity", "flag", "workers", "Have Accelerate bind workers to the CPUs near "
    "their GPU."),
    row("--debug", "flag", "backend", "Have Accelerate compare the shapes of tensors before each "
    "collective."),
    *REFUSED,
    *NEEDLESS,
    *(setting.option for setting in SETTINGS),
)  # fmt: skip
"""What no option of train is."""

THEIRS = (
    *OWN,
    same("gpus", "--gpu-ids", "Which GPUs; all is all of them."),
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
"""How Accelerate writes them; dashes are taken as well."""

OPTIONS: tuple[Option, ...] = with_trains(THEIRS, "accelerate")
