"""Code shared by the commands that accept the options of another launcher (drop-in commands).

It builds the rows of a drop-in command's option table, parses the command line, and runs the job.
Errors spell options as the other launcher does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from distlaunch.cli.option import Group, Kind, Option, Place
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.cli.parser import Given, scan
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.record import Record, replace
from distlaunch.planning.train_options import Dialect, DropInOptions

_TRAIN = {option.field: option for option in TRAIN_OPTIONS}


class Translation(Record):
    """A translated command: options of train, and notices to print before the job."""

    options: DropInOptions
    notices: tuple[str, ...]


def train_option(field: str, flags: str = "", help: str = "") -> Option:  # noqa: A002 - named as the field that it fills
    """Return the row of an option that train has too, with another launcher's spelling."""
    option = _TRAIN[field]
    return replace(option, flags=tuple(flags.split()) or option.flags, help=help or option.help)


def with_train_options(command_options: Sequence[Option], place: Place) -> tuple[Option, ...]:
    """Return the options of a drop-in command: its own rows (``command_options``), then those of train that
    apply to it.

    ``place`` is the command.
    """
    fields = {option.field for option in command_options}
    return (
        *command_options,
        *(
            option
            for option in TRAIN_OPTIONS
            if option.field not in fields and place not in option.absent
        ),
    )


def spelling_of(place: Place) -> Iterator[tuple[str, str]]:
    """Yield pairs of names: an option of train that does not apply to the command ``place``, and
    the option that replaces it there."""
    for option in TRAIN_OPTIONS:
        absence = option.absent.get(place)
        if absence is not None and absence.instead:
            yield option.name, absence.instead


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
) -> Option:
    """Return the row of an option that train does not have. ``kind`` is the type of its value."""
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
    )


def scan_command_line(
    argv: Sequence[str],
    options: Iterable[Option],
    dialect: Dialect,
    *,
    abbreviated: Iterable[Option] = (),
    drops_dashes: bool = False,
) -> tuple[Given, tuple[str, ...]]:
    """Parse a command line with ``scan``. Errors use the spelling of ``dialect``."""
    with with_option_names(dialect):
        return scan(argv, options, abbreviated=abbreviated, drops_dashes=drops_dashes)


@contextmanager
def with_option_names(dialect: Dialect) -> Iterator[None]:
    """Replace the names of options in a LaunchError by those of ``dialect``, and raise the same
    error again."""
    try:
        yield
    except LaunchError as error:
        error.message = dialect.spelt(error.message)
        error.hint = dialect.spelt(error.hint) if error.hint else None
        error.args = (error.message,)
        raise


def run_drop_in(
    options: DropInOptions,
    notices: Sequence[str],
    environ: Mapping[str, str],
    *,
    table: Iterable[Option],
    around: AbstractContextManager[None] | None = None,
) -> int:
    """Print the notices, then run the job inside the context ``around``. Return the exit code.

    ``table`` has the options of this command.
    """
    from distlaunch.cli.commands.train import train
    from distlaunch.cli.error_output import print_warnings
    from distlaunch.cli.misplaced_options import misplaced_options
    from distlaunch.cli.parser import unknown_variables

    if not options.quiet:
        names = (flag for option in table for flag in option.all_flags)
        print_warnings(
            [*unknown_variables(environ), *notices, *misplaced_options(options, names, environ)]
        )
    with with_option_names(options.dialect), around or nullcontext():
        return train(options)
