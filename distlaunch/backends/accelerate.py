"""Scripts of Hugging Face Accelerate, and its configuration files.

``accelerate launch`` says in variables what ``Accelerator()`` is to do; so does this. How many
processes there are, on which machines and devices, is what distlaunch is told, whatever the file
says of that.
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
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.topology import Topology

_SHARDED = ("FSDP", "MEGATRON_LM")
_SETTINGS = "-o settings"
_DEFAULT = "accelerate/default_config.yaml"
"""Accelerate speaks of a JSON file, too, and calls that default_config.yaml as well."""


class Accelerate(TorchBackend):
    """DDP's environment, and what a configuration and the options say."""

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
        self._above_zero("gradient-accumulation-steps")
        self._config = None
        above = _settings(str(chosen.get("settings", "{}")))
        if "config" in chosen or above:
            bare = Document(path=_SETTINGS, values={}, lines={})
            with reading_file_of("config"):
                document = (
                    read_document(texts["config"], str(chosen["config"]))
                    if "config" in chosen
                    else bare
                )
                self._config = c.read_config(document, above)
                self._config.variables(None)  # raises what is wrong before anything else is done

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """List the configuration file, and what wins over it."""
        return (
            BackendOption(
                name="config",
                about="a file of accelerate config, YAML or JSON, instead of its "
                "default_config.yaml in "
                "~/.cache/huggingface/accelerate (or $HF_HOME/accelerate); none: neither",
                kind="file",
            ),
            BackendOption(
                name="settings",
                about="what ranks above that file, or is all there is without one: JSON of the "
                "same names and values",
                metavar="JSON",
            ),
            BackendOption(
                name="mixed-precision",
                about="what forward computes in",
                kind="choice",
                choices=c.PRECISIONS,
            ),
            BackendOption(
                name="dynamo-backend",
                about="compile with this backend",
                kind="choice",
                choices=c.DYNAMO_BACKENDS,
            ),
            BackendOption(
                name="dynamo-mode", about="how to compile", kind="choice", choices=c.DYNAMO_MODES
            ),
            BackendOption(
                name="gradient-accumulation-steps",
                about="batches between two steps of the optimizer",
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
        """Look at the file of DeepSpeed that the configuration names, unless a user's variable
        names another."""
        path = None if self._config is None else self._config.deepspeed_file
        if self._config is None or path is None or variables.get(c.DEEPSPEED_FILE) != path:
            return
        where = self._config.document.where("deepspeed_config", "deepspeed_config_file")
        named = f"{where}: deepspeed_config_file: {printable(path)}"
        text = read(path, named)
        if text is not None:
            read_config(text, named, hint="Accelerate reads JSON alone, and no Hjson")

    def needed(self, variables: Mapping[str, str]) -> tuple[Requirement, ...]:
        """Add DeepSpeed where the configuration has Accelerate use it."""
        used = self._config is not None and self._config.kind == "DEEPSPEED"
        return (*self.requires, *DeepSpeed.requires) if used else self.requires

    @property
    def notes(self) -> Sequence[str]:
        """Tell of keys that are not known."""
        return () if self._config is None else self._config.notes

    def notes_on(self, topology: Topology) -> Sequence[str]:
        """Tell of what the configuration says of nodes, devices and addresses that is not so
        here."""
        return () if self._config is None else tuple(_contradictions(self._config, topology))

    def unwanted(self) -> Sequence[str]:
        """Name what a configuration decides: it is all there is then, and the environment without
        one."""
        return () if self._config is None else c.DECIDED

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return what ``Accelerator()`` reads. Raises ConfigError."""
        precision = self.chosen.get("mixed-precision")
        told = None if precision is None else str(precision)
        variables = {} if self._config is None else self._config.variables(told)
        kind = "NO" if self._config is None else self._config.kind
        if told is not None:
            variables["ACCELERATE_MIXED_PRECISION"] = told
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
        if on_cpus and kind != "DEEPSPEED":  # which Accelerate leaves out then
            variables["ACCELERATE_USE_CPU"] = "true"
        return {**super().job_variables(topology), **variables}


def _settings(text: str) -> Mapping[str, Any]:
    """Read ``-o settings``. Raises ConfigError."""
    if not text.lstrip().startswith("{"):
        raise ConfigError(
            f"{_SETTINGS} takes JSON, not {quoted(text)}",
            hint='{"fsdp_config": {"fsdp_version": 2}}',
        )
    return read_document(text, _SETTINGS).values


def _contradictions(config: c.Config, topology: Topology) -> Iterator[str]:
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
        yield f"{path} says {' and '.join(unused)}; here it is {what}, as the options and nodes say"
    gpus = config.text("gpu_ids")
    if (
        gpus not in (None, "all")
        and topology.device != "cpu"
        and _shown_devices(topology) != _listed(gpus)
    ):
        yield (
            f"{config.document.where('gpu_ids')}: gpu_ids: {printable(gpus)} is not used: --gpus "
            "chooses devices"
        )
    address, port = config.text("main_process_ip"), config.number("main_process_port")
    if address is not None and address != topology.master_addr and (machines or 1) > 1:
        where = config.document.where("main_process_ip")
        yield (
            f"{where}: main_process_ip: {printable(address)} is not used: --master-addr says "
            "where rank 0 is reached"
        )
    if port and port != topology.master_port:
        where = config.document.where("main_process_port")
        yield (
            f"{where}: main_process_port: {port} is not used: a free port is taken, or "
            "--master-port"
        )
    for section, key in (
        ("mpirun_config", "mpirun_hostfile"),
        *(("deepspeed_config", k) for k in c.NODE_LISTS),
    ):
        if config.section(section).get(key) is not None:
            where = config.document.where(section, key)
            yield f"{where}: {key} is not used: --hostfile, --include and --exclude name nodes"
    if config.document.values.get("enable_cpu_affinity"):
        where = config.document.where("enable_cpu_affinity")
        yield (
            f"{where}: enable_cpu_affinity does nothing in a file, under accelerate launch too: "
            "--bind numa does it"
        )
    if config.uses_cpu and topology.device == "cuda":
        yield (
            f"{path} is for CPUs: these workers' GPUs are idle (--num-procs starts workers on CPUs)"
        )
    if topology.device == "cpu" and config.kind in c.ON_GPUS:
        yield f"{path} is for GPUs (distributed_type: {config.kind}); these workers run on CPUs"
    if topology.device == "cpu" and config.kind in _SHARDED:
        yield (
            f"{path}: Accelerate does {config.kind} on GPUs alone; these workers, on CPUs, train "
            "with DDP"
        )


def _shown_devices(topology: Topology) -> set[str]:
    """Return the devices of all nodes, as their masks and people name them."""
    return {
        device
        for node in topology.nodes
        for group in (*node.masks, node.devices or ())
        for device in group
    }


def _listed(text: str | None) -> set[str]:
    return {word.strip() for word in (text or "").split(",")}
