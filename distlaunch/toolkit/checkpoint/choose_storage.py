"""Choose the storage for a directory or a URL."""

from __future__ import annotations

import os
from urllib.parse import unquote

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.bucket import Bucket
from distlaunch.toolkit.checkpoint.directory import Folder
from distlaunch.toolkit.checkpoint.storage import Store


def store_for(where: str | os.PathLike[str]) -> Store:
    """Return the storage of a directory or URL.

    Raises ConfigError for anything else, as a URL that went through ``pathlib.Path``, which turns
    ``s3://`` into ``s3:/``.
    """
    given: object = where  # a script may pass a value of any type
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(
            f"checkpoints in {where!r}: not a path or a URL: give a directory, as 'runs/a'"
        )
    scheme, slashes, rest = path.partition("://")
    if slashes and scheme != "file":
        return Bucket(path)
    if slashes:
        host, _, rest = rest.partition("/")
        if host not in ("", "localhost"):
            raise ConfigError(
                f"checkpoints in {path}: file:// has three slashes before a path: file:///{host}/{rest}"
            )
        path = f"/{unquote(rest)}"
    elif (first := path.partition("/")[0]).endswith(":"):  # pathlib.Path replaces // by /
        raise ConfigError(
            f"checkpoints in {path}: a directory named {first}, or a URL that has lost a slash? "
            f"Give a URL as a str ('{first}//{path.removeprefix(first).lstrip('/')}'), and a "
            f"directory as './{path}'"
        )
    else:
        path = os.path.expanduser(path)
    return Folder(os.path.abspath(path))
