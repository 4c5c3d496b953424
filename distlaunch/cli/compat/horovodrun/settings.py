"""Convert horovodrun's options and configuration file to values of ``-o``.

The table of settings is in ``backends/horovod``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.backends.backend_options import convert_value
from distlaunch.backends.horovod import SETTINGS, HorovodSetting
from distlaunch.cli.compat.drop_in import own_option
from distlaunch.cli.option import Option, option_error
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.text import printable, quoted

if TYPE_CHECKING:
    from distlaunch.backends.config_file import Document

_PREFIXES = {
    "autotune": "autotune",
    "timeline": "timeline",
    "stall_check": "stall-check",
    "logging": "log",
}
"""By section of the configuration file: the prefix that the names of its settings have and its keys
do not have."""
_SWITCHES = {
    "log-with-timestamp": (
        "--no-log-hide-timestamp --log-with-timestamp",
        "--log-hide-timestamp --log-without-timestamp",
    )
}
"""Flags of a setting if they are not ``--name`` and ``--no-name``."""
_KINDS = {
    "count": "a whole number >= 0",
    "number": "a number >= 0",
    "flag": "true or false",
    "text": "a file",
}


def rows() -> Iterator[Option]:
    """Yield the rows of all settings. A switch has a second row that turns it off."""
    for setting in SETTINGS:
        name, about = setting.name, f"{setting.option.about[0].upper()}{setting.option.about[1:]}."
        if setting.option.kind == "flag":
            on, off = _flags_of(name)
            yield own_option(on, "flag", "backend", about, field=_field_of(name))
            yield own_option(off, "flag", "backend", "Turn it off.", field=f"no_{_field_of(name)}")
        else:
            choices = tuple(choice.upper() for choice in setting.option.choices)
            yield own_option(
                f"--{name}",
                "text",
                "backend",
                about,
                metavar=setting.option.metavar or "N",
                choices=choices,
            )


def given_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the settings on the command line by name.

    Raises UsageError if a switch is turned both on and off.
    """
    texts = {}
    for name in (setting.name for setting in SETTINGS):
        if _field_of(name) in given:
            texts[name] = given[_field_of(name)]
        if f"no_{_field_of(name)}" in given:
            if name in texts:
                on, off = _flags_of(name)
                raise UsageError(f"{on.split()[-1]} and {off.split()[-1]} exclude each other")
            texts[name] = "off"
    return texts


def words(
    given: Mapping[str, str], document: Document | None, notices: list[str]
) -> dict[str, str]:
    """Return for each setting its word ``NAME=VALUE`` for ``-o``. The command line takes precedence
    over the file.

    Unknown keys of the file are ignored, as by horovodrun, and added to ``notices``. Raises
    UsageError or ConfigError for an invalid value.
    """
    texts = dict(_read_settings(document, notices)) if document is not None else {}
    texts |= {name: (text, f"--{name}") for name, text in given.items()}
    return {
        setting.name: f"{setting.name}={_check_setting(setting, *texts[setting.name])}"
        for setting in SETTINGS
        if setting.name in texts
    }


def _field_of(name: str) -> str:
    return name.replace("-", "_")


def _flags_of(name: str) -> tuple[str, str]:
    return _SWITCHES.get(name, (f"--{name}", f"--no-{name}"))


def _key_of(setting: HorovodSetting) -> str:
    return (
        _field_of(setting.name.removeprefix(_PREFIXES.get(setting.section, "")).lstrip("-"))
        or "enabled"
    )


def _read_settings(document: Document, notices: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    keys = {(setting.section, _key_of(setting)): setting.name for setting in SETTINGS}
    sections = {setting.section: None for setting in SETTINGS}
    for section, values in document.values.items():
        if section == "controller":
            continue
        if section not in sections:
            notices.append(_unknown_key_notice(document, (section,), [*sections, "controller"]))
            continue
        if not isinstance(values, dict | None):
            raise ConfigError(
                f"{document.where(section)}: {section} takes a mapping, not {quoted(str(values))}"
            )
        for key, value in (values or {}).items():
            name = keys.get((section, key))
            if name is None:
                notices.append(
                    _unknown_key_notice(
                        document, (section, key), [name for at, name in keys if at == section]
                    )
                )
                continue
            if value is not None:
                yield name, (str(value), f"{document.where(section, key)}: {key}")


def _unknown_key_notice(document: Document, keys: tuple[str, ...], there: Sequence[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(keys[-1], there, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(there)}"
    return (
        f"{document.where(*keys)}: horovodrun has no {quoted(keys[-1])}, and it changes "
        f"nothing: {hint}"
    )


def _check_setting(setting: HorovodSetting, text: str, source: str) -> str:
    choices = [choice.upper() for choice in setting.option.choices]
    if choices and text in choices:
        return text.lower()
    value = None if choices else convert_value(setting.option, text)
    if value is not None and setting.fits(value):
        return text
    what = f"{', '.join(choices[:-1])} or {choices[-1]}" if choices else _KINDS[setting.option.kind]
    what = f"a number from 0 to {setting.most:g}" if setting.most < float("inf") else what
    if source.startswith("-"):
        raise option_error(source, f"takes {what}, not {quoted(text)}")
    raise ConfigError(f"{printable(source)} takes {what}, not {quoted(text)}")
