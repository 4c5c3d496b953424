"""The ``accelerate`` backend: scripts of Hugging Face Accelerate, and its configuration files.

Sets the variables by which ``accelerate launch`` configures ``Accelerator()``. Sizes, nodes and
devices come from distlaunch's options, not from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from distlaunch.backends import accelerate_config as c
from distlaunch.backends.base import BackendOption, Requirement, Value, reading_file_of
from distlaunch.backends.config_file import Document, read_document
from distlaunch.backends.deepspeed import DeepSpeed, read_config
from distlaunch.backends.pytorch_ddp import TorchBackend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.topology import Topology

_SHARDED = ("FSDP", "MEGATRON_LM")
_DEFAULT = "accelerate/default_config.yaml"
"""Accelerate's default name, also if the content is JSON."""


class Accelerate(TorchBackend):
    """Sets DDP's variables, and the variables for Accelerate's configuration file and options."""

    name = "accelerate"
    about = "Hugging Face Accelerate: what accelerate launch sets, from its configuration file"
    requires = (Requirement(module="accelerate", package="accelerate", at_least="1.0"),)
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "config": (
            f"$HF_HOME/{_DEFAULT}",
            f"$XDG_CACHE_HOME/huggingface/{_DEFAULT}",
            f"~/.cache/huggingface/{_DEFAULT}",
        )
    }

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        self._check_above_zero("gradient-accumulation-steps")
        self._config = None
        above = _parse_settings(str(chosen.get("settings", "{}")))
        if "config" in chosen or above:
            bare = Document(path=Opt.OPT("settings"), values={}, lines={})
            with reading_file_of("config"):
                document = (
                    read_document(texts["config"], str(chosen["config"]))
                    if "config" in chosen
                    else bare
                )
                self._config = c.read_config(document, above)
                self._config.variables(None)  # to raise errors now

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """Return the configuration file, and options that override it."""
        return (
            BackendOption(
                name="config",
                about="a configuration file (YAML or JSON) instead of "
                "default_config.yaml in ~/.cache/huggingface/accelerate (or "
                "$HF_HOME/accelerate); none: no file",
                kind="file",
            ),
            BackendOption(
                name="settings",
                about="JSON with the same names and values; overrides the file",
                metavar="JSON",
            ),
            BackendOption(
                name="mixed-precision",
                about="precision of the forward pass",
                kind="choice",
                choices=c.PRECISIONS,
            ),
            BackendOption(
                name="dynamo-backend",
                about="backend of torch.compile",
                kind="choice",
                choices=c.DYNAMO_BACKENDS,
            ),
            BackendOption(
                name="dynamo-mode",
                about="mode of torch.compile",
                kind="choice",
                choices=c.DYNAMO_MODES,
            ),
            BackendOption(
                name="gradient-accumulation-steps",
                about="batches per step of the optimizer",
                kind="count",
            ),
            BackendOption(
                name="debug",
                about="compare the shapes of tensors before each collective",
                kind="flag",
            ),
            *super().options(),
        )

    def check_files(
        self, variables: Mapping[str, str], read: Callable[[str, str], str | None]
    ) -> None:
        """Check the DeepSpeed configuration that Accelerate's configuration names, unless the
        workers' variables name another file. Raises ConfigError."""
        path = None if self._config is None else self._config.deepspeed_file
        if self._config is None or path is None or variables.get(c.DEEPSPEED_FILE) != path:
            return
        where = self._config.document.where("deepspeed_config", "deepspeed_config_file")
        named = f"{where}: deepspeed_config_file: {printable(path)}"
        text = read(path, named)
        if text is not None:
            read_config(text, named, hint="Accelerate reads only JSON, not Hjson")

    def needed(self, variables: Mapping[str, str]) -> tuple[Requirement, ...]:
        """Return Accelerate, and DeepSpeed if the configuration enables it."""
        used = self._config is not None and self._config.kind == "DEEPSPEED"
        return (*self.requires, *DeepSpeed.requires) if used else self.requires

    @property
    def notes(self) -> Sequence[str]:
        """A notice for each unknown key."""
        return () if self._config is None else self._config.notes

    def notes_on(self, topology: Topology) -> Sequence[str]:
        """Return a notice for each node, device or address in the file that is not used."""
        return () if self._config is None else tuple(_unused_settings(self._config, topology))

    def unwanted(self) -> Sequence[str]:
        """Return the variables whose values come from the configuration file alone; none without a
        file."""
        return () if self._config is None else c.DECIDED_VARIABLES

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return the variables that ``Accelerator()`` reads. Raises ConfigError."""
        precision = self.chosen.get("mixed-precision")
        chosen_precision = None if precision is None else str(precision)
        variables = {} if self._config is None else self._config.variables(chosen_precision)
        kind = "NO" if self._config is None else self._config.kind
        if chosen_precision is not None:
            variables["ACCELERATE_MIXED_PRECISION"] = chosen_precision
        if "dynamo-backend" in self.chosen:
            variables["ACCELERATE_DYNAMO_BACKEND"] = str(self.chosen["dynamo-backend"]).upper()
        if "dynamo-mode" in self.chosen:
            variables["ACCELERATE_DYNAMO_MODE"] = str(self.chosen["dynamo-mode"])
        if "gradient-accumulation-steps" in self.chosen:
            variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(
                self.chosen["gradient-accumulation-steps"]
            )
        if "debug" in self.chosen:
            variables["ACCELERATE_DEBUG_MODE"] = "true" if self.chosen["debug"] else "false"
        on_cpus = topology.device == "cpu" or (self._config is not None and self._config.uses_cpu)
        if on_cpus and kind != "DEEPSPEED":  # with DeepSpeed accelerate launch does not set it
            variables["ACCELERATE_USE_CPU"] = "true"
        return {**super().job_variables(topology), **variables}


def _parse_settings(text: str) -> Mapping[str, Any]:
    if not text.lstrip().startswith("{"):
        raise ConfigError(
            f"{Opt.OPT('settings')} takes JSON, not {quoted(text)}",
            hint='{"fsdp_config": {"fsdp_version": 2}}',
        )
    return read_document(text, Opt.OPT("settings")).values


def _unused_settings(config: c.Config, topology: Topology) -> Iterator[str]:
    path = printable(config.document.path)
    unused = []
    processes, machines = config.number("num_processes"), config.number("num_machines")
    world = topology.world_size
    fixed = topology.bounds is None
    if fixed and world is not None and processes not in (None, world):
        unused.append(f"num_processes: {processes}")
    if fixed and machines not in (None, len(topology.nodes)):
        unused.append(f"num_machines: {machines}")
    if unused:
        what = (
            f"{counted(world, 'worker') if world else 'the workers'} on "
            f"{counted(len(topology.nodes), 'node')}"
        )
        yield f"{path} says {' and '.join(unused)}, which is not used: the job has {what}"
    gpus = config.text("gpu_ids")
    if (
        gpus not in (None, "all")
        and topology.device != "cpu"
        and _visible_devices(topology) != _split_list(gpus)
    ):
        yield (
            f"{config.document.where('gpu_ids')}: gpu_ids: {printable(gpus)} is not used: "
            f"{Opt.GPUS} "
            "chooses devices"
        )
    address, port = config.text("main_process_ip"), config.number("main_process_port")
    if address is not None and address != topology.master_addr and (machines or 1) > 1:
        where = config.document.where("main_process_ip")
        yield (
            f"{where}: main_process_ip: {printable(address)} is not used: "
            f"{Opt.MASTER_ADDR} sets the address of rank 0"
        )
    if port and port != topology.master_port:
        where = config.document.where("main_process_port")
        yield (
            f"{where}: main_process_port: {port} is not used: distlaunch uses a free "
            f"port, or {Opt.MASTER_PORT}"
        )
    for section, key in (
        ("mpirun_config", "mpirun_hostfile"),
        *(("deepspeed_config", k) for k in c.NODE_LISTS),
    ):
        if config.section(section).get(key) is not None:
            where = config.document.where(section, key)
            yield (
                f"{where}: {key} is not used: {Opt.HOSTFILE}, {Opt.INCLUDE} and {Opt.EXCLUDE} "
                "name nodes"
            )
    if config.document.values.get("enable_cpu_affinity"):
        where = config.document.where("enable_cpu_affinity")
        yield (
            f"{where}: enable_cpu_affinity has no effect in a file (nor with "
            f"accelerate launch): use {Opt.BIND('numa')}"
        )
    if config.uses_cpu and topology.device == "cuda":
        yield (
            f"{path} is for CPUs, so the GPUs of these workers stay idle: {Opt.NUM_PROCS} "
            "starts workers on CPUs"
        )
    if topology.device == "cpu" and config.kind in c.ON_GPUS:
        yield f"{path} is for GPUs (distributed_type: {config.kind}); these workers run on CPUs"
    if topology.device == "cpu" and config.kind in _SHARDED:
        yield (
            f"{path}: Accelerate supports {config.kind} on GPUs only; these workers "
            "run on CPUs and train with DDP"
        )


def _visible_devices(topology: Topology) -> set[str]:
    return {
        device
        for node in topology.nodes
        for group in (*node.masks, node.devices or ())
        for device in group
    }


def _split_list(text: str | None) -> set[str]:
    return {word.strip() for word in (text or "").split(",")}
