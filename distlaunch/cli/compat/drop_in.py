"""Code shared by the commands that accept another launcher's options (drop-in commands)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from distlaunch.cli.option import Group, Kind, Option, Place
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.core.model.option_names import TRAIN_NAMES, OptionNames, use_names
from distlaunch.core.model.record import Record, replace
from distlaunch.planning.train_options import DropInOptions

_TRAIN = {option.field: option for option in TRAIN_OPTIONS}


class Translation(Record):
    """Options of train, and notices to print before the job."""

    options: DropInOptions
    notices: tuple[str, ...]


def train_option(field: str, flags: str = "", help: str = "") -> Option:  # noqa: A002 - named as the field that it fills
    """Return train's row of an option, with another launcher's ``flags`` (separated by spaces) and
    ``help`` if given."""
    option = _TRAIN[field]
    return replace(option, flags=tuple(flags.split()) or option.flags, help=help or option.help)


def with_train_options(command_options: Sequence[Option], place: Place) -> tuple[Option, ...]:
    """Return a command's own rows, then those of train that apply to it."""
    fields = {option.field for option in command_options}
    return (
        *command_options,
        *(
            option
            for option in TRAIN_OPTIONS
            if option.field not in fields and place not in option.absent
        ),
    )


def underscored(options: Iterable[Option]) -> tuple[Option, ...]:
    """Return the options with names that have underscores in messages. The parser accepts dashes
    too."""
    return tuple(
        replace(option, shown=f"--{option.name[2:].replace('-', '_')}")
        if "-" in option.name[2:]
        else option
        for option in options
    )


def option_names(place: Place, options: Iterable[Option]) -> OptionNames:
    """Return the names of train's options in a drop-in command."""
    own = {option.field: option.name for option in options if option.field in _TRAIN}
    absences = {
        option.field: option.absent[place] for option in TRAIN_OPTIONS if place in option.absent
    }
    instead = {field: absence.instead for field, absence in absences.items() if absence.instead}
    differing = {
        field: name
        for field, name in (instead | own).items()
        if field not in ("script", "opt") and name != TRAIN_NAMES.name(field)
    }
    absent = absences.keys() - instead.keys() - own.keys() - {"script"}
    if "rendezvous" in absent:
        absent |= {"rendezvous_port"}
    names = differing | {"backend": "the backend"}
    return OptionNames(names=names, absent=frozenset(absent - names.keys()))


def own_option(
    flags: str,
    kind: Kind,
    group: Group,
    help: str,  # noqa: A002 - named as the field that it fills
    *,
    metavar: str = "",
    choices: tuple[str, ...] = (),
    field: str = "",
    repeatable: bool = False,
    shown: str = "",
) -> Option:
    """Return the row of an option that train does not have."""
    words = tuple(flags.split())
    return Option(
        flags=words,
        field=field or words[-1][2:].replace("-", "_"),
        kind=kind,
        default=False if kind == "flag" else None,
        help=help,
        group=group,
        variable=None,
        metavar="|".join(choices) or metavar,
        choices=choices,
        repeatable=repeatable,
        shown=shown,
    )


def run_drop_in(
    options: DropInOptions,
    notices: Sequence[str],
    environ: Mapping[str, str],
    *,
    table: Iterable[Option],
    around: AbstractContextManager[None] | None = None,
) -> int:
    """Print the notices and warnings unless ``--quiet`` is given, then run the job inside the
    context ``around``. Return the exit code.

    ``table`` has the options of the command, for a warning about options after the script.
    """
    from distlaunch.cli.commands.train import train
    from distlaunch.cli.error_output import print_warnings
    from distlaunch.cli.misplaced_options import misplaced_options
    from distlaunch.cli.parser import unknown_variables

    with use_names(options.dialect.names), around or nullcontext():
        if not options.quiet:
            names = (flag for option in table for flag in option.all_flags)
            print_warnings(
                [*unknown_variables(environ), *notices, *misplaced_options(options, names, environ)]
            )
        return train(options)
