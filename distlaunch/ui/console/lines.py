r"""Layer ui.console: chunks taken apart into whole lines and the unfinished one, which is held for PARTIAL_S at most.

An unfinished line with a carriage return is a bar: only its newest state is kept, shown now and then as a line of its
own, and at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from distlaunch.ui.console.escapes import hold_back
from distlaunch.ui.console.returns import is_redrawn, last_states, newest_state, squeeze
from distlaunch.ui.console.writer import Writer

PARTIAL_S = 0.5
"""A line without its newline is shown after this long (design: 0.5 s)."""
PROGRESS_S = 10.0
"""The newest state of a bar is shown at most this often, where it cannot be drawn over the one before."""
PIECE = 64 << 10
"""A longer line is shown in pieces: memory stays bounded whatever a worker writes."""
STREAMS = {1: "stdout", 2: "stderr"}


class Source:
    """One stream of one rank: what it has written since its last newline and is not yet shown."""

    __slots__ = ("bar", "buf", "cut", "due", "length", "paced_s", "rank", "started", "state", "stream")

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
        self.bar = False
        """This line has a carriage return; ``buf`` holds its newest state, shown or not."""
        self.state: bytes | None = None
        """The state of this bar that is on the console."""
        self.paced_s = -PROGRESS_S
        """When a state of a bar was last shown."""


class Lines(ABC):
    """The sources of one console, and which of them has a line waiting for its end; subclasses show them."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._sources: dict[tuple[int, int], Source] = {}
        self._partial: dict[Source, None] = {}
        self._bars: dict[Source, None] = {}
        self._bars_due = 0.0

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
        bars = self._flush_bars(now) if self._bars else None
        while self._partial:
            source = next(iter(self._partial))
            if source.due > now:
                return source.due if bars is None else min(source.due, bars)
            self._show(source)
        return bars

    def finish(self, now: float) -> None:
        """Show everything that is held."""
        for source in self._sources.values():
            self._end(source, now)
        self._sources.clear()

    def _take(self, source: Source, data: bytes, now: float) -> None:
        cut = data.rfind(b"\n")
        if cut >= 0:
            self._take_lines(source, data[:cut], now)
            data = data[cut + 1 :]
        if not data:
            return
        if source.bar or b"\r" in data:
            self._move(source, data, now)
        else:
            self._extend(source, data, now)

    def _take_lines(self, source: Source, block: bytes, now: float) -> None:
        if source.bar or (source.started and b"\r" in block):
            line, newline, block = block.partition(b"\n")
            self._end_bar(source, line, now)
            if not newline:
                return
        block = self._joined(source, block)
        self._complete(source, last_states(block) if b"\r" in block else block, now)

    def _end(self, source: Source, now: float) -> None:
        if source.bar and not source.started and source.state is None and not newest_state(bytes(source.buf)):
            self._forget_bar(source)
        elif source.bar:
            self._end_bar(source, b"", now)
        elif source.buf or self._is_open(source):
            self._complete(source, self._joined(source, b""), now)

    def _move(self, source: Source, data: bytes, now: float) -> None:
        """Take a piece of an unfinished line that has a carriage return."""
        self._partial.pop(source, None)
        source.bar = True
        if b"\r" in data:
            source.buf[:] = squeeze(bytes(source.buf) + data)
        else:
            source.buf += data
        if len(source.buf) < PIECE:
            self._moved(source, now)
            return
        state = newest_state(bytes(source.buf))
        self._forget_bar(source)
        if state:
            self._leave(source)
            source.buf += state
            self._show(source)

    def _end_bar(self, source: Source, line: bytes, now: float) -> None:
        """Show how a bar's line ends, unless that is on the console already; ``line`` is the rest of it."""
        line = bytes(source.buf) + line
        shown = source.state
        self._forget_bar(source)
        if shown is None and not is_redrawn(line):
            self._complete(source, line, now)
        else:
            self._complete_bar(source, newest_state(line), shown, now)

    def _forget_bar(self, source: Source) -> None:
        self._bars.pop(source, None)
        self._partial.pop(source, None)
        source.buf.clear()
        source.bar = False
        source.state = None

    def _moved(self, source: Source, now: float) -> None:
        """Plan when the newest state of a bar is shown."""
        if source not in self._bars:
            self._plan_bar(source, (now if source.state is None else source.paced_s) + PROGRESS_S)

    def _plan_bar(self, source: Source, due: float) -> None:
        self._bars_due = min(due, self._bars_due) if self._bars else due
        self._bars[source] = None
        source.due = due

    def _flush_bars(self, now: float) -> float | None:
        if self._bars_due <= now:
            for source in [source for source in self._bars if source.due <= now]:
                del self._bars[source]
                self._show_bar(source, now)
            self._bars_due = min((source.due for source in self._bars), default=0.0)
        return self._bars_due if self._bars else None

    def _show_bar(self, source: Source, now: float) -> None:
        """Show the newest state of a bar if it is not on the console; an unfinished character or escape waits."""
        state = newest_state(bytes(source.buf))
        if not source.buf.endswith(b"\r"):
            state = hold_back(state)[0]
        if state and state != source.state:
            self._show_state(source, state, now)
            source.state = state
            source.paced_s = now

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

    @abstractmethod
    def _complete(self, source: Source, block: bytes, now: float) -> None:
        """Show whole lines; ``block`` is without its last newline and may have others."""

    @abstractmethod
    def _show(self, source: Source) -> None:
        """Show the unfinished line, which is no longer waiting."""

    @abstractmethod
    def _show_state(self, source: Source, state: bytes, now: float) -> None:
        """Show a state of a bar that goes on."""

    @abstractmethod
    def _complete_bar(self, source: Source, state: bytes, shown: bytes | None, now: float) -> None:
        """Show the last state of a bar, of which ``shown`` is on the console."""

    @abstractmethod
    def _leave(self, source: Source) -> None:
        """End the part of the unfinished line that is on the console: what follows replaces it."""
