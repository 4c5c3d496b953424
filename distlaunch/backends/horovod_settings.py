"""What can be set of Horovod itself: the one table for ``-o``, horovodrun's options and its file.

The names, and what they become, are those of horovodrun 0.28.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distlaunch.backends.base import BackendOption, Kind, Value
from distlaunch.core.model.record import Record

LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
Section = Literal["params", "autotune", "timeline", "stall_check", "library_options", "logging"]


class Setting(Record):
    """One of them."""

    section: Section
    """Of horovodrun's configuration file."""
    option: BackendOption
    variable: str
    factor: int = 1
    """What a whole number is multiplied with."""
    opposite: bool = False
    """The variable says the opposite of the switch."""
    most: float = float("inf")
    of: str = ""
    """The setting without which this one means nothing."""

    @property
    def name(self) -> str:
        """What ``-o`` and horovodrun call it."""
        return self.option.name

    def fits(self, value: Value) -> bool:
        """Tell whether a value of the right kind is not too great."""
        return isinstance(value, str) or value <= self.most

    def text(self, value: Value) -> str:
        """Give what the variable says."""
        if isinstance(value, bool):
            return str(int(value != self.opposite))
        if isinstance(value, float):
            return f"{value:.12g}"
        return str(value * self.factor) if isinstance(value, int) else value.upper() if self.option.choices else value


def _at(
    section: Section, name: str, kind: Kind, variable: str, about: str, *, metavar: str = "", factor: int = 1,
    opposite: bool = False, most: float = float("inf"), of: str = "", choices: tuple[str, ...] = ()
) -> Setting:  # fmt: skip
    option = BackendOption(name=name, about=about, kind=kind, metavar=metavar, choices=choices)
    variable = f"HOROVOD_{variable}"
    return Setting(
        section=section, option=option, variable=variable, factor=factor, opposite=opposite, most=most, of=of
    )


SETTINGS = (
    _at("params", "fusion-threshold-mb", "count", "FUSION_THRESHOLD", "how much is reduced at once; 0: no fusion",
        metavar="MB", factor=1 << 20),
    _at("params", "cycle-time-ms", "number", "CYCLE_TIME", "how often tensors are collected", metavar="MS"),
    _at("params", "cache-capacity", "count", "CACHE_CAPACITY", "how many tensors' names are kept; 0: none"),
    _at("params", "hierarchical-allreduce", "flag", "HIERARCHICAL_ALLREDUCE",
        "reduce within nodes first, then between them"),
    _at("params", "hierarchical-allgather", "flag", "HIERARCHICAL_ALLGATHER",
        "gather within nodes first, then between them"),
    _at("params", "torus-allreduce", "flag", "TORUS_ALLREDUCE", "reduce in a torus, by NCCL"),
    _at("autotune", "autotune", "flag", "AUTOTUNE", "tune what is not given while training"),
    _at("autotune", "autotune-log-file", "text", "AUTOTUNE_LOG", "where it writes what it tried",
        metavar="FILE", of="autotune"),
    _at("autotune", "autotune-warmup-samples", "count", "AUTOTUNE_WARMUP_SAMPLES", "samples that it passes over",
        of="autotune"),
    _at("autotune", "autotune-steps-per-sample", "count", "AUTOTUNE_STEPS_PER_SAMPLE", "steps that it takes for each",
        of="autotune"),
    _at("autotune", "autotune-bayes-opt-max-samples", "count", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "the most samples that it takes", of="autotune"),
    _at("autotune", "autotune-gaussian-process-noise", "number", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "how much noise it reckons with, from 0 to 1", metavar="X", most=1.0, of="autotune"),
    _at("timeline", "timeline-filename", "text", "TIMELINE", "write Horovod's timeline of rank 0 to this file",
        metavar="FILE"),
    _at("timeline", "timeline-mark-cycles", "flag", "TIMELINE_MARK_CYCLES", "mark the cycles on it",
        of="timeline-filename"),
    _at("stall_check", "stall-check", "flag", "STALL_CHECK_DISABLE", "warn of ranks that others wait for (as it does)",
        opposite=True),
    _at("stall_check", "stall-check-warning-time-seconds", "count", "STALL_CHECK_TIME_SECONDS", "after so long",
        metavar="SECONDS"),
    _at("stall_check", "stall-check-shutdown-time-seconds", "count", "STALL_SHUTDOWN_TIME_SECONDS",
        "end Horovod after so long", metavar="SECONDS"),
    _at("library_options", "mpi-threads-disable", "flag", "MPI_THREADS_DISABLE",
        "a matter of MPI alone, which has no part here"),
    _at("library_options", "num-nccl-streams", "count", "NUM_NCCL_STREAMS", "streams of NCCL"),
    _at("library_options", "thread-affinity", "count", "THREAD_AFFINITY",
        "the CPU of Horovod's own thread, on each node from the first worker's on", metavar="CPU"),
    _at("library_options", "gloo-timeout-seconds", "count", "GLOO_TIMEOUT_SECONDS",
        "how long gloo waits for another worker (30)", metavar="SECONDS"),
    _at("logging", "log-level", "choice", "LOG_LEVEL", "what Horovod logs", choices=LEVELS),
    _at("logging", "log-with-timestamp", "flag", "LOG_HIDE_TIME", "with the time of day in what Horovod logs",
        opposite=True),
)  # fmt: skip


def is_idle(setting: Setting, chosen: Mapping[str, Value]) -> bool:
    """Tell whether it means nothing, since another one is not chosen."""
    return bool(setting.of) and not chosen.get(setting.of)
