"""What ``accelerate launch`` would set for a configuration file, and for what ranks above it."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from distlaunch.backends import accelerate_names as n
from distlaunch.backends.accelerate_values import check_value
from distlaunch.backends.config_file import Document
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, quoted

_MOST_TOLD = 10
_MOST_COMPARED = 200
"""Of keys that are not known: how many are told of, and how many are looked at for slips of the pen."""

_ACCUMULATION = "gradient_accumulation_steps"
"""Of all but DeepSpeed's; accelerate launch has an option for it and refuses it in a file."""


class Config(Record):
    """A configuration that was read; what it says of nodes and devices is only to be compared with the plan."""

    document: Document
    kind: str
    """``distributed_type``."""
    precision: str | None
    """``mixed_precision``, if it says so."""
    notes: tuple[str, ...]
    of_deepspeed: tuple[str, ...]
    """Keys of the file's own ``deepspeed_config``, without what ranks above it."""

    def number(self, name: str) -> int | None:
        """Give a whole number, or None where there is none (or -1). Raises ConfigError."""
        value = self.document.values.get(name)
        if value is None or value == -1:
            return None
        if type(value) is not int or value < 0:
            raise ConfigError(f"{self.document.where(name)}: {name} takes a whole number, not {quoted(str(value))}")
        return value

    def text(self, name: str) -> str | None:
        """Give what a key says as text; None where it says nothing."""
        value = self.document.values.get(name)
        return None if value is None else str(value)

    @property
    def uses_cpu(self) -> bool:
        """Tell whether it is for CPUs."""
        return bool(self.document.values.get("use_cpu")) or self.kind == "MULTI_CPU"

    @property
    def deepspeed_file(self) -> str | None:
        """Give the file with DeepSpeed's own configuration; None without one, and where that itself stands here."""
        value = self.section("deepspeed_config").get("deepspeed_config_file")
        has_one = self.kind == "DEEPSPEED" and value is not None and str(value) != "none"
        return str(value) if has_one and not _is_inline(str(value)) else None

    def variables(self, precision: str | None) -> dict[str, str]:
        """Give what all workers get; ``precision`` instead of the file's. Raises ConfigError."""
        found = precision or self.precision or "no"
        variables = {"ACCELERATE_MIXED_PRECISION": found}
        if found == "fp8":
            variables.update(self._fp8())
        if self.kind == "DEEPSPEED":
            fields = [
                *self.of_deepspeed,
                *(["mixed_precision"] if not precision and self.precision else []),
            ]
            variables.update(self._of("deepspeed_config", n.DEEPSPEED, "deepspeed_"))
            variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields).lower()
            variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        else:
            variables.update(self._of("dynamo_config", n.DYNAMO, "dynamo_"))
            variables["ACCELERATE_DYNAMO_BACKEND"] = self._dynamo_backend(variables["ACCELERATE_DYNAMO_BACKEND"])
        if self.kind == "FSDP":
            variables.update(self._fsdp())
        if self.kind == "MEGATRON_LM":
            variables.update(self._of("megatron_lm_config", n.MEGATRON, "megatron_lm_"))
            variables["ACCELERATE_USE_MEGATRON_LM"] = "true"
        if self.section("parallelism_config") and self.kind not in ("NO", "MULTI_CPU"):
            variables.update(self._parallelism())
        if self.document.values.get("debug"):
            variables["ACCELERATE_DEBUG_MODE"] = "true"
        for name, value in variables.items():
            if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ConfigError(
                    f"{self.document.where()}: {name} would be {quoted(value)}, which no variable can hold"
                )
        return variables

    def section(self, name: str) -> Mapping[str, Any]:
        """Give the names and values of a section; none where it is missing. Raises ConfigError."""
        return _mapping(self.document, name)

    def _of(self, section: str, rows: Mapping[str, n.Row], prefix: str) -> dict[str, str]:
        """Turn a section into variables; its keys may have the prefix that launch's options have."""
        given = {
            (key if key in rows else key.removeprefix(prefix)): (key, value)
            for key, value in self.section(section).items()
            if value is not None
        }
        for name, (key, value) in given.items():
            if name in rows:
                check_value(f"{self.document.where(section, key)}: {key}", value, rows[name].variable)
        return dict(_settings({name: value for name, (_, value) in given.items()}, rows))

    def _fsdp(self) -> dict[str, str]:
        variables = {**self._of("fsdp_config", n.FSDP, "fsdp_"), "ACCELERATE_USE_FSDP": "true"}
        if (variables["FSDP_CPU_RAM_EFFICIENT_LOADING"], variables["FSDP_SYNC_MODULE_STATES"]) == ("true", "false"):
            where = self.document.where("fsdp_config", "fsdp_sync_module_states")
            raise ConfigError(
                f"{where}: fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states: true",
                hint="only rank 0 loads the model then, and the others get theirs from it",
            )
        return variables

    def _parallelism(self) -> dict[str, str]:
        variables = self._of("parallelism_config", n.PARALLELISM, "parallelism_config_")
        defaults = {}
        if variables["PARALLELISM_CONFIG_CP_SIZE"] != "1":
            defaults["CP_COMM_STRATEGY"] = "allgather"
        if variables["PARALLELISM_CONFIG_SP_SIZE"] != "1":
            defaults.update(SP_SEQ_LENGTH="None", SP_SEQ_LENGTH_IS_VARIABLE="True", SP_ATTN_IMPLEMENTATION="sdpa")
        named = {"PARALLELISM_CONFIG_" + name: value for name, value in defaults.items()}
        return {**named, **variables, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}

    def _fp8(self) -> dict[str, str]:
        variables = self._of("fp8_config", n.FP8, "fp8_")
        told = self.section("fp8_config").get("override_linear_precision") or (False,) * len(n.FP8_OVERRIDES)
        values = told.split(",") if isinstance(told, str) else told
        if not isinstance(values, list | tuple) or len(values) != len(n.FP8_OVERRIDES):
            where = self.document.where("fp8_config", "override_linear_precision")
            raise ConfigError(f"{where}: override_linear_precision takes three switches: forward, dgrad, wgrad")
        overrides = zip(n.FP8_OVERRIDES, values, strict=True)
        return {**variables, **{f"ACCELERATE_FP8_OVERRIDE_{name}": str(value).strip() for name, value in overrides}}

    def _dynamo_backend(self, text: str) -> str:
        # Without quotes a file's "no" is false.
        name = "no" if text == "False" else text.lower()
        if name not in n.DYNAMO_BACKENDS:
            where = self.document.where("dynamo_config", "dynamo_backend")
            raise ConfigError(f"{where}: dynamo_backend {quoted(text)}", hint=_choices(text, n.DYNAMO_BACKENDS))
        return name.upper()


def read_config(document: Document, above: Mapping[str, Any] | None = None) -> Config:
    """Check a configuration, with what ranks ``above`` it: names and values as in it.

    Raises ConfigError with file and line for what cannot be meant, or is not for here.
    """
    of_deepspeed = tuple(_mapping(document, "deepspeed_config"))
    document = _overlaid(document, above or {})
    values = document.values
    notes = tuple(_unknown_keys(document))
    environment = values.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise ConfigError(
            f"{document.where('compute_environment')}: {quoted(str(environment))} is for accelerate launch alone",
            hint="compute_environment: LOCAL_MACHINE is for any machines that you can log in to",
        )
    if "distributed_type" not in values:
        raise ConfigError(f"{document.where()}: distributed_type is missing", hint=", ".join(n.TYPES))
    kind = "NO" if values["distributed_type"] is False else str(values["distributed_type"])
    if kind in ("XLA", "TPU"):
        raise ConfigError(f"{document.where('distributed_type')}: TPUs are not started by distlaunch")
    if kind not in n.TYPES:
        raise ConfigError(f"{document.where('distributed_type')}: {quoted(kind)}", hint=_choices(kind, n.TYPES))
    precision = values.get("mixed_precision", "fp16" if values.get("fp16") else None)
    precision = "no" if precision is False else precision
    if precision is not None and str(precision).lower() not in n.PRECISIONS:
        raise ConfigError(
            f"{document.where('mixed_precision')}: mixed_precision {quoted(str(precision))}",
            hint=_choices(str(precision), n.PRECISIONS),
        )
    if "dynamo_backend" in values and "dynamo_config" not in values:  # of Accelerate before 0.17
        document = Document(
            path=document.path,
            values={**values, "dynamo_config": {"dynamo_backend": values["dynamo_backend"]}},
            lines=document.lines,
        )
    return Config(
        document=document,
        kind=kind,
        precision=None if precision is None else str(precision).lower(),
        notes=notes,
        of_deepspeed=of_deepspeed,
    )


def _overlaid(document: Document, above: Mapping[str, Any]) -> Document:
    """Give the document with other values in it, of a section by its keys; None takes a key out."""
    values, lines = dict(document.values), dict(document.lines)
    for name, value in above.items():
        if name in n.SECTIONS and isinstance(value, Mapping):
            kept = {key: each for key, each in _mapping(document, name).items() if key not in value}
            values[name] = {**kept, **value}  # of two names for one key the last one counts
            lines = {keys: line for keys, line in lines.items() if keys[:1] != (name,) or keys[-1] in kept}
        else:
            values[name] = value
            lines.pop((name,), None)
    there = {name: value for name, value in values.items() if value is not None}
    return Document(path=document.path, values=there, lines=lines)


def _is_inline(text: str) -> bool:
    """Tell whether a text is JSON, or base64 of it: Accelerate takes that where there is no file of this name."""
    for decoded in (bytes, urlsafe_b64decode):
        with suppress(ValueError, RecursionError):
            return isinstance(json.loads(decoded(text.encode())), dict)
    return False


def _settings(given: Mapping[str, Any], rows: Mapping[str, n.Row]) -> Iterator[tuple[str, str]]:
    for name, row in rows.items():
        value = str(given[name]) if name in given else row.default
        if value is not None:
            yield row.variable, value.lower() if row.small else value


def _mapping(document: Document, name: str) -> Mapping[str, Any]:
    value = document.values.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{document.where(name)}: {name} takes names and values, not {quoted(str(value))}")
    return value


def _unknown_keys(document: Document) -> Iterator[str]:
    """Refuse what looks like a slip of the pen, and tell of what a newer Accelerate may know."""
    unknown: list[tuple[tuple[str, ...], frozenset[str]]] = [
        ((name,), n.TOP) for name in document.values if name not in n.TOP
    ]
    for name, section in n.SECTIONS.items():
        known = {*section.rows, *(section.prefix + key for key in section.rows), *section.others}
        unknown += [((name, key), frozenset(known)) for key in _mapping(document, name) if key not in known]
    for at, (keys, there) in enumerate(unknown[:_MOST_COMPARED]):
        said = f"{document.where(*keys)}: {quoted(keys[-1])} is not known"
        near = get_close_matches(keys[-1], sorted(there), n=1, cutoff=0.85)
        if near:
            raise ConfigError(said, hint=f"did you mean {near[0]}?")
        if at < _MOST_TOLD:
            instead = "; -o gradient-accumulation-steps=N sets it" if keys == (_ACCUMULATION,) else ""
            yield f"{said}, and not passed on{instead}"
    if len(unknown) > _MOST_TOLD:
        more = f"{counted(len(unknown) - _MOST_TOLD, 'more key')} {'is' if len(unknown) == _MOST_TOLD + 1 else 'are'}"
        yield f"{document.where()}: {more} not known: is it a configuration of Accelerate?"


def _choices(text: str, there: tuple[str, ...]) -> str:
    near = get_close_matches(text, there, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(there)}"
