r"""Split chunks of worker output into lines, progress bars and displays.

A bar is an unfinished line with carriage returns. The text between two ``\r`` is a state of the
bar. Only the newest state that is not blank is kept, so that a cleared bar leaves its last state. A
display is output of a program that moves the cursor up (``live_display``).

``LineSplitter`` keeps a ``Source`` for each stream of each rank. It passes to a ``LineView``
(``screen``, ``jsonl``):

* Complete lines, at once.
* Unfinished lines, after at most PARTIAL_S.
* States of bars and rows of displays. If the output is a terminal, they are drawn in place as live
  rows (``live_rows``). Otherwise the newest state is shown as a line at most every PROGRESS_S, and
  at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from distlaunch.console.escapes import hold_back

if TYPE_CHECKING:
    from distlaunch.console.live_display import Display
    from distlaunch.console.live_rows import LiveRows

PARTIAL_S = 0.5
"""Time after which an unfinished line is shown."""
PROGRESS_S = 10.0
"""Minimum time between two states of a bar that cannot be drawn in place."""
PIECE = 64 << 10
"""A longer line is shown in pieces, so that memory is limited."""
STREAMS = {1: "stdout", 2: "stderr"}
_REDRAW_S = 0.05
"""How long a program may still be drawing its bars after it has moved the cursor below them."""
_MAX_HELD_S = 0.2
"""How long output is held while the rank redraws bars again and again."""
_MAX_MOVE_BYTES = 8
"""Maximum length of a sequence that moves the cursor."""


class Source:
    """One stream of one rank. ``buf`` has the output after the last newline that has not been
    shown."""

    __slots__ = (
        "bar",
        "buf",
        "cut",
        "display",
        "drawn_s",
        "due",
        "length",
        "paced_s",
        "rank",
        "started",
        "state",
        "stream",
    )

    def __init__(self, rank: int, stream: int) -> None:
        self.rank = rank
        self.stream = stream
        self.buf = bytearray()
        self.due = 0.0
        self.started = False
        """Whether the beginning of the current line is already shown."""
        self.length = 0
        self.cut = False
        """The rest of this line is not shown (terminal only)."""
        self.bar = False
        """Whether the current line has a carriage return. ``buf`` then holds its newest state,
        shown or not."""
        self.state: bytes | None = None
        """The state of this bar that is shown."""
        self.paced_s = -PROGRESS_S
        """When a state of a bar was last shown."""
        self.display: Display | None = None
        """The rows that the program redraws; None if it redraws no rows."""
        self.drawn_s = 0.0
        """When the display last changed."""


class LineView(Protocol):
    """Shows the lines, bars and displays that the splitter finds."""

    def show_lines(self, source: Source, block: bytes, now: float) -> None:
        """Show complete lines. ``block`` has newlines between them, but not after the last one."""

    def show_unfinished(self, source: Source) -> None:
        """Show the unfinished line in ``source.buf``. Bytes that cannot be shown yet remain in
        ``buf``."""

    def show_bar(self, source: Source, state: bytes, now: float) -> None:
        """Show a state of a bar. The state may change again."""

    def end_bar(self, source: Source, state: bytes, shown: bytes | None, now: float) -> None:
        """Show the last state of a bar. ``shown`` is the state that has been shown before, if
        any."""

    def leave_line(self, source: Source) -> None:
        """End the visible unfinished line, because other output follows."""

    def is_open(self, source: Source) -> bool:
        """Return whether an unfinished line of this source is visible."""

    def is_growing(self, source: Source) -> bool:
        """Return whether further pieces of this source's unfinished line are shown at once."""

    def show_live_rows_as_lines(self, rank: int, rows: list[bytes]) -> None:
        """Show former live rows as lines, without waiting for equal lines of other ranks."""

    def end_open_line(self) -> None:
        """End the unfinished line in which the cursor is, so that live rows can be drawn."""


class LineSplitter:
    """Splits the output of all sources of one console.

    ``live``: the live rows of a terminal; None for a pipe or file.
    """

    def __init__(self, view: LineView, live: LiveRows | None = None) -> None:
        self._view = view
        self._live = live
        self._sources: dict[tuple[int, int], Source] = {}
        self._partial: dict[Source, None] = {}
        """Sources with an unfinished line, ordered by due time."""
        self._bars: dict[Source, None] = {}
        """Sources with a bar or display whose newest state is not yet shown."""
        self._bars_due = 0.0
        self._drawing: dict[Source, None] = {}
        """Sources with a display."""
        self._held: dict[Source, tuple[bytearray, float]] = {}
        """Output that is held because the rank may be drawing on its other stream, and the time
        since when."""

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        source = self._sources.get((rank, stream))
        if source is None:
            source = self._sources[rank, stream] = Source(rank, stream)
        if source in self._held:
            self._held[source][0].extend(data)
        elif source.display is None and self._redraw_end(source) > now:
            self._held[source] = bytearray(data), now
        else:
            self._add_output(source, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        for stream in STREAMS:
            source = self._sources.pop((rank, stream), None)
            if source is not None:
                self._add_held(source, now)
                self._end(source, now)

    def flush_due(self, now: float) -> float | None:
        """Show unfinished lines that have been held long enough; return when the next is due."""
        dues: list[float | None] = []
        for source, (_, since) in list(self._held.items()):
            until = min(self._redraw_end(source), since + _MAX_HELD_S)
            if until <= now:
                self._add_held(source, now)
            else:
                dues.append(until)
        dues.append(self._show_final_rows(now) if self._drawing else None)
        dues.append(self._flush_bars(now) if self._bars else None)
        while self._partial:
            source = next(iter(self._partial))
            if source.due > now:
                dues.append(source.due)
                break
            self._show_unfinished(source)
        return min((due for due in dues if due is not None), default=None)

    def finish(self, now: float) -> None:
        for source in self._sources.values():
            self._add_held(source, now)
            self._end(source, now)
        self._sources.clear()

    def release_held(self, now: float) -> None:
        """Show output that is held while bars may be redrawn."""
        for source in list(self._held):
            self._add_held(source, now)

    def _redraw_end(self, source: Source) -> float:
        """Return the time until which output of ``source`` must be held.

        The rank may be redrawing a display on its other stream. The display looks complete when the
        cursor is back on a free row, but within _REDRAW_S of its last change the program may only
        be between two rows. Output shown in that moment would break the display. Return 0 if there
        is no such display.
        """
        return max(
            (
                other.drawn_s + _REDRAW_S
                for other in self._drawing
                if other.rank == source.rank and other.display and other.display.is_complete
            ),
            default=0.0,
        )

    def _add_held(self, source: Source, now: float) -> None:
        if source in self._held:
            data, _ = self._held.pop(source)
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
        if self._drawing:
            self._complete_displays(source, now)
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
        block = self._with_held(source, block)
        self._view.show_lines(source, last_states(block) if b"\r" in block else block, now)

    def _with_held(self, source: Source, block: bytes) -> bytes:
        """Return ``block`` preceded by the output that the source holds, and empty the source."""
        self._partial.pop(source, None)
        if source.buf:
            source.buf += block
            block = bytes(source.buf)
            source.buf.clear()
        return block

    def _add_unfinished(self, source: Source, data: bytes, now: float) -> None:
        source.buf += data
        if len(source.buf) >= PIECE or self._view.is_growing(source):
            self._show_unfinished(source)
        elif source not in self._partial:
            source.due = now + self._hold_s(source)
            self._partial[source] = None

    def _hold_s(self, source: Source) -> float:
        """Return how long an unfinished line is held.

        With live rows the cursor cannot remain in an unfinished line, so each piece becomes a line.
        The line is therefore held longer.
        """
        live = self._live
        return PARTIAL_S if live is None or live.owner in (None, source.rank) else PROGRESS_S

    def _show_unfinished(self, source: Source) -> None:
        self._partial.pop(source, None)
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

    def _end(self, source: Source, now: float) -> None:
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
            self._view.show_lines(source, self._with_held(source, b""), now)

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
        self._partial.pop(source, None)
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
        """Show the last state of a bar, unless this state has been shown. ``line`` is the rest of
        the bar's line."""
        line = bytes(source.buf) + line
        shown = source.state
        self._forget_bar(source)
        if shown is None and not is_redrawn(line):
            self._view.show_lines(source, line, now)
        else:
            self._view.end_bar(source, newest_state(line), shown, now)

    def _forget_bar(self, source: Source) -> None:
        self._bars.pop(source, None)
        self._partial.pop(source, None)
        source.buf.clear()
        source.bar = False
        source.state = None

    def _schedule_bar(self, source: Source, now: float) -> None:
        if source in self._bars:
            return
        if self._live is not None:
            due = max(now + PARTIAL_S, source.paced_s + PROGRESS_S)
        else:
            due = (now if source.state is None else source.paced_s) + PROGRESS_S
        self._schedule(source, due)

    def _schedule(self, source: Source, due: float) -> None:
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
        """Show the newest state of a bar, unless this state has been shown.

        An unfinished character or escape sequence is held.
        """
        if source.display is not None:
            self._show_display(source, now)
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
            self._drawing[source] = None
        source.drawn_s = now
        self._show_rows(source, display.feed(data, now), now)
        self._after_drawing(source, now)

    def _after_drawing(self, source: Source, now: float) -> None:
        if source.display is not None and source.display.is_over:
            self._end_display(source, now)
            self.release_rows()
        elif self._live is not None and self._live.can_own(source.rank, now):
            self._draw_live(self._live, source, now)
        else:
            self._schedule_bar(source, now)
            self.release_rows()

    def _show_display(self, source: Source, now: float) -> None:
        """Show the rows of a display that have changed since they were last shown."""
        rows = source.display.rows() if source.display is not None else []
        shown = (source.state or b"").split(b"\n")
        for row in rows:
            if row and row not in shown:
                self._view.show_bar(source, row, now)
                source.paced_s = now
        source.state = b"\n".join(rows)

    def _show_rows(self, source: Source, rows: list[bytes], now: float) -> None:
        """Show final rows of a display, except rows that have been shown."""
        live = self._live
        if live is not None and live.owner == source.rank and rows:
            self._view.show_live_rows_as_lines(source.rank, rows)
            live.draw(self._live_displays(), now)
            return
        shown = (source.state or b"").split(b"\n")
        if rows := [row for row in rows if not row or row not in shown]:
            self._view.show_lines(source, b"\n".join(rows), now)

    def _end_display(self, source: Source, now: float) -> None:
        """Show the last state of a display. The source has plain lines from now on."""
        display = source.display
        if display is not None:
            self._show_rows(source, display.finish(), now)
        source.display = None
        self._drawing.pop(source, None)
        self._forget_bar(source)

    def _show_final_rows(self, now: float) -> float | None:
        dues = []
        for source in list(self._drawing):
            display = source.display
            if display is None:
                continue
            if rows := display.settle(now):
                self._show_rows(source, rows, now)
                self._after_drawing(source, now)
            if source.display is not None:
                dues.append(display.due())
        return min((due for due in dues if due is not None), default=None)

    def _complete_displays(self, source: Source, now: float) -> None:
        """End the display on the rank's other stream if it looks complete, so that the rank's
        output remains in order."""
        for other in list(self._drawing):
            display = other.display
            if other.rank == source.rank and display is not None and display.is_complete:
                self._end_display(other, now)

    # --- live rows

    def draw_due(self, now: float) -> float | None:
        """Draw the live rows if they are due. Return when they are due next; None if they are up to
        date."""
        live = self._live
        if live is None:
            return None
        if live.due is not None and live.due <= now:
            live.draw(self._live_displays(), now)
        return live.due

    def release_rows(self) -> None:
        """Release the live rows if their rank no longer has a display."""
        if self._live is not None and self._live.owner is not None and not self._live_sources():
            self._live.release()

    def _draw_live(self, live: LiveRows, source: Source, now: float) -> None:
        """Draw a display as live rows. If they showed another rank before, its displays are shown
        like bars."""
        before = self._live_sources()
        if live.set_owner(source.rank, now):
            for other in before:
                self._schedule_bar(other, now)
            self._view.end_open_line()
        self._bars.pop(source, None)
        live.draw_soon(self._live_displays(), now)

    def _live_sources(self) -> list[Source]:
        owner = None if self._live is None else self._live.owner
        return [source for source in self._drawing if source.rank == owner]

    def _live_displays(self) -> list[Display]:
        displays = (source.display for source in self._live_sources())
        return [display for display in displays if display is not None]


# --- the states of a bar


_ERASING = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K", b"\x1b[A")


def is_redrawn(line: bytes) -> bool:
    r"""Return whether a complete line has several states. A ``\r`` at its end only ends the
    line."""
    return b"\r" in line.removesuffix(b"\r")


def newest_state(line: bytes) -> bytes:
    """Return the last state of a bar that is not blank; empty bytes if all are blank."""
    end = len(line)
    while end >= 0:
        start = line.rfind(b"\r", 0, end) + 1
        state = line[start:end]
        if not _is_blank(state):
            return state
        end = start - 1
    return b""


def shorten_bar(line: bytes) -> bytes:
    """Return an unfinished line reduced to its newest state and the beginning of the next state."""
    end = line.rfind(b"\r")
    if end <= 0 or (end == len(line) - 1 and not is_redrawn(line)):
        return line
    rest = line[end + 1 :]
    if not _is_blank(rest):
        return b"\r" + rest
    return b"\r" + newest_state(line[:end]) + b"\r" + rest


def last_states(block: bytes) -> bytes:
    """Return a block in which each line with several states is reduced to its newest state."""
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
