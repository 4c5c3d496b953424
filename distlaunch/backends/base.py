"""Base class of backends.

A backend supplies the variables, arguments and options that one framework needs. Other packages add
backends by the entry-point group ``distlaunch.backends``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Literal

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
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


def option_name(item: str) -> str:
    """Return the name in ``NAME=VALUE``, in lower case with dashes."""
    return item.partition("=")[0].strip().replace("_", "-").lower()


class BackendError(ConfigError):
    """A backend cannot be used; ``problem`` says why."""

    def __init__(self, name: str, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"{Opt.BACKEND(quoted(name))}: {problem}", hint=hint)
        self.problem = problem


class OptionFileError(ConfigError):
    """The file that an option names, or its default file, is invalid."""

    def __init__(self, option: str, error: ConfigError) -> None:
        super().__init__(error.message, hint=error.hint)
        self.option = option


@contextmanager
def reading_file_of(option: str) -> Iterator[None]:
    """Convert ConfigErrors to OptionFileErrors of this option."""
    try:
        yield
    except ConfigError as error:
        raise OptionFileError(option, error) from error


class BackendOption(Record):
    """One option for ``-o NAME=VALUE``. If it is not set, the framework's default applies."""

    name: str
    about: str
    kind: Kind = "text"
    choices: tuple[str, ...] = ()
    metavar: str = ""


class Requirement(Record):
    """A module that the workers import, and the package that contains it."""

    module: str
    package: str
    at_least: str = ""
    """The oldest version that works; empty: any."""
    variables: str = ""
    """Variables for pip if the package has to be compiled: ``NAME=1 OTHER=1``."""
    see: str = ""
    """Where the installation is described, if the command is not enough."""
    demanded: bool = True
    """False if not every script imports it; then only ``distlaunch backends`` reports that it is
    missing."""
    beside: Requirement | None = None
    """The package is needed only if this other package has at least its ``at_least``, and must have
    the same release (2.21.1 for 2.21.0)."""


class Backend(PlannedBackend):
    """A backend with its options. Subclasses override what their framework needs."""

    about: ClassVar[str]
    """One line of description for ``distlaunch backends``."""
    requires: ClassVar[tuple[Requirement, ...]] = ()
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Default files by option. Of several paths, the first whose variable (``$NAME/…``) is set is
    read."""

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        """Create a backend from validated options.

        ``texts``: contents of files by option. Raises ConfigError for contradicting options, and
        OptionFileError for an invalid file.
        """
        del texts
        self.chosen = chosen

    def agreed(self) -> Mapping[str, Value]:
        """Return the chosen options, which must be equal on all nodes.

        A file is represented by its base name, because directories may differ.
        """
        files = {option.name for option in self.options() if option.kind == "file"}
        return {
            name: str(value).rpartition("/")[2] if name in files else value
            for name, value in self.chosen.items()
        }

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """Return the options for ``-o``."""
        return ()

    @classmethod
    def env_files(cls, environ: Mapping[str, str], cwd: str) -> Sequence[str]:
        """Return existing files with lines NAME=VALUE for all workers. ``--env-file`` overrides
        them.

        Raises ConfigError if a named file does not exist.
        """
        del environ, cwd
        return ()

    def sized(self, options: TrainOptions) -> TrainOptions:
        """Return the options with sizes and devices adapted to this backend. Raises ConfigError."""
        return options

    def location(self, options: TrainOptions, machine: str) -> Location | None:
        """Return where the job runs if the backend's own cluster (Ray) chooses the nodes, with
        placeholders for them; else None.

        Raises ConfigError for options that the cluster cannot satisfy.
        """
        del options, machine
        return None

    def check_files(
        self, variables: Mapping[str, str], read: Callable[[str, str], str | None]
    ) -> None:
        """Check the files that workers with these variables will read. Raises ConfigError.

        ``read(path, named)`` returns the content of a file, relative to the workers' directory;
        None if the file may exist on other machines only. ``named`` begins its errors.
        """
        del variables, read

    def needed(self, variables: Mapping[str, str]) -> tuple[Requirement, ...]:
        """Return the modules that workers with these variables need."""
        del variables
        return self.requires
