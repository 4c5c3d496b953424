"""Write a report to a file."""

from __future__ import annotations

import os
from contextlib import suppress

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import printable
from distlaunch.core.private_files import open_private


def write_file(path: str, text: str) -> None:
    """Replace a file by one with this text, which only the owner can read. A device or pipe is
    written to. Raises ConfigError if that fails."""
    fresh = f"{path}.{os.urandom(4).hex()}.new"
    is_special = os.path.exists(path) and not os.path.isfile(path)
    try:
        if is_special:  # a device or pipe, such as /dev/stdout
            with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return
        descriptor = open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(fresh, path)
    except OSError as exc:
        with suppress(OSError):
            os.unlink(fresh)
        raise ConfigError(
            f"the report was not written to {printable(path)}: {os.strerror(exc.errno or 0)}",
            hint="name another file with -o FILE",
        ) from exc
