"""Layer ui.console: what the ranks wrote, as whole prefixed lines for one pipe or file, byte for byte.

One screen serves every stream that ends in the same file, so that a rank's own order holds across stdout and stderr.
``terminal`` refines it for a person's terminal.
"""

from __future__ import annotations

from collections.abc import Iterable

from distlaunch.ui.console.folding import Folder
from distlaunch.ui.console.ranks import Prefixes
from distlaunch.ui.console.writer import Writer

PARTIAL_S = 0.5
"""A line without its newline is shown after this long (design: 0.5 s)."""
PIECE = 64 << 10
"""A longer line is shown in pieces: memory stays bounded whatever a worker writes."""


class Source:
    """One stream of one rank: what it has written since its last newline and is not yet shown."""

    __slots__ = ("buf", "cut", "due", "length", "rank", "started")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.buf = bytearray()
        self.due = 0.0
        self.started = False
        """A first part of this line is on the console already."""
        self.length = 0
        self.cut = False
        """The rest of this line is not shown (terminal only)."""


class Screen:
    """Turns chunks into lines, folds them, and gives them to a writer."""

    def __init__(self, writer: Writer, *, ranks: Iterable[int], prefixes: Prefixes) -> None:
        self.writer = writer
        self._prefix = prefixes
        known = frozenset(ranks)
        self._folder = Folder(known, self._emit) if len(known) > 1 else None
        self._sources: dict[tuple[int, int], Source] = {}
        self._partial: dict[Source, None] = {}
        self._open: Source | None = None
        self._out: list[bytes] = []

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk; see ``job.sink.Sink``."""
        source = self._sources.get((rank, stream))
        if source is None:
            source = self._sources[rank, stream] = Source(rank)
        self._take(source, data, now)
        self._send()

    def rank_ended(self, rank: int, now: float) -> None:
        """Finish the lines of this rank; what is held for folding is held no longer than before."""
        for stream in (1, 2):
            source = self._sources.pop((rank, stream), None)
            if source is not None:
                self._end(source, now)
        if self._folder is not None:
            self._folder.ended(rank)
        self._send()

    def flush_due(self, now: float) -> float | None:
        """Show what has been held long enough; return when the next is due."""
        due = self._folder.flush_due(now) if self._folder is not None else None
        while self._partial:
            source = next(iter(self._partial))
            if source.due > now:
                due = source.due if due is None else min(due, source.due)
                break
            self._show(source)
        self._send()
        return due

    def interject(self, text: bytes) -> None:
        """Show lines of our own, after all whole lines that came before them."""
        self._flush_folder()
        self._end_open()
        self._out.append(text)
        self._send(must=True)

    def finish(self, now: float) -> None:
        """Show everything that is held."""
        for source in self._sources.values():
            self._end(source, now)
        self._sources.clear()
        self._flush_folder()
        self._end_open()
        self._send()

    def _take(self, source: Source, data: bytes, now: float) -> None:
        cut = data.rfind(b"\n")
        if cut >= 0:
            self._complete(source, data[:cut], now)
            data = data[cut + 1 :]
        if data:
            self._extend(source, data, now)

    def _end(self, source: Source, now: float) -> None:
        if source.buf or self._open is source:
            self._complete(source, b"", now)

    def _complete(self, source: Source, block: bytes, now: float) -> None:
        """Take whole lines; ``block`` is without its last newline and may have others."""
        self._partial.pop(source, None)
        if source.buf:
            source.buf += block
            block = bytes(source.buf)
            source.buf.clear()
        if source.started:
            source.started = False
            first, newline, block = block.partition(b"\n")
            if self._open is source:
                self._finish(source, first)
            elif first.rstrip(b"\r"):
                self._add(source.rank, first, now)
            if not newline:
                return
        self._add(source.rank, block, now)

    def _add(self, rank: int, block: bytes, now: float) -> None:
        if self._folder is not None:
            self._folder.add(rank, block, now)
            return
        self._end_open()
        prefix = self._prefix(rank)
        self._out.append(prefix + block.replace(b"\n", b"\n" + prefix) + b"\n")

    def _emit(self, who: int | frozenset[int], lines: list[bytes]) -> None:
        self._end_open()
        prefix = self._prefix(who)
        self._out.append(prefix + (b"\n" + prefix).join(lines) + b"\n")

    def _extend(self, source: Source, data: bytes, now: float) -> None:
        """Take a piece of a line without a newline."""
        source.buf += data
        if self._open is source or len(source.buf) >= PIECE:
            self._show(source)
        elif source not in self._partial:
            source.due = now + PARTIAL_S
            self._partial[source] = None

    def _show(self, source: Source) -> None:
        """Show the unfinished line, and leave the cursor in it."""
        self._partial.pop(source, None)
        self._claim(source)
        self._out.append(bytes(source.buf))
        source.buf.clear()

    def _finish(self, source: Source, rest: bytes) -> None:
        """End the line in which the cursor stands with the rest of it."""
        self._out.append(rest + b"\n")
        self._open = None

    def _claim(self, source: Source) -> bool:
        """Have the cursor in a line of this source; tell whether a new one had to be begun."""
        source.started = True
        if self._open is source:
            return False
        self._flush_folder()
        self._end_open()
        self._out.append(self._prefix(source.rank))
        self._open = source
        return True

    def _end_open(self) -> None:
        if self._open is not None:
            self._out.append(b"\n")
            self._open = None

    def _flush_folder(self) -> None:
        if self._folder is not None:
            self._folder.flush()

    def _send(self, *, must: bool = False) -> None:
        if not self._out:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        if not self.writer.put(data, must=must):
            self._open = None
