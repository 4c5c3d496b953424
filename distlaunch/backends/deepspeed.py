"""DeepSpeed, for its own scripts, Accelerate's and those of the Transformers Trainer.

The variables are those of DeepSpeed's own launcher (0.19), and where ZeRO is chosen here those of
``accelerate launch`` (1.15), by which Accelerate and Transformers come to DeepSpeed. A script that
calls ``deepspeed.initialize`` itself takes its configuration from its arguments: ``-o pass-config``
adds it to them.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Mapping, Sequence

from distlaunch.backends.base import BackendOption, Requirement, Value
from distlaunch.backends.pytorch_ddp import TorchBackend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.model.topology import Topology

_ENV_FILE = ".deepspeed_env"
_ENV_FILE_NAME = "DS_ENV_FILE"
_CONFIG_WORDS = {"deepspeed": "--deepspeed_config", "transformers": "--deepspeed"}
_BUFFER = "deepspeed_allreduce_buffer_{uid}_{address}_{port}"
_PRECISIONS = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}


class _Setting(Record):
    """Where an option goes: Accelerate's variable, and its place in DeepSpeed's configuration."""

    variable: str
    place: tuple[str, ...]


_SETTINGS = {
    "zero": _Setting(
        variable="ACCELERATE_DEEPSPEED_ZERO_STAGE", place=("zero_optimization", "stage")
    ),
    "offload-optimizer": _Setting(
        variable="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        place=("zero_optimization", "offload_optimizer", "device"),
    ),
    "offload-param": _Setting(
        variable="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        place=("zero_optimization", "offload_param", "device"),
    ),
    "gradient-accumulation": _Setting(
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", place=("gradient_accumulation_steps",)
    ),
}


class DeepSpeed(TorchBackend):
    """What DeepSpeed's launcher sets, and how a script is told which ZeRO it is to use."""

    name = "deepspeed"
    about = "DeepSpeed, also by way of Accelerate and Transformers"
    requires = (
        Requirement(module="torch", package="torch"),
        Requirement(module="deepspeed", package="deepspeed", at_least="0.10"),
    )
    # Of its collectives on CPUs, made where all workers are on one node: 69 MB for each
    # (csrc/cpu/comm/shm.cpp of 0.19), or one file for all of them (ccl.cpp beside it, as it was
    # until 0.14.0 at least).
    shared_memory = (f"{_BUFFER}_{{rank}}", _BUFFER)

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        stage = chosen.get("zero")
        for name in ("offload-optimizer", "offload-param"):
            needed = ("3",) if name == "offload-param" else ("1", "2", "3")
            if chosen.get(name, "none") != "none" and stage is not None and stage not in needed:
                raise ConfigError(
                    f"-o {name}={chosen[name]} and -o zero={stage} contradict each other",
                    hint=f"there is something to offload with zero={' or '.join(needed)}",
                )
        if chosen.get("gradient-accumulation") == 0:
            raise ConfigError(
                "-o gradient-accumulation=0: there is no step without gradients",
                hint="1 adds up none",
            )
        if "config" in chosen:
            self._check_config(str(chosen["config"]), texts["config"])
        elif "pass-config" in chosen:
            raise ConfigError(
                f"-o pass-config={chosen['pass-config']}: there is no configuration to pass",
                hint="-o config=FILE",
            )

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """List what can be chosen of DeepSpeed, and how the script is told."""
        devices = ("none", "cpu")
        return (
            BackendOption(
                name="zero",
                about="the stage of ZeRO, for Accelerate and Transformers",
                kind="choice",
                choices=tuple("0123"),
            ),
            BackendOption(
                name="config",
                about="DeepSpeed's configuration, for the same (see pass-config)",
                kind="file",
            ),
            BackendOption(
                name="pass-config",
                about="add it to the script's arguments: --deepspeed_config=FILE, or the Trainer's "
                "--deepspeed=FILE",
                kind="choice",
                choices=tuple(_CONFIG_WORDS),
            ),
            BackendOption(
                name="local-rank",
                about="add --local_rank=N to the script's arguments, as DeepSpeed does",
                kind="flag",
            ),
            BackendOption(
                name="offload-optimizer",
                about="where the optimizer's state is kept",
                kind="choice",
                choices=devices,
            ),
            BackendOption(
                name="offload-param",
                about="where parameters are kept (zero=3)",
                kind="choice",
                choices=devices,
            ),
            BackendOption(
                name="gradient-accumulation",
                about="steps of which gradients are added up",
                kind="count",
            ),
            BackendOption(
                name="precision",
                about="what Accelerate computes in",
                kind="choice",
                choices=tuple(_PRECISIONS),
            ),
            *super().options(),
        )

    @classmethod
    def env_files(cls, environ: Mapping[str, str], cwd: str) -> Sequence[str]:
        """Find ``.deepspeed_env`` (or what DS_ENV_FILE says) at home and here; the latter has the
        last word."""
        name = environ.get(_ENV_FILE_NAME) or _ENV_FILE
        places = [
            os.path.join(folder, name)
            for folder in (environ.get("HOME") or os.path.expanduser("~"), cwd)
        ]
        there = [path for path in dict.fromkeys(places) if os.path.isfile(path)]
        if not there and environ.get(_ENV_FILE_NAME):
            other = next((path for path in places if os.path.exists(path)), None)
            if (
                other is not None
            ):  # a pipe could be read once only, and DeepSpeed's own launcher leaves it alone
                kind = "a folder" if os.path.isdir(other) else "no plain file"
                raise ConfigError(f"{_ENV_FILE_NAME} {quoted(name)}: {printable(other)} is {kind}")
            looked = " and ".join(
                dict.fromkeys(printable(os.path.dirname(path)) for path in places)
            )
            raise ConfigError(
                f"{_ENV_FILE_NAME} {quoted(name)}: there is no such file",
                hint=f"looked in {looked}",
            )
        for path in there:
            if not os.access(path, os.R_OK):
                raise ConfigError(f"{printable(path)}: not readable by this user")
        return there

    def notes_on(self, topology: Topology) -> Sequence[str]:
        """Say what Accelerate does not do on CPUs, where options are given that are for it."""
        own_script = self.chosen.get("pass-config") == "deepspeed"
        names = [
            f"-o {name}" for name in ("config", "precision", *_SETTINGS) if name in self.chosen
        ]
        if topology.device != "cpu" or topology.world_size == 1 or own_script or not names:
            return ()
        chosen = " and ".join(names)
        note = (
            f"on CPUs Accelerate and Transformers, which read {chosen}, use DeepSpeed with one "
            "worker only"
        )
        return (f"{note}; a script that calls DeepSpeed itself has its own configuration",)

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return the number of nodes, and if anything of ZeRO is chosen what Accelerate and
        Transformers read of it."""
        told = self._told()
        used = {"ACCELERATE_USE_DEEPSPEED": "true"} if told else {}
        return {
            **super().job_variables(topology),
            "CROSS_SIZE": str(len(topology.nodes)),
            **used,
            **told,
        }

    def unwanted(self) -> Sequence[str]:
        """Name the switches to others than DeepSpeed, what only accelerate launch knows, and a file
        beside options."""
        file = (
            ("ACCELERATE_DEEPSPEED_CONFIG_FILE",)
            if any(name in self.chosen for name in _SETTINGS)
            else ()
        )
        return (
            "ACCELERATE_USE_FSDP",
            "ACCELERATE_USE_MEGATRON_LM",
            "ACCELERATE_CONFIG_DS_FIELDS",
            *file,
        )

    def node_variables(self, topology: Topology, node_rank: int) -> Mapping[str, str]:
        """Return the node's place and size, under the names that DeepSpeed has for them."""
        slots = topology.nodes[node_rank].slots
        return {
            "CROSS_RANK": str(node_rank),
            **({} if slots is None else {"LOCAL_SIZE": str(slots)}),
        }

    def script_words(self) -> tuple[str, ...]:
        """Return the configuration, if that is asked for."""
        if "pass-config" not in self.chosen:
            return ()
        return (f"{_CONFIG_WORDS[str(self.chosen['pass-config'])]}={self.chosen['config']}",)

    def worker_words(self, local_rank: int) -> tuple[str, ...]:
        """Give ``--local_rank``, if that is asked for."""
        return (f"--local_rank={local_rank}",) if self.chosen.get("local-rank") else ()

    def _told(self) -> dict[str, str]:
        """Return what Accelerate and Transformers are told of the choices."""
        told = {
            setting.variable: str(self.chosen[name])
            for name, setting in _SETTINGS.items()
            if name in self.chosen
        }
        if "config" in self.chosen:
            told["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(self.chosen["config"])
        if "precision" in self.chosen:
            told["ACCELERATE_MIXED_PRECISION"] = _PRECISIONS[str(self.chosen["precision"])]
        return told

    def _check_config(self, path: str, text: str) -> None:
        """Hold the file against the options, which fill in only what it calls ``auto``. Raises
        ConfigError."""
        if path.endswith(".hjson"):
            return
        shown = printable(path)
        config = read_config(
            text, shown, hint="DeepSpeed alone reads Hjson too: call such a file NAME.hjson"
        )
        for name, setting in _SETTINGS.items():
            if name not in self.chosen:
                continue
            place, said = ".".join(setting.place), _looked_up(config, setting.place)
            if said != "auto" and str(said) != str(self.chosen[name]):
                raise ConfigError(
                    f"-o {name}={self.chosen[name]} does not count beside {shown}, "
                    + (
                        f"which does not have {place}"
                        if said is None
                        else f"where {place} is {said}"
                    ),
                    hint=f'leave the option out, or write "auto" for {place} there',
                )


def read_config(text: str, named: str, *, hint: str) -> dict[str, object]:
    """Read a configuration. Raises ConfigError, begun by ``named``, with ``hint`` for what is no
    JSON."""
    if re.search("[\ud800-\udfff]", text) is not None:
        raise ConfigError(f"{named}: not UTF-8 text", hint="is it the right file?")
    try:
        config = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"{named}: no JSON: {exc}", hint=hint) from exc
    except RecursionError as exc:
        raise ConfigError(
            f"{named}: no configuration of DeepSpeed, it is nested too deeply"
        ) from exc
    if not isinstance(config, dict):
        raise ConfigError(
            f"{named}: no configuration of DeepSpeed",
            hint='it looks like {"train_batch_size": 32, ...}',
        )
    return config


def _looked_up(config: object, place: Sequence[str]) -> object:
    for key in place:
        config = config.get(key) if isinstance(config, dict) else None
    return config
