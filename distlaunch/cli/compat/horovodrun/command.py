"""The command ``distlaunch horovodrun``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from distlaunch.backends.horovod import Horovod
from distlaunch.backends.requirements import install_command
from distlaunch.cli.compat.drop_in import run_drop_in
from distlaunch.cli.compat.horovodrun.options import COMMAND_OPTIONS, OPTIONS
from distlaunch.cli.compat.horovodrun.translate import NAMES, read_command, translate
from distlaunch.cli.parser import scan
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import use_names
from distlaunch.core.model.text import printable

_PATIENCE_S = 120.0
_ASK = {
    "version": "import horovod; print(horovod.__version__)",
    "check_build": "from horovod.runner.launch import check_build; check_build(False)",
}


def horovodrun(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command, or print what ``--version`` or ``--check-build`` asks for. Return the exit
    code.

    Raises HelpRequested, and LaunchError for an error before the job starts.
    """
    with use_names(NAMES):
        given, rest = scan(argv, OPTIONS, abbreviated=COMMAND_OPTIONS)
        for field in _ASK:
            if field in given:
                python = given["python"][-1] if "python" in given else _find_python(rest, environ)
                return ask(field, python)
        translation = translate(given, rest, environ)
    return run_drop_in(translation.options, translation.notices, environ, table=OPTIONS)


def _find_python(rest: Sequence[str], environ: Mapping[str, str]) -> str:
    path = environ.get("PATH")
    return read_command(rest).python or shutil.which("python", path=path) or sys.executable


def ask(field: str, python: str) -> int:
    """Print Horovod's version or features, as the interpreter ``python`` knows them. Return 0.

    ``field`` is ``version`` or ``check_build``. Raises ConfigError if the interpreter cannot be
    run, fails, does not answer in time, or has no Horovod.
    """
    try:
        done = subprocess.run(
            [python, "-c", _ASK[field]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except OSError as exc:
        raise ConfigError(f"--python {printable(python)}: {exc.strerror}") from exc
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(
            f"{printable(python)}: Horovod did not answer within {_PATIENCE_S:g} s"
        ) from exc
    if "No module named 'horovod'" in done.stderr:
        hint = install_command(python, Horovod.requires[0])
        raise ConfigError(f"{printable(python)} has no module horovod", hint=hint)
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{printable(python)}: Horovod could not say it: {printable(last[:200])}")
    return 0
