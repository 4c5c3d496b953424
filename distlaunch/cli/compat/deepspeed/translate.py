"""Translate the command line of DeepSpeed's launcher into options of train."""

from __future__ import annotations

import os.path
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.backends.base import option_name
from distlaunch.cli.compat.deepspeed.options import LAUNCHERS, OPTIONS, OWN_OPTIONS
from distlaunch.cli.compat.drop_in import Translation, option_names
from distlaunch.cli.parser import Given, build
from distlaunch.core.errors import UsageError
from distlaunch.core.model.option_names import OptionNames
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import quoted
from distlaunch.planning.train_options import (
    Dialect,
    DropInOptions,
)

DEFAULT_HOSTFILE = "/job/hostfile"
"""DeepSpeed reads it if it exists and the user names no other."""
_SLURM = "slurm"
_ACCELERATOR = "DS_ACCELERATOR"
_RENDEZVOUS_PORT = 29500
_RENDEZVOUS_OPTION = "--master_addr"
_USE_CPUS = "with DS_ACCELERATOR=cpu in the environment --num_gpus N starts N workers without GPUs"
NAMES = replace(
    option_names("deepspeed", OPTIONS),
    with_this_value={("opt", "local-rank=off"): "--no_local_rank"},
    use_cpus=_USE_CPUS,
    use_cpus_of_each=f"{_USE_CPUS} on each node",
    more_cpu_workers="--num_gpus N starts N of them",
)
"""The names of options in messages."""
_GRACE_S = 30.0
"""Time from TERM to KILL, as in DeepSpeed's launcher."""
_ELASTIC_RESTARTS = 100
_LISTS = ("hosts", "hostfile", "discover")
_NUMBERS = (
    "num_nodes",
    "num_gpus",
    "num_accelerators",
    "node_rank",
    "min_elastic_nodes",
    "max_elastic_nodes",
)
_TEXTS = ("include", "exclude", "master_addr", "launcher_args")
_UNSET = {**dict.fromkeys(_NUMBERS, "-1"), **dict.fromkeys(_TEXTS, "")}
"""The user may also type default values: ``--include "$INCLUDE"`` with an empty variable."""


class DeepspeedTranslation(Translation):
    """A translated command. ``save_pid``: keep a file with the launcher's process id."""

    save_pid: bool


def translate(
    given: Given,
    rest: Sequence[str],
    environ: Mapping[str, str],
    *,
    default_hostfile: str = DEFAULT_HOSTFILE,
) -> DeepspeedTranslation:
    """Translate a parsed command line.

    Values that mean "not set" to DeepSpeed (-1, or empty) count as not given. ``default_hostfile``
    is read if it exists and nothing else names the nodes. Raises UsageError or ConfigError for
    options that distlaunch does not support.
    """
    given = {field: texts for field, texts in given.items() if texts != [_UNSET.get(field)]}
    if (count := given.pop("num_accelerators", None)) is not None and given.setdefault(
        "num_gpus", count
    ) != count:
        raise UsageError(
            f"--num_gpus {given['num_gpus'][0]} and --num_accelerators {count[0]} contradict each "
            "other"
        )
    if given.get("launcher", [""])[-1].lower() == _SLURM:
        given.setdefault("source", [_SLURM])
    values = build(given, rest, environ, OPTIONS)
    own = {option.field: values.pop(option.field, None) for option in OWN_OPTIONS}
    own["launcher"] = (own["launcher"] or "pdsh").lower()
    _refuse_options(own, values)
    notices: list[str] = []
    if not any(field in values for field in _LISTS) and values.get("source", "auto") == "auto":
        if os.path.isfile(default_hostfile):
            values["hostfile"] = default_hostfile
        else:
            values["source"] = "flags"
    several = values.get("source") != "flags" or any(
        field in values for field in (*_LISTS, "rendezvous")
    )
    _set_size(own, values, environ, several=several)
    _set_nodes(own, values, notices, several=several)
    _set_workers(own, values)
    if own["log_level"] in ("warning", "error", "critical"):
        values["quiet"] = True
    if own["enable_each_rank_log"] not in (None, "None"):
        values.update(log_dir=own["enable_each_rank_log"], output="none")
    values["backend"] = "deepspeed"
    values.setdefault("grace", _GRACE_S)
    values.setdefault("failure_grace", _GRACE_S)
    options = DropInOptions(**values, dialect=Dialect(names=_names_for(own, values)))
    return DeepspeedTranslation(
        options=options, notices=tuple(notices), save_pid=bool(own["save_pid"])
    )


def _names_for(own: Mapping[str, Any], values: Mapping[str, Any]) -> OptionNames:
    """Return the names of options in messages. Some depend on what the user typed."""
    names, with_this_value = dict(NAMES.names), dict(NAMES.with_this_value)
    if own["num_gpus"]:
        names["gpus_per_node"] = "--num_gpus"
    if values["given"].get("rendezvous") == _RENDEZVOUS_OPTION:
        names |= {"rendezvous": _RENDEZVOUS_OPTION, "rendezvous_port": "--master_port"}
        with_this_value["rendezvous", "HOST:PORT"] = "--master_port PORT"
    if own["launcher"] == _SLURM:
        with_this_value["source", _SLURM] = "--launcher slurm"
    return replace(NAMES, names=names, with_this_value=with_this_value)


def _refuse_options(own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    if own["autotuning"] is not None:
        raise UsageError(
            "--autotuning: experiments are DeepSpeed's own launcher's",
            hint="deepspeed --autotuning tune ... runs them",
        )
    if (cores := own["bind_core_list"]) is not None:
        raise UsageError(
            f"--bind_core_list {quoted(cores)}: workers share the CPUs that we have ourselves",
            hint=f"taskset -c {shlex.quote(cores)} distlaunch deepspeed --bind_cores_to_rank ...",
        )
    launcher = own["launcher"]
    if launcher not in LAUNCHERS:
        raise UsageError(
            f"--launcher {quoted(launcher)}: no such launcher",
            hint=f"there is: {', '.join(LAUNCHERS)}",
        )
    if launcher == _SLURM:
        others = [f"--{field}" for field in _LISTS if field in values]
        if values["source"] != _SLURM:
            others.append(f"--source {values['source']}")
        if others:
            raise UsageError(
                f"--launcher slurm: the nodes are those of the Slurm job, not {others[0]}'s",
                hint="--include and --exclude choose among them",
            )
    if "include" in values and "exclude" in values:
        raise UsageError(
            "--include and --exclude exclude each other",
            hint="one of them says which hosts and slots",
        )
    filters = next((name for name in ("include", "exclude") if name in values), None)
    size = (
        "num_gpus"
        if own["num_gpus"] is not None
        else "num_nodes"
        if "num_nodes" in values
        else None
    )
    if filters is not None and size is not None:
        raise UsageError(
            f"--{size} and --{filters} exclude each other",
            hint=f"--{filters} says how many as well",
        )
    for name in ("min_elastic_nodes", "max_elastic_nodes"):
        if own[name] is not None and not own["elastic_training"]:
            raise UsageError(
                f"--{name} belongs to --elastic_training", hint="--num_nodes N is a fixed number"
            )


def _set_size(
    own: Mapping[str, Any], values: dict[str, Any], environ: Mapping[str, str], *, several: bool
) -> None:
    """Set the number of workers, and the device if DeepSpeed itself would use the CPU.

    ``several``: there may be other machines. Raises UsageError if two options contradict each
    other.
    """
    if environ.get(_ACCELERATOR) == "cpu" and not {"gpus", "gpus_per_node"} & values.keys():
        values.setdefault("device", "cpu")
    count = own["num_gpus"]
    if count is None:
        return
    if "gpus_per_node" in values:
        raise UsageError(
            "--num_gpus and --gpus-per-node exclude each other", hint="give one of them"
        )
    if values.get("device") == "cpu":
        values["procs_per_node"] = count
    elif not several:
        # Workers use GPUs if this machine has any, otherwise CPUs.
        values["hosts"] = f"localhost:{count}"
    else:
        values["gpus_per_node"] = count
        values["given"]["gpus_per_node"] = "--num_gpus"


def _set_nodes(
    own: Mapping[str, Any], values: dict[str, Any], notices: list[str], *, several: bool
) -> None:
    """Set the nodes and how they are reached. ``several``: there may be other machines.

    Raises UsageError for options that need another launcher.
    """
    if own["launcher"] not in ("pdsh", _SLURM):
        how = "srun" if values.get("source") == _SLURM else "SSH"
        notices.append(f"--launcher {own['launcher']}: nodes are reached by {how} here")
    if own["launcher_args"] is not None:
        _set_launcher_args(own, values, notices, several=several)
    if own["elastic_training"]:
        _set_elastic(own, values)
    rank = values.get("node_rank")
    if not several:
        values.pop("master_addr", None)  # the master is this machine, as in DeepSpeed
        if rank and own["no_ssh"]:
            raise UsageError(
                f"--no_ssh --node_rank {rank}: nothing names the nodes",
                hint="--hostfile FILE lists them all",
            )
        values["node_rank"] = None
    if "rendezvous" in values:  # nodes find each other as with ``train``
        return
    if not own["no_ssh"]:
        if rank is not None:
            notices.append(
                "--node_rank has no effect without --no_ssh: which node this is shows from the "
                "host names"
            )
            values["node_rank"] = None
    elif rank is None and any(field in values for field in _LISTS):
        raise UsageError(
            "--no_ssh: nothing says which of the nodes this is",
            hint="--node_rank N, counted from 0",
        )
    elif several and "master_addr" in values:
        host = values["master_addr"]
        bare = f"[{host}]" if ":" in host else host
        values["rendezvous"] = f"{bare}:{values.pop('master_port', _RENDEZVOUS_PORT)}"
        values["given"]["rendezvous"] = _RENDEZVOUS_OPTION


def _set_launcher_args(
    own: Mapping[str, Any], values: dict[str, Any], notices: list[str], *, several: bool
) -> None:
    """Pass --launcher_args to srun. On one machine they have no effect. Raises UsageError if they
    are not srun's."""
    if own["launcher"] == _SLURM:
        values["srun_args"] = own["launcher_args"]
    elif not several:
        notices.append("--launcher_args has no effect: there is one machine, this one")
    else:
        by_srun = values.get("source") == _SLURM
        raise UsageError(
            f"--launcher_args {quoted(own['launcher_args'])}: nodes are reached by "
            f"{'srun' if by_srun else 'SSH'},"
            f" and not by {own['launcher']}",
            hint="--launcher slurm, whose these are then"
            if by_srun
            else "--ssh-config FILE or --ssh-command COMMAND says how; --interface NAME by which "
            "network",
        )


def _set_elastic(own: Mapping[str, Any], values: dict[str, Any]) -> None:
    most, fewest = own["max_elastic_nodes"], own["min_elastic_nodes"] or 1
    if "num_nodes" in values:
        raise UsageError(
            "--elastic_training and --num_nodes exclude each other",
            hint="--max_elastic_nodes N is the most",
        )
    if most is None or fewest > most:
        raise UsageError(
            "--elastic_training: how many nodes there may be is not said"
            if most is None
            else f"--min_elastic_nodes {fewest} is more than --max_elastic_nodes {most}",
            hint="--min_elastic_nodes N --max_elastic_nodes M, with 1 <= N <= M",
        )
    values["num_nodes"] = (fewest, most) if fewest < most else most
    values.setdefault("max_restarts", _ELASTIC_RESTARTS)


def _set_workers(own: Mapping[str, Any], values: dict[str, Any]) -> None:
    if own["bind_cores_to_rank"]:
        values["bind"] = "cores"
    if own["venv_script"] is not None:
        if "setup" in values:
            raise UsageError(
                "--venv_script and --setup exclude each other",
                hint="--setup '. FILE; MORE' does both",
            )
        values["setup"] = f". {shlex.quote(own['venv_script'])}"
    chosen = values.get("opt", ())
    if not own["no_local_rank"] and all(option_name(word) != "local-rank" for word in chosen):
        values["opt"] = (*chosen, "local-rank=on")
