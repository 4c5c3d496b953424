r"""What the ranks wrote, as whole prefixed lines for one pipe or file, byte for byte but for bars.

One screen serves every stream that ends in the same file, so that a rank's own order holds across
stdout and stderr. ``terminal`` refines it for a person's terminal.
"""

from __future__ import annotations

from collections.abc import Iterable

from distlaunch.console.folding import Folder
from distlaunch.console.lines import Lines, Source
from distlaunch.console.prefixes import Prefixes
from distlaunch.console.repeated_blocks import Repeats
from distlaunch.console.writer import Writer


class Screen(Lines):
    """Prefixes lines, folds them, and gives them to a writer."""

    def __init__(self, writer: Writer, *, ranks: Iterable[int], prefixes: Prefixes) -> None:
        super().__init__(writer)
        self._prefix = prefixes
        known = frozenset(ranks)
        several = len(known) > 1
        self._repeats = Repeats(self._emit) if several else None
        self._folder = Folder(known, self._compare) if several else None
        self._now = 0.0
        self._open: Source | None = None
        self._out: list[bytes] = []

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk; see ``job.sink.Sink``."""
        self._now = now
        super().output(rank, stream, data, now)
        self._send()

    def rank_ended(self, rank: int, now: float) -> None:
        """Finish the lines of this rank; what is held for folding is held no longer than before."""
        self._now = now
        super().rank_ended(rank, now)
        if self._folder is not None:
            self._folder.ended(rank)
        self._send()

    def flush_due(self, now: float) -> float | None:
        """Show what has been held long enough; return when the next is due."""
        self._now = now
        partial = super().flush_due(now)
        folded = self._folder.flush_due(now) if self._folder is not None else None
        repeated = self._repeats.flush_due(now) if self._repeats is not None else None
        self._send()
        return min((due for due in (folded, repeated, partial) if due is not None), default=None)

    def interject(self, lines: bytes) -> None:
        """Show lines of our own, after all whole lines that came before them, even on a stopped
        terminal."""
        self._flush_folder()
        self._send()  # what workers wrote may be dropped, our own lines are not
        self._insert(lines)
        self._send(must=True)

    def finish(self, now: float) -> None:
        """Show everything that is held."""
        self._now = now
        super().finish(now)
        self._flush_folder()
        self._end_open()
        self._send()

    def _complete(self, source: Source, block: bytes, now: float) -> None:
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

    def _compare(self, who: int | frozenset[int], lines: list[bytes]) -> None:
        """Take lines that nothing holds for folding any more."""
        if self._repeats is not None:
            self._repeats.add(who, lines, self._now)

    def _emit(self, who: int | frozenset[int], lines: list[bytes]) -> None:
        self._end_open()
        prefix = self._prefix(who)
        self._out.append(prefix + (b"\n" + prefix).join(lines) + b"\n")

    def _is_due(self, source: Source) -> bool:
        return self._open is source

    def _is_open(self, source: Source) -> bool:
        return self._open is source

    def _show(self, source: Source) -> None:
        """Show the unfinished line, and leave the cursor in it."""
        self._partial.pop(source, None)
        self._claim(source)
        self._out.append(bytes(source.buf))
        source.buf.clear()

    def _show_state(self, source: Source, state: bytes, now: float) -> None:
        self._leave(source)
        self._add(source.rank, state, now)

    def _complete_bar(self, source: Source, state: bytes, shown: bytes | None, now: float) -> None:
        self._leave(source)
        if state != shown:
            self._add(source.rank, state, now)

    def _leave(self, source: Source) -> None:
        source.started = False
        if self._open is source:
            self._end_open()

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

    def _release(self, rank: int) -> None:
        """Show what is held of one rank for folding."""
        if self._folder is not None:
            self._folder.release(rank)
        if self._repeats is not None:
            self._repeats.release(rank, self._now)

    def _flush_folder(self) -> None:
        if self._folder is not None:
            self._folder.flush()
        if self._repeats is not None:
            self._repeats.flush(self._now)

    def _insert(self, data: bytes) -> None:
        """Put bytes behind all whole lines that came before, and behind no unfinished one."""
        self._flush_folder()
        self._end_open()
        self._out.append(data)

    def _send(self, *, must: bool = False) -> None:
        if not self._out:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        if not self.writer.put(data, must=must):
            self._open = None
