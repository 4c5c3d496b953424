"""Read the JSON that torch's ``@record`` leaves in TORCHELASTIC_ERROR_FILE.

``{"message": {"message": "Type: text", "extraInfo": {"py_callstack": "...", "timestamp": "..."}}}``; older torch and
other writers put a plain string there. A worker writes it, so anything may be in it: a file that cannot be read is
as good as none.
"""

from __future__ import annotations

from distlaunch.diagnosis.clean_text import to_lines, without_escapes
from distlaunch.diagnosis.tracebacks import Raised, find_tracebacks

_LIMIT = 262144


def read_error_file(data: bytes | None) -> list[Raised]:
    """Return the chain of exceptions that the file tells of, the outermost last; nothing if it cannot be read."""
    if not data or len(data) > _LIMIT:
        return []
    import json

    try:
        record = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return []
    message = record.get("message") if isinstance(record, dict) else None
    stack: object = None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = message.get("message")
    if isinstance(stack, str):
        found = [one for one in find_tracebacks(to_lines(stack.encode("utf-8", "replace"))) if one.chain]
        if found:
            return found[-1].chain
    if not isinstance(message, str) or not message.strip():
        return []
    first, *rest = (without_escapes(line) for line in message.strip().split("\n"))
    type_, colon, text = first.partition(": ")
    typed = colon and type_.replace(".", "").isidentifier()
    raised = Raised(type_, text, lines=[first]) if typed else Raised(message=first, lines=[first])
    raised.detail.extend(rest)
    return [raised]
