"""A backend with its options, and the files that these name, which are read here."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.backends.base import Backend
from distlaunch.backends.usual import NEITHER, usual_files, without
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import printable
from distlaunch.core.probe.files import read_bounded

if TYPE_CHECKING:
    from distlaunch.planning.train_options import TrainOptions

_TEXT_BYTES = 4 << 20
_TEXT_S = 60.0


def read_users_text(path: str, named: str, *, hint: str | None = None) -> str:
    """Read a file that the user names, in bounds, since it may be a pipe. Raises ConfigError, begun by ``named``."""
    try:
        data = read_bounded(path, most=_TEXT_BYTES, patience_s=_TEXT_S)
    except OSError as exc:
        raise ConfigError(f"{named}: {exc.strerror}", hint=hint) from exc
    except ValueError as exc:
        raise ConfigError(f"{named}: a name of a file has no NUL") from exc
    return data.decode(errors="surrogateescape").replace("\r\n", "\n").replace("\r", "\n")


def configured_backend(
    kind: type[Backend], options: TrainOptions, environ: Mapping[str, str], cwd: str
) -> tuple[Backend, tuple[str, ...]]:
    """Have a backend take its options, and tell which files are read unasked; those named are below ``cwd``.

    Raises ConfigError.
    """
    usual = usual_files(kind.usual, environ, cwd)
    if not options.opt and options.address is None and not usual:
        return kind({}, {}), ()
    from distlaunch.backends.backend_options import chosen_options, given_words

    known = kind.options()
    chosen = chosen_options(given_words(options, known, kind.name), known, kind.name)
    texts: dict[str, str] = {}
    unasked: list[str] = []

    def text_of(path: str, named: str, *, hint: str | None) -> str:
        known = options.texts.get(path)
        return read_users_text(path, named, hint=hint) if known is None else known

    for option in (option for option in known if option.kind == "file"):
        name, there = option.name, usual.get(option.name)
        if name in kind.usual and chosen.get(name) == NEITHER:
            del chosen[name]
        elif name in chosen:
            path = os.path.join(cwd, str(chosen[name]))
            hint = f"the usual one is {printable(there)}, which is read without -o {name}" if there else None
            texts[name] = text_of(path, f"-o {name}={chosen[name]}", hint=hint)
            chosen[name] = path  # workers may have another directory
        elif there:
            texts[name] = text_of(there, printable(there), hint=without(name))
            chosen[name] = there
            unasked.append(name)
    try:
        backend = kind(chosen, texts)
    except ConfigError as error:
        if any(printable(str(chosen[name])) in error.message for name in unasked):
            error.hint = "; ".join(filter(None, (error.hint, *map(without, unasked))))
        raise
    return backend, tuple(f"{printable(str(chosen[name]))} is read ({without(name)})" for name in unasked)


def check_files(
    backend: Backend, variables: Mapping[str, str], workdir: str, *, local: bool, unasked: Sequence[str] = ()
) -> None:
    """Have a backend look at the files that workers with these variables are to read. Raises ConfigError.

    ``local``: this machine is one of the nodes. Else a file that is not here may well be on those. ``unasked``: what
    ``configured_backend`` told, of files that may have named them.
    """

    def read(path: str, named: str) -> str | None:
        whole = os.path.join(workdir, path)
        if os.path.exists(whole):
            return read_users_text(whole, named)
        if local:
            hint = f"the workers look for {printable(whole)}: correct the path, or put the file there"
            raise ConfigError(f"{named}: there is no such file", hint=hint)
        return None

    try:
        backend.check_files(variables, read)
    except ConfigError as error:
        error.hint = "; ".join(filter(None, (error.hint, *unasked))) or None
        raise
