"""Show the output of all ranks as complete, prefixed lines on one pipe, file or terminal.

One screen handles all streams that are written to the same file, so that each rank's stdout and
stderr remain in order. A pipe or file gets each line unchanged, except bars. A terminal gets lines
without harmful control sequences and of limited length, and has live rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from distlaunch.console.equal_lines import LineFolder
from distlaunch.console.escapes import clean, hold_back, is_clean
from distlaunch.console.lines import PIECE, LineSplitter, Source
from distlaunch.console.live_rows import LiveRows
from distlaunch.console.prefixes import RESET, Prefixes
from distlaunch.console.repeated_blocks import RepeatedBlocks
from distlaunch.console.writer import Writer

CUT = "… line continues, see the log".encode()


class Screen:
    """Joins equal lines, adds prefixes, and passes lines to a writer.

    ``live``: the live rows of a terminal.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        ranks: Iterable[int],
        prefixes: Prefixes,
        live: LiveRows | None = None,
    ) -> None:
        self.writer = writer
        self._prefix = prefixes
        self._live = live
        self._lines = LineSplitter(self, live)
        known = frozenset(ranks)
        several = len(known) > 1
        self._folder = LineFolder(known, self._pass_on) if several else None
        self._repeats = RepeatedBlocks(self._emit) if several else None
        self._now = 0.0
        self._out: list[bytes] = []
        self._open: Source | None = None
        """The source in whose unfinished line the cursor is."""
        self._is_coloured = False
        """Whether that line has colours."""
        self._is_raw_open = False
        """Whether the cursor is in an unfinished line of raw bytes."""

    # --- what the console calls

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show a chunk of a rank's output, as far as it is complete."""
        self._now = now
        self._lines.output(rank, stream, data, now)
        self._write_out()

    def raw_output(self, data: bytes) -> None:
        """Show bytes unchanged, after ending an unfinished line of a source, if there is one."""
        self._is_raw_open = False
        self._append_lines(data)
        self._write_out()
        self._is_raw_open = not data.endswith(b"\n")

    def rank_ended(self, rank: int, now: float) -> None:
        """Finish the unfinished lines of a rank. Lines that wait to be joined stay."""
        self._now = now
        self._lines.rank_ended(rank, now)
        if self._folder is not None:
            self._folder.ended(rank)
        self._write_out()
        self._lines.release_rows()

    def flush_due(self, now: float) -> float | None:
        """Show held output that is due. Return when the next is due."""
        self._now = now
        dues = [self._lines.flush_due(now)]
        if self._folder is not None:
            dues.append(self._folder.flush_due(now))
        if self._repeats is not None:
            dues.append(self._repeats.flush_due(now))
        self._write_out()
        dues.append(self._lines.draw_due(now))
        return min((due for due in dues if due is not None), default=None)

    def show_launcher_lines(self, lines: bytes) -> None:
        """Show messages of the launcher after all whole lines, even on a stopped terminal."""
        self._lines.release_held(self._now)
        self._flush_folder()
        self._write_out()  # separately, because output of workers may be dropped
        self._append_lines(lines)
        self._write_out(must=True)

    def finish(self, now: float) -> None:
        """Show all output that is held. Raw bytes get no newline."""
        self._now = now
        self._lines.finish(now)
        self._flush_folder()
        self._is_raw_open = False
        self.end_open_line()
        self._write_out()
        self._lines.release_rows()

    # --- what the line splitter calls

    def show_lines(self, source: Source, block: bytes, now: float) -> None:
        if source.started:
            source.started = False
            first, newline, block = block.partition(b"\n")
            if self._open is source:
                self._finish_open_line(source, first)
            elif first.rstrip(b"\r"):
                self._add_block(source.rank, first, now)
            if not newline:
                return
        self._add_block(source.rank, block, now)

    def show_unfinished(self, source: Source) -> None:
        """Show the unfinished line. Without live rows, the cursor remains in it."""
        if self._live is None:
            self._open_line_of(source)
            self._out.append(bytes(source.buf))
            source.buf.clear()
            return
        shown, held = hold_back(bytes(source.buf))
        if not shown:
            return
        if self._open_line_of(source):
            source.length = 0
        source.buf[:] = held
        self._add_piece(source, shown)
        if self._live.owner is not None:
            self.end_open_line()

    def show_bar(self, source: Source, state: bytes, now: float) -> None:
        """Show a state of a bar as a line."""
        self.leave_line(source)
        self._add_block(source.rank, state, now)

    def end_bar(self, source: Source, state: bytes, shown: bytes | None, now: float) -> None:
        """Show the last state of a bar as a line, unless it is shown already."""
        self.leave_line(source)
        if state != shown:
            self._add_block(source.rank, state, now)

    def leave_line(self, source: Source) -> None:
        source.started = False
        if self._open is source:
            self.end_open_line()

    def is_open(self, source: Source) -> bool:
        return self._open is source

    def is_growing(self, source: Source) -> bool:
        return self._open is source

    def show_live_rows_as_lines(self, rank: int, rows: list[bytes]) -> None:
        """Show rows as lines at once: the user has seen them as live rows."""
        if self._folder is not None:
            self._folder.release(rank)
        if self._repeats is not None:
            self._repeats.release(rank, self._now)
        self._emit(rank, rows)

    def end_open_line(self) -> None:
        """Move the cursor to the start of a row."""
        if self._is_raw_open:
            self._is_raw_open = False
            self._out.append(b"\n")
        if self._open is not None:
            self._out.append(RESET + b"\n" if self._is_coloured else b"\n")
            self._open = None
        self._is_coloured = False

    # --- whole lines

    def _add_block(self, rank: int, block: bytes, now: float) -> None:
        if self._live is not None:
            block = _clean_block(block)
        if self._folder is not None:
            self._folder.add(rank, block, now)
            return
        self.end_open_line()
        prefix = self._prefix(rank)
        self._out.append(prefix + block.replace(b"\n", b"\n" + prefix) + b"\n")

    def _pass_on(self, who: int | frozenset[int], lines: list[bytes]) -> None:
        if self._repeats is not None:
            self._repeats.add(who, lines, self._now)

    def _emit(self, who: int | frozenset[int], lines: list[bytes]) -> None:
        """Queue lines with the prefix of these ranks for the writer."""
        self.end_open_line()
        prefix = self._prefix(who)
        self._out.append(prefix + (b"\n" + prefix).join(lines) + b"\n")

    def _flush_folder(self) -> None:
        if self._folder is not None:
            self._folder.flush()
        if self._repeats is not None:
            self._repeats.flush(self._now)

    # --- the unfinished line in which the cursor stands

    def _open_line_of(self, source: Source) -> bool:
        source.started = True
        if self._open is source:
            return False
        self._flush_folder()
        self.end_open_line()
        self._out.append(self._prefix(source.rank))
        self._open = source
        return True

    def _add_piece(self, source: Source, piece: bytes) -> None:
        """Show a piece of the open line. Cut a line that becomes too long."""
        out = clean(piece[: PIECE - source.length], reset=False)
        self._is_coloured = self._is_coloured or b"\x1b" in out
        self._out.append(out)
        source.length += len(piece)
        if source.length > PIECE:
            self._out.append(CUT)
            self.end_open_line()
            source.cut = True
            source.started = False
            source.buf.clear()

    def _finish_open_line(self, source: Source, rest: bytes) -> None:
        if self._live is None:
            self._out.append(rest + b"\n")
            self._open = None
            return
        rest = rest.removesuffix(b"\r")
        if rest:
            self._add_piece(source, rest)
        source.cut = False
        self.end_open_line()

    # --- the writer

    def _append_lines(self, data: bytes) -> None:
        self._flush_folder()
        self.end_open_line()
        self._out.append(data)

    def _write_out(self, *, must: bool = False) -> None:
        if not self._out:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        if not self.writer.put(data, must=must):
            self._open = None


def _clean_block(block: bytes) -> bytes:
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
    if is_clean(block) and (len(block) <= PIECE or max(map(len, block.split(b"\n"))) <= PIECE):
        return block
    return b"\n".join(
        clean(line[:PIECE]) + CUT if len(line) > PIECE else clean(line)
        for line in block.split(b"\n")
    )
