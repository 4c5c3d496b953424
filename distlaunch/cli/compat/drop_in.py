"""What the commands share that take another launcher's words.

Rows of their tables, taking a command line apart, and running a job whose errors are in these words.
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
    """One command of another launcher: options of train, and notices for before the job."""

    options: DropInOptions
    notices: tuple[str, ...]


def same(field: str, flags: str = "", help: str = "") -> Option:  # noqa: A002 - named as the field that it fills
    """Make the row of an option that train has as well, with another launcher's spelling of it."""
    option = _TRAIN[field]
    return replace(option, flags=tuple(flags.split()) or option.flags, help=help or option.help)


def with_trains(theirs: Sequence[Option], place: Place) -> tuple[Option, ...]:
    """Return the options of a command: its own rows, then those of train that apply there too."""
    fields = {option.field for option in theirs}
    return (
        *theirs,
        *(
            option
            for option in TRAIN_OPTIONS
            if option.field not in fields and place not in option.absent
        ),
    )


def spelling_of(place: Place) -> Iterator[tuple[str, str]]:
    """Yield the names of train's options that another option stands for here, each with that one."""
    for option in TRAIN_OPTIONS:
        absence = option.absent.get(place)
        if absence is not None and absence.instead:
            yield option.name, absence.instead


def row(
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
    """Make the row of an option that train does not have."""
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


def take_apart(
    argv: Sequence[str],
    options: Iterable[Option],
    dialect: Dialect,
    *,
    abbreviated: Iterable[Option] = (),
    drops_dashes: bool = False,
) -> tuple[Given, tuple[str, ...]]:
    """Take a command line apart as ``scan`` does, with its errors in this dialect."""
    with in_words_of(dialect):
        return scan(argv, options, abbreviated=abbreviated, drops_dashes=drops_dashes)


@contextmanager
def in_words_of(dialect: Dialect) -> Iterator[None]:
    """Put what a LaunchError says into this dialect. The same one goes on: its kind and exit code
    may be its own."""
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
    """Print the notices, and run the job within ``around``; return the exit code.

    ``table``: the options of this command.
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
    with in_words_of(options.dialect), around or nullcontext():
        return train(options)
