"""The files that options of a backend name, and those that it reads where no option names one."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.backends.base import Backend, OptionFileError
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import printable
from distlaunch.core.probe.files import read_bounded

if TYPE_CHECKING:
    from distlaunch.planning.train_options import TrainOptions

_TEXT_BYTES = 4 << 20
_TEXT_S = 60.0

NEITHER = "none"
"""As the value of an option that has a usual file: neither that nor another."""


def configured_backend(
    kind: type[Backend], options: TrainOptions, environ: Mapping[str, str], cwd: str
) -> tuple[Backend, tuple[str, ...]]:
    """Return a backend with its options and the files that they name, and a notice for each file
    that is read unasked.

    Relative names are below ``cwd``. Raises ConfigError.
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
            hint = (
                f"the usual one is {printable(there)}, which is read without -o {name}"
                if there
                else None
            )
            texts[name] = text_of(path, f"-o {name}={chosen[name]}", hint=hint)
            chosen[name] = path  # workers may have another directory
        elif there:
            texts[name] = text_of(there, printable(there), hint=without(name))
            chosen[name] = there
            unasked.append(name)
    try:
        backend = kind(chosen, texts)
    except OptionFileError as error:
        if error.option in unasked:
            error.hint = "; ".join(filter(None, (error.hint, without(error.option))))
        raise
    return backend, tuple(
        f"{printable(str(chosen[name]))} is read ({without(name)})" for name in unasked
    )


def usual_files(
    usual: Mapping[str, Sequence[str]], environ: Mapping[str, str], cwd: str
) -> dict[str, str]:
    """Find by option those that are there; ``usual`` is ``Backend.usual``, and relative ones are
    below ``cwd``."""
    found = {name: _usual_file(places, environ, cwd) for name, places in usual.items()}
    return {name: path for name, path in found.items() if path is not None}


def _usual_file(places: Sequence[str], environ: Mapping[str, str], cwd: str) -> str | None:
    for place in places:
        first, _, rest = place.partition("/")
        folder = environ.get(first[1:]) if first[0] == "$" else first
        if folder is not None:
            path = os.path.join(cwd, os.path.expanduser(os.path.join(folder, rest)))
            return path if os.path.isfile(path) else None
    return None


def without(name: str) -> str:
    """Return how the usual file of an option is left out."""
    return f"-o {name}={NEITHER} does without"


def check_files(
    backend: Backend,
    variables: Mapping[str, str],
    workdir: str,
    *,
    local: bool,
    unasked: Sequence[str] = (),
) -> None:
    """Let a backend check the files that workers with these variables will read. Raises
    ConfigError.

    ``local``: this machine is one of the nodes. Else a file that is not here may well be on those.
    ``unasked``: what ``configured_backend`` told, of files that may have named them.
    """

    def read(path: str, named: str) -> str | None:
        whole = os.path.join(workdir, path)
        if os.path.exists(whole):
            return read_users_text(whole, named)
        if local:
            hint = (
                f"the workers look for {printable(whole)}: correct the path, or put the file there"
            )
            raise ConfigError(f"{named}: there is no such file", hint=hint)
        return None

    try:
        backend.check_files(variables, read)
    except ConfigError as error:
        error.hint = "; ".join(filter(None, (error.hint, *unasked))) or None
        raise


def read_users_text(path: str, named: str, *, hint: str | None = None) -> str:
    """Read a file that the user names, in bounds, since it may be a pipe. Raises ConfigError, begun
    by ``named``."""
    try:
        data = read_bounded(path, most=_TEXT_BYTES, timeout_s=_TEXT_S)
    except OSError as exc:
        raise ConfigError(f"{named}: {exc.strerror}", hint=hint) from exc
    except ValueError as exc:
        raise ConfigError(f"{named}: a name of a file has no NUL") from exc
    return data.decode(errors="surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
