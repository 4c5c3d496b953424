"""Restore tracebacks that a logger has changed. No I/O.

The result has the lines that the interpreter would have printed (``traceback.format_exc``). Rich
draws a box around a traceback. A logger may write its prefix before every line, and lines of two
threads may be mixed. JSON and logfmt records have a traceback as one string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

HEADER = "Traceback (most recent call last):"
_BOX_TOP = re.compile(r"^\s*[╭┌+][─-]+ ?Traceback \(most recent call last\) ?[─-]+[╮┐+]$")
_BOX_BOTTOM = re.compile(r"^\s*[╰└+][─-]+[╯┘+]$")
_BOX_LINE = re.compile(r"^\s*[│|] ?(.*?)\s*[│|]$")
_BOX_FRAME = re.compile(r"^(\S.*?):(\d{1,9}) in (\S+)$")
_BOX_SOURCE = re.compile(r"^[❱>] +\d+ [│|]? ?(.*)$")
_BOX_LINES = 2000
_OWN_PREFIXES = ("Exception Group ", "Original ", "+ ", "| ")
_PREFIX_CHARS = 200
_PREFIX_LINES = 300
_FRAME_BEGINS = '  File "'
_GAP = 12
"""Number of lines of other writers that a prefixed traceback may contain in a row."""
_EXCEPTION_LINE = re.compile(r"[\w.<>]+(?:: .*)?$")
_CHAIN_BEGINS = ("During handling of the above", "The above exception was")
_JSON_DEPTH = 4
_GRAPH_ERROR = "Graph execution error:"
_GRAPH_LINES = 400
_GRAPH_NODE = re.compile(r"Detected at node '?([^\s']+)'? defined at \(most recent call last\):")
_GRAPH_FRAME = re.compile(r'\s+File "(.+)", line (\d+), in (\S+)$')
_GRAPH_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_ROOTS = re.compile(r"\d+ root error\(s\) found\.")
_ROOT = re.compile(r"^\(\d+\)\s*")
"""TensorFlow 2.5 to 2.21: ``  (0) RESOURCE_EXHAUSTED:  OOM when allocating tensor ...``."""
_ENCODED = re.compile(rf"{re.escape(HEADER)}(?:\\+n|\\u000a)(.*)")
"""A record of structlog or logfmt: ``exception="Traceback (most recent call last):\\n  File ...``."""
_ESCAPE = re.compile(r'\\+(n|r|t|"|\')')
_ENCODED_END = re.compile(r"(?<!\\)[\"'][,}\s].*$|(?<!\\)[\"']$")
_PLAIN_ESCAPES = {"n": "\n", "r": "", "t": "    ", '"': '"', "'": "'"}


def expand_record(line: str) -> list[str] | None:
    """Return the traceback in a log record of one line, as lines. The record's event comes first.

    Return None if the record has no traceback.
    """
    begin = line.find("{")
    if begin >= 0 and ("exc_type" in line or HEADER in line):
        try:
            record = json.loads(line[begin:])
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and (found := list(_of_value(record, 0))):
            event = record.get("event") or record.get("message") or record.get("msg")
            return [*([event] if isinstance(event, str) and "\n" not in event else []), *found]
    if (match := _ENCODED.search(line)) is not None:
        text = _ENCODED_END.sub("", match[1])
        text = _ESCAPE.sub(lambda found: _PLAIN_ESCAPES[found[1]], text)
        return [line[: match.start()].rstrip(" \"'="), HEADER, *text.split("\n")]
    return None


def _of_value(value: object, depth: int) -> Iterator[str]:
    """Yield the lines of the first traceback in a decoded record."""
    if depth > _JSON_DEPTH:
        return
    if isinstance(value, str):
        if HEADER in value and "\n" in value:
            yield from value.rstrip().split("\n")
    elif isinstance(value, dict):
        if isinstance(value.get("exc_type"), str) and isinstance(value.get("frames"), list):
            yield from _of_structured(value)
            return
        for item in value.values():
            yield from _of_value(item, depth + 1)
    elif isinstance(value, list):
        for item in value[:8]:
            yield from _of_value(item, depth + 1)


def _of_structured(value: dict[str, object]) -> Iterator[str]:
    """Yield the lines of a traceback that structlog's ``dict_tracebacks`` has turned into a
    dict."""
    yield HEADER
    frames = value["frames"]
    for frame in frames if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            place = f'  File "{frame.get("filename")}", line {frame.get("lineno")}'
            yield f"{place}, in {frame.get('name')}"
    yield f"{value['exc_type']}: {value.get('exc_value') or ''}".removesuffix(": ")


def unwrap(lines: Sequence[str]) -> list[str]:
    """Return the lines with boxed and prefixed tracebacks in the interpreter's form, and errors of
    TensorFlow's graphs in one line."""
    if not any("Traceback (most recent call last)" in line for line in lines):
        return list(lines)
    return _with_graph_errors(_without_prefixes(_boxes_to_tracebacks(lines)))


def _with_graph_errors(lines: list[str]) -> list[str]:
    """Return the lines with the error of a TensorFlow graph in the line of its exception.

    TensorFlow writes the Python lines that made the node between the two.
    """
    shown: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.endswith(_GRAPH_ERROR):
            shown.append(line)
            continue
        node, place = None, None
        begin = at
        while at < min(begin + _GRAPH_LINES, len(lines)):
            text = lines[at]
            if (named := _GRAPH_NODE.match(text)) is not None:
                node = node or named[1]
            elif (frame := _GRAPH_FRAME.match(text)) is not None:
                if not any(part in frame[1] for part in _GRAPH_LIBRARIES):
                    place = f"{frame[1].rpartition('/')[2]}:{frame[2]} in {frame[3]}"
            elif not (
                not text
                or text.startswith(("    ", "Node: ", "<stack traces"))
                or _ROOTS.match(text)
            ):
                break
            at += 1
        if node is None or at >= len(lines):
            shown.append(line)
            at = begin
            continue
        shown.append(f"{line} {_ROOT.sub('', lines[at].strip())}")
        shown.append(f"node {node}" + (f", defined at {place}" if place else ""))
        at += 1
    return shown


def _boxes_to_tracebacks(lines: Sequence[str]) -> list[str]:
    shown: list[str] = []
    at = 0
    while at < len(lines):
        if not _BOX_TOP.match(lines[at]):
            shown.append(lines[at])
            at += 1
            continue
        inside: list[str] = []
        at += 1
        while at < len(lines) and len(inside) < _BOX_LINES:
            if _BOX_BOTTOM.match(lines[at]):
                at += 1
                break
            match = _BOX_LINE.match(lines[at])
            if match is None:
                break
            inside.append(match[1])
            at += 1
        shown += [HEADER, *_of_box(inside)]
        message, at = _joined_message(lines, at, len(lines[at - 1].strip()))
        shown += message
    return shown


def _joined_message(lines: Sequence[str], at: int, width: int) -> tuple[list[str], int]:
    """Return the exception's line below a box, which is wrapped at the box's width, and the next
    index."""
    if at >= len(lines) or not lines[at]:
        return [], at
    text = last = lines[at]
    at += 1
    while at < len(lines) and lines[at] and len(last) + 1 + len(lines[at].split()[0]) > width:
        last = lines[at]
        text += f" {last}"
        at += 1
    return [text], at


def _of_box(inside: Sequence[str]) -> Iterator[str]:
    """Yield the frames in a box. A path that is too long for the box continues on the next line."""
    path = ""
    for line in inside:
        if line.startswith(("╭", "╰", "│", "┌", "└", "+-", "|")):  # the box of local variables
            continue
        if (source := _BOX_SOURCE.match(line)) is not None:
            yield f"    {source[1].strip()}"
            path = ""
        elif not line or line[0] in " .":
            path = ""
        else:
            path += line if not path or " in " not in path else f" {line}"
            if (frame := _BOX_FRAME.match(path)) is not None:
                yield f'  File "{frame[1]}", line {frame[2]}, in {frame[3]}'
                path = ""


class _Prefixed:
    """A traceback whose lines all have the prefix of a logger."""

    def __init__(self, prefix: str) -> None:
        bare = prefix.rstrip()
        shape = re.sub(r"(?:\\?\d)+", r"\\d+", re.escape(bare))
        self.shape = re.compile(f"{shape}(?:{re.escape(prefix[len(bare) :])}|$)")
        self.lines = [HEADER]
        self.named = False
        """The line that names the exception has been read."""

    def take(self, line: str) -> bool:
        """Add ``line`` if it is a line of this traceback, and the traceback is not too long. Return
        whether it was added."""
        match = self.shape.match(line)
        if match is None or len(self.lines) >= _PREFIX_LINES:
            return False
        rest = line[match.end() :]
        indented = rest.startswith("  ")
        if self.named and rest and not indented and not rest.startswith((HEADER, *_CHAIN_BEGINS)):
            return False
        self.named = bool(rest) and not indented and _EXCEPTION_LINE.match(rest) is not None
        self.lines.append(rest)
        return True


def _without_prefixes(lines: Sequence[str]) -> list[str]:
    """Return the lines with the prefixes of tracebacks removed. The lines of each traceback are put
    together."""
    shown: list[str | _Prefixed] = []
    open_blocks: list[_Prefixed] = []
    for at, line in enumerate(lines):
        taken = next((block for block in reversed(open_blocks) if block.take(line)), None)
        if taken is not None:
            continue
        if (block := _begin(lines, at)) is not None:
            shown.append(line[: line.find(HEADER)].rstrip())
            shown.append(block)
            open_blocks = [*open_blocks[-7:], block]
        else:
            shown.append(line)
    flat: list[str] = []
    for each in shown:
        flat += each.lines if isinstance(each, _Prefixed) else [each]
    return flat


def _begin(lines: Sequence[str], at: int) -> _Prefixed | None:
    """Return the traceback that begins with a prefix at this line. Return None if none does."""
    column = lines[at].find(HEADER)
    if not 0 < column <= _PREFIX_CHARS or not lines[at].endswith(HEADER):
        return None
    prefix = lines[at][:column]
    if not prefix.strip() or prefix.lstrip().startswith(_OWN_PREFIXES):
        return None
    block = _Prefixed(prefix)
    for line in lines[at + 1 : at + 1 + _GAP]:
        match = block.shape.match(line)
        if match is not None:
            return block if line[match.end() :].startswith(_FRAME_BEGINS) else None
    return None
