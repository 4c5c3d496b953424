"""Write the job's first failure to a file in torch's format.

The program that started the launcher reads the file. torch's ``@record`` writes ``{"message":
{"message": "Type: text", "extraInfo": {"py_callstack": "...", "timestamp": "..."}}}``. torchrun
copies the file of the first failed worker to its own TORCHELASTIC_ERROR_FILE, and adds
``errorCode`` beside the inner ``message``. In Kubernetes the file is the pod's termination log,
which is limited to 4096 bytes.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable

VARIABLE = "TORCHELASTIC_ERROR_FILE"
TERMINATION_LOG = "/dev/termination-log"
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_MOST_OF_TERMINATION = 4096
"""Bytes; from the documentation of Kubernetes, "Determine the Reason for Pod Failure"."""
_MOST_READ = 1 << 18


def error_file_path(
    option: str | None,
    environ: Mapping[str, str],
    *,
    of_a_script: bool,
    termination_log: str = TERMINATION_LOG,
) -> str | None:
    """Return the path of the launcher's error file: that of --error-file, of
    TORCHELASTIC_ERROR_FILE, or Kubernetes' termination log.

    None if there is none of them. ``option``: the value of ``--error-file``. ``of_a_script``: a
    worker's script started this launcher, so TORCHELASTIC_ERROR_FILE is the worker's file. Raises
    ConfigError if the option names a directory, or a file in a directory that does not exist.
    """
    if option is not None:
        path = os.path.abspath(option)
        if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path)):
            why = "it is a directory" if os.path.isdir(path) else "its directory does not exist"
            raise ConfigError(
                f"{Opt.ERROR_FILE(printable(option))}: {why}",
                hint="name a file in a directory that exists",
            )
        return path
    if found := environ.get(VARIABLE):
        return None if of_a_script else os.path.abspath(found)
    if _IN_KUBERNETES in environ and os.access(termination_log, os.W_OK):
        return termination_log
    return None


class ErrorFile:
    """The error file of one launcher.

    Only the first failure of a job is written. ``say`` is called with a message if writing fails.
    """

    def __init__(self, path: str | None, say: Callable[[str], None] = lambda _: None) -> None:
        self._path = path
        self.say = say
        self._written = False

    def write(
        self, message: str, details: str, exit_code: int, *, recorded: str | None = None
    ) -> None:
        """Write a failure, unless a failure has been written before.

        ``details`` is written instead of a traceback. ``recorded`` is the path of the failed
        worker's error file. If that file exists and has torch's format, its content is copied.
        """
        if self._path is None or self._written:
            return
        self._written = True
        record = (_read(recorded) if recorded else None) or {
            "message": {
                "message": message,
                "extraInfo": {"py_callstack": details, "timestamp": str(int(time.time()))},
            }
        }
        if isinstance(record["message"], dict):
            record["message"]["errorCode"] = exit_code
        try:
            _overwrite(self._path, _fitting(record, self._path))
        except OSError as exc:
            self.say(f"the first failure could not be written to {self._path}: {exc.strerror}")


def _read(path: str) -> dict[str, Any] | None:
    """Return the content of a worker's error file; None if the file is missing or has another
    format."""
    with suppress(OSError, ValueError, RecursionError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            record = json.loads(file.read(_MOST_READ))
        if isinstance(record, dict) and isinstance(record.get("message"), dict | str):
            return record
    return None


def _fitting(record: dict[str, Any], path: str) -> bytes:
    """Return the record as JSON, which changes the record.

    For a termination log, the beginning of a long traceback and the end of a long message are left
    out.
    """
    data = json.dumps(record).encode()
    inner = record["message"]
    if path != TERMINATION_LOG or not isinstance(inner, dict):
        return data
    extra = inner.get("extraInfo")
    for part, key in ((extra, "py_callstack"), (inner, "message")):
        while (
            len(data) > _MOST_OF_TERMINATION
            and isinstance(part, dict)
            and len(str(part.get(key, ""))) > 1
        ):
            text, over = str(part[key]), len(data) - _MOST_OF_TERMINATION
            part[key] = (
                "..." + text[max(over + 3, 4) :]
                if key == "py_callstack"
                else text[: max(1, len(text) - over)]
            )
            if len(json.dumps(record)) >= len(data):
                part[key] = ""
            data = json.dumps(record).encode()
    return data


def _overwrite(path: str, data: bytes) -> None:
    """Overwrite the content of a file, without replacing the file.

    A termination log is a mount point, so no other file can replace it. If the file is the
    launcher's own output (/dev/stderr), the data is appended.
    """
    how = os.O_APPEND if _is_our_output(path) else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    with open(descriptor, "wb") as file:
        file.write(data)


def _is_our_output(path: str) -> bool:
    with suppress(OSError):
        found = os.stat(path)
        return any(os.path.samestat(found, os.fstat(descriptor)) for descriptor in (1, 2))
    return False
