"""Translate the command line of ``accelerate launch`` into options of train. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distlaunch.backends.accelerate_config import NODE_LISTS, Config, check_value
from distlaunch.cli.compat.accelerate.options import (
    FLOATS,
    IGNORED_OPTIONS,
    OPTIONS,
    OWN_OPTIONS,
    REFUSED_OPTIONS,
    SETTINGS,
    TYPE_BY_OPTION,
    TYPE_OF_SECTION,
)
from distlaunch.cli.compat.drop_in import Translation, option_names
from distlaunch.cli.parser import Given, build
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import quoted
from distlaunch.planning.train_options import Dialect, DropInOptions

_RENDEZVOUS_PORT = 29500
_LISTS = ("hosts", "hostfile", "discover")
_JOIN_S = 600.0
"""Timeout of torchrun's rendezvous, which Accelerate uses."""
_LAUNCHER_PER_MACHINE = ("standard", "nossh")
"""Values of ``deepspeed_multinode_launcher`` for which the user starts a launcher on each machine.
"""
_RENDEZVOUS_HINT = (
    "--main_process_ip HOST on each machine says where machine 0 is; --hosts a,b starts all "
    "from here, by SSH"
)
_USE_CPUS = "--cpu --num_processes N starts N workers without GPUs"
_BASE = option_names("accelerate", OPTIONS)
NAMES = replace(
    _BASE,
    names={**_BASE.names, "rendezvous_port": "--main_process_port"},
    with_this_value={
        ("device", "cpu"): "--cpu",
        ("opt", "settings"): "the command line",
        ("rendezvous", "HOST:PORT"): "--main_process_ip HOST --main_process_port PORT",
    },
    use_cpus=_USE_CPUS,
    use_cpus_of_each=_USE_CPUS,
)
"""The names of options in messages."""


class _Settings(Record):
    own: Mapping[str, Any]
    config: Config | None

    def number(self, field: str) -> int | None:
        """Return a number; None if it is missing or ``-1``."""
        if self.own[field] is not None:
            return int(self.own[field])
        return None if self.config is None else self.config.number(field)

    def text(self, field: str) -> str | None:
        if self.own[field] is not None:
            return str(self.own[field])
        return None if self.config is None else self.config.text(field)

    @property
    def distributed_type(self) -> str:
        if self.own["cpu"]:
            return "MULTI_CPU"
        chosen = next((kind for field, kind in TYPE_BY_OPTION.items() if self.own[field]), None)
        return chosen or ("NO" if self.config is None else self.config.kind)

    @property
    def on_cpus(self) -> bool:
        return bool(self.own["cpu"] or (self.config is not None and self.config.uses_cpu))


def translate(
    given: Given, rest: Sequence[str], environ: Mapping[str, str], config: Config | None
) -> Translation:
    """Translate a parsed command line and the configuration. The command line takes precedence.

    Raises UsageError or ConfigError for options that distlaunch does not support.
    """
    values = build(given, rest, environ, OPTIONS)
    own = {option.field: values.pop(option.field, None) for option in OWN_OPTIONS}
    _refuse_options(own)
    settings = _Settings(own=own, config=config)
    notices = [*_ignored_notice(own)]
    listed = _set_host_list(settings, values)
    values["opt"] = (*_backend_words(settings, notices, listed=listed), *values.get("opt", ()))
    gpus = values.pop("gpus", None) or (None if config is None else config.text("gpu_ids"))
    if gpus not in (None, "all") and not settings.on_cpus:
        values["gpus"] = gpus
    if listed:
        _set_listed_machines(settings, values, notices)
    else:
        values["source"] = "flags"
        if (settings.number("num_machines") or 1) > 1:
            _set_launcher_per_machine(settings, values)
        else:
            _set_one_machine(settings, values, notices)
    if settings.on_cpus:
        values["device"] = "cpu"
    _set_environment(settings, values)
    dialect = Dialect(role=own["role"] or "default", names=NAMES)
    return Translation(
        options=DropInOptions(**values, backend="accelerate", dialect=dialect),
        notices=tuple(notices),
    )


def _refuse_options(own: Mapping[str, Any]) -> None:
    refused = next(
        (option.field for option in REFUSED_OPTIONS if own[option.field] is not None), None
    )
    name = f"--{refused}"
    if refused == "mpirun_hostfile":
        raise UsageError(
            f"{name}: no MPI is needed here",
            hint="--hostfile FILE --cpu --num_processes N starts workers on its hosts",
        )
    if refused is not None:
        what = "SageMaker is asked" if refused.startswith("aws") else "TPUs are started"
        raise UsageError(f"{name}: {what} by accelerate launch itself", hint=own_command("launch"))
    ways = [
        f"--{field}" for field in ("cpu", "multi_gpu", "use_deepspeed", "use_fsdp") if own[field]
    ]
    if len(ways) > 1:
        raise UsageError(f"{ways[0]} and {ways[1]} exclude each other", hint="give one of them")
    if own["use_parallelism_config"] and not own["use_fsdp"]:
        raise UsageError(
            "--use_parallelism_config needs --use_fsdp",
            hint="--use_fsdp --fsdp_version 2 --use_parallelism_config",
        )


def own_command(word: str) -> str:
    """Return a hint with the command that runs Accelerate's launcher even if ``accelerate`` is a
    link to distlaunch."""
    return f"python -m accelerate.commands.accelerate_cli {word} ... is Accelerate's own"


def _ignored_notice(own: Mapping[str, Any]) -> Iterator[str]:
    idle = [f"--{option.field}" for option in IGNORED_OPTIONS if own[option.field] is not None]
    if own["rdzv_backend"] not in (None, "static", "c10d"):
        idle.append(f"--rdzv_backend {quoted(own['rdzv_backend'])}")
    if idle:
        yield f"without effect here: {', '.join(idle)} (see distlaunch accelerate launch --help)"


def _backend_words(settings: _Settings, notices: list[str], *, listed: bool) -> Iterator[str]:
    own = settings.own
    if settings.config is None:
        yield "config=none"
    elif own["config_file"] is not None:
        yield f"config={own['config_file']}"
    merged: dict[str, Any] = {
        "distributed_type": settings.distributed_type,
        "use_cpu": settings.on_cpus,
        **_merge_sections(settings, notices),
    }
    if settings.config is not None:  # distlaunch's own options decide these
        merged |= dict.fromkeys(("main_process_ip", "main_process_port"))
        merged |= {
            field: None
            for field in ("num_processes", "num_machines")
            if own[field] is not None or own["cpu"]
        }
    if listed and settings.distributed_type == "DEEPSPEED":
        merged["deepspeed_config"] = {
            **merged.get("deepspeed_config", {}),
            **dict.fromkeys(NODE_LISTS),
        }
    yield "settings=" + json.dumps(merged)
    if own["mixed_precision"] is not None:
        yield f"mixed-precision={own['mixed_precision']}"
    if own["debug"]:
        yield "debug=on"


def _merge_sections(settings: _Settings, notices: list[str]) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    idle: dict[str, list[str]] = {}
    for setting in SETTINGS:
        field, value = setting.option.field, settings.own[setting.option.field]
        if value is None:
            continue
        value = _check_setting(field, value, setting.variable)
        if (needed := _missing_option(settings, setting.section)) is not None:
            idle.setdefault(needed, []).append(f"--{field}")
        else:
            sections.setdefault(setting.section, {})[setting.key] = value
    notices += [
        f"without effect: {', '.join(names)} (of {needed})" for needed, names in idle.items()
    ]
    there = settings.config is not None and bool(settings.config.section("parallelism_config"))
    if not _is_parallel(settings) and there:
        sections["parallelism_config"] = None
    elif _is_parallel(settings) and "parallelism_config" not in sections and not there:
        # All other keys have their defaults.
        sections["parallelism_config"] = {"dp_replicate_size": 1}
    return sections


def _check_setting(field: str, value: Any, variable: str) -> Any:
    try:
        check_value(f"--{field}", value, variable)
        return float(value) if field in FLOATS and value != "auto" else value
    except ConfigError as error:
        raise UsageError(error.message, hint=error.hint) from None
    except ValueError:
        raise UsageError(f"--{field} takes a number, not {quoted(value)}") from None


def _missing_option(settings: _Settings, section: str) -> str | None:
    """Return the option without which Accelerate ignores a config section; for a section that
    DeepSpeed jobs ignore, the jobs that use it. None if the section is used."""
    if section in TYPE_OF_SECTION:
        distributed_type, flag = TYPE_OF_SECTION[section]
        return None if settings.distributed_type == distributed_type else flag
    match section:
        case "parallelism_config":
            return None if _is_parallel(settings) else "--use_parallelism_config"
        case "fp8_config":
            precision = settings.own["mixed_precision"] or (
                settings.config and settings.config.precision
            )
            return None if precision == "fp8" else "--mixed_precision fp8"
        case _:
            return "jobs without DeepSpeed" if settings.distributed_type == "DEEPSPEED" else None


def _is_parallel(settings: _Settings) -> bool:
    """Return whether parallelism_config is used.

    If an option selects the ``distributed_type``, only ``--use_parallelism_config`` counts.
    """
    if any(settings.own[field] for field in TYPE_BY_OPTION):
        return bool(settings.own["use_parallelism_config"])
    return settings.config is not None and bool(settings.config.section("parallelism_config"))


def _set_host_list(settings: _Settings, values: dict[str, Any]) -> bool:
    """Return whether a host list names the machines: one of our options, or DeepSpeed's host file
    if its launcher is to start all machines. Set the options of that file."""
    if any(field in values for field in _LISTS) or values.get("source", "auto") not in (
        "auto",
        "flags",
    ):
        return True
    if (
        settings.config is None
        or settings.distributed_type != "DEEPSPEED"
        or (settings.number("num_machines") or 1) == 1
    ):
        return False
    section = settings.config.section("deepspeed_config")
    launcher = settings.own["deepspeed_multinode_launcher"] or section.get(
        "deepspeed_multinode_launcher"
    )
    if launcher in _LAUNCHER_PER_MACHINE or section.get(NODE_LISTS[0]) is None:
        return False
    for key, field in zip(NODE_LISTS, ("hostfile", "exclude", "include"), strict=True):
        if section.get(key) is not None:
            values.setdefault(field, str(section[key]))
    return True


def _set_listed_machines(settings: _Settings, values: dict[str, Any], notices: list[str]) -> None:
    """Set the sizes, without the configuration's numbers: the list has its own."""
    own = settings.own
    _set_count(settings, values, own["num_processes"], per_node=False)
    if own["num_machines"] is not None:
        values["num_nodes"] = own["num_machines"]
    if own["main_process_ip"] is not None:
        values["master_addr"] = own["main_process_ip"]
    if own["main_process_port"]:
        values["master_port"] = own["main_process_port"]
    if own["machine_rank"] is not None:
        notices.append(
            "--machine_rank has no effect here: the list of hosts says which of the machines "
            "this is"
        )


def _set_launcher_per_machine(settings: _Settings, values: dict[str, Any]) -> None:
    """Set the rendezvous. Raises UsageError if the main process's address is missing, or the number
    of processes is missing or no multiple of the machines."""
    machines, processes = settings.number("num_machines") or 1, settings.number("num_processes")
    host, rank = settings.text("main_process_ip"), settings.number("machine_rank")
    named = f"--num_machines {machines}"
    if host is None:
        raise UsageError(f"{named}: where they meet is not said", hint=_RENDEZVOUS_HINT)
    if processes is None or processes % machines:
        what = (
            "is missing"
            if processes is None
            else f"{processes} is not the same number on each machine"
        )
        raise UsageError(
            f"{named}: --num_processes {what}",
            hint="it is how many workers there are on all machines",
        )
    if settings.text("rdzv_backend") == "c10d":
        rank = settings.own["machine_rank"]
    elif rank is None:
        raise UsageError(
            f"{named}: which of them this is is not said", hint="--machine_rank N, counted from 0"
        )
    bare = f"[{host}]" if ":" in host and host[0] != "[" else host
    values.update(num_nodes=machines, node_rank=rank)
    values["rendezvous"] = f"{bare}:{settings.number('main_process_port') or _RENDEZVOUS_PORT}"
    values["given"]["rendezvous"] = "--main_process_ip"
    values.setdefault("join_timeout", _JOIN_S)
    _set_count(settings, values, processes // machines, per_node=True)


def _set_one_machine(settings: _Settings, values: dict[str, Any], notices: list[str]) -> None:
    own = settings.own
    for_gpus = own["cpu"] and settings.config is not None and not settings.config.uses_cpu
    count = own["num_processes"] if for_gpus else settings.number("num_processes")
    if own["machine_rank"]:
        raise UsageError(
            f"--machine_rank {own['machine_rank']}: there is one machine",
            hint="--num_machines N says more",
        )
    if own["main_process_ip"] is not None:
        notices.append("--main_process_ip has no effect: there is one machine, this one")
    if own["main_process_port"]:
        values["master_port"] = own["main_process_port"]
    if count is None and (
        settings.on_cpus or (settings.config is not None and settings.distributed_type == "NO")
    ):
        count = 1
    if (
        count is not None
        and count > 1
        and (
            settings.on_cpus or (settings.config is not None and settings.distributed_type == "NO")
        )
    ):
        notices.append(
            f"{count} workers are started; accelerate launch would start one, and leave more to "
            "mpirun"
        )
    if count == 1 and not settings.on_cpus:  # the single worker gets all GPUs, if there are any
        values.update(procs_per_node=1, whole_nodes=True)
        values["given"]["procs_per_node"] = "--num_processes"
    elif settings.on_cpus or values.get("gpus") is not None:
        _set_count(settings, values, count, per_node=False)
    elif count is not None:
        # Workers use GPUs if this machine has any, otherwise CPUs.
        values["hosts"] = f"localhost:{count}"


def _set_count(
    settings: _Settings, values: dict[str, Any], count: int | None, *, per_node: bool
) -> None:
    if count is not None:
        field = ("procs" if settings.on_cpus else "gpus") + "_per_node"
        field = field if per_node else f"num_{field.partition('_')[0]}"
        values[field] = count
        values["given"][field] = "--num_processes"


def _set_environment(settings: _Settings, values: dict[str, Any]) -> None:
    """Set variables. Those of --env take precedence."""
    own = settings.own
    variables = []
    if own["num_cpu_threads_per_process"] is not None:
        variables.append(f"OMP_NUM_THREADS={own['num_cpu_threads_per_process']}")
    if own["enable_cpu_affinity"]:
        variables.append("ACCELERATE_CPU_AFFINITY=1")
    values["env"] = (*variables, *values.get("env", ()))
