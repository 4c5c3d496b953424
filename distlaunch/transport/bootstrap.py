"""Start an agent on a node through a login shell, and pack the agent's code as a zip.

The node needs ``/bin/sh`` and a Python >= 3.10. ``remote_command`` returns a shell command. The
command finds a Python, which runs ``STUB``. ``STUB`` reads the zip from stdin and runs the agent in
it. The command has no secrets: other users of the node can see it in /proc.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import pkgutil
import re
import select
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import printable
from distlaunch.core.protocol.agent_messages import GREETING
from distlaunch.transport.connect_errors import STARTUP_HINT, ConnectStepError
from distlaunch.transport.connection import (
    Connection,
    ConnectionEnd,
    EndKind,
    behind_shell,
    describe_end,
)

OLDEST = (3, 10)
PYTHONS = (
    "python3",
    *(f"python3.{minor}" for minor in range(14, OLDEST[1] - 1, -1)),
    "/usr/bin/python3",
    "/usr/local/bin/python3",
)
FLAGS = ("-I", "-S", "-X", "utf8")
"""Options of the agent's interpreter: no modules of the user or the site, and UTF-8 in any
locale."""
_TOO_OLD, _CUT = 97, 98
_OLD, _TRIED, _NONE = "distlaunch-old", "distlaunch-tried", "distlaunch-none"
# Lines are joined by "|", since csh drops newlines. Only double quotes, no backslash, no
# exclamation mark. The class Z keeps zipimport from reading each module twice. Garbage collection
# finds nothing while modules are loaded. Both together save a seventh of an agent's start.
_STUB_LINES = (
    "import gc,os,sys,zipimport",
    f'if sys.version_info<{OLDEST}:print("{_OLD}","%d.%d.%d"%sys.version_info[:3]);sys.exit({_TOO_OLD})',
    'try:f=os.memfd_create("distlaunch")',
    "except(AttributeError,OSError):import tempfile;t=tempfile.TemporaryFile();f=t.fileno()",
    "n=int(sys.argv[1])",
    "while n:",
    f" b=os.read(0,n) or sys.exit({_CUT});n-=len(b)",
    " while b:b=b[os.write(f,b):]",
    "class Z(zipimport.zipimporter):",
    (
        ' get_filename=lambda s,n:s.archive+"/"+s.prefix+n.split(".")[-1]+("/__init__.py" if '
        's.is_package(n) else ".py")'
    ),
    "sys.path_hooks.insert(0,Z)",
    'sys.path.insert(0,"/proc/self/fd/%d"%f)',
    "gc.disable()",
    "from distlaunch.core.agent.MODULE import main",
    "main(WORDS,f)",
)
_KEPT_BEFORE_GREETING = 64 << 10
"""Number of bytes before the greeting that are stored."""
_MOST_BEFORE_GREETING = 16 << 20
"""A node that prints more bytes before the greeting is an error."""
_JOIN_S = 5.0
_LAST_LINES = 3
_LONGEST_LINE = 200
_TRIED_LINE = re.compile(rf"^{_TRIED} (\d+) (.*)$")
_OLD_LINE = re.compile(rf"^{_OLD} ([\d.]+)$")
_LEVEL = 1
"""Compression level of deflate. Level 6 makes the zip 6 % smaller but needs 50 % more time, which
only pays off for 50 nodes and more."""
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_NEEDS = 20
"""The version of PKZIP that supports deflate and directories."""
_DEFLATED = 8
_DATE = 1 << 5 | 1
"""The first of January 1980, the earliest date of a zip."""
_UNCHECKED = struct.pack("<I8x", 1)
"""Follows the magic number of a .pyc that is valid by its hash (PEP 552), unchecked."""
_PYC_HEADER = 16


def stub(module: str, words: str) -> str:
    """Return code for ``python -c`` that reads the zip with distlaunch's code from stdin and starts
    an agent.

    Its first argument is COUNT, the size of the zip. It reads no more of stdin, and calls ``main``
    of ``module``, a module of ``core.agent``, with the value of the expression ``words``.
    """
    lines = "|".join(_STUB_LINES).replace("MODULE", module).replace("WORDS", words)
    return f'exec("""{lines}""".replace("|",chr(10)))'


STUB = stub("main", "sys.argv[2]")
"""For COUNT and NONCE: an agent that uses its stdin and stdout."""


# $1 nonce, $2 count, $3 stub, then interpreters. The shell's own stderr is closed: it would report
# a killed child. 2: a Python that does not know our flags; 126, 127: it cannot be run.
_SCRIPT = (
    'w=$1 c=$2 s=$3 t=:; shift 3; exec 3>&2 2>/dev/null; for p in "$@" '
    + " ".join(PYTHONS)
    + '; do q=$(command -v "$p") || continue; '
    'case $q in /*) ;; *) continue;; esac; test -f "$q" && test -x "$q" || continue; '
    'case $t in *":$q:"*) continue;; esac; t="$t$q:"; '
    f'(exec "$q" {" ".join(FLAGS)} -c "$s" "$c" "$w" 2>&3 3>&-); r=$?; '
    f'case $r in 2|{_TOO_OLD}|126|127) echo "{_TRIED} $r $q";; *) exit $r;; esac; '
    f"done; echo {_NONE}; exit {_TOO_OLD}"
)


class BootstrapConnection(Connection, Protocol):
    """A connection whose agent has not sent its greeting yet."""

    def unread(self, data: bytes) -> None:
        """Put bytes back, for the next ``receive``. ``fileno`` becomes readable."""

    def stderr_tail(self) -> bytes:
        """Return the last 16 KiB of stderr that have arrived."""

    def clear_stderr(self) -> None:
        """Drop the stderr that has arrived up to now."""


def remote_command(*, count: int, nonce: str, pythons: Sequence[str] = ()) -> str:
    """Return the command for a login shell of any kind: sh, bash, dash, zsh, csh, tcsh, fish.

    ``pythons`` are interpreters to try before the usual ones, without paths that some shell could
    misinterpret.
    """
    arguments = (
        _SCRIPT,
        "distlaunch",
        nonce,
        str(count),
        STUB,
        *(path for path in pythons if is_plain(path)),
    )
    return "exec /bin/sh -c " + " ".join(f"'{argument}'" for argument in arguments)


def is_plain(path: str) -> bool:
    """Return whether a path is absolute and needs no quoting between single quotes in any shell."""
    return path.startswith("/") and path.isprintable() and not any(char in path for char in "'\\!")


def start_agent(
    stream: BootstrapConnection, code: bytes, nonce: str, *, until: float, where: str
) -> None:
    """Send the agent's code and wait for its greeting, before the monotonic time ``until``.

    Later bytes are left for ``receive``. ``where`` names the node in messages. Closes the stream
    and raises ConnectStepError if the agent does not start.

    A thread sends the code, because a shell that prints much may read its stdin only once its
    output has been read.
    """
    sender = threading.Thread(
        target=_send_code, args=(stream, code), name="dl-bootstrap", daemon=True
    )
    sender.start()
    try:
        _skip_to_greeting(stream, nonce, until, where)
    except BaseException:
        stream.close()  # also ends the sender
        raise
    finally:
        sender.join(_JOIN_S)


def _send_code(stream: BootstrapConnection, code: bytes) -> None:
    try:
        stream.send(code)
    except OSError:
        pass  # the reader sees the end of the stream as well, and reports it


def _skip_to_greeting(stream: BootstrapConnection, nonce: str, until: float, where: str) -> None:
    """Receive and drop bytes up to the greeting. Raise ConnectStepError if there is none."""
    # The greeting begins with a newline, in case earlier output does not end with one.
    mark = GREETING + nonce.encode() + b"\n"
    noise = b""
    passed = 0
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    while True:
        data = stream.receive()
        if data is None:
            raise _login_error(stream, noise, where)
        searched = noise + data
        at = searched.find(mark)
        if at >= 0:
            if rest := searched[at + len(mark) :]:
                stream.unread(rest)
            stream.clear_stderr()  # the shell's output
            return
        passed += len(data)
        noise = searched[-_KEPT_BEFORE_GREETING:]
        if passed > _MOST_BEFORE_GREETING:
            raise ConnectStepError(
                "agent",
                f"{where} prints over {_MOST_BEFORE_GREETING >> 20} MiB before the agent starts"
                f"{clause_of_last_lines(noise)}",
                passing=False,
            )
        left_s = until - time.monotonic()
        if left_s <= 0:
            said = clause_of_last_lines(stream.stderr_tail() or noise)
            raise ConnectStepError(
                "agent",
                f"the agent did not start in time{said}",
                hint=None if said else STARTUP_HINT,
            )
        if not data:
            poll.poll(left_s * 1000 + 1)


def _login_error(stream: BootstrapConnection, noise: bytes, where: str) -> ConnectStepError:
    """Return the error of a login shell or an agent that ended without a greeting."""
    words = stream.stderr_tail()
    lines = noise.decode(errors="replace").splitlines()
    if _NONE in lines:
        return _no_python_error(lines, where)
    last = words if words.strip() else noise
    end = replace(stream.end(), last_words="")
    how = describe_end(end)
    if b"Traceback (most recent call last)" in words:
        return ConnectStepError(
            "agent", f"the agent failed to start: {how}{clause_of_last_lines(last)}", passing=False
        )
    return ConnectStepError(
        "agent",
        f"the login ended before the agent could start: {how}{clause_of_last_lines(last)}",
        passing=_was_interrupted(end),
    )


def _was_interrupted(end: ConnectionEnd) -> bool:
    """Return whether a broken connection or a signal ended the login."""
    return behind_shell(end).kind is not EndKind.EXITED


def _no_python_error(lines: list[str], where: str) -> ConnectStepError:
    floor = ".".join(map(str, OLDEST))
    found: list[str] = []
    version = None
    for line in lines:
        if old := _OLD_LINE.match(line):
            version = old[1]
        elif tried := _TRIED_LINE.match(line):
            status, path = int(tried[1]), printable(tried[2])
            if status == _TOO_OLD and version is not None:
                found.append(f"Python {version} ({path})")
            elif status == 2:
                found.append(f"a Python before 3.4 ({path})")
            else:
                found.append(f"{path}, which cannot be run")
            version = None
    has = f"{where} has {_join_words(found)}" if found else f"{where} has no Python on its PATH"
    return ConnectStepError(
        "python",
        f"{has}; the agent needs {floor} or newer",
        hint=f"use {Opt.PYTHON} PATH for one that is not on the PATH of a login shell; "
        "for one from `module load`, load the module in .bashrc or use its path",
        passing=False,
    )


def _join_words(found: list[str]) -> str:
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + " and " + found[-1]


def clause_of_last_lines(said: bytes, most: int = _LAST_LINES) -> str:
    """Return the last ``most`` lines of a program's output for the end of a message: ``: one /
    two``; "" if there are none.

    The lines are printable and shortened. Lines of our own script are left out.
    """
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    shown = [
        printable(line[:_LONGEST_LINE])
        for line in lines
        if line and not line.startswith("distlaunch-")
    ]
    return ": " + " / ".join(shown[-most:]) if shown else ""


def agent_zip() -> bytes:
    """Return a zip with ``distlaunch/__init__`` and ``distlaunch.core``, as source and as bytecode.

    A Python of another version compiles the source. Modules without cached bytecode are compiled,
    and cached if possible. Raises ImportError or OSError if the package is damaged.
    """
    import distlaunch
    from distlaunch import core

    return _make_zip(
        file
        for package in (distlaunch, core)
        for file in _package_files(package, deep=package is core)
    )


def _package_files(package: ModuleType, *, deep: bool) -> Iterator[tuple[str, bytes]]:
    spec = package.__spec__
    yield from _module_files(package.__name__, spec, is_package=True)
    if deep:
        yield from _submodule_files(package.__name__ + ".", package.__path__)


def _submodule_files(prefix: str, folders: Any) -> Iterator[tuple[str, bytes]]:
    for info in pkgutil.iter_modules(folders, prefix):
        spec: Any = info.module_finder.find_spec(info.name, None)
        yield from _module_files(info.name, spec, is_package=info.ispkg)
        if info.ispkg:
            yield from _submodule_files(info.name + ".", spec.submodule_search_locations)


def _module_files(name: str, spec: Any, *, is_package: bool) -> Iterator[tuple[str, bytes]]:
    stem = name.replace(".", "/") + ("/__init__" if is_package else "")
    source = spec.loader.get_data(spec.origin)
    code = _cached_bytecode(spec, len(source)) or marshal.dumps(spec.loader.get_code(name))
    yield stem + ".py", source
    yield stem + ".pyc", importlib.util.MAGIC_NUMBER + _UNCHECKED + code


def _cached_bytecode(spec: Any, size: int) -> bytes | None:
    """Return the bytecode of a module from Python's cache if it matches the source. This halves the
    import time."""
    if not spec.cached:
        return None
    try:
        with open(spec.cached, "rb") as file:
            held = file.read()
        changed = int(os.stat(spec.origin).st_mtime)
    except OSError:
        return None
    header = importlib.util.MAGIC_NUMBER + struct.pack(
        "<III", 0, changed & 0xFFFFFFFF, size & 0xFFFFFFFF
    )
    return held[_PYC_HEADER:] if held[:_PYC_HEADER] == header else None


def _make_zip(files: Iterator[tuple[str, bytes]]) -> bytes:
    """Return a zip of the files. ``zipfile`` would take five times as long."""
    parts: list[bytes] = []
    directory: list[bytes] = []
    at = 0
    for name, data in files:
        path = name.encode()
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = packer.compress(data) + packer.flush()
        facts = (0, _DEFLATED, 0, _DATE, zlib.crc32(data), len(packed), len(data), len(path), 0)
        local = _LOCAL.pack(b"PK\3\4", _NEEDS, *facts) + path + packed
        directory.append(_CENTRAL.pack(b"PK\1\2", _NEEDS, _NEEDS, *facts, 0, 0, 0, 0, at) + path)
        parts.append(local)
        at += len(local)
    listed = b"".join(directory)
    end = _END.pack(b"PK\5\6", 0, 0, len(directory), len(directory), len(listed), at, 0)
    return b"".join((*parts, listed, end))
