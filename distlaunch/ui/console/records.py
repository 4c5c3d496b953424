"""Layer ui.console: ``--format jsonl``: everything on one descriptor, one JSON object a line.

``{"time": epoch seconds, "type": "output", "rank": r, "stream": "stdout"|"stderr", "text": ...}`` for each line,
without its end. ``"partial": true``: the line goes on in this stream's next record. ``"base64"`` has the bytes of
a text that is not UTF-8. Our own lines are ``{"time", "type": "message", "level", "text"}``; job events come as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distlaunch.ui.console.escapes import hold_back
from distlaunch.ui.console.screen import PARTIAL_S, PIECE, Source
from distlaunch.ui.console.writer import Writer

_STREAMS = {1: "stdout", 2: "stderr"}


class RecordSource(Source):
    """One stream of one rank, with the head that all its records share."""

    __slots__ = ("head",)

    def __init__(self, rank: int, stream: int) -> None:
        super().__init__(rank)
        self.head = f', "type": "output", "rank": {rank}, "stream": "{_STREAMS[stream]}", "text": '


class Records:
    """Writes worker lines, messages and events as JSON."""

    def __init__(self, writer: Writer, *, wall: Callable[[], float]) -> None:
        from json.encoder import encode_basestring_ascii

        self.writer = writer
        self._quote = encode_basestring_ascii
        self._wall = wall
        self._sources: dict[tuple[int, int], RecordSource] = {}
        self._partial: dict[RecordSource, None] = {}

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk; see ``job.sink.Sink``."""
        source = self._sources.get((rank, stream))
        if source is None:
            source = self._sources[rank, stream] = RecordSource(rank, stream)
        cut = data.rfind(b"\n")
        if cut >= 0:
            self._complete(source, data[:cut])
            data = data[cut + 1 :]
        if not data:
            return
        source.buf += data
        if len(source.buf) >= PIECE:
            self._show(source)
        elif source not in self._partial:
            source.due = now + PARTIAL_S
            self._partial[source] = None

    def rank_ended(self, rank: int, now: float) -> None:
        """Write what is held of this rank."""
        for stream in _STREAMS:
            source = self._sources.pop((rank, stream), None)
            if source is not None and (source.buf or source.started):
                self._complete(source, b"")

    def flush_due(self, now: float) -> float | None:
        """Write partial lines that have been held long enough; return when the next is due."""
        while self._partial:
            source = next(iter(self._partial))
            if source.due > now:
                return source.due
            self._show(source)
        return None

    def finish(self, now: float) -> None:
        """Write everything that is held."""
        for rank in {rank for rank, _stream in self._sources}:
            self.rank_ended(rank, now)

    def message(self, text: str, level: str) -> None:
        """Write lines of our own."""
        self.event({"time": round(self._wall(), 6), "type": "message", "level": level, "text": text})

    def event(self, record: Mapping[str, object]) -> None:
        """Write one record as it is."""
        import json

        self.writer.put(json.dumps(dict(record)).encode() + b"\n", must=True)

    def _complete(self, source: RecordSource, block: bytes) -> None:
        self._partial.pop(source, None)
        if source.buf:
            source.buf += block
            block = bytes(source.buf)
            source.buf.clear()
        source.started = False
        start = f'{{"time": {self._wall():.6f}{source.head}'
        if len(block) <= PIECE or max(map(len, block.split(b"\n"))) <= PIECE:
            try:
                text = block.decode()
            except UnicodeDecodeError:
                pass
            else:
                quote = self._quote
                lines = [start + quote(line.removesuffix("\r")) + "}\n" for line in text.split("\n")]
                self._put("".join(lines))
                return
        self._put("".join(self._long_or_binary(start, line) for line in block.split(b"\n")))

    def _long_or_binary(self, start: str, line: bytes) -> str:
        line = line.removesuffix(b"\r")
        out = []
        while len(line) > PIECE:
            piece, held = hold_back(line[:PIECE])
            out.append(self._record(start, piece, partial=True))
            line = held + line[PIECE:]
        out.append(self._record(start, line, partial=False))
        return "".join(out)

    def _show(self, source: RecordSource) -> None:
        """Write the unfinished line, in pieces of at most PIECE; an unfinished character stays."""
        self._partial.pop(source, None)
        start = f'{{"time": {self._wall():.6f}{source.head}'
        shown, held = hold_back(bytes(source.buf))
        source.buf[:] = held
        if shown:
            source.started = True
            pieces = []
            while len(shown) > PIECE:
                piece, rest = hold_back(shown[:PIECE])
                pieces.append(self._record(start, piece, partial=True))
                shown = rest + shown[PIECE:]
            pieces.append(self._record(start, shown, partial=True))
            self._put("".join(pieces))

    def _record(self, start: str, line: bytes, *, partial: bool) -> str:
        end = ', "partial": true}\n' if partial else "}\n"
        try:
            text = line.decode()
        except UnicodeDecodeError:
            from binascii import b2a_base64

            text = line.decode("utf-8", "replace")
            end = f', "base64": "{b2a_base64(line, newline=False).decode()}"{end}'
        return start + self._quote(text) + end

    def _put(self, text: str) -> None:
        self.writer.put(text.encode())
