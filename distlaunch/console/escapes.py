r"""Remove control sequences from worker output, so that it cannot disturb the user's terminal.

Colours (SGR) and erase-in-line (``K``) are passed on. Sequences of progress bars, such as cursor up
(``\x1b[A``), are dropped. Other control characters are made visible. An ESC byte is only output as
part of a complete harmless sequence, so that two pieces cannot form a harmful one. Bytes that are
not UTF-8 become U+FFFD, so 8-bit controls cannot occur.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlaunch.console.prefixes import RESET

if TYPE_CHECKING:
    import re

_CONTROLS = bytes([*range(9), *range(0x0B, 0x20), 0x7F])
"""All C0 characters except tab and newline."""
_LONGEST_SEQUENCE = 64
"""Longest sequence that is held back. A 24-bit foreground and background take 37 characters."""
_DELETE = 0x7F
_C1_FIRST = 0x80

_patterns: tuple[re.Pattern[str], re.Pattern[str]] | None = None


def is_clean(data: bytes) -> bool:
    """Return whether ``clean`` would change nothing, and there is no carriage return."""
    if len(data.translate(None, _CONTROLS)) != len(data):
        return False
    if data.isascii():
        return True
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return b"\xc2" not in data or not any("\x80" <= char <= "\x9f" for char in text)


def clean(line: bytes, *, reset: bool = True) -> bytes:
    """Return a line, or a piece of it, without harmful control sequences.

    With ``reset``, a colour that is still on is turned off.
    """
    if is_clean(line):
        return line
    unsafe, colours = _compile_patterns()
    text = unsafe.sub(_make_visible, line.decode("utf-8", "replace"))
    out = text.encode()
    if reset and b"\x1b" in out:
        found = colours.findall(text)
        if found and found[-1].strip("0;:"):
            out += RESET
    return out


def clean_text(text: bytes) -> bytes:
    """Return text without harmful control sequences. Newlines and carriage returns stay."""
    lines = text.split(b"\n")
    return b"\n".join(b"\r".join(map(clean, line.split(b"\r"))) for line in lines)


def hold_back(piece: bytes) -> tuple[bytes, bytes]:
    """Split a piece before the unfinished sequence or character at its end. The second part is
    empty if there is none."""
    start = piece.rfind(b"\x1b", max(0, len(piece) - _LONGEST_SEQUENCE))
    if start >= 0:
        tail = piece[start + 1 :]
        if not tail or (tail[:1] == b"[" and not tail[1:].strip(b"0123456789;:?")):
            return piece[:start], piece[start:]
    for size in range(1, min(3, len(piece)) + 1):
        byte = piece[-size]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (piece[:-size], piece[-size:]) if size < needed else (piece, b"")
        if byte < _C1_FIRST:
            break
    return piece, b""


def _compile_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    global _patterns  # noqa: PLW0603 - compiled at the first line that needs it: re costs time at start
    if _patterns is None:
        import re

        _patterns = (
            re.compile(
                r"\x1b\[[0-9;:]{0,60}[mK]|\x1b\[(?:[0-9]{0,4}[AF]|\?25[hl])|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
            ),
            re.compile(r"\x1b\[([0-9;:]*)m"),
        )
    return _patterns


def _make_visible(match: re.Match[str]) -> str:
    found = match[0]
    if len(found) > 1:
        return found if found[-1] in "mK" else ""
    code = ord(found)
    if code < _DELETE:
        return chr(0x2400 + code)
    return "\u2421" if code == _DELETE else "\ufffd"
