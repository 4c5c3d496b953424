"""Layer ui.console: chunks taken apart into whole lines and the unfinished one, which is held for PARTIAL_S at most."""

from __future__ import annotations

from distlaunch.ui.console.writer import Writer

PARTIAL_S = 0.5
"""A line without its newline is shown after this long (design: 0.5 s)."""
PIECE = 64 << 10
"""A longer line is shown in pieces: memory stays bounded whatever a worker writes."""
STREAMS = {1: "stdout", 2: "stderr"}


class Source:
    """One stream of one rank: what it has written since its last newline and is not yet shown."""

    __slots__ = ("buf", "cut", "due", "length", "rank", "started", "stream")

    def __init__(self, rank: int, stream: int) -> None:
        self.rank = rank
        self.stream = stream
        self.buf = bytearray()
        self.due = 0.0
        self.started = False
        """A first part of this line is on the console already."""
        self.length = 0
        self.cut = False
        """The rest of this line is not shown (terminal only)."""


class Lines:
    """The sources of one console, and which of them has a line waiting for its end; subclasses show them."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._sources: dict[tuple[int, int], Source] = {}
        self._partial: dict[Source, None] = {}

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk; see ``job.sink.Sink``."""
        source = self._sources.get((rank, stream))
        if source is None:
            source = self._sources[rank, stream] = Source(rank, stream)
        self._take(source, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Finish the lines of this rank."""
        for stream in STREAMS:
            source = self._sources.pop((rank, stream), None)
            if source is not None:
                self._end(source, now)

    def flush_due(self, now: float) -> float | None:
        """Show unfinished lines that have been held long enough; return when the next is due."""
        while self._partial:
            source = next(iter(self._partial))
            if source.due > now:
                return source.due
            self._show(source)
        return None

    def finish(self, now: float) -> None:
        """Show everything that is held."""
        for source in self._sources.values():
            self._end(source, now)
        self._sources.clear()

    def _take(self, source: Source, data: bytes, now: float) -> None:
        cut = data.rfind(b"\n")
        if cut >= 0:
            self._complete(source, self._joined(source, data[:cut]), now)
            data = data[cut + 1 :]
        if data:
            self._extend(source, data, now)

    def _end(self, source: Source, now: float) -> None:
        if source.buf or self._is_open(source):
            self._complete(source, self._joined(source, b""), now)

    def _joined(self, source: Source, block: bytes) -> bytes:
        """Put what is held of a source before ``block``; then nothing of it is held."""
        self._partial.pop(source, None)
        if source.buf:
            source.buf += block
            block = bytes(source.buf)
            source.buf.clear()
        return block

    def _extend(self, source: Source, data: bytes, now: float) -> None:
        """Take a piece of a line without a newline."""
        source.buf += data
        if len(source.buf) >= PIECE or self._is_due(source):
            self._show(source)
        elif source not in self._partial:
            source.due = now + PARTIAL_S
            self._partial[source] = None

    def _is_due(self, source: Source) -> bool:
        """Tell whether a piece is shown at once."""
        del source
        return False

    def _is_open(self, source: Source) -> bool:
        """Tell whether the line that is on the console is still to be ended."""
        return source.started

    def _complete(self, source: Source, block: bytes, now: float) -> None:
        """Show whole lines; ``block`` is without its last newline and may have others."""
        raise NotImplementedError

    def _show(self, source: Source) -> None:
        """Show the unfinished line, which is no longer waiting."""
        raise NotImplementedError
