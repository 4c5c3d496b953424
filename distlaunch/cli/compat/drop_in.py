"""What the commands share that take another launcher's words: rows of their tables, how words are
spelt out, and how a job is run whose errors are told in these words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from distlaunch.cli.option import Group, Kind, Option, Place
from distlaunch.cli.option_table import HELP_FLAGS, TRAIN_OPTIONS
from distlaunch.cli.parser import Given, scan
from distlaunch.core.errors import LaunchError, UsageError
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import quoted
from distlaunch.planning.train_options import Dialect, DropInOptions

_TRAIN = {option.field: option for option in TRAIN_OPTIONS}


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
    """Give the names of train's options that another option stands for here, each with that one."""
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
    theirs: Iterable[Option],
    dialect: Dialect,
    *,
    drops_dashes: bool = False,
) -> tuple[Given, tuple[str, ...]]:
    """Take a command line apart as ``scan`` does, with its errors in this dialect; see
    ``plain_words``."""
    with in_words_of(dialect):
        return scan(plain_words(argv, options, theirs, drops_dashes=drops_dashes), options)


def plain_words(
    argv: Sequence[str],
    options: Iterable[Option],
    theirs: Iterable[Option],
    *,
    drops_dashes: bool = False,
) -> list[str]:
    """Make the words up to the script or command fit for our own parser.

    ``drops_dashes``: one ``--`` directly behind the script is left out, as by launchers that use
    argparse. Spelt out are beginnings of the long names of ``theirs``, and words such as ``-np``,
    ``-np2`` and ``-H=a:2``, which our parser would take apart into letters. Raises UsageError for a
    beginning of several names.
    """
    by_flag = {flag: option for option in options for flag in option.all_flags}
    one_dash = {
        flag: option.name for flag, option in by_flag.items() if flag[1] != "-" and len(flag) > 2
    }
    long = {flag: option.field for option in theirs for flag in option.flags if flag[:2] == "--"}
    words: list[str] = []
    at = 0
    while at < len(argv) and argv[at] != "--" and len(argv[at]) > 1 and argv[at][0] == "-":
        word = argv[at]
        at += 1
        flag, equals, value = word.partition("=")
        if flag[:2] == "--":
            dashed = flag.replace("_", "-")
            flag = dashed if dashed in by_flag else whole_name(flag, long)
        else:
            flag, equals, value = _one_dash(word, one_dash, by_flag)
        option = by_flag.get(flag)
        words += (
            [flag, value]
            if option is not None and equals and flag[1] != "-"
            else [flag + equals + value]
        )
        if option is not None and option.kind != "flag" and not equals and at < len(argv):
            words.append(argv[at])
            at += 1
    rest = argv[at:]
    return [*words, *(without_dashes(rest) if drops_dashes else rest)]


def without_dashes(rest: Sequence[str]) -> list[str]:
    """Leave out one ``--`` directly behind the script, unless another one stands before the
    script."""
    drops = len(rest) > 1 and rest[0] != "--" and rest[1] == "--"
    return [rest[0], *rest[2:]] if drops else [*rest]


def _one_dash(
    word: str, names: Mapping[str, str], by_flag: Mapping[str, Option]
) -> tuple[str, str, str]:
    """Spell a word with one dash out, if it is a long name, the beginning of one alone, or one with
    a number behind.

    Where its first letter is an option, a word that is no whole name is that option and its value.
    """
    flag, equals, value = word.partition("=")
    if flag in names:
        return names[flag], equals, value
    if flag[:2] not in by_flag and flag not in HELP_FLAGS:
        begun = {names[name] for name in names if name.startswith(flag)}
        if len(begun) == 1:
            return begun.pop(), equals, value
        for name in names:
            if flag[len(name) :].isdigit() and flag.startswith(name) and not equals:
                return names[name], "=", flag[len(name) :]
    return flag, equals, value


def whole_name(flag: str, fields: Mapping[str, str]) -> str:
    """Give the long name, with dashes, of which this is the beginning, and the flag as it is where
    there is none.

    ``fields`` has the field of each long name. Raises UsageError for a beginning of several.
    """
    dashed = "--" + flag[2:].replace("_", "-")
    names = {**fields, HELP_FLAGS[0]: "help"}
    if dashed in names:
        return dashed
    begun = [name for name in names if name.startswith(dashed)]
    if len({names[name] for name in begun}) > 1:
        raise UsageError(f"{quoted(flag)} is the beginning of several options: {', '.join(begun)}")
    return begun[0] if begun else flag


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
    remarks: Sequence[str],
    environ: Mapping[str, str],
    *,
    table: Iterable[Option],
    around: AbstractContextManager[None] | None = None,
) -> int:
    """Say what is to be said before the job, and run it; ``around`` lasts as long. Returns the exit
    code.

    ``table``: the options of this command.
    """
    from distlaunch.cli.commands.train import train
    from distlaunch.cli.error_output import print_warnings
    from distlaunch.cli.misplaced_options import misplaced_options
    from distlaunch.cli.parser import unknown_variables

    if not options.quiet:
        names = (flag for option in table for flag in option.all_flags)
        print_warnings(
            [*unknown_variables(environ), *remarks, *misplaced_options(options, names, environ)]
        )
    with in_words_of(options.dialect), around or nullcontext():
        return train(options)
