"""``--format jsonl``: write one JSON object per line to one descriptor.

A line of a worker is ``{"time": epoch seconds, "type": "output", "rank": r, "stream":
"stdout"|"stderr", "text": ...}``, without its newline. Further keys:

* ``"partial": true`` if the line continues in the next record of this stream.
* ``"base64"``, besides ``"text"``, has the exact bytes of a line that is not UTF-8.
* ``"progress": true`` if the record is the newest state of a progress bar. When the bar ends, the
  bar's last state is written as a line without this key.

Messages of the launcher are ``{"time", "type": "message", "level", "text"}``. Job events are
written unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distlaunch.console.escapes import hold_back
from distlaunch.console.lines import PIECE, STREAMS, LineSplitter, Source
from distlaunch.console.writer import Writer, dropped_text


def dropped_record(wall: Callable[[], float]) -> Callable[[int], bytes]:
    """Return a function that formats the number of dropped lines as a record."""

    def describe(lines: int) -> bytes:
        import json

        text = dropped_text(lines)
        record = {"time": round(wall(), 6), "type": "message", "level": "warning", "text": text}
        return json.dumps(record).encode() + b"\n"

    return describe


class JsonOutput:
    """Writes worker lines, messages and events as JSON."""

    def __init__(self, writer: Writer, *, wall: Callable[[], float]) -> None:
        from json.encoder import encode_basestring_ascii

        self.writer = writer
        self._lines = LineSplitter(self)
        self._quote = encode_basestring_ascii
        self._wall = wall

    # --- what the console calls

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        self._lines.output(rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        self._lines.rank_ended(rank, now)

    def flush_due(self, now: float) -> float | None:
        return self._lines.flush_due(now)

    def finish(self, now: float) -> None:
        self._lines.finish(now)

    def message(self, text: str, level: str) -> None:
        """Write a message of the launcher as a record."""
        self.event(
            {"time": round(self._wall(), 6), "type": "message", "level": level, "text": text}
        )

    def event(self, record: Mapping[str, object]) -> None:
        """Write a job event unchanged."""
        import json

        self.writer.put(json.dumps(dict(record)).encode() + b"\n", must=True)

    # --- what the line splitter calls

    def show_lines(self, source: Source, block: bytes, now: float) -> None:
        """Write complete lines as records."""
        source.started = False
        start = self._record_start(source)
        if len(block) <= PIECE or max(map(len, block.split(b"\n"))) <= PIECE:
            try:
                text = block.decode()
            except UnicodeDecodeError:
                pass
            else:
                quote = self._quote
                lines = [
                    start + quote(line.removesuffix("\r")) + "}\n" for line in text.split("\n")
                ]
                self._put("".join(lines))
                return
        self._put(
            "".join(
                self._format_pieces(start, line.removesuffix(b"\r"), partial=False)
                for line in block.split(b"\n")
            )
        )

    def show_unfinished(self, source: Source) -> None:
        """Write the unfinished line in pieces of at most PIECE bytes. An unfinished character
        stays."""
        start = self._record_start(source)
        shown, held = hold_back(bytes(source.buf))
        source.buf[:] = held
        if shown:
            source.started = True
            self._put(self._format_pieces(start, shown, partial=True))

    def show_bar(self, source: Source, state: bytes, now: float) -> None:
        """Write the newest state of a bar as a progress record."""
        del now
        self.leave_line(source)
        self._put(self._format_record(self._record_start(source), state, mark="progress"))

    def end_bar(self, source: Source, state: bytes, shown: bytes | None, now: float) -> None:
        """Write the last state of a bar as a line, even after a progress record."""
        del shown, now
        self.leave_line(source)
        self._put(self._format_pieces(self._record_start(source), state, partial=False))

    def leave_line(self, source: Source) -> None:
        """End the unfinished line with an empty record."""
        if source.started:
            self._put(self._format_record(self._record_start(source), b""))
        source.started = False

    def is_open(self, source: Source) -> bool:
        """Return whether the beginning of the current line has been written."""
        return source.started

    def is_growing(self, source: Source) -> bool:
        """Return False: pieces of a line are collected for PARTIAL_S."""
        del source
        return False

    def show_live_rows_as_lines(self, rank: int, rows: list[bytes]) -> None:
        """Do nothing, because this format has no live rows."""

    def end_open_line(self) -> None:
        """Do nothing: each record is a line."""

    # --- records

    def _format_pieces(self, start: str, line: bytes, *, partial: bool) -> str:
        """Return records of at most PIECE bytes. ``partial``: the last one is partial, too."""
        out = []
        while len(line) > PIECE:
            piece, held = hold_back(line[:PIECE])
            out.append(self._format_record(start, piece, mark="partial"))
            line = held + line[PIECE:]
        out.append(self._format_record(start, line, mark="partial" if partial else ""))
        return "".join(out)

    def _record_start(self, source: Source) -> str:
        stream = STREAMS[source.stream]
        return (
            f'{{"time": {self._wall():.6f}, "type": "output", "rank": {source.rank}, "stream": '
            f'"{stream}", "text": '
        )

    def _format_record(self, start: str, line: bytes, *, mark: str = "") -> str:
        end = f', "{mark}": true}}\n' if mark else "}\n"
        try:
            text = line.decode()
        except UnicodeDecodeError:
            from binascii import b2a_base64

            text = line.decode("utf-8", "replace")
            end = f', "base64": "{b2a_base64(line, newline=False).decode()}"{end}'
        return start + self._quote(text) + end

    def _put(self, text: str) -> None:
        self.writer.put(text.encode())
