"""Files named by a backend's options, and default files."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.backends.base import Backend, OptionFileError
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable
from distlaunch.core.probe.files import read_bounded

if TYPE_CHECKING:
    from distlaunch.planning.train_options import TrainOptions

_MAX_BYTES = 4 << 20
_TIMEOUT_S = 60.0

NEITHER = "none"
"""Value of an option that reads neither a named nor the default file."""


def configured_backend(
    kind: type[Backend], options: TrainOptions, environ: Mapping[str, str], cwd: str
) -> tuple[Backend, tuple[str, ...]]:
    """Create a backend with its options. Read the files that its options name.

    A default file (``Backend.usual``) is read if it exists and its option is not given; the second
    value has a notice for each. Relative paths are below ``cwd``. Raises ConfigError.
    """
    usual = default_files(kind.usual, environ, cwd)
    if not options.opt and options.address is None and not usual:
        return kind({}, {}), ()
    from distlaunch.backends.backend_options import chosen_options, given_options

    known = kind.options()
    chosen = chosen_options(given_options(options, known, kind.name), known, kind.name)
    texts: dict[str, str] = {}
    read_by_default: list[str] = []

    def text_of(path: str, named: str, *, hint: str | None) -> str:
        known = options.texts.get(path)
        return read_named_file(path, named, hint=hint) if known is None else known

    for option in (option for option in known if option.kind == "file"):
        name, default = option.name, usual.get(option.name)
        if name in kind.usual and chosen.get(name) == NEITHER:
            del chosen[name]
        elif name in chosen:
            path = os.path.join(cwd, str(chosen[name]))
            hint = f"without {Opt.OPT(name)}, {printable(default)} is read" if default else None
            texts[name] = text_of(path, f"{Opt.OPT} {name}={chosen[name]}", hint=hint)
            chosen[name] = path  # absolute: workers may start in another directory
        elif default:
            texts[name] = text_of(default, printable(default), hint=ignore_hint(name))
            chosen[name] = default
            read_by_default.append(name)
    try:
        backend = kind(chosen, texts)
    except OptionFileError as error:
        if error.option in read_by_default:
            error.hint = "; ".join(filter(None, (error.hint, ignore_hint(error.option))))
        raise
    return backend, tuple(
        f"{printable(str(chosen[name]))} is read ({ignore_hint(name)})" for name in read_by_default
    )


def default_files(
    usual: Mapping[str, Sequence[str]], environ: Mapping[str, str], cwd: str
) -> dict[str, str]:
    """Return the default files that exist, by option. ``usual`` is ``Backend.usual``."""
    found = {name: _default_file(places, environ, cwd) for name, places in usual.items()}
    return {name: path for name, path in found.items() if path is not None}


def _default_file(places: Sequence[str], environ: Mapping[str, str], cwd: str) -> str | None:
    for place in places:
        first, _, rest = place.partition("/")
        folder = environ.get(first[1:]) if first[0] == "$" else first
        if folder is not None:
            path = os.path.join(cwd, os.path.expanduser(os.path.join(folder, rest)))
            return path if os.path.isfile(path) else None
    return None


def ignore_hint(name: str) -> str:
    """Return how to ignore an option's default file."""
    return f"{Opt.OPT} {name}={NEITHER} ignores it"


def check_files(
    backend: Backend,
    variables: Mapping[str, str],
    workdir: str,
    *,
    local: bool,
    read_by_default: Sequence[str] = (),
) -> None:
    """Check the files that workers with these variables will read. Raises ConfigError.

    If this machine is not a node (``local``), a missing file may exist on the nodes.
    ``read_by_default``: the notices of ``configured_backend``, for hints.
    """

    def read(path: str, named: str) -> str | None:
        whole = os.path.join(workdir, path)
        if os.path.exists(whole):
            return read_named_file(whole, named)
        if local:
            hint = (
                f"the workers look for {printable(whole)}: correct the path, or put the file there"
            )
            raise ConfigError(f"{named}: there is no such file", hint=hint)
        return None

    try:
        backend.check_files(variables, read)
    except ConfigError as error:
        error.hint = "; ".join(filter(None, (error.hint, *read_by_default))) or None
        raise


def read_named_file(path: str, named: str, *, hint: str | None = None) -> str:
    """Read a file that the user has named by the option or variable ``named``.

    Raises ConfigError if it cannot be read, is too large, or is a pipe that does not end in time.
    """
    try:
        data = read_bounded(path, most=_MAX_BYTES, timeout_s=_TIMEOUT_S)
    except OSError as exc:
        raise ConfigError(f"{named}: {exc.strerror}", hint=hint) from exc
    except ValueError as exc:
        raise ConfigError(f"{named}: a file name cannot contain NUL") from exc
    return data.decode(errors="surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
