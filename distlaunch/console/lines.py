r"""Split chunks of worker output into lines, progress bars and displays.

A bar is an unfinished line with carriage returns; the text between two ``\r`` is a state. Only the
newest state that is not blank is kept, so that a cleared bar leaves its last one. A display is
output of a program that moves the cursor up (``live_display``).

``LineSplitter`` passes to a ``LineView`` (``screen``, ``jsonl``): complete lines, at once;
unfinished lines, after at most PARTIAL_S; states of bars and rows of displays. On a terminal the
latter are drawn in place (``live_rows``). Otherwise the newest state is shown as a line at most
every PROGRESS_S, and at the end.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from distlaunch.console.escapes import hold_back

if TYPE_CHECKING:
    from distlaunch.console.live_display import Display
    from distlaunch.console.live_rows import LiveRows

PARTIAL_S = 0.5
PROGRESS_S = 10.0
"""Least time between two states of a bar that cannot be drawn in place."""
PIECE = 64 << 10
"""A longer line is shown in pieces."""
STREAMS = {1: "stdout", 2: "stderr"}
_REDRAW_S = 0.05
"""How long a program may still be drawing after it has moved the cursor below its bars."""
_MAX_HELD_S = 0.2
"""How long output of a rank is held that redraws bars again and again."""
_MAX_MOVE_BYTES = 8
_NEVER = float("inf")


class PendingOutput(Enum):
    """Output that is shown at ``Source.due``, unless it changes before."""

    LINE = auto()
    """The unfinished line in ``Source.buf``."""
    BAR = auto()
    """The newest state of the bar or of the display."""


class Source:
    """One stream of one rank. ``buf`` has the output of the current line that has not been shown."""

    __slots__ = (
        "bar",
        "buf",
        "cut",
        "display",
        "display_number",
        "drawn_s",
        "due",
        "held",
        "held_s",
        "length",
        "other",
        "paced_s",
        "pending",
        "rank",
        "started",
        "state",
        "stream",
        "timer",
    )

    def __init__(self, rank: int, stream: int) -> None:
        self.rank = rank
        self.stream = stream
        self.other: Source | None = None
        """The other stream of the rank, if it has had output."""
        self.buf = bytearray()
        self.pending: PendingOutput | None = None
        self.due = 0.0
        self.held: bytearray | None = None
        """Output that came while the rank may be drawing on its other stream."""
        self.held_s = 0.0
        self.timer = _NEVER
        """When ``LineSplitter.flush_due`` next looks at this source."""
        self.started = False
        """Whether the beginning of the current line is already shown."""
        self.length = 0
        self.cut = False
        """Whether the rest of this line is not shown (terminal only)."""
        self.bar = False
        """Whether the line has a carriage return. ``buf`` then holds its newest state, shown or
        not."""
        self.state: bytes | None = None
        """The state of this bar that is shown."""
        self.paced_s = -PROGRESS_S
        self.display: Display | None = None
        """The rows that the program redraws; None if it redraws none."""
        self.display_number = 0
        """Displays are numbered in the order in which they begin."""
        self.drawn_s = 0.0

    @property
    def redraw_end(self) -> float:
        """The time until which output of this source must be held; 0 if not at all.

        The rank may be redrawing a display on its other stream. The display looks complete when the
        cursor is back on a free row, but within _REDRAW_S of its last change the program may only
        be between two rows.
        """
        other = self.other
        if other is None or other.display is None or not other.display.is_complete:
            return 0.0
        return other.drawn_s + _REDRAW_S

    @property
    def held_until(self) -> float:
        """When held output is due."""
        return min(self.redraw_end, self.held_s + _MAX_HELD_S)

    def next_due(self) -> float | None:
        """Return the earliest time at which output of this source must be shown; None if none is
        held."""
        dues = (
            self.held_until if self.held is not None else None,
            self.due if self.pending is not None else None,
            self.display.due() if self.display is not None else None,
        )
        return min((due for due in dues if due is not None), default=None)


class LineView(Protocol):
    """Shows the lines, bars and displays that the splitter finds."""

    def show_lines(self, source: Source, block: bytes, now: float) -> None:
        """Show complete lines. ``block`` has no newline after the last one."""

    def show_unfinished(self, source: Source) -> None:
        """Show the unfinished line in ``source.buf``. Bytes that cannot be shown yet stay there."""

    def show_bar(self, source: Source, state: bytes, now: float) -> None:
        """Show a state of a bar, which may change again."""

    def end_bar(self, source: Source, state: bytes, shown: bytes | None, now: float) -> None:
        """Show the last state of a bar. ``shown`` is the one that has been shown."""

    def leave_line(self, source: Source) -> None:
        """End the visible unfinished line, because other output follows."""

    def is_open(self, source: Source) -> bool:
        """Return whether an unfinished line of this source is visible."""

    def is_growing(self, source: Source) -> bool:
        """Return whether further pieces of the unfinished line are to be shown at once, without
        waiting."""

    def show_live_rows_as_lines(self, rank: int, rows: list[bytes]) -> None:
        """Show former live rows as lines, without joining."""

    def end_open_line(self) -> None:
        """End the unfinished line with the cursor, so that live rows can be drawn."""


class LineSplitter:
    """Splits the output of all sources of one console. ``live`` is None for a pipe or file."""

    def __init__(self, view: LineView, live: LiveRows | None = None) -> None:
        self._view = view
        self._live = live
        self._sources: dict[tuple[int, int], Source] = {}
        self._timers: list[tuple[float, int, Source]] = []
        """A heap of times with a number of their own. Each source that waits has an entry, at the
        latest at its ``next_due``."""
        self._timers_set = 0
        self._displays = 0

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show complete lines of a chunk at once, and hold the rest of it."""
        source = self._sources.get((rank, stream))
        if source is None:
            source = self._add_source(rank, stream)
        if source.held is not None:
            source.held.extend(data)
        elif source.display is None and source.redraw_end > now:
            source.held, source.held_s = bytearray(data), now
            self._set_timer(source)
        else:
            self._add_output(source, data, now)

    def _add_source(self, rank: int, stream: int) -> Source:
        source = self._sources[rank, stream] = Source(rank, stream)
        for other in self._sources_of(rank):
            if other is not source:
                source.other, other.other = other, source
        return source

    def _sources_of(self, rank: int) -> list[Source]:
        sources = (self._sources.get((rank, stream)) for stream in STREAMS)
        return [source for source in sources if source is not None]

    def rank_ended(self, rank: int, now: float) -> None:
        """Show all output of a rank that is held, and forget the rank."""
        for source in self._sources_of(rank):
            self._add_held(source, now)
            self._end_source(source, now)
            del self._sources[rank, source.stream]

    def flush_due(self, now: float) -> float | None:
        """Show held output that is due. Return when the next output is due."""
        sources = self._pop_timers(now)
        for source in sources:
            if source.held is not None and source.held_until <= now:
                self._add_held(source, now)
        for source in sorted(sources, key=lambda source: source.display_number):
            self._show_final_rows(source, now)
        for source in sources:
            if source.pending is PendingOutput.BAR and source.due <= now:
                source.pending = None
                self._show_bar(source, now)
        for source in sources:
            if source.pending is PendingOutput.LINE and source.due <= now:
                self._show_unfinished(source)
        for source in sources:
            self._set_timer(source)
        return self._next_due()

    def _set_timer(self, source: Source) -> None:
        due = source.next_due()
        if due is not None and due < source.timer:
            from heapq import heappush

            source.timer = due
            self._timers_set += 1
            heappush(self._timers, (due, self._timers_set, source))

    def _pop_timers(self, now: float) -> list[Source]:
        if not self._timers or self._timers[0][0] > now:
            return []
        from heapq import heappop

        found: dict[Source, None] = {}
        while self._timers and self._timers[0][0] <= now:
            _, _, source = heappop(self._timers)
            source.timer = _NEVER
            found[source] = None
        return list(found)

    def _next_due(self) -> float | None:
        while self._timers:
            at, _, source = self._timers[0]
            if source.next_due() == at:
                return at
            from heapq import heappop

            heappop(self._timers)
            if source.timer == at:
                source.timer = _NEVER
                self._set_timer(source)
        return None

    def finish(self, now: float) -> None:
        """Show all output that is held, and forget all ranks."""
        for source in self._sources.values():
            self._add_held(source, now)
            self._end_source(source, now)
        self._sources.clear()
        self._timers.clear()

    def release_held(self, now: float) -> None:
        """Show output that is held while bars may be redrawn."""
        for source in self._sources.values():
            self._add_held(source, now)

    def _add_held(self, source: Source, now: float) -> None:
        if source.held is not None:
            data, source.held = source.held, None
            self._add_output(source, bytes(data), now)

    # --- lines

    def _add_output(self, source: Source, data: bytes, now: float) -> None:
        if source.cut:
            at = data.find(b"\n")
            if at < 0:
                return
            source.cut = False
            data = data[at + 1 :]
        if source.display is not None or (b"\x1b" in data and self._moves_cursor(source, data)):
            self._feed_display(source, data, now)
            return
        self._complete_display(source, now)
        cut = data.rfind(b"\n")
        if cut >= 0:
            last = data.rfind(b"\n", 0, cut) + 1
            if self._may_return(source, data[last:cut], now):
                if last:
                    self._add_lines(source, data[: last - 1], now)
                self._feed_display(source, data[last:], now)
                return
            self._add_lines(source, data[:cut], now)
            data = data[cut + 1 :]
        if not data:
            return
        if source.bar or b"\r" in data:
            self._update_bar(source, data, now)
        else:
            self._add_unfinished(source, data, now)

    def _may_return(self, source: Source, line: bytes, now: float) -> bool:
        """Return whether the program may move the cursor up to this line again, as to the first of
        several bars."""
        live = self._live
        return is_redrawn(line) and live is not None and live.can_own(source.rank, now)

    def _add_lines(self, source: Source, block: bytes, now: float) -> None:
        if source.bar or (source.started and b"\r" in block):
            line, newline, block = block.partition(b"\n")
            self._end_bar(source, line, now)
            if not newline:
                return
        block = self._take_unfinished(source, block)
        self._view.show_lines(source, last_states(block) if b"\r" in block else block, now)

    def _take_unfinished(self, source: Source, block: bytes) -> bytes:
        if source.pending is PendingOutput.LINE:
            source.pending = None
        if source.buf:
            source.buf += block
            block = bytes(source.buf)
            source.buf.clear()
        return block

    def _add_unfinished(self, source: Source, data: bytes, now: float) -> None:
        source.buf += data
        if len(source.buf) >= PIECE or self._view.is_growing(source):
            self._show_unfinished(source)
        elif source.pending is not PendingOutput.LINE:
            source.pending, source.due = PendingOutput.LINE, now + self._hold_s(source)
            self._set_timer(source)

    def _hold_s(self, source: Source) -> float:
        """Return how long an unfinished line is held: longer with live rows. The cursor cannot
        remain in an unfinished line then, so each piece becomes a line."""
        live = self._live
        return PARTIAL_S if live is None or live.owner in (None, source.rank) else PROGRESS_S

    def _show_unfinished(self, source: Source) -> None:
        if source.pending is PendingOutput.LINE:
            source.pending = None
        live = self._live
        if (
            live is not None
            and live.owner == source.rank
            and source.due >= live.moved_s + PARTIAL_S
            and hold_back(bytes(source.buf))[0]
        ):
            for other in self._live_sources():  # show a prompt whose bar has stopped
                self._end_display(other, source.due)
            self.release_rows()
        self._view.show_unfinished(source)

    def _end_source(self, source: Source, now: float) -> None:
        if source.display is not None:
            self._end_display(source, now)
        elif (
            source.bar
            and not source.started
            and source.state is None
            and not newest_state(bytes(source.buf))
        ):
            self._forget_bar(source)
        elif source.bar:
            self._end_bar(source, b"", now)
        elif source.buf or self._view.is_open(source):
            self._view.show_lines(source, self._take_unfinished(source, b""), now)

    # --- bars

    def _update_bar(self, source: Source, data: bytes, now: float) -> None:
        live = self._live
        if (
            live is not None
            and b"\r" in (bytes(source.buf) + data)[:-1]  # a last \r may be half of a line end
            and live.can_own(source.rank, now)
        ):
            self._feed_display(source, data, now)
            return
        if source.pending is PendingOutput.LINE:
            source.pending = None
        source.bar = True
        if b"\r" in data:
            source.buf[:] = shorten_bar(bytes(source.buf) + data)
        else:
            source.buf += data
        if len(source.buf) < PIECE:
            self._schedule_bar(source, now)
            return
        state = newest_state(bytes(source.buf))
        self._forget_bar(source)
        if state:
            self._view.leave_line(source)
            source.buf += state
            self._show_unfinished(source)

    def _end_bar(self, source: Source, line: bytes, now: float) -> None:
        line = bytes(source.buf) + line
        shown = source.state
        self._forget_bar(source)
        if shown is None and not is_redrawn(line):
            self._view.show_lines(source, line, now)
        else:
            self._view.end_bar(source, newest_state(line), shown, now)

    def _forget_bar(self, source: Source) -> None:
        source.pending = None
        source.buf.clear()
        source.bar = False
        source.state = None

    def _schedule_bar(self, source: Source, now: float) -> None:
        if source.pending is PendingOutput.BAR:
            return
        if self._live is not None:
            due = max(now + PARTIAL_S, source.paced_s + PROGRESS_S)
        else:
            due = (now if source.state is None else source.paced_s) + PROGRESS_S
        source.pending, source.due = PendingOutput.BAR, due
        self._set_timer(source)

    def _show_bar(self, source: Source, now: float) -> None:
        """Show the newest state of a bar. Hold an unfinished character or escape sequence."""
        if source.display is not None:
            self._show_rows_as_bars(source, now)
            return
        if self._live is not None and self._live.can_own(source.rank, now):
            self._feed_display(source, b"", now)
            return
        state = newest_state(bytes(source.buf))
        if not source.buf.endswith(b"\r"):
            state = hold_back(state)[0]
        if state and state != source.state:
            self._view.show_bar(source, state, now)
            source.state = state
            source.paced_s = now

    # --- displays

    def _moves_cursor(self, source: Source, data: bytes) -> bool:
        from distlaunch.console.live_display import moves_cursor

        return moves_cursor(bytes(source.buf[-_MAX_MOVE_BYTES:]) + data)

    def _feed_display(self, source: Source, data: bytes, now: float) -> None:
        display = source.display
        if display is None:
            from distlaunch.console.live_display import Display

            data = bytes(source.buf) + data
            self._forget_bar(source)
            self._view.leave_line(source)
            display = source.display = Display()
            self._displays += 1
            source.display_number = self._displays
        source.drawn_s = now
        self._show_rows(source, display.feed(data, now), now)
        self._after_drawing(source, now)
        self._set_timer(source)
        self._on_drawn(source)

    def _on_drawn(self, source: Source) -> None:
        """Set the timer of the rank's other stream, whose output may be held because of this
        display."""
        if source.other is not None and source.other.held is not None:
            self._set_timer(source.other)

    def _after_drawing(self, source: Source, now: float) -> None:
        """End a display that is over, draw it as live rows, or schedule it as a bar."""
        if source.display is not None and source.display.is_over:
            self._end_display(source, now)
            self.release_rows()
        elif self._live is not None and self._live.can_own(source.rank, now):
            self._draw_live(self._live, source, now)
        else:
            self._schedule_bar(source, now)
            self.release_rows()

    def _show_rows_as_bars(self, source: Source, now: float) -> None:
        rows = source.display.rows() if source.display is not None else []
        shown = (source.state or b"").split(b"\n")
        for row in rows:
            if row and row not in shown:
                self._view.show_bar(source, row, now)
                source.paced_s = now
        source.state = b"\n".join(rows)

    def _show_rows(self, source: Source, rows: list[bytes], now: float) -> None:
        live = self._live
        if live is not None and live.owner == source.rank and rows:
            self._view.show_live_rows_as_lines(source.rank, rows)
            live.draw(self._live_displays(), now)
            return
        shown = (source.state or b"").split(b"\n")
        if rows := [row for row in rows if not row or row not in shown]:
            self._view.show_lines(source, b"\n".join(rows), now)

    def _end_display(self, source: Source, now: float) -> None:
        display = source.display
        if display is not None:
            self._show_rows(source, display.finish(), now)
        source.display = None
        self._forget_bar(source)
        self._on_drawn(source)

    def _show_final_rows(self, source: Source, now: float) -> None:
        if source.display is not None and (rows := source.display.settle(now)):
            self._show_rows(source, rows, now)
            self._after_drawing(source, now)

    def _complete_display(self, source: Source, now: float) -> None:
        """End the display on the rank's other stream if it looks complete, to keep the order of the
        output."""
        other = source.other
        if other is not None and other.display is not None and other.display.is_complete:
            self._end_display(other, now)

    # --- live rows

    def draw_due(self, now: float) -> float | None:
        """Draw the live rows if they are due. Return when they are due next."""
        live = self._live
        if live is None:
            return None
        if live.due is not None and live.due <= now:
            live.draw(self._live_displays(), now)
        return live.due

    def release_rows(self) -> None:
        """Release the live rows if their rank has no display any more."""
        if self._live is not None and self._live.owner is not None and not self._live_sources():
            self._live.release()

    def _draw_live(self, live: LiveRows, source: Source, now: float) -> None:
        """Show the displays of the rank that had the live rows before like bars."""
        before = self._live_sources()
        if live.set_owner(source.rank, now):
            for other in before:
                self._schedule_bar(other, now)
            self._view.end_open_line()
        if source.pending is PendingOutput.BAR:
            source.pending = None
        live.draw_soon(self._live_displays(), now)

    def _live_sources(self) -> list[Source]:
        owner = None if self._live is None else self._live.owner
        if owner is None:
            return []
        found = [source for source in self._sources_of(owner) if source.display is not None]
        return sorted(found, key=lambda source: source.display_number)

    def _live_displays(self) -> list[Display]:
        displays = (source.display for source in self._live_sources())
        return [display for display in displays if display is not None]


# --- the states of a bar


_ERASING = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K", b"\x1b[A")


def is_redrawn(line: bytes) -> bool:
    r"""Return whether a complete line has several states. A final ``\r`` only ends the line."""
    return b"\r" in line.removesuffix(b"\r")


def newest_state(line: bytes) -> bytes:
    """Return the last state of a bar that is not blank; empty if all are."""
    end = len(line)
    while end >= 0:
        start = line.rfind(b"\r", 0, end) + 1
        state = line[start:end]
        if not _is_blank(state):
            return state
        end = start - 1
    return b""


def shorten_bar(line: bytes) -> bytes:
    """Reduce an unfinished line to its newest state and the beginning of the next."""
    end = line.rfind(b"\r")
    if end <= 0 or (end == len(line) - 1 and not is_redrawn(line)):
        return line
    rest = line[end + 1 :]
    if not _is_blank(rest):
        return b"\r" + rest
    return b"\r" + newest_state(line[:end]) + b"\r" + rest


def last_states(block: bytes) -> bytes:
    """Reduce each line with several states to its newest one."""
    if block.count(b"\r") == block.count(b"\r\n") + block.endswith(b"\r"):
        return block
    return b"\n".join(
        [newest_state(line) if is_redrawn(line) else line for line in block.split(b"\n")]
    )


def _is_blank(state: bytes) -> bool:
    if b"\x1b" in state:
        for sequence in _ERASING:
            state = state.replace(sequence, b"")
    return not state.strip()
