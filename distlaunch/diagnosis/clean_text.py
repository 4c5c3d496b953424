"""Convert worker output to lines that are safe to read and to print."""

from __future__ import annotations

import re

from distlaunch.diagnosis.unwrap import expand_record

_ESCAPES = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b\n]*(?:\x1b\\)?"  # DCS and the other strings
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|\x1b[ -/]*[0-~]?"
)
_LINE_CHARS = 4000
"""Of a longer line, only the beginning and end are examined."""
_LEFT_OUT = " ... "
_BREAK = re.compile(r"\r\n|\n|\r")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""torch.distributed's excepthook writes this before every line of a traceback once a process group
exists."""
_NAMES_FILE = re.compile(r"^[\s|]*File \"|can't open file '")
_BYTE = re.compile(r"\\udc([89a-f][0-9a-f])")
r"""Python's stderr writes a byte of a file's name that is not UTF-8 in this form; ``core.model.text`` has
``\xff``."""

_MARKERS = re.compile(r"[\s|+^~]*[|+^~]$")
_NOISE = re.compile(
    r"\[[WI]\d{4} "  # C++ warnings of torch: [W1128 00:45:12.3 file.cpp:1]
    r"|[WI]\d{4} \d\d:"  # the same of glog
    r"|(\S+:\d+: )?\w*Warning: "
    r"|  warnings\.warn\("
    r"|wandb: (?!ERROR)"  # of Weights & Biases, also while the interpreter ends
    r"|Exception ignored "
)


def without_escapes(text: str) -> str:
    """Return a line without escape sequences and unprintable characters. Tabs become spaces."""
    if text.isascii() and text.isprintable():
        return text
    shown = []
    for char in _ESCAPES.sub("", text):
        if char.isprintable():
            shown.append(char)
        elif char == "\t":
            shown.append("    ")
        elif char.isspace() and char > "\x9f":
            shown.append(" ")
    return "".join(shown)


def to_lines(data: bytes) -> list[str]:
    """Return worker output as clean lines. A carriage return ends a line too (progress bars)."""
    lines = []
    for raw in _BREAK.split(data.decode("utf-8", "replace")):
        line = without_escapes(raw).rstrip()
        if line.startswith("[rank"):
            line = _RANK_PREFIX.sub("", line)
        if ("exc_type" in line or "Traceback (most" in line) and (
            found := expand_record(line)
        ) is not None:
            lines += [part.rstrip() for part in found]
            continue
        if "\\udc" in line and _NAMES_FILE.search(line):
            line = _BYTE.sub(r"\\x\1", line)
        if len(line) > _LINE_CHARS:
            line = f"{line[: _LINE_CHARS // 2]} ... {line[-_LINE_CHARS // 2 :]}"
        lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def is_noise(line: str) -> bool:
    """Return whether a line explains no failure: a warning, a progress bar or the like."""
    return not line.strip() or "%|" in line or _NOISE.match(line) is not None


def is_markers(line: str) -> bool:
    """Return whether a line only has markers (``^``, ``~``) for the line above."""
    return _MARKERS.match(line) is not None


def shorten_middle(text: str, limit: int) -> str:
    """Return ``text`` without its middle if it is longer than ``limit``."""
    if len(text) <= limit:
        return text
    kept = limit - len(_LEFT_OUT)
    return f"{text[: kept - kept // 2]}{_LEFT_OUT}{text[len(text) - kept // 2 :]}"


def shorten(text: str, limit: int) -> str:
    """Return ``text``, cut with ``...`` if it is longer than ``limit``."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
