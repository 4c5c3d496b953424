"""The ``fsdp`` backend: fully sharded data parallel by the toolkit, Accelerate or Transformers.

The toolkit reads the options directly. The others read the variables of ``accelerate launch``
(1.15) and use FSDP2. Accelerate before 1.6 only has FSDP1, which reads the sharding strategy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from distlaunch.backends.base import BackendOption, Requirement, Value
from distlaunch.backends.pytorch_ddp import TorchBackend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.topology import Topology

_STRATEGIES = {"full": "FULL_SHARD", "grad": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD"}
_FLAGS = {
    "cpu-offload": "FSDP_OFFLOAD_PARAMS",
    "activation-checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
}


_CALLS_DDP = re.compile(
    r"^[^#\n]*\b(?:DistributedDataParallel|DDP)\s*\(|^[^#\n]*\bimport\s.*\bDistributedDataParallel\s+as\b",
    re.MULTILINE,
)
_MAY_SHARD = re.compile(
    r"\b(?:fully_shard|FullyShardedDataParallel|FSDP|toolkit|accelerate|transformers|Fabric)\b|lightning"
)


class Fsdp(TorchBackend):
    """DDP's variables, and how the model is sharded."""

    name = "fsdp"
    about = "PyTorch's FSDP2, for scripts of the toolkit, Accelerate and Transformers"
    requires = (Requirement(module="torch", package="torch", at_least="2.6"),)

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        self._check_above_zero("wrap-min-params")
        if "wrap-min-params" in chosen and "wrap-classes" in chosen:
            raise ConfigError(
                f"{Opt.OPT} wrap-min-params and {Opt.OPT} wrap-classes exclude each other",
                hint="layers are sharded by their size, or by their class",
            )
        for name in _class_names(chosen):
            if not name.isidentifier():
                raise ConfigError(
                    f"{Opt.OPT} wrap-classes={chosen['wrap-classes']}: {name!r} is not a class "
                    "name",
                    hint="use class names without modules, separated by commas: Block,Embedding",
                )

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """Return the options for sharding."""
        return (
            BackendOption(
                name="sharding",
                about="full: parameters, gradients, optimizer (default); grad: like "
                "full, but parameters stay whole between forward and backward; "
                "hybrid: full within a node, copies between nodes",
                kind="choice",
                choices=tuple(_STRATEGIES),
            ),
            BackendOption(
                name="precision",
                about="precision of forward and backward",
                kind="choice",
                choices=("bf16", "fp16", "fp32"),
            ),
            BackendOption(
                name="cpu-offload",
                about="keep parameters that are not in use in the host's memory",
                kind="flag",
            ),
            BackendOption(
                name="wrap-min-params",
                about="shard layers with at least this many parameters",
                kind="count",
            ),
            BackendOption(
                name="wrap-classes",
                about="shard layers of these classes (GPT2Block,...)",
                metavar="CLASS,...",
            ),
            BackendOption(
                name="activation-checkpointing",
                about="recompute activations instead of storing them",
                kind="flag",
            ),
            *super().options(),
        )

    def notes_on(self, topology: Topology) -> Sequence[str]:
        """Return a notice that Accelerate does not shard on CPUs, for a job on CPUs."""
        if topology.device != "cpu":
            return ()
        return (("on CPUs only the toolkit shards; Accelerate and Transformers train with DDP"),)

    def notes_on_script(self, name: str, text: str) -> Sequence[str]:
        """Return a notice if the script wraps its model in DDP itself, so that it is not sharded."""
        if _CALLS_DDP.search(text) is None or _MAY_SHARD.search(text) is not None:
            return ()
        note = (
            f"{name} calls DistributedDataParallel itself, so it trains with DDP: {Opt.BACKEND} "
            "fsdp does not change that"
        )
        return (
            (
                f"{note} (distlaunch.toolkit.wrap shards, and so do Accelerate, Transformers and "
                "fully_shard)"
            ),
        )

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return the variables for Accelerate and Transformers.

        Raises ConfigError for hybrid sharding with different numbers of workers on the nodes.
        """
        variables = {**super().job_variables(topology), "ACCELERATE_USE_FSDP": "true"}
        sharding = self.chosen.get("sharding")
        if sharding is not None:
            variables["FSDP_SHARDING_STRATEGY"] = _STRATEGIES[str(sharding)]
            variables["FSDP_RESHARD_AFTER_FORWARD"] = _true_or_false(sharding != "grad")
        if sharding == "hybrid":
            mesh = _hybrid_mesh(topology)
            if topology.device != "cpu":  # Accelerate accepts no mesh on CPUs
                variables.update(mesh)
        if "precision" in self.chosen:
            precision = str(self.chosen["precision"])
            variables["ACCELERATE_MIXED_PRECISION"] = "no" if precision == "fp32" else precision
        for name, variable in _FLAGS.items():
            if name in self.chosen:
                variables[variable] = _true_or_false(bool(self.chosen[name]))
        if "wrap-min-params" in self.chosen:
            variables["FSDP_AUTO_WRAP_POLICY"] = "SIZE_BASED_WRAP"
            variables["FSDP_MIN_NUM_PARAMS"] = str(self.chosen["wrap-min-params"])
        if "wrap-classes" in self.chosen:
            variables["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
            variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(_class_names(self.chosen))
        return variables

    def unwanted(self) -> Sequence[str]:
        """Return variables that choose other frameworks or another mesh."""
        mesh: tuple[str, ...] = (
            ("ACCELERATE_USE_PARALLELISM_CONFIG",) if "sharding" in self.chosen else ()
        )
        if self.chosen.get("sharding") == "hybrid":
            mesh += tuple(f"PARALLELISM_CONFIG_{name}_SIZE" for name in ("TP", "CP", "SP"))
        return (
            "ACCELERATE_USE_DEEPSPEED",
            "ACCELERATE_USE_MEGATRON_LM",
            "ACCELERATE_CONFIG_DS_FIELDS",
            *mesh,
        )

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return the variables that select FSDP2 and wrap the layers that a Transformers model
        names."""
        on_cpus = {"ACCELERATE_USE_CPU": "true"} if topology.device == "cpu" else {}
        return {
            **super().default_variables(topology),
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            **on_cpus,
        }


def _class_names(chosen: Mapping[str, Value]) -> list[str]:
    text = str(chosen.get("wrap-classes", ""))
    return [name.strip() for name in text.split(",")] if text else []


def _true_or_false(on: bool) -> str:  # noqa: FBT001 - it is what the variable says
    return "true" if on else "false"


def _hybrid_mesh(topology: Topology) -> dict[str, str]:
    """Return the mesh of hybrid sharding; none if a node's number of workers is unknown. Raises
    ConfigError if the numbers differ."""
    slots = {node.slots for node in topology.nodes}
    if len(slots) > 1 and None not in slots:
        counts = ", ".join(f"{node.host}: {node.slots}" for node in topology.nodes[:8])
        raise ConfigError(
            f"{Opt.OPT} sharding=hybrid needs the same number of workers on each node ({counts})",
            hint=f"use {Opt.OPT} sharding=full",
        )
    if len(slots) != 1 or None in slots:
        return {}
    return {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(len(topology.nodes)),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(slots.pop()),
    }
