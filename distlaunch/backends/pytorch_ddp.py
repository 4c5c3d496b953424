"""The ``pytorch-ddp`` backend, and the base of all backends that use torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.backends.base import Backend, BackendOption, Requirement, Value
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.topology import Topology
from distlaunch.core.model.variables import FLIGHT_RECORDER

_TRACES = "nccl_trace_rank_"
"""The rank follows. ``torchfrtrace`` reads a directory with such files."""
_BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""The name since torch 2.8. There, the older TORCH_NCCL_TRACE_BUFFER_SIZE makes each rank print a
warning."""


class TorchBackend(Backend):
    """Options and variables of torch.distributed.

    NCCL's flight recorder stores the last collectives of each rank (2,000 since torch 2.7) and
    writes them to the attempt's directory on a timeout. gloo records as well, but torch 2.13 never
    writes its records.
    """

    uses_master_port = True

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        self._check_above_zero("collective-timeout")

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """Return the options of communication."""
        levels = ("version", "warn", "info", "trace")
        return (
            BackendOption(
                name="nccl-debug",
                about="what NCCL logs (NCCL_DEBUG)",
                kind="choice",
                choices=levels,
            ),
            BackendOption(
                name="collective-timeout",
                about="time after which a collective of the toolkit's process group fails",
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
                about="a pipe for each rank in the attempt's folder; writing to it "
                "dumps NCCL's flight recorder",
                kind="flag",
            ),
        )

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return the variables for ``-o nccl-debug`` and ``-o flight-recorder``, if they are set."""
        variables = {}
        if "nccl-debug" in self.chosen:
            variables["NCCL_DEBUG"] = str(self.chosen["nccl-debug"]).upper()
        if "flight-recorder" in self.chosen:
            variables[_BUFFER_SIZE] = str(self.chosen["flight-recorder"])
        return variables

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return a variable with which the recorder writes on a timeout also in older torch; none
        on CPUs."""
        return {} if topology.device == "cpu" else {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}

    def attempt_files(self, topology: Topology) -> Mapping[str, str]:
        """Return the variables with the recorder's files and, for ``-o dump-pipe``, the pipes that
        make it write; none on CPUs."""
        if topology.device == "cpu":
            return {}
        pipes = {FLIGHT_RECORDER[2]: "nccl_dump_rank_"} if self.chosen.get("dump-pipe") else {}
        return {**dict.fromkeys(FLIGHT_RECORDER[:2], _TRACES), **pipes}

    def _check_above_zero(self, *names: str) -> None:
        for name in names:
            if self.chosen.get(name, 1) == 0:
                raise ConfigError(
                    f"{Opt.OPT} {name}=0: a number above 0 is needed",
                    hint="leave it out for torch's default",
                )


class PytorchDdp(TorchBackend):
    """DDP by ``env://``, as under torchrun. Options are for the toolkit's ``wrap``."""

    name = "pytorch-ddp"
    about = "PyTorch's environment (env://): DDP, and every script written for torchrun"
    requires = (Requirement(module="torch", package="torch", demanded=False),)

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        self._check_above_zero("bucket-mb")

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """Return the options of communication and of DDP."""
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
                about="toolkit: every step has the same graph",
                kind="flag",
            ),
        )

    @property
    def notes(self) -> Sequence[str]:
        """A notice if one option has no effect because of another."""
        if self.chosen.get("static-graph") and self.chosen.get("find-unused-parameters"):
            return (
                (
                    f"{Opt.OPT} find-unused-parameters has no effect with static-graph, "
                    "which finds them by itself"
                ),
            )
        return ()
