"""What a backend is: the variables, words and options that one training framework needs of a
launcher.

A backend changes nothing else: supervision, output, reports and restarts are the same for all. One
is a class of its own; ``distlaunch.backends`` is the entry-point group for those of other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Literal

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import quoted
from distlaunch.planning.backend import PlannedBackend, Value

__all__ = [
    "Backend",
    "BackendError",
    "BackendOption",
    "OptionFileError",
    "Requirement",
    "Value",
    "option_name",
    "reading_file_of",
]

if TYPE_CHECKING:
    from distlaunch.planning.node_source import Location
    from distlaunch.planning.train_options import TrainOptions

Kind = Literal["text", "choice", "flag", "count", "number", "seconds", "file"]


def option_name(word: str) -> str:
    """Return the name of the option that a word NAME=VALUE is about, however it is written."""
    return word.partition("=")[0].strip().replace("_", "-").lower()


class BackendError(ConfigError):
    """A backend cannot be used; ``problem`` says why, without the backend's name."""

    def __init__(self, name: str, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"--backend {quoted(name)}: {problem}", hint=hint)
        self.problem = problem


class OptionFileError(ConfigError):
    """The file that an option names, or that is read for it unasked, is not right."""

    def __init__(self, option: str, error: ConfigError) -> None:
        super().__init__(error.message, hint=error.hint)
        self.option = option


@contextmanager
def reading_file_of(option: str) -> Iterator[None]:
    """Turn each ConfigError into an OptionFileError of this option."""
    try:
        yield
    except ConfigError as error:
        raise OptionFileError(option, error) from error


class BackendOption(Record):
    """One ``-o NAME=VALUE``. Nothing is set for it where it is not given: the framework's own
    default holds."""

    name: str
    about: str
    kind: Kind = "text"
    choices: tuple[str, ...] = ()
    metavar: str = ""


class Requirement(Record):
    """A module that the workers import, and the package that brings it."""

    module: str
    package: str
    at_least: str = ""
    """The oldest version that works; empty: any."""
    variables: str = ""
    """Set while it is compiled beside what is there already, ``NAME=1 OTHER=1``; empty for a
    package that is not."""
    see: str = ""
    """Where people read how that is done, if the command is not all."""
    demanded: bool = True
    """A job does not start without it. False: not every script imports it, and ``distlaunch
    backends`` alone tells."""
    beside: Requirement | None = None
    """Needed only where this is at least that new, and then in the same release (2.21.1 for
    2.21.0)."""


class Backend(PlannedBackend):
    """A backend with its options chosen; a subclass says what is different from what all workers
    get."""

    about: ClassVar[str]
    """A line for ``distlaunch backends``."""
    requires: ClassVar[tuple[Requirement, ...]] = ()
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """By option where a file is read that the user has not named: at the first whose variable
    (``$NAME/…``) is set."""

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        """Take the options that the user gave, checked and converted, and the contents of the files
        that they name.

        ``texts``: by option. Raises ConfigError for options that contradict each other, and
        OptionFileError for a file that is not right (see ``reading_file_of``).
        """
        del texts
        self.chosen = chosen

    def agreed(self) -> Mapping[str, Value]:
        """Name files without their folders, which may be others on each node."""
        files = {option.name for option in self.options() if option.kind == "file"}
        return {
            name: str(value).rpartition("/")[2] if name in files else value
            for name, value in self.chosen.items()
        }

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """List the options that ``-o`` takes."""
        return ()

    @classmethod
    def env_files(cls, environ: Mapping[str, str], cwd: str) -> Sequence[str]:
        """Name files of NAME=VALUE lines that are there, and hold for all workers; ``--env-file``
        ranks above them.

        Raises ConfigError for one that is named and is not there.
        """
        del environ, cwd
        return ()

    def sized(self, options: TrainOptions) -> TrainOptions:
        """Return the sizes and devices as this backend takes them. Raises ConfigError for those that
        it cannot have."""
        return options

    def location(self, options: TrainOptions, machine: str) -> Location | None:
        """Say on which nodes workers run, as far as that is known before its own cluster has
        decided it, as Ray's does.

        None: it has none, and the nodes are whoever else names them. ``machine``: our own name.
        Raises ConfigError.
        """
        del options, machine
        return None

    def check_files(
        self, variables: Mapping[str, str], read: Callable[[str, str], str | None]
    ) -> None:
        """Look at files that workers with these variables are to read, named by those that were
        given.

        ``read(path, named)``: what a file holds whose path is taken from the workers' directory;
        None where that is on other machines alone. It raises ConfigError, begun by ``named``.
        Raises ConfigError for one that is not right.
        """
        del variables, read

    def needed(self, variables: Mapping[str, str]) -> tuple[Requirement, ...]:
        """Return of ``requires``, and beside it, what workers with these variables and options
        import."""
        del variables
        return self.requires
