"""The command ``distlaunch accelerate launch``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from distlaunch.backends import option_files
from distlaunch.backends.accelerate import Accelerate
from distlaunch.backends.accelerate_config import Config, read_config
from distlaunch.backends.base import option_name
from distlaunch.backends.config_file import read_document
from distlaunch.backends.option_files import read_named_file
from distlaunch.cli.compat.accelerate.options import OPTIONS
from distlaunch.cli.compat.accelerate.translate import NAMES, own_command, translate
from distlaunch.cli.compat.drop_in import run_drop_in
from distlaunch.cli.option_table import HELP_FLAGS
from distlaunch.cli.parser import Given, HelpRequested, scan
from distlaunch.core.errors import UsageError
from distlaunch.core.model.option_names import use_names
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import printable, quoted


def accelerate(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command and return the exit code.

    Raises HelpRequested, and LaunchError for an error before the job starts.
    """
    if not argv:
        raise UsageError(
            "accelerate what?", hint="distlaunch accelerate launch [OPTIONS] SCRIPT [ARGS]..."
        )
    word = argv[0]
    if word in HELP_FLAGS:
        raise HelpRequested
    if word != "launch":
        raise UsageError(
            f"accelerate {printable(word)}: there is launch alone here",
            hint=own_command(printable(word)),
        )
    with use_names(NAMES):
        given, rest = scan(argv[1:], OPTIONS, drops_dashes=True)
        config, texts = configuration(given, environ, os.getcwd())
        translation = translate(given, rest, environ, config)
    return run_drop_in(
        replace(translation.options, texts=texts), translation.notices, environ, table=OPTIONS
    )


def configuration(
    given: Given, environ: Mapping[str, str], cwd: str
) -> tuple[Config | None, dict[str, str]]:
    """Read Accelerate's configuration: the file of ``--config_file``, or the default file.

    ``--cpu`` and ``-o config=none`` skip the default file. The second value has the text of the
    file by its path. Raises LaunchError if the file cannot be read, and UsageError for ``-o
    config`` and ``-o settings``, which the command line replaces.
    """
    without_usual = "cpu" in given
    for word in given.get("opt", ()):
        match option_name(word), word.partition("=")[2]:
            case "config", option_files.NEITHER:
                without_usual = True
            case "config" | "settings", _:
                raise UsageError(
                    f"-o {quoted(word)}: the command line says it itself", hint="--config_file FILE"
                )
    if "config_file" in given:
        path = given["config_file"][-1]
        whole, named = os.path.join(cwd, path), f"--config_file {quoted(path)}"
    else:
        there = (
            None
            if without_usual
            else option_files.default_files(Accelerate.usual, environ, cwd).get("config")
        )
        if there is None:
            return None, {}
        path = whole = there
        named = printable(there)
    text = read_named_file(whole, named)
    return read_config(read_document(text, path)), {whole: text}
