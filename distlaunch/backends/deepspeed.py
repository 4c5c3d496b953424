"""The ``deepspeed`` backend: scripts of DeepSpeed itself, of Accelerate and of Transformers.

Sets the variables of DeepSpeed's launcher (0.19). With options for ZeRO, it also sets those of
``accelerate launch`` (1.15). A script that calls ``deepspeed.initialize`` reads its configuration
from its arguments, to which ``-o pass-config`` adds it.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Mapping, Sequence

from distlaunch.backends.base import BackendOption, Requirement, Value
from distlaunch.backends.pytorch_ddp import TorchBackend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.model.topology import Topology

_ENV_FILE = ".deepspeed_env"
_ENV_FILE_NAME = "DS_ENV_FILE"
_CONFIG_OPTIONS = {"deepspeed": "--deepspeed_config", "transformers": "--deepspeed"}
_BUFFER = "deepspeed_allreduce_buffer_{uid}_{address}_{port}"
_PRECISIONS = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}


class _ZeroOption(Record):
    """Accelerate's variable, and the path of the key in DeepSpeed's configuration."""

    variable: str
    key_path: tuple[str, ...]


_ZERO_OPTIONS = {
    "zero": _ZeroOption(
        variable="ACCELERATE_DEEPSPEED_ZERO_STAGE", key_path=("zero_optimization", "stage")
    ),
    "offload-optimizer": _ZeroOption(
        variable="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        key_path=("zero_optimization", "offload_optimizer", "device"),
    ),
    "offload-param": _ZeroOption(
        variable="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        key_path=("zero_optimization", "offload_param", "device"),
    ),
    "gradient-accumulation": _ZeroOption(
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", key_path=("gradient_accumulation_steps",)
    ),
}


class DeepSpeed(TorchBackend):
    """Variables of DeepSpeed's launcher, and ZeRO options for the script."""

    name = "deepspeed"
    about = "DeepSpeed, also by way of Accelerate and Transformers"
    requires = (
        Requirement(module="torch", package="torch"),
        Requirement(module="deepspeed", package="deepspeed", at_least="0.10"),
    )
    # Buffers of its collectives on CPUs, if all workers are on one node: 69 MB per worker
    # (csrc/cpu/comm/shm.cpp of 0.19), or one file for all of them (ccl.cpp, until 0.14.0 at least).
    shared_memory = (f"{_BUFFER}_{{rank}}", _BUFFER)

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        stage = chosen.get("zero")
        for name in ("offload-optimizer", "offload-param"):
            needed = ("3",) if name == "offload-param" else ("1", "2", "3")
            if chosen.get(name, "none") != "none" and stage is not None and stage not in needed:
                raise ConfigError(
                    f"{Opt.OPT} {name}={chosen[name]} and {Opt.OPT} zero={stage} contradict each "
                    "other",
                    hint=f"offloading needs zero={' or '.join(needed)}",
                )
        if chosen.get("gradient-accumulation") == 0:
            raise ConfigError(
                f"{Opt.OPT} gradient-accumulation=0: at least 1 is needed",
                hint="1 means no accumulation",
            )
        if "config" in chosen:
            self._check_config(str(chosen["config"]), texts["config"])
        elif "pass-config" in chosen:
            raise ConfigError(
                f"{Opt.OPT} pass-config={chosen['pass-config']}: there is no configuration to pass",
                hint=f"{Opt.OPT} config=FILE",
            )

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """Return options for ZeRO, and for how the script gets its configuration."""
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
                about="DeepSpeed's configuration file, for Accelerate and "
                "Transformers (see pass-config)",
                kind="file",
            ),
            BackendOption(
                name="pass-config",
                about="add it to the script's arguments: --deepspeed_config=FILE, or the Trainer's "
                "--deepspeed=FILE",
                kind="choice",
                choices=tuple(_CONFIG_OPTIONS),
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
                about="steps over which gradients are accumulated",
                kind="count",
            ),
            BackendOption(
                name="precision",
                about="precision that Accelerate uses",
                kind="choice",
                choices=tuple(_PRECISIONS),
            ),
            *super().options(),
        )

    @classmethod
    def env_files(cls, environ: Mapping[str, str], cwd: str) -> Sequence[str]:
        """Return the existing ones of ``.deepspeed_env`` (or $DS_ENV_FILE) in the home and then the
        current directory, whose values win.

        Raises ConfigError if a file cannot be read, or if $DS_ENV_FILE names none.
        """
        name = environ.get(_ENV_FILE_NAME) or _ENV_FILE
        places = [
            os.path.join(folder, name)
            for folder in (environ.get("HOME") or os.path.expanduser("~"), cwd)
        ]
        existing = [path for path in dict.fromkeys(places) if os.path.isfile(path)]
        if not existing and environ.get(_ENV_FILE_NAME):
            other = next((path for path in places if os.path.exists(path)), None)
            # A pipe can be read only once, and DeepSpeed's own launcher ignores it.
            if other is not None:
                kind = "a folder" if os.path.isdir(other) else "not a regular file"
                raise ConfigError(f"{_ENV_FILE_NAME} {quoted(name)}: {printable(other)} is {kind}")
            folders = " and ".join(
                dict.fromkeys(printable(os.path.dirname(path)) for path in places)
            )
            raise ConfigError(
                f"{_ENV_FILE_NAME} {quoted(name)}: there is no such file",
                hint=f"looked in {folders}",
            )
        for path in existing:
            if not os.access(path, os.R_OK):
                raise ConfigError(f"{printable(path)}: not readable by this user")
        return existing

    def notes_on(self, topology: Topology) -> Sequence[str]:
        """Return a notice about options that Accelerate ignores on CPUs, if there are any."""
        own_script = self.chosen.get("pass-config") == "deepspeed"
        names = [
            Opt.OPT(name) for name in ("config", "precision", *_ZERO_OPTIONS) if name in self.chosen
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
        """Return the number of nodes, and the ZeRO options for Accelerate and Transformers."""
        zero_variables = self._zero_variables()
        enabled = {"ACCELERATE_USE_DEEPSPEED": "true"} if zero_variables else {}
        return {
            **super().job_variables(topology),
            "CROSS_SIZE": str(len(topology.nodes)),
            **enabled,
            **zero_variables,
        }

    def unwanted(self) -> Sequence[str]:
        """Return variables that choose other frameworks or contradict the options."""
        file = (
            ("ACCELERATE_DEEPSPEED_CONFIG_FILE",)
            if any(name in self.chosen for name in _ZERO_OPTIONS)
            else ()
        )
        return (
            "ACCELERATE_USE_FSDP",
            "ACCELERATE_USE_MEGATRON_LM",
            "ACCELERATE_CONFIG_DS_FIELDS",
            *file,
        )

    def node_variables(self, topology: Topology, node_rank: int) -> Mapping[str, str]:
        """Return the node's rank and number of workers under DeepSpeed's names."""
        slots = topology.nodes[node_rank].slots
        return {
            "CROSS_RANK": str(node_rank),
            **({} if slots is None else {"LOCAL_SIZE": str(slots)}),
        }

    def script_words(self) -> tuple[str, ...]:
        """Return the option for the configuration file, with ``pass-config``."""
        if "pass-config" not in self.chosen:
            return ()
        return (f"{_CONFIG_OPTIONS[str(self.chosen['pass-config'])]}={self.chosen['config']}",)

    def worker_words(self, local_rank: int) -> tuple[str, ...]:
        """Return ``--local_rank`` if ``-o local-rank`` is set."""
        return (f"--local_rank={local_rank}",) if self.chosen.get("local-rank") else ()

    def _zero_variables(self) -> dict[str, str]:
        zero_variables = {
            setting.variable: str(self.chosen[name])
            for name, setting in _ZERO_OPTIONS.items()
            if name in self.chosen
        }
        if "config" in self.chosen:
            zero_variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(self.chosen["config"])
        if "precision" in self.chosen:
            zero_variables["ACCELERATE_MIXED_PRECISION"] = _PRECISIONS[
                str(self.chosen["precision"])
            ]
        return zero_variables

    def _check_config(self, path: str, text: str) -> None:
        """Raise ConfigError if options and file differ.

        Options fill in only values that the file sets to ``auto``. A file ``*.hjson`` is not
        checked.
        """
        if path.endswith(".hjson"):
            return
        shown = printable(path)
        config = read_config(
            text,
            shown,
            hint="for Hjson, which only DeepSpeed itself reads, name the file NAME.hjson",
        )
        for name, setting in _ZERO_OPTIONS.items():
            if name not in self.chosen:
                continue
            key_path, value = ".".join(setting.key_path), _value_at(config, setting.key_path)
            if value != "auto" and str(value) != str(self.chosen[name]):
                raise ConfigError(
                    f"{Opt.OPT} {name}={self.chosen[name]} contradicts {shown}, "
                    + (
                        f"which does not have {key_path}"
                        if value is None
                        else f"where {key_path} is {value}"
                    ),
                    hint=f'leave the option out, or write "auto" for {key_path} there',
                )


def read_config(text: str, named: str, *, hint: str) -> dict[str, object]:
    """Parse a configuration of DeepSpeed.

    Raises ConfigError; its message begins with ``named``. ``hint`` is for text that is not JSON.
    """
    if re.search("[\ud800-\udfff]", text) is not None:
        raise ConfigError(f"{named}: not UTF-8 text", hint="is it the right file?")
    try:
        config = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"{named}: not JSON: {exc}", hint=hint) from exc
    except RecursionError as exc:
        raise ConfigError(f"{named}: not a configuration of DeepSpeed: nested too deeply") from exc
    if not isinstance(config, dict):
        raise ConfigError(
            f"{named}: not a configuration of DeepSpeed",
            hint='it looks like {"train_batch_size": 32, ...}',
        )
    return config


def _value_at(config: object, key_path: Sequence[str]) -> object:
    for key in key_path:
        config = config.get(key) if isinstance(config, dict) else None
    return config
