"""Translate horovodrun's options, and the command to run, into options of train."""

from __future__ import annotations

import os.path
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.backends.base import option_name
from distlaunch.backends.config_file import Document, read_document
from distlaunch.backends.horovod import SETTINGS
from distlaunch.backends.option_files import read_named_file
from distlaunch.cli.compat.drop_in import Translation, option_names
from distlaunch.cli.compat.horovodrun.options import ELASTIC_OPTIONS, OPTIONS, OWN_OPTIONS
from distlaunch.cli.compat.horovodrun.settings import given_settings, words
from distlaunch.cli.parser import Given, build
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.run_files import horovodrun_layout
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.launch.surroundings import read_host_file
from distlaunch.planning.allocation import Host
from distlaunch.planning.hosts import from_options
from distlaunch.planning.node_source import option_of_host_list
from distlaunch.planning.train_options import Dialect, DropInOptions

_START_TIMEOUT = "HOROVOD_START_TIMEOUT"
_SCHEDULERS = {"SLURM_JOB_ID": "Slurm", "LSB_JOBID": "LSF", "PBS_JOBID": "PBS"}
_NODES = "-H a:{},b:{}"
_BASE = option_names("horovodrun", OPTIONS)
NAMES = replace(
    _BASE,
    names={**_BASE.names, "script": "COMMAND"},
    with_value={"gpus_per_node": _NODES, "procs_per_node": _NODES},
    with_this_value={
        ("procs_per_node", "N"): "--device cpu",
        **{("opt", setting.name): f"--{setting.name}" for setting in SETTINGS},
    },
    use_cpus="--device cpu asks for workers without GPUs",
    use_cpus_of_each="--device cpu asks for workers without GPUs",
    more_cpu_workers="",  # -np does not choose between GPUs and CPUs
)
"""The names of options in messages."""


def translate(given: Given, rest: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """Translate a parsed command line.

    Raises UsageError or ConfigError for options that distlaunch does not support.
    """
    _refuse_options(given)
    command = read_command(rest)
    values = build(given, command.words, environ, OPTIONS)
    own = {option.field: values.pop(option.field, None) for option in OWN_OPTIONS}
    notices: list[str] = []
    document = _read_config_file(own["config_file"])
    values["opt"] = _merge_settings(
        {field: texts[-1] for field, texts in given.items()}, document, values, notices
    )
    if own["tcp"]:
        values["env"] = ("NCCL_IB_DISABLE=1", *values.get("env", ()))
    if command.python is None:
        _check_program(values["script"], environ)
        values["no_python"] = True
    else:
        values["module"] = command.module
        # For distlaunch's own Python --python is not needed.
        if not _is_ours(command.python, environ):
            values.setdefault("python", command.python)
    if "join_timeout" not in values and (text := environ.get(_START_TIMEOUT)):
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"{_START_TIMEOUT} takes seconds, not {quoted(text)}")
        values["join_timeout"] = float(text)
    workers = _set_size(own["num_proc"], values, environ, notices)
    _set_network(own["network_interfaces"] or (), values)
    if own["verbose"]:
        values["explain"] = True
    names = NAMES
    if command.python is not None and "python" not in values["given"]:
        values["given"]["python"] = shown = printable(command.python)
        names = replace(names, with_this_value={**names.with_this_value, ("python", shown): shown})
    dialect = Dialect(names=names)
    if own["output_filename"] is not None:
        values["log_dir"] = own["output_filename"]
        dialect = replace(dialect, layout=horovodrun_layout(workers))
    options = DropInOptions(**values, backend="horovod", dialect=dialect)
    return Translation(options=options, notices=tuple(notices))


class Command(Record):
    """The command that the workers run."""

    words: tuple[str, ...]
    """A script or module and its arguments; or any command."""
    python: str | None = None
    """The interpreter, if the command is a Python that runs a script or module."""
    module: bool = False


def read_command(rest: Sequence[str]) -> Command:
    """Return the command, and its interpreter if it is a Python that runs a script or module.

    With an interpreter, distlaunch can check the script, preload modules, and collect stacks.
    """
    if rest and _is_python(rest[0]):
        after = list(rest[1:])
        if after[:1] == ["-u"]:  # workers are always started unbuffered
            after = after[1:]
        if after[:1] == ["-m"] and len(after) > 1:
            return Command(words=tuple(after[1:]), python=rest[0], module=True)
        if after and after[0] and after[0][0] != "-":
            return Command(words=tuple(after), python=rest[0])
    return Command(words=tuple(rest))


def _is_python(word: str) -> bool:
    version = os.path.basename(word).removeprefix("python")
    return version != os.path.basename(word) and all(
        part.isdecimal() for part in version.split(".") if version
    )


def _refuse_options(given: Given) -> None:
    names = {option.field: option.name for option in OWN_OPTIONS}
    for option in ELASTIC_OPTIONS:
        if option.field in given:
            raise UsageError(
                f"{option.name}: elastic Horovod is not offered, since its protocol runs what "
                "comes from the network",
                hint="distlaunch train --backend horovod --discover CMD --num-nodes MIN:MAX "
                "--max-restarts N SCRIPT"
                " starts the job again with the nodes that are left; SCRIPT resumes from its "
                "checkpoint",
            )
    for field in ("mpi", "jsrun", "mpi_args"):
        if field in given:
            raise UsageError(
                f"{names[field]}: workers are controlled by gloo here, not by MPI",
                hint="mpirun -np N COMMAND (or jsrun) starts Horovod's workers by MPI",
            )
    if "binding_args" in given:
        raise UsageError(
            "--binding-args: these are mpirun's",
            hint="--bind cores or --bind numa binds workers to CPUs",
        )
    if "prefix_output_with_timestamp" in given:
        raise UsageError(
            "--prefix-output-with-timestamp: lines have no time here",
            hint="--format jsonl gives every line its time",
        )


def _read_config_file(path: str | None) -> Document | None:
    if path is None:
        return None
    document = read_document(read_named_file(path, f"--config-file {printable(path)}"), path)
    controller = document.values.get("controller", "gloo")
    if str(controller).lower() != "gloo":
        raise ConfigError(
            f"{document.where('controller')}: workers are controlled by gloo here, not by "
            f"{quoted(str(controller))}",
            hint="mpirun -np N COMMAND starts Horovod's workers by MPI",
        )
    return document


def _merge_settings(
    given: Mapping[str, str],
    document: Document | None,
    values: Mapping[str, Any],
    notices: list[str],
) -> tuple[str, ...]:
    """Return the words for ``-o``. The command line takes precedence over the configuration
    file."""
    texts = given_settings(given)
    found = words(texts, document, notices)
    own: tuple[str, ...] = values.get("opt", ())
    if values["given"].get("opt", "").startswith("-"):
        found = {
            name: word
            for name, word in found.items()
            if name in texts or name not in map(option_name, own)
        }
    else:
        own = tuple(word for word in own if option_name(word) not in found)
    return (*found.values(), *own)


def _check_program(name: str, environ: Mapping[str, str]) -> None:
    if (
        name.endswith(".py")
        and os.sep not in name
        and shutil.which(name, path=environ.get("PATH")) is None
    ):
        shown = printable(name)
        raise UsageError(
            f"{shown}: no such command on PATH", hint=f"python {shown} [ARGS]... runs a script"
        )


def _is_ours(python: str, environ: Mapping[str, str]) -> bool:
    found = shutil.which(python, path=environ.get("PATH"))
    same_folder = found is not None and os.path.dirname(os.path.abspath(found)) == os.path.dirname(
        sys.executable
    )
    return (
        found is not None
        and same_folder
        and os.path.realpath(found) == os.path.realpath(sys.executable)
    )


def _set_size(
    count: int | None, values: dict[str, Any], environ: Mapping[str, str], notices: list[str]
) -> int:
    who = option_of_host_list(DropInOptions(**values))
    if who is None:
        if count is None:
            raise UsageError(
                "-np is missing: how many workers?",
                hint="-np 4, or -H a:2,b:2 for all slots of hosts",
            )
        if values.get("source", "auto") not in ("auto", "flags"):
            values["num_procs" if values.get("device") == "cpu" else "num_gpus"] = count
            return count
        for variable, name in _SCHEDULERS.items():
            if environ.get(variable):
                notices.append(
                    f"all {counted(count, 'worker')} run on this machine, as under horovodrun;"
                    f" --source {name.lower()} takes the nodes of the {name} job"
                )
        values["hosts"] = f"localhost:{count}"  # workers use GPUs if there are any
        return count
    hosts = _read_hosts(values, who)
    unknown = next((host.name for host in hosts if host.slots is None), None)
    if unknown is not None:
        raise UsageError(
            f"how many slots {printable(unknown)} has is not said",
            hint=f"{printable(unknown)}:4 in -H, or slots=4",
        )
    total = sum(host.slots or 0 for host in hosts)
    if count is not None and count > total:
        raise UsageError(
            f"-np {count}: the hosts have only {counted(total, 'slot')}",
            hint="give hosts more slots, as in a:4,b:4",
        )
    values["hosts"] = _take_slots(hosts, count or total)
    values["given"]["hosts"] = who
    return count or total


def _read_hosts(values: dict[str, Any], who: str) -> tuple[Host, ...]:
    """Return the hosts of ``-H`` or the host file, and take the file out of ``values``.

    The file is read only once, because it may be a pipe.
    """
    path = values.pop("hostfile", None)
    texts = {} if path is None else {path: read_host_file(path, who)}
    found = from_options.find(hosts=values.get("hosts"), hostfile=path, texts=texts, who=who)
    return () if found is None else found.hosts


def _take_slots(hosts: Sequence[Host], count: int) -> str:
    """Return a host list with ``count`` slots. The hosts are filled in order, as by horovodrun."""
    parts = []
    for host in hosts:
        taken = min(host.slots or 0, count)
        count -= taken
        if taken:
            user = f"{host.user}@" if host.user else ""
            name = f"[{host.name}]" if ":" in host.name else host.name
            port = f":port={host.port}" if host.port else ""
            parts.append(f"{user}{name}:{taken}{port}")
    return ",".join(parts)


def _set_network(given: Sequence[str], values: dict[str, Any]) -> None:
    names = list(
        dict.fromkeys(name.strip() for text in given for name in text.split(",") if name.strip())
    )
    if len(names) > 1:
        raise UsageError(
            f"--network-interfaces {','.join(names)}: Horovod uses one of them",
            hint="name that one, or a network that all nodes share: --network-interface "
            "10.0.0.0/16",
        )
    if names:
        values["interface"] = names[0]
