"""A traceback whose end is missing.

A signal handler that raises while the interpreter prints (torch's, when a data-loader worker dies), a KILL meanwhile or
a full disk leaves one: frames, perhaps a line of markers, and no exception. From Python 3.11 on the interpreter then
writes the exception as an object, ending with ``lost sys.stderr``: before the frames under torch's excepthook, else
right where they stop, even within a line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from distlaunch.diagnosis.tracebacks import Raised, Traceback, announces_another, find_tracebacks, said_after

_DUMP_ENDS = "lost sys.stderr"
_DUMP_BEGINS = "object address  : "
_DUMP_LINES = 12
_TYPE = "object type name: "
_REPR = "object repr     : "
_PLAIN_TEXT = re.compile(r"\((?:'([^'\\]*)'|\"([^\"\\]*)\")\)")
_LOADER = "torch/utils/data/dataloader.py"
_LOADER_WAITS = ("__next__", "_next_data", "_get_data", "_try_get_data")
_READS_ITSELF = "_dataset_fetcher"
"""In the line by which a loader without workers reads its data set."""


def read_tracebacks(lines: list[str]) -> tuple[list[str], list[Traceback], Traceback | None]:
    """Return the lines without the interpreter's dump, all tracebacks in them, and the torn one at their end.

    What is ``torn`` in it has a type if the dump told it.
    """
    dump = _find_dump(lines)
    if dump is not None:
        named, begin, end = dump
        kept = [*lines[:begin], lines[begin].partition(_DUMP_BEGINS)[0].rstrip(), *lines[end:]]
        found = find_tracebacks(kept)
        torn = _torn_at_the_end(found, kept)
        if torn is not None and torn.torn is not None:
            torn.torn.type, torn.torn.message = named.type, named.message
            torn.torn.lines.append(named.text)
            return kept, found, torn
        if not said_after(lines[end:]):
            last = found[-1].chain[-1] if found and found[-1].chain else Raised()
            if last.type.rpartition(".")[2] == named.type:
                if named.message.startswith(last.message):
                    last.message = named.message
                return kept, found, None
            alone = Traceback(kind="main", chain=[], start=len(kept), end=len(kept), torn=named)
            return kept, [*found, alone], alone
    found = find_tracebacks(lines)
    return lines, found, _torn_at_the_end(found, lines)


def loader_may_be_gone(raised: Raised) -> bool:
    """Tell whether these frames lie where a data loader waits for its workers: no code of the user was called there."""
    waits = [
        number
        for number, frame in enumerate(raised.frames)
        if frame.file.endswith(_LOADER) and frame.function in _LOADER_WAITS
    ]
    if not waits or any(_READS_ITSELF in line for line in raised.lines):
        return False
    return not any(frame.of_user for frame in raised.frames[waits[-1] :])


def _find_dump(lines: Sequence[str]) -> tuple[Raised, int, int] | None:
    """Find the last dump: the exception, the index of its first line and of the first one after it."""
    if _DUMP_ENDS not in lines:
        return None
    end = len(lines) - lines[::-1].index(_DUMP_ENDS)
    begin = next((at for at in range(end - 1, max(-1, end - _DUMP_LINES), -1) if _DUMP_BEGINS in lines[at]), None)
    if begin is None:
        return None
    type_ = next((line.removeprefix(_TYPE) for line in lines[begin:end] if line.startswith(_TYPE)), "")
    shown = next((line.removeprefix(_REPR) for line in lines[begin:end] if line.startswith(_REPR)), "")
    if not type_:
        return None
    arguments = shown.removeprefix(type_.rpartition(".")[2])
    if text := _PLAIN_TEXT.fullmatch(arguments):
        message = text[1] or text[2] or ""
    else:
        message = arguments[1:-1] if arguments[:1] + arguments[-1:] == "()" else shown
    return Raised(type_, message, lines=[f"{type_}: {message}"]), begin, end


def _torn_at_the_end(found: Sequence[Traceback], lines: Sequence[str]) -> Traceback | None:
    """Return the torn traceback with which the worker's words end; ignored exceptions may come after it."""
    end = len(lines)
    for one in reversed(found):
        if any(not announces_another(line) for line in said_after(lines[one.end : end])):
            return None
        if one.torn is not None:
            return one
        if one.kind != "ignored":
            return None
        end = one.start
    return None
