"""Layer ui: what horovodrun sets of Horovod itself: by option or in a configuration file, a variable for each.

The names, and what they become, are those of Horovod 0.28.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable, quoted
from distlaunch.ui.option import option_error

if TYPE_CHECKING:
    from distlaunch.backends.config_text import Document

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
Takes = Literal["whole", "number", "share", "text", "level", "switch"]


class Setting(Record):
    """One of them. ``name`` is the option's, without dashes; ``section`` and ``key`` are the file's."""

    name: str
    takes: Takes
    variable: str
    section: str
    key: str
    help: str
    metavar: str = ""
    factor: int = 1
    opposite: bool = False
    """The variable says the opposite of the switch."""
    on: tuple[str, ...] = ()
    """How a switch is written, if not as ``--name``."""
    off: tuple[str, ...] = ()
    """How it is undone, if not as ``--no-name``."""
    of: str = ""
    """The setting without which this one means nothing."""

    @property
    def flags(self) -> tuple[str, ...]:
        """How it is given, and a switch is turned on."""
        return self.on or (f"--{self.name}",)

    @property
    def undone(self) -> tuple[str, ...]:
        """How a switch is turned off."""
        return (self.off or (f"--no-{self.name}",)) if self.takes == "switch" else ()


def _at(section: str, variable: str, name: str, takes: Takes, about: str, **more: Any) -> Setting:
    """Make a row whose key in the file follows from its name."""
    key = more.pop("key", name.replace("-", "_"))
    return Setting(name=name, takes=takes, variable=f"HOROVOD_{variable}", section=section, key=key, help=about, **more)


SETTINGS: tuple[Setting, ...] = (
    _at(
        "params",
        "FUSION_THRESHOLD",
        "fusion-threshold-mb",
        "whole",
        "How much is reduced at once; 0: no fusion.",
        metavar="MB",
        factor=1 << 20,
    ),
    _at("params", "CYCLE_TIME", "cycle-time-ms", "number", "How often tensors are collected.", metavar="MS"),
    _at("params", "CACHE_CAPACITY", "cache-capacity", "whole", "How many tensors' names are kept.", metavar="N"),
    _at(
        "params",
        "HIERARCHICAL_ALLREDUCE",
        "hierarchical-allreduce",
        "switch",
        "Reduce within nodes first, then between them.",
    ),
    _at(
        "params",
        "HIERARCHICAL_ALLGATHER",
        "hierarchical-allgather",
        "switch",
        "Gather within nodes first, then between them.",
    ),
    _at("params", "TORUS_ALLREDUCE", "torus-allreduce", "switch", "Reduce in a torus, by NCCL."),
    _at(
        "autotune",
        "AUTOTUNE",
        "autotune",
        "switch",
        "Tune what is not given while training.",
        key="enabled",
    ),
    _at(
        "autotune",
        "AUTOTUNE_LOG",
        "autotune-log-file",
        "text",
        "Where it writes what it tried.",
        key="log_file",
        metavar="FILE",
        of="autotune",
    ),
    _at(
        "autotune",
        "AUTOTUNE_WARMUP_SAMPLES",
        "autotune-warmup-samples",
        "whole",
        "Samples that it passes over.",
        key="warmup_samples",
        metavar="N",
        of="autotune",
    ),
    _at(
        "autotune",
        "AUTOTUNE_STEPS_PER_SAMPLE",
        "autotune-steps-per-sample",
        "whole",
        "Steps that it takes for each.",
        key="steps_per_sample",
        metavar="N",
        of="autotune",
    ),
    _at(
        "autotune",
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "autotune-bayes-opt-max-samples",
        "whole",
        "The most samples that it takes.",
        key="bayes_opt_max_samples",
        metavar="N",
        of="autotune",
    ),
    _at(
        "autotune",
        "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "autotune-gaussian-process-noise",
        "share",
        "How much noise it reckons with, from 0 to 1.",
        key="gaussian_process_noise",
        metavar="X",
        of="autotune",
    ),
    _at(
        "timeline",
        "TIMELINE",
        "timeline-filename",
        "text",
        "Write Horovod's timeline of rank 0 to this file.",
        key="filename",
        metavar="FILE",
    ),
    _at(
        "timeline",
        "TIMELINE_MARK_CYCLES",
        "timeline-mark-cycles",
        "switch",
        "Mark the cycles on it.",
        key="mark_cycles",
        of="timeline-filename",
    ),
    _at(
        "stall_check",
        "STALL_CHECK_DISABLE",
        "stall-check",
        "switch",
        "Warn of ranks that others wait for (so it is by default).",
        key="enabled",
        opposite=True,
    ),
    _at(
        "stall_check",
        "STALL_CHECK_TIME_SECONDS",
        "stall-check-warning-time-seconds",
        "whole",
        "After so long.",
        key="warning_time_seconds",
        metavar="SECONDS",
    ),
    _at(
        "stall_check",
        "STALL_SHUTDOWN_TIME_SECONDS",
        "stall-check-shutdown-time-seconds",
        "whole",
        "End Horovod after so long.",
        key="shutdown_time_seconds",
        metavar="SECONDS",
    ),
    _at(
        "library_options",
        "MPI_THREADS_DISABLE",
        "mpi-threads-disable",
        "switch",
        "As there, a matter of MPI alone, which has no part here.",
    ),
    _at("library_options", "NUM_NCCL_STREAMS", "num-nccl-streams", "whole", "Streams of NCCL.", metavar="N"),
    _at(
        "library_options",
        "THREAD_AFFINITY",
        "thread-affinity",
        "whole",
        "The CPU of Horovod's own thread, on each node from the first worker's on.",
        metavar="CPU",
    ),
    _at(
        "library_options",
        "GLOO_TIMEOUT_SECONDS",
        "gloo-timeout-seconds",
        "whole",
        "How long gloo waits for another worker (30).",
        metavar="SECONDS",
    ),
    _at("logging", "LOG_LEVEL", "log-level", "level", "What Horovod logs.", key="level"),
    _at(
        "logging",
        "LOG_HIDE_TIME",
        "log-with-timestamp",
        "switch",
        "With the time of day in what Horovod logs.",
        key="with_timestamp",
        opposite=True,
        on=("--no-log-hide-timestamp", "--log-with-timestamp"),
        off=("--log-hide-timestamp", "--log-without-timestamp"),
    ),
)


def variables(given: Mapping[str, str], document: Document | None, remarks: list[str]) -> dict[str, str]:
    """Give the variables of what was set: ``given`` has texts by name and wins over the file.

    Raises UsageError or ConfigError for a value that is none.
    """
    texts = dict(_of_file(document)) if document is not None else {}
    texts |= {name: (text, f"--{name}") for name, text in given.items()}
    found = {}
    for setting in SETTINGS:
        if setting.name not in texts:
            continue
        text, source = texts[setting.name]
        value = _value(setting, text, source)
        if setting.of and texts.get(setting.of, ("0", ""))[0] in ("", "0"):
            remarks.append(f"{source} has no effect without --{setting.of}")
        else:
            found[setting.variable] = value
    return found


def _of_file(document: Document) -> Iterator[tuple[str, tuple[str, str]]]:
    rows = {(setting.section, setting.key): setting for setting in SETTINGS}
    sections = {setting.section: None for setting in SETTINGS}
    for section, values in document.values.items():
        if section == "controller":
            continue
        if section not in sections:
            raise _unknown(document, (section,), [*sections, "controller"])
        if not isinstance(values, dict | None):
            raise ConfigError(f"{document.where(section)}: {section} takes a mapping, not {quoted(str(values))}")
        for key, value in (values or {}).items():
            setting = rows.get((section, key))
            if setting is None:
                raise _unknown(document, (section, key), [name for at, name in rows if at == section])
            if value is not None:
                text = str(int(value)) if isinstance(value, bool) else str(value)
                yield setting.name, (text, f"{document.where(section, key)}: {key}")


def _unknown(document: Document, keys: tuple[str, ...], there: Sequence[str]) -> ConfigError:
    from difflib import get_close_matches

    near = get_close_matches(keys[-1], there, n=1, cutoff=0.6)
    return ConfigError(
        f"{document.where(*keys)}: horovodrun has no {quoted(keys[-1])}",
        hint=f"did you mean {near[0]}?" if near else f"there are {', '.join(there)}",
    )


def _value(setting: Setting, text: str, source: str) -> str:
    """Turn a text into the variable's value. Raises ConfigError, or UsageError where an option gave it."""
    what = ""
    match setting.takes:
        case "whole":
            if text.isascii() and text.isdigit() and len(text) < 10:
                return str(int(text) * setting.factor)
            what = "a whole number >= 0"
        case "number" | "share":
            number = _number(text)
            if number is not None and number <= (1 if setting.takes == "share" else 1e9):
                return text
            what = "a number from 0 to 1" if setting.takes == "share" else "a number >= 0"
        case "level":
            if text in LEVELS:
                return text
            what = f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}"
        case "switch":
            if text in ("0", "1"):
                return str(int((text == "1") != setting.opposite))
            what = "true or false"
        case "text":
            if text and "\0" not in text:
                return text
            what = "a file"
    if source.startswith("-"):
        raise option_error(source, f"takes {what}, not {quoted(text)}")
    raise ConfigError(f"{printable(source)} takes {what}, not {quoted(text)}")


def _number(text: str) -> float | None:
    whole, _, fraction = text.partition(".")
    digits = whole + fraction
    return float(text) if digits.isascii() and digits.isdigit() else None


def switches_given(given: Mapping[str, str]) -> dict[str, str]:
    """Take what was given by field, and give what was set by name. Raises UsageError for a switch both on and off."""
    texts = {}
    for setting in SETTINGS:
        field = setting.name.replace("-", "_")
        if field in given:
            texts[setting.name] = given[field]
        if f"no_{field}" in given:
            if setting.name in texts:
                raise UsageError(f"{setting.flags[-1]} and {setting.undone[-1]} exclude each other")
            texts[setting.name] = "0"
    return texts
