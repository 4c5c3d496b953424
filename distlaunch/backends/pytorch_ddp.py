"""PyTorch's own environment (``env://``), for DDP and every script written for torchrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.backends.base import Backend, BackendOption, Requirement, Value
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Topology
from distlaunch.core.model.variables import FLIGHT_RECORDER

_TRACES = "nccl_trace_rank_"
"""How the recorder's files begin; the rank follows. ``torchfrtrace`` reads a folder of them."""
_BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""From torch 2.8 on, where TORCH_NCCL_TRACE_BUFFER_SIZE, its name before, makes every rank print a
warning."""


class TorchBackend(Backend):
    """What all that communicate by torch.distributed have in common.

    NCCL's flight recorder keeps the last collectives of each rank, and writes them where one times
    out: into the attempt's folder. It is NCCL's alone: gloo records too, and torch 2.13 writes that
    nowhere. How many it keeps is left to torch (2,000 since 2.7), unless an option says it.
    """

    meets_at_port = True

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        self._above_zero("collective-timeout")

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """List what concerns how workers communicate."""
        levels = ("version", "warn", "info", "trace")
        return (
            BackendOption(
                name="nccl-debug",
                about="what NCCL tells (NCCL_DEBUG)",
                kind="choice",
                choices=levels,
            ),
            BackendOption(
                name="collective-timeout",
                about="after how long the toolkit's process group gives a collective up",
                kind="seconds",
            ),
            BackendOption(
                name="flight-recorder",
                about="how many collectives NCCL's flight recorder keeps, 0: none (torch >= 2.8; "
                "before, "
                "--env TORCH_NCCL_TRACE_BUFFER_SIZE=N)",
                kind="count",
            ),
            BackendOption(
                name="dump-pipe",
                about="a pipe for each rank in the attempt's folder: what is written to it has "
                "NCCL's recorder dumped",
                kind="flag",
            ),
        )

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return what the options say."""
        variables = {}
        if "nccl-debug" in self.chosen:
            variables["NCCL_DEBUG"] = str(self.chosen["nccl-debug"]).upper()
        if "flight-recorder" in self.chosen:
            variables[_BUFFER_SIZE] = str(self.chosen["flight-recorder"])
        return variables

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Have the recorder write where a collective times out: older releases of torch do not by
        themselves."""
        return {} if topology.device == "cpu" else {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}

    def attempt_files(self, topology: Topology) -> Mapping[str, str]:
        """Say where the recorder writes, and where the pipes are that make it write."""
        if topology.device == "cpu":
            return {}
        pipes = {FLIGHT_RECORDER[2]: "nccl_dump_rank_"} if self.chosen.get("dump-pipe") else {}
        return {**dict.fromkeys(FLIGHT_RECORDER[:2], _TRACES), **pipes}

    def _above_zero(self, *names: str) -> None:
        for name in names:
            if self.chosen.get(name, 1) == 0:
                raise ConfigError(
                    f"-o {name}=0: a number above 0 is needed",
                    hint="leave it out for torch's default",
                )


class PytorchDdp(TorchBackend):
    """All that torch reads is what all workers get; the options reach the toolkit's ``wrap``."""

    name = "pytorch-ddp"
    about = "PyTorch's environment (env://): DDP, and every script written for torchrun"
    requires = (Requirement(module="torch", package="torch", demanded=False),)

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        self._above_zero("bucket-mb")

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """List what DDP can be told."""
        return (
            *super().options(),
            BackendOption(
                name="find-unused-parameters",
                about="toolkit: look for parameters without gradients",
                kind="flag",
            ),
            BackendOption(
                name="bucket-mb",
                about="toolkit: MiB of gradients that are reduced at once",
                kind="count",
            ),
            BackendOption(
                name="static-graph",
                about="toolkit: every step computes by the same graph",
                kind="flag",
            ),
        )

    @property
    def notes(self) -> Sequence[str]:
        """Say which choice is idle beside another."""
        if self.chosen.get("static-graph") and self.chosen.get("find-unused-parameters"):
            return (
                (
                    "-o find-unused-parameters does nothing beside static-graph, which finds them "
                    "by "
                    "itself"
                ),
            )
        return ()
